"""CPU time per step, and up to the first, of each loop in `loop/`, beside a hand-written one.

The model is small and always the same, so that only the loops differ: two processes under
torchrun, one thread each. Each loop takes turns with the hand-written one in the same processes,
see `loop/turns.py`, since one run on shared cores is often a third slower than the next. Wall time
would mean little there. Each file in `loop/` except `common.py` and `turns.py` is a loop.
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
from typing import Any, NamedTuple

_TOP = Path(__file__).resolve().parent.parent
LOOPS = Path(__file__).resolve().parent / "loop"
REFERENCE = "by_hand"
OURS = "ours"
TARGETS = {"ratio": 1.02, "start_ratio": 1.10}
"""Largest allowed ratio of `ours` to the hand-written loop: per step, and up to the first."""
_FRAMEWORKS = _TOP / ".venv-frameworks/bin/python"
_NOT_PASSED_ON = ("DEPLOYKIT_", "LOOP_", "PYTHON", "SLURM_", "TORCHELASTIC_")


class Sample(NamedTuple):
    """CPU time of rank 0: ms per step, and seconds from its start to the end of the first step."""

    cpu_ms: float
    start_s: float
    reference_ms: float
    """Of the hand-written loop in the same process, per step."""


class LoopFailedError(Exception):
    """A loop failed, or did not print its result."""


def loops(folder: Path = LOOPS) -> list[str]:
    """The names of the loops, the reference first."""
    names = {path.stem for path in folder.glob("*.py")} - {"common", "turns"}
    return sorted(names, key=lambda name: (name != REFERENCE, name != OURS, name))


def environment(steps: int, *, compiled: bool = False) -> dict[str, str]:
    """The environment variables of every loop."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(_NOT_PASSED_ON)}
    # With an arena for each thread, one of two equal loops in turns was 3% slower (glibc 2.36).
    own = {"LOOP_STEPS": str(steps), "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    return inherited | own | ({"LOOP_COMPILE": "1"} if compiled else {})


def run(name: str, python: Path, env: Mapping[str, str]) -> Sample:
    """Run a loop in turns with the reference, or that alone. Raises LoopFailedError."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    program = [f"{REFERENCE}.py"] if name == REFERENCE else ["turns.py", name]
    argv = [str(python), *torchrun, str(LOOPS / program[0]), *program[1:]]
    with tempfile.TemporaryDirectory() as scratch:
        done = subprocess.run(
            argv, cwd=scratch, env=env, capture_output=True, text=True, check=False, timeout=600
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"cpu_ms"')]
    if done.returncode != 0 or len(lines) != len(program):
        raise LoopFailedError(f"{name} exited with code {done.returncode}\n{done.stderr[-3000:]}")
    reference, own = json.loads(lines[0]), json.loads(lines[-1])  # the reference ends first
    return Sample(own["cpu_ms"], own["start_s"], reference["cpu_ms"])


def measure(
    names: Sequence[str], repeats: int, python: Path, env: Mapping[str, str]
) -> dict[str, list[Sample]]:
    """What each loop measured, once per repeat."""
    samples: dict[str, list[Sample]] = {name: [] for name in names}
    for repeat in range(repeats):
        turn = repeat % len(names)
        for name in [*names[turn:], *names[:turn]]:
            found = run(name, python, env)
            samples[name].append(found)
            text = f"{found.cpu_ms:.2f} ms, {found.start_s:.2f} s to the first step"
            print(f"repeat {repeat + 1}: {name} {text}", file=sys.stderr)
    return samples


def rows(samples: Mapping[str, Sequence[Sample]]) -> list[dict[str, object]]:
    """Medians, the least, and the median ratios to the reference beside it in the same repeat."""
    reference = samples[REFERENCE]
    return [
        {
            "loop": name,
            "cpu_ms": round(statistics.median(one.cpu_ms for one in found), 3),
            "cpu_ms_min": round(min(one.cpu_ms for one in found), 3),
            "ratio": _ratio([one.cpu_ms for one in found], [one.reference_ms for one in found]),
            "start_s": round(statistics.median(one.start_s for one in found), 3),
            "start_ratio": _ratio(
                [one.start_s for one in found], [one.start_s for one in reference]
            ),
        }
        for name, found in samples.items()
    ]


def _ratio(values: Sequence[float], reference: Sequence[float]) -> float:
    pairs = zip(values, reference, strict=True)
    return round(statistics.median(mine / theirs for mine, theirs in pairs), 3)


def missed(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The targets that our loop misses: close to the hand-written one, below all frameworks."""
    by_name = {row["loop"]: row for row in rows}
    ours = by_name.pop(OURS, None)
    if ours is None:
        return []
    what = {"ratio": "per step", "start_ratio": "to the first step"}
    misses = [
        f"ours takes {ours[key]:.2f} times as long as {REFERENCE} {what[key]}, more than {most:.2f}"
        for key, most in TARGETS.items()
        if ours[key] > most
    ]
    peers = (name for name in by_name if name != REFERENCE)
    return misses + [
        f"ours is not faster than {name}"
        for name in peers
        if ours["ratio"] >= by_name[name]["ratio"]
    ]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as a text table."""
    line = "{:<20}{:>16}{:>8}{:>8}{:>18}{:>8}".format
    lines = [line("loop", "CPU ms per step", "least", "ratio", "CPU s to 1st step", "ratio")]
    keys = ("cpu_ms", "cpu_ms_min", "ratio", "start_s", "start_ratio")
    lines += [line(row["loop"], *(f"{row[key]:.2f}" for key in keys)) for row in rows]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Measure, print, and return 1 if our loop misses a target, 2 if a loop failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.add_argument("--repeats", type=int, default=8, metavar="N", help="default: 8")
    parser.add_argument("--steps", type=int, default=1000, metavar="N", help="default: 1000")
    parser.add_argument("--only", nargs="+", metavar="LOOP", help=f"in addition to {REFERENCE}")
    parser.add_argument("--compile", action="store_true", help="compile layers; of these two alone")
    parser.add_argument(
        "--python", type=Path, default=_FRAMEWORKS, help="Python with all frameworks"
    )
    args = parser.parse_args(argv)
    only = [OURS] if args.compile else args.only
    names = [name for name in loops() if not only or name in {REFERENCE, *only}]
    env = environment(args.steps, compiled=args.compile)
    try:
        samples = measure(names, args.repeats, args.python, env)
    except (LoopFailedError, OSError, subprocess.TimeoutExpired) as error:
        print(f"measurement failed: {error}", file=sys.stderr)
        return 2
    result = rows(samples)
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
