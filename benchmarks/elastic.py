"""How long a job needs to go on after it has lost a node, and whether its numbers stay.

    python benchmarks/elastic.py [--backend slurm] [--losses 20] [--double] [--lr 0.05]

Trains the reference trainer on two to three nodes. A random launcher is killed, again and again,
each time after the node has come back. Prints a table in Markdown: seconds from the loss to the
first new step, and beside it those of a start of the same ranks without a loss; then the largest
difference of a loss from that of one process. Exits with code 1 if a loss did not heal.

Fewer ranks add up the same gradients in another order, and training amplifies such rounding the
more, the larger the learning rate. `--double` computes in double precision: a difference that is
only rounding becomes smaller by some nine digits, any other stays as it is.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

TOP = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TOP))

from tests.elastic_run import launcher  # noqa: E402
from tests.trainer_losses import losses  # noqa: E402

NODES = 3
EVERY = 20
"""Steps between two checkpoints."""
PATIENCE = 120.0
DOUBLE = "import torch\n\ntorch.set_default_dtype(torch.float64)\n"
T = TypeVar("T")


class Recovery(NamedTuple):
    """Seconds from a loss to the new group of nodes, and to its first step; steps repeated."""

    group: float
    step: float
    repeated: int


def words(given: argparse.Namespace) -> list[str]:
    """Arguments of the trainer."""
    model = ["--layers", "2", "--width", "32", "--heads", "4", "--sequence", "32"]
    each = ["--task", "text", "--text", ".", "--batch-size", "12", "--epochs", "1000"]
    often = ["--steps", str(given.steps), "--checkpoint-steps", str(EVERY), "--log-every", "1"]
    rule = ["--optimizer", given.optimizer, "--lr", str(given.lr)]
    return [*each, *model, *often, *rule, "--no-tensorboard"]


def main() -> int:
    """Disturb a run, and print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--backend", default="local")
    parser.add_argument("--losses", type=int, default=20)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--optimizer", default="sgd")
    parser.add_argument("--lr", type=float, default=0.005)
    parser.add_argument("--double", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="elastic-") as scratch:
        os.environ |= {"DEPLOYKIT_HOME": f"{scratch}/home"}
        folder = Path(scratch, "job")
        _write_job(folder, given)
        begun = time.time()
        run = _Run(folder, given.backend)
        start = run.until(lambda: run.step() > 0 and time.time()) - begun
        found = [run.disturbed(number) for number in range(given.losses)]
        code = run.ended()
        _print(start, found)
        if code == 0:
            largest = _difference(run, given)
            print(f"\nLargest difference of a loss from one process: {largest:.1e}")
    return code


def _write_job(folder: Path, given: argparse.Namespace) -> None:
    folder.mkdir()
    (folder / "words.txt").write_text("A small text with many repetitions. " * 2000)
    shutil.copy(TOP / "entrypoints/train.py", folder)
    shutil.copytree(TOP / "entrypoints/trainer", folder / "trainer")
    if given.double:
        _replace(folder / "train.py", "import torch\n", DOUBLE)
        _replace(folder / "trainer/task.py", ".float()", ".double()")
    job = {
        "name": "elastic",
        "entrypoint": {"script": "train.py", "args": [*words(given), "--strategy", "ddp"]},
        "resources": {"nodes": f"2:{NODES}", "time_limit": "2h"},
        "env": {"OMP_NUM_THREADS": "1"},
    }
    (folder / "job.yaml").write_text(json.dumps(job))


def _replace(path: Path, old: str, new: str) -> None:
    before, found, after = path.read_text().partition(old)
    if not found:
        raise ValueError(f"{path} has no {old!r}")
    path.write_text(f"{before}{new}{after}")


class _Run:
    """A run of the job that is disturbed."""

    def __init__(self, folder: Path, backend: str) -> None:
        self.job = folder
        if self.deploykit("submit", "--backend", backend, "--run", "one"):
            raise SystemExit("the run did not start")
        self.folder = Path(os.environ["DEPLOYKIT_HOME"], "runs/one")
        self.random = random.Random(1)

    def deploykit(self, *argv: str) -> int:
        """Run a command; its exit code."""
        full = [sys.executable, "-m", "deploykit", *argv]
        return subprocess.run(full, cwd=self.job, stdout=sys.stderr, check=False).returncode

    def until(self, what: Callable[[], T]) -> T:
        """Wait until `what` returns something true."""
        end = time.monotonic() + PATIENCE
        while not (value := what()):
            if time.monotonic() > end:
                raise TimeoutError((self.folder / "logs/node-0.log").read_text()[-3000:])
            time.sleep(0.02)
        return value

    def step(self) -> int:
        """The latest step."""
        lines = self._metrics().splitlines(keepends=True)
        steps = [json.loads(line)["step"] for line in lines[-2:] if line.endswith("\n")]
        return steps[-1] if steps else 0

    def groups(self) -> int:
        """How many groups of nodes there were."""
        return len(list((self.folder / "members/0").glob("generation-*.json")))

    def disturbed(self, number: int) -> Recovery:
        """Lose a node, and wait until all nodes train again."""
        before, node = self.groups(), self.random.randrange(NODES)
        step = self.step()
        self.until(lambda: self.step() > step + EVERY)
        begun, step = time.time(), self.step()
        os.kill(launcher(self.folder, node), 9)
        self.until(lambda: self.groups() == before + 1)
        group = time.time() - begun
        saved = step // EVERY * EVERY
        self.until(lambda: self._written_after(begun + group) and self.step() > saved)
        found = Recovery(group, time.time() - begun, max(0, step - saved))
        print(f"{number + 1}: node {node}, {found}", file=sys.stderr, flush=True)
        self.until(lambda: self.groups() == before + 2)
        again = time.time()
        self.until(lambda: self._written_after(again))
        return found

    def ended(self) -> int:
        """Wait for the end; the exit code."""
        return self.deploykit("wait", "one")

    def _metrics(self) -> str:
        path = self.folder / "output/metrics.jsonl"
        return path.read_text() if path.exists() else ""

    def _written_after(self, begun: float) -> bool:
        return (self.folder / "output/metrics.jsonl").stat().st_mtime > begun


def _print(start: float, found: list[Recovery]) -> None:
    groups, steps = ([each[column] for each in found] for column in (0, 1))
    print("| | median | longest |\n| --- | --- | --- |")
    print(f"| from the loss to a new group | {_seconds(groups)} |")
    print(f"| from the loss to its first step | {_seconds(steps)} |")
    print(f"| steps repeated | {statistics.median(one.repeated for one in found):.0f} | ", end="")
    print(f"{max(one.repeated for one in found)} |")
    print(f"\nFrom submit to the first step without a loss: {start:.1f} s.")


def _seconds(values: list[float]) -> str:
    return f"{statistics.median(values):.1f} s | {max(values):.1f} s"


def _difference(run: _Run, given: argparse.Namespace) -> float:
    """Of the losses of all steps from those of one process."""
    alone = run.folder / "alone"
    env = {**os.environ, "DEPLOYKIT_OUTPUT_DIR": str(alone), "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, "train.py", *words(given), "--strategy", "single"]
    env["DEPLOYKIT_CHECKPOINT_DIR"] = str(alone / "checkpoints")
    subprocess.run(argv, cwd=run.job, env=env, capture_output=True, check=True)
    one, other = losses(run.folder / "output"), losses(alone)
    return max(abs(one[step] / other[step] - 1) for step in range(1, given.steps + 1))


if __name__ == "__main__":
    sys.exit(main())
