"""Process CPU time of deploykit's start-up and dry runs, each beside a peer, in one run.

CPU time (user and system, of the process and all that it starts) says what a command costs whatever
else the machine is doing; the median of interleaved repeats evens out the rest. ``make bench``
makes the environments and runs this; it ends with 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

_TOP = Path(__file__).resolve().parent.parent
_OURS = Path(sys.executable).parent
_FRESH = "{fresh}"
"""In an argument: a folder that does not exist yet, another one for each run."""

_NOT_PASSED_ON = ("AWS_", "DEPLOYKIT_", "PYTHON", "SAGEMAKER_", "SLURM_", "TORCHX", "XDG_")
"""Beginnings of variables that the measured commands do not see: they change what is done."""


@dataclass(frozen=True)
class Command:
    """A program to measure, and a word of its output that proves that it did its work."""

    argv: tuple[str, ...]
    proof: str = ""


@dataclass(frozen=True)
class Comparison:
    """One of our commands, its peer, and the largest share of the peer's time it may take."""

    what: str
    ours: Command
    peer: Command
    target: float


@dataclass(frozen=True)
class Row:
    """A comparison's outcome. Times are medians, in milliseconds."""

    what: str
    ours_ms: float
    peer_ms: float
    ratio: float
    target: float
    met: bool


class CommandFailedError(Exception):
    """A measured command did not do its work, so its time says nothing."""


def comparisons(torchx: Path) -> list[Comparison]:
    """What is compared. Both Slurm dry runs stage the same folder, for the same two processes."""
    deploykit, python = str(_OURS / "deploykit"), str(_OURS / "python")
    job = (str(_TOP / "job.yaml"), "--dry-run", "--backend")
    return [
        Comparison(
            "--help / torchx --help",
            Command((deploykit, "--help"), "submit"),
            Command((str(torchx), "--help"), "usage"),
            0.5,
        ),
        Comparison(
            "Slurm dry run / torchx's",
            Command((deploykit, "submit", *job, "slurm"), "#SBATCH"),
            Command((str(torchx), *_torchx_dry_run()), "#SBATCH"),
            0.5,
        ),
        Comparison(
            "SageMaker dry run / import sagemaker.pytorch",
            Command((deploykit, "submit", *job, "sagemaker"), "TrainingJobName"),
            Command((python, "-c", "import sagemaker.pytorch"), ""),
            0.12,
        ),
    ]


def _torchx_dry_run() -> Iterator[str]:
    """What job.yaml says, in torchx's words. It stages the source in `job_dir` before printing."""
    yield from ("run", "--scheduler", "slurm", "--dryrun")
    yield from ("--scheduler_args", f"job_dir={_FRESH},time=10")
    yield from ("--workspace", f"file://{_TOP / 'entrypoints'}")
    yield from ("dist.ddp", "-j", "1x2", "--env", "OMP_NUM_THREADS=1", "--script", "train.py", "--")
    yield from ("--epochs", "15", "--batch-size", "64", "--lr", "0.05", "--seed", "0")


def environment(home: Path) -> dict[str, str]:
    """The environment of every measured command: no user's settings, no settings from here."""
    passed_on = {k: v for k, v in os.environ.items() if not k.startswith(_NOT_PASSED_ON)}
    return {**passed_on, "HOME": str(home), "AWS_EC2_METADATA_DISABLED": "true"}


def cpu_ms(command: Command, scratch: Path, env: Mapping[str, str]) -> float:
    """Run `command` once; its CPU time and that of the programs it waited for.

    Raises CommandFailedError when it fails, or prints nothing of what it should.
    """
    fresh = Path(tempfile.mkdtemp(dir=scratch)) / "new"
    argv = [word.replace(_FRESH, str(fresh)) for word in command.argv]
    before = _children_seconds()
    done = subprocess.run(argv, cwd=scratch, env=env, capture_output=True, text=True, check=False)
    seconds = _children_seconds() - before
    if done.returncode != 0 or command.proof not in done.stdout:
        told = f"exit code {done.returncode}, {command.proof!r} expected in its output"
        raise CommandFailedError(f"{' '.join(argv)}\n{told}\n{done.stderr}")
    return seconds * 1000


def _children_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def measure(compared: list[Comparison], repeats: int) -> list[Row]:
    """Each comparison's medians. The repeats are interleaved: a slow minute touches all alike."""
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        env = environment(scratch)
        rounds = [_round(compared, scratch, env) for _ in range(repeats + 1)]
    counted = rounds[1:]  # the first one has written the .pyc files
    return [
        _row(comparison, [times[n] for times in counted]) for n, comparison in enumerate(compared)
    ]


def _round(
    compared: list[Comparison], scratch: Path, env: Mapping[str, str]
) -> list[tuple[float, float]]:
    return [(cpu_ms(c.ours, scratch, env), cpu_ms(c.peer, scratch, env)) for c in compared]


def _row(comparison: Comparison, times: list[tuple[float, float]]) -> Row:
    ours, peer = (statistics.median(side) for side in zip(*times, strict=True))
    ratio = ours / peer
    met = ratio <= comparison.target
    return Row(
        comparison.what, round(ours, 1), round(peer, 1), round(ratio, 3), comparison.target, met
    )


def table(rows: list[Row]) -> str:
    """The rows for people."""
    line = "{:<46}{:>9}{:>9}{:>7}{:>8}  {}".format
    lines = [line("CPU time", "ours ms", "peer ms", "ratio", "target", "met")]
    lines += [
        line(
            row.what,
            f"{row.ours_ms:.0f}",
            f"{row.peer_ms:.0f}",
            f"{row.ratio:.2f}",
            f"{row.target:.2f}",
            "yes" if row.met else "NO",
        )
        for row in rows
    ]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Measure, print, and return 1 when a target is missed, 2 when a command failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.add_argument("--repeats", type=int, default=10, metavar="N", help="default: 10")
    parser.add_argument(
        "--torchx", type=Path, default=_TOP / ".venv-torchx/bin/torchx", help="torchx's program"
    )
    args = parser.parse_args(argv)
    try:
        rows = measure(comparisons(args.torchx), args.repeats)
    except (CommandFailedError, OSError) as error:
        print(f"cannot be measured: {error}", file=sys.stderr)
        if isinstance(error, FileNotFoundError):
            print("`make bench` installs what is measured", file=sys.stderr)
        return 2
    heading = {"python": platform.python_version(), "cpus": os.cpu_count(), "repeats": args.repeats}
    if args.json:
        print(json.dumps({**heading, "rows": [asdict(row) for row in rows]}, indent=2))
    else:
        print(", ".join(f"{key} {value}" for key, value in heading.items()))
        print(table(rows))
    return 0 if all(row.met for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
