"""What watching costs a run: the CPU of its launcher and of `watch`, beside that of the ranks.

    python benchmarks/watching.py [--seconds 30]

Two ranks compute on this machine and print each step, while the launcher looks at them every 5
seconds and `watch` at the run every 2. All three are counted in CPU time, so a busy machine changes
little. Returns 1 where the two watchers need more than 1% of what the ranks need.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

TARGET = 0.01
_INTERVAL = 2.0
"""Seconds between two looks of `watch`."""
_TICKS = os.sysconf("SC_CLK_TCK")
SCRIPT = """\
import time
step = 0
while True:
    end = time.monotonic() + 0.1
    while time.monotonic() < end:
        sum(range(1000))
    step += 1
    print(f"step {step}/100000 loss {1 / step:.4f}", flush=True)
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
    seconds = parser.parse_args(argv).seconds
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DEPLOYKIT_HOME"] = f"{folder}/home"
        Path(folder, "train.py").write_text(SCRIPT)
        Path(folder, "job.yaml").write_text(JOB)
        _deploykit("submit", "--backend", "local", "--run", "one", cwd=folder)
        try:
            ranks, launcher, watch = _measured(Path(folder, "home/runs/one"), seconds)
        finally:
            _deploykit("cancel", "one", cwd=folder)
            _deploykit("wait", "one", cwd=folder)
    share = (launcher + watch) / ranks
    print(f"ranks     {ranks:7.2f} s of CPU in {seconds:g} s")
    print(f"launcher  {launcher:7.2f} s")
    print(f"watch     {watch:7.2f} s")
    print(f"watching  {100 * share:7.2f} % of what the ranks need (target: {100 * TARGET:g} %)")
    return int(share > TARGET)


def _measured(folder: Path, seconds: float) -> tuple[float, float, float]:
    """Seconds of CPU of the ranks, of the launcher, and of looks at the run."""
    from deploykit import registry
    from deploykit.run_watch import Watch

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
