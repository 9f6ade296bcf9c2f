"""CPU time of a training step in each loop of `loop/`, beside the hand-written one, in one run.

The same small model, so that the loop is what differs: two processes under torchrun, one thread
each. The loops take turns, and the order turns too, so that a busy minute touches all alike; wall
time would say little on shared cores. Each file of `loop/` but `common.py` is a loop; a file of
another environment than `.venv-frameworks` says so in `_PYTHON`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

_TOP = Path(__file__).resolve().parent.parent
LOOPS = Path(__file__).resolve().parent / "loop"
REFERENCE = "by_hand"
OURS = "ours"
TARGET = 1.10
"""The largest share of the hand-written loop's time that `ours` may take."""
_FRAMEWORKS = _TOP / ".venv-frameworks/bin/python"
_NOT_PASSED_ON = ("DEPLOYKIT_", "LOOP_", "PYTHON", "SLURM_", "TORCHELASTIC_")


class LoopFailedError(Exception):
    """A loop ended with an error or without its line, so there is nothing to compare."""


def loops(folder: Path = LOOPS) -> list[str]:
    """The names of the loops, the reference first."""
    found = {path.stem for path in folder.glob("*.py")} - {"common"}
    return sorted(found, key=lambda name: (name != REFERENCE, name != OURS, name))


def environment(steps: int) -> dict[str, str]:
    """The environment of every loop."""
    passed_on = {k: v for k, v in os.environ.items() if not k.startswith(_NOT_PASSED_ON)}
    return {**passed_on, "LOOP_STEPS": str(steps), "OMP_NUM_THREADS": "1"}


def run(name: str, python: Path, env: Mapping[str, str]) -> float:
    """CPU milliseconds of a step: rank 0's mean of one run. Raises LoopFailedError."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    argv = [str(python), *torchrun, str(LOOPS / f"{name}.py")]
    with tempfile.TemporaryDirectory() as scratch:
        done = subprocess.run(
            argv, cwd=scratch, env=env, capture_output=True, text=True, check=False, timeout=600
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"cpu_ms"')]
    if done.returncode != 0 or len(lines) != 1:
        raise LoopFailedError(f"{name}: exit code {done.returncode}\n{done.stderr[-3000:]}")
    return float(json.loads(lines[0])["cpu_ms"])


def measure(
    names: Sequence[str], repeats: int, python: Path, env: Mapping[str, str]
) -> dict[str, list[float]]:
    """Each loop's times, one for each repeat."""
    times: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(repeats):
        turn = repeat % len(names)
        for name in [*names[turn:], *names[:turn]]:
            times[name].append(run(name, python, env))
            print(f"repeat {repeat + 1}: {name} {times[name][-1]:.2f} ms", file=sys.stderr)
    return times


def rows(times: Mapping[str, Sequence[float]]) -> list[dict[str, object]]:
    """Medians, minima, and the median of the ratios to the reference of the same repeat."""
    return [
        {
            "loop": name,
            "cpu_ms": round(statistics.median(found), 3),
            "cpu_ms_min": round(min(found), 3),
            "ratio": round(
                statistics.median(
                    mine / theirs for mine, theirs in zip(found, times[REFERENCE], strict=True)
                ),
                3,
            ),
        }
        for name, found in times.items()
    ]


def missed(found: Sequence[Mapping[str, object]]) -> list[str]:
    """What our loop should be and is not: near the hand-written one, below every framework."""
    ratios = {str(row["loop"]): float(str(row["ratio"])) for row in found}
    ours = ratios.pop(OURS, None)
    if ours is None:
        return []
    told = [f"ours is {ours:.2f} of {REFERENCE}, not {TARGET:.2f}"] if ours > TARGET else []
    peers = {name: ratio for name, ratio in ratios.items() if name != REFERENCE}
    return told + [f"ours is not below {name}" for name, ratio in peers.items() if ours >= ratio]


def table(found: Sequence[Mapping[str, object]]) -> str:
    """The rows for people."""
    line = "{:<20}{:>16}{:>10}{:>8}".format
    lines = [line("loop", "CPU ms per step", "least", "ratio")]
    lines += [
        line(row["loop"], f"{row['cpu_ms']:.2f}", f"{row['cpu_ms_min']:.2f}", f"{row['ratio']:.2f}")
        for row in found
    ]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Measure, print, and return 1 when our loop misses its target, 2 when a loop failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.add_argument("--repeats", type=int, default=8, metavar="N", help="default: 8")
    parser.add_argument("--steps", type=int, default=1000, metavar="N", help="default: 1000")
    parser.add_argument("--only", nargs="+", metavar="LOOP", help=f"besides {REFERENCE}")
    parser.add_argument("--python", type=Path, default=_FRAMEWORKS, help="with every framework")
    args = parser.parse_args(argv)
    names = [name for name in loops() if not args.only or name in {REFERENCE, *args.only}]
    try:
        times = measure(names, args.repeats, args.python, environment(args.steps))
    except (LoopFailedError, OSError, subprocess.TimeoutExpired) as error:
        print(f"cannot be measured: {error}", file=sys.stderr)
        return 2
    found = rows(times)
    print(
        json.dumps({"repeats": args.repeats, "rows": found}, indent=2)
        if args.json
        else table(found)
    )
    for text in missed(found):
        print(text, file=sys.stderr)
    return 1 if missed(found) else 0


if __name__ == "__main__":
    sys.exit(main())
