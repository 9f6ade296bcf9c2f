"""What watching costs a run: its step beside that of the bare script, and the watchers' own CPU.

    python benchmarks/watching.py [--seconds 30] [--turns 3]

Two ranks compute on this machine and print each step, while the launcher looks at them every 5
seconds and `watch` at the run every 2. All is counted in CPU time, so a busy machine changes
little. First the script runs bare and watched in turns, and the cheapest turn of each counts. Then
the watchers are measured beside the ranks. Returns 1 where either is more than 1%.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from deploykit.job.model import State

TARGET = 0.01
_AT_MOST = f"(target: {100 * TARGET:g} %)"
_SUBMIT = "submit", "--backend", "local", "--run"
_INTERVAL = 2.0
"""Seconds between two looks of `watch`."""
_TICKS = os.sysconf("SC_CLK_TCK")
_STEPS = 120
"""Of a turn, some 10 s."""
SCRIPT = """\
import sys, time
steps, begin = int(sys.argv[1]), 0.0
for step in range(1, steps + 1):
    for _ in range(5000):
        sum(range(1000))
    if step == 20:
        begin = time.process_time()
    print(f"step {step}/{steps} loss {1 / step:.4f}", flush=True)
print(f"milliseconds {1000 * (time.process_time() - begin) / (steps - 20)}")
"""
JOB = """\
name: watched
entrypoint: {script: train.py}
resources: {processes_per_node: 2, time_limit: 1h}
"""


def main(argv: list[str] | None = None) -> int:
    """Measure and print; return 1 where watching costs more than the target."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=30, metavar="N", help="default: 30")
    parser.add_argument("--turns", type=int, default=3, metavar="N", help="default: 3")
    options = parser.parse_args(argv)
    seconds = options.seconds
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DEPLOYKIT_HOME"] = f"{folder}/home"
        Path(folder, "train.py").write_text(SCRIPT)
        Path(folder, "job.yaml").write_text(JOB)
        turns = [(_bare(folder), _watched(folder, turn)) for turn in range(options.turns)]
        _deploykit(*_SUBMIT, "one", "--", "1000000", cwd=folder)
        try:
            ranks, launcher, watch = _measured(Path(folder, "home/runs/one"), seconds)
        finally:
            _deploykit("cancel", "one", cwd=folder)
            _deploykit("wait", "one", cwd=folder)
    bare, watched = map(min, zip(*turns, strict=True))
    share = (launcher + watch) / ranks
    print(f"step      {bare:7.2f} ms of CPU in the bare script")
    print(f"          {watched:7.2f} ms watched: {100 * (watched / bare - 1):+.2f} % {_AT_MOST}")
    print(f"ranks     {ranks:7.2f} s of CPU in {seconds:g} s")
    print(f"launcher  {launcher:7.2f} s")
    print(f"watch     {watch:7.2f} s")
    print(f"watching  {100 * share:7.2f} % of what the ranks need {_AT_MOST}")
    return int(share > TARGET or watched > (1 + TARGET) * bare)


def _bare(folder: str) -> float:
    """Milliseconds of CPU for a step of two processes of the script."""
    argv = [sys.executable, "train.py", str(_STEPS)]
    both = [subprocess.Popen(argv, cwd=folder, stdout=subprocess.PIPE, text=True) for _ in "12"]
    return _mean("".join(one.communicate()[0] for one in both))


def _watched(folder: str, turn: int) -> float:
    """The same of a run, at which `watch` looks until it has ended."""
    from deploykit.run import registry
    from deploykit.run.watch import Watch

    _deploykit(*_SUBMIT, f"turn-{turn}", "--", str(_STEPS), cwd=folder)
    row = registry.known(f"turn-{turn}")
    watch = Watch([row])
    while not State(watch.look()[0].row.state).final:
        time.sleep(_INTERVAL)
    return _mean(Path(row.folder, "logs/node-0.log").read_text())


def _mean(log: str) -> float:
    return statistics.mean(map(float, re.findall(r"milliseconds ([0-9.]+)", log)))


def _measured(folder: Path, seconds: float) -> tuple[float, float, float]:
    """Seconds of CPU of the ranks, of the launcher, and of looks at the run."""
    from deploykit.run import registry
    from deploykit.run.watch import Watch

    watch = Watch([registry.known("one")])
    while watch.look()[0].progress.step is None:
        time.sleep(_INTERVAL)
    records = [json.loads(path.read_text()) for path in folder.glob("exit_records/process-*.json")]
    ranks = [int(one["pid"]) for one in records]
    launchers = list(_launchers(ranks[0]))
    before = sum(map(_cpu, ranks)), sum(map(_cpu, launchers)), time.process_time()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        watch.look()
        time.sleep(_INTERVAL)
    after = sum(map(_cpu, ranks)), sum(map(_cpu, launchers)), time.process_time()
    first, second, third = (late - early for late, early in zip(after, before, strict=True))
    return first, second, third


def _launchers(pid: int) -> Iterator[int]:
    """The processes of the launcher above a rank, without the relay of its output."""
    while (pid := _parent(pid)) > 1:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"--rank" not in words and any(word.endswith(b"launch.py") for word in words):
            yield pid


def _stat(pid: int) -> list[str]:
    """The fields of ``/proc/PID/stat`` after the name; see proc(5)."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _parent(pid: int) -> int:
    return int(_stat(pid)[1])


def _cpu(pid: int) -> float:
    """Seconds of CPU that a process has used."""
    user, system = _stat(pid)[11:13]
    return (int(user) + int(system)) / _TICKS


def _deploykit(*words: str, cwd: str) -> None:
    program = [sys.executable, "-m", "deploykit", *words]
    subprocess.run(program, cwd=cwd, check=False, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    sys.exit(main())
