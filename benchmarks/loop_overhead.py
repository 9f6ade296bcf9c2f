"""CPU time per training step of each loop in `loop/`, compared with a hand-written one.

The model is small and always the same, so that only the loops differ: two processes under
torchrun, one thread each. The loops take turns, in rotating order, so that a busy minute affects
all of them alike. Wall time would mean little on shared cores. Each file in `loop/` except
`common.py` is a loop.
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
"""Largest allowed ratio of `ours` to the hand-written loop."""
_FRAMEWORKS = _TOP / ".venv-frameworks/bin/python"
_NOT_PASSED_ON = ("DEPLOYKIT_", "LOOP_", "PYTHON", "SLURM_", "TORCHELASTIC_")


class LoopFailedError(Exception):
    """A loop failed, or did not print its result."""


def loops(folder: Path = LOOPS) -> list[str]:
    """The names of the loops, the reference first."""
    names = {path.stem for path in folder.glob("*.py")} - {"common"}
    return sorted(names, key=lambda name: (name != REFERENCE, name != OURS, name))


def environment(steps: int) -> dict[str, str]:
    """The environment variables of every loop."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(_NOT_PASSED_ON)}
    return {**inherited, "LOOP_STEPS": str(steps), "OMP_NUM_THREADS": "1"}


def run(name: str, python: Path, env: Mapping[str, str]) -> float:
    """Run a loop; returns rank 0's mean CPU time per step, in ms. Raises LoopFailedError."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    argv = [str(python), *torchrun, str(LOOPS / f"{name}.py")]
    with tempfile.TemporaryDirectory() as scratch:
        done = subprocess.run(
            argv, cwd=scratch, env=env, capture_output=True, text=True, check=False, timeout=600
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"cpu_ms"')]
    if done.returncode != 0 or len(lines) != 1:
        raise LoopFailedError(f"{name} exited with code {done.returncode}\n{done.stderr[-3000:]}")
    return float(json.loads(lines[0])["cpu_ms"])


def measure(
    names: Sequence[str], repeats: int, python: Path, env: Mapping[str, str]
) -> dict[str, list[float]]:
    """Milliseconds of each loop, one value per repeat."""
    times: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(repeats):
        turn = repeat % len(names)
        for name in [*names[turn:], *names[:turn]]:
            times[name].append(run(name, python, env))
            print(f"repeat {repeat + 1}: {name} {times[name][-1]:.2f} ms", file=sys.stderr)
    return times


def rows(times: Mapping[str, Sequence[float]]) -> list[dict[str, object]]:
    """Medians, minima, and the median ratio to the reference in the same repeat."""
    return [
        {
            "loop": name,
            "cpu_ms": round(statistics.median(values), 3),
            "cpu_ms_min": round(min(values), 3),
            "ratio": round(
                statistics.median(
                    mine / theirs for mine, theirs in zip(values, times[REFERENCE], strict=True)
                ),
                3,
            ),
        }
        for name, values in times.items()
    ]


def missed(rows: Sequence[Mapping[str, object]]) -> list[str]:
    """The targets that our loop misses: close to the hand-written one, below all frameworks."""
    ratios = {str(row["loop"]): float(str(row["ratio"])) for row in rows}
    ours = ratios.pop(OURS, None)
    if ours is None:
        return []
    misses = (
        [f"ours takes {ours:.2f} times as long as {REFERENCE}, more than {TARGET:.2f}"]
        if ours > TARGET
        else []
    )
    peers = {name: ratio for name, ratio in ratios.items() if name != REFERENCE}
    return misses + [
        f"ours is not faster than {name}" for name, ratio in peers.items() if ours >= ratio
    ]


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """The rows as a text table."""
    line = "{:<20}{:>16}{:>10}{:>8}".format
    lines = [line("loop", "CPU ms per step", "least", "ratio")]
    lines += [
        line(row["loop"], f"{row['cpu_ms']:.2f}", f"{row['cpu_ms_min']:.2f}", f"{row['ratio']:.2f}")
        for row in rows
    ]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Measure, print, and return 1 if our loop misses a target, 2 if a loop failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.add_argument("--repeats", type=int, default=8, metavar="N", help="default: 8")
    parser.add_argument("--steps", type=int, default=1000, metavar="N", help="default: 1000")
    parser.add_argument("--only", nargs="+", metavar="LOOP", help=f"in addition to {REFERENCE}")
    parser.add_argument(
        "--python", type=Path, default=_FRAMEWORKS, help="Python with all frameworks"
    )
    args = parser.parse_args(argv)
    names = [name for name in loops() if not args.only or name in {REFERENCE, *args.only}]
    try:
        times = measure(names, args.repeats, args.python, environment(args.steps))
    except (LoopFailedError, OSError, subprocess.TimeoutExpired) as error:
        print(f"measurement failed: {error}", file=sys.stderr)
        return 2
    result = rows(times)
    print(
        json.dumps({"repeats": args.repeats, "rows": result}, indent=2)
        if args.json
        else table(result)
    )
    for text in missed(result):
        print(text, file=sys.stderr)
    return 1 if missed(result) else 0


if __name__ == "__main__":
    sys.exit(main())
