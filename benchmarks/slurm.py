"""Slurm at size, on a real cluster on this machine: a long queue, a long array, long logs.

    python benchmarks/slurm.py [queue | queue-with-accounting | array | logs]...

Each figure stands beside its peer, in the same run. It needs Debian's Slurm (see README.md), ends
with 1 when a target is missed, and prints JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

TOP = Path(__file__).resolve().parent.parent
CLUSTER = TOP / "infra" / "slurm" / "cluster.py"
MANY = 1000
RANKS, LINES = 8, 50_000
REPEATS = 6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="*", choices=[[], *FIGURES], default=[])
    chosen = parser.parse_args().what or list(FIGURES)
    figures = {name: figure(name) for name in chosen}
    print(json.dumps(figures, indent=1))
    return 0 if all(figure["met"] for figure in figures.values()) else 1


def figure(name: str) -> dict[str, object]:
    """One of them, on a cluster of its own."""
    with cluster(accounting=name.endswith("accounting")) as box:
        folder = box / "work"
        folder.mkdir()
        os.environ["DEPLOYKIT_HOME"] = str(box / "deploykit")
        with contextlib.chdir(folder):
            return FIGURES[name](folder)


@contextlib.contextmanager
def cluster(*, accounting: bool) -> Iterator[Path]:
    """A cluster of four nodes."""
    with tempfile.TemporaryDirectory(prefix="box-") as name:
        folder = Path(name)
        start = [sys.executable, CLUSTER, "start", folder, "--accounting", str(int(accounting))]
        subprocess.run(start, check=True, stdout=sys.stderr)
        os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
        try:
            yield folder
        finally:
            subprocess.run([sys.executable, CLUSTER, "stop", folder], check=True, stdout=sys.stderr)


def queue(folder: Path) -> dict[str, object]:
    """One `status` of 1,000 queued jobs, and one `squeue`."""
    from deploykit.backends import slurm
    from deploykit.model import Handle

    script = "#!/bin/sh\n#SBATCH --hold\n#SBATCH --output=/dev/null\ntrue\n"
    handles = []
    for number in range(MANY):
        argv = ["sbatch", "--parsable", f"--job-name=run-{number}"]
        sent = subprocess.run(argv, input=script, capture_output=True, text=True, check=True)
        job = sent.stdout.strip()
        handles.append(Handle("slurm", "localhost", job, f"run-{number}", str(folder)))
    ours, theirs = interleaved(
        lambda: slurm.status(handles),
        lambda: subprocess.run(["squeue"], check=True, stdout=subprocess.DEVNULL),
    )
    found = Counter(status.state.value for status in slurm.status(handles).values())
    subprocess.run(["scancel", "--me"], check=True)
    return {
        "status_of_1000_s": ours,
        "squeue_s": theirs,
        "ratio": ours / theirs,
        "states": found,
        "met": ours <= 5 * theirs and found == {"queued": MANY},
    }


def array(folder: Path) -> dict[str, object]:
    """An array of 1,000: a run of deploykit's, functions of its executor, and submitit's own."""
    import submitit

    from deploykit import lifecycle
    from deploykit.slurm import executor

    numbers = itertools.count()

    def run() -> None:
        chosen = [f"slurm.array={MANY}"]
        plan = lifecycle.prepare(path, chosen, "slurm", f"run-{next(numbers)}").plan
        lifecycle.submit(plan)

    path = folder / "project" / "job.yaml"
    path.parent.mkdir()
    path.write_text(
        "name: many\nentrypoint: {module: none}\nresources: {time_limit: 5m}\n"
        "slurm: {extra: {hold: ''}}\n"
    )
    mine = executor(path, folder=folder / "ours")
    peer = submitit.SlurmExecutor(folder=folder / "theirs")
    peer.update_parameters(time=5, additional_parameters={"hold": True})
    of_run, ours, theirs = interleaved(
        run, lambda: mine.map_array(abs, range(MANY)), lambda: peer.map_array(abs, range(MANY))
    )
    subprocess.run(["scancel", "--me"], check=True)
    return {
        "run_s": of_run,
        "functions_s": ours,
        "submitit_s": theirs,
        "ratio_of_run": of_run / theirs,
        "ratio_of_functions": ours / theirs,
        "met": max(of_run, ours) <= theirs,
    }


WRITER = """
import os, time
rank, attempt = os.environ["RANK"], int(os.environ["DEPLOYKIT_RESTART_COUNT"])
for number in range(attempt * {half}, (attempt + 1) * {half}):
    print("line", rank, number, flush=number % 1000 == 0)
if attempt == 0:
    print("half", flush=True)
    time.sleep(600)
"""


def logs(folder: Path) -> dict[str, object]:
    """8 ranks x 50,000 lines with a requeue in the middle, followed live."""
    from deploykit import paths

    (folder / "train.py").write_text(WRITER.format(half=LINES // 2))
    (folder / "job.yaml").write_text(
        "name: logs\nentrypoint: {script: train.py}\n"
        "resources: {time_limit: 20m, nodes: 2, processes_per_node: 4}\n"
    )
    command = [sys.executable, "-m", "deploykit"]
    begun = time.monotonic()
    submit = [*command, "submit", "--backend", "slurm", "--run", "logs"]
    subprocess.run(submit, check=True, stdout=subprocess.DEVNULL)
    follower = subprocess.Popen([*command, "logs", "-f", "logs"], stdout=subprocess.PIPE, text=True)
    seen: dict[str, list[int]] = {str(rank): [] for rank in range(RANKS)}
    halves = 0
    with follower:
        for line in follower.stdout or ():
            if match := re.match(r"\[rank \d+\] line (\d+) (\d+)$", line):
                seen[match[1]].append(int(match[2]))
            elif line.endswith("] half\n"):
                halves += 1
                if halves == RANKS:
                    job = paths.run_folder("logs") / "claim"
                    subprocess.run(["scontrol", "requeue", str(job.readlink())], check=True)
    whole = sum(numbers == list(range(LINES)) for numbers in seen.values())
    code = subprocess.run([*command, "wait", "logs"], stdout=subprocess.DEVNULL, check=False)
    return {
        "lines": sum(map(len, seen.values())),
        "ranks_with_every_line_once_in_order": whole,
        "exit_code": code.returncode,
        "seconds": time.monotonic() - begun,
        "met": whole == RANKS and code.returncode == 0,
    }


def interleaved(*calls: Callable[[], object]) -> list[float]:
    """Median wall times in seconds, measured in turn, each as often the first as any other."""
    times: list[list[float]] = [[] for _ in calls]
    for repeat in range(REPEATS):
        for number in range(len(calls)):
            one = (repeat + number) % len(calls)
            begun = time.perf_counter()
            calls[one]()
            times[one].append(time.perf_counter() - begun)
    return list(map(statistics.median, times))


FIGURES: dict[str, Callable[[Path], dict[str, object]]] = {
    "queue": queue,
    "queue-with-accounting": queue,
    "array": array,
    "logs": logs,
}

if __name__ == "__main__":
    sys.exit(main())
