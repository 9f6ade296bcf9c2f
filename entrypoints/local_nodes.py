"""All nodes of a job on this machine: one launcher for each, watched to their end.

    python .deploykit/local_nodes.py --nodes=2 --time-limit=600 torchrun --nnodes=2 ... -- train.py

Signals go to every launcher; when one fails, or the time limit (in seconds) is over, the others
are told to stop. The exit code is that of the launcher that failed first, 124 at the time limit.
Needs DEPLOYKIT_RUN_DIR: launcher N writes to ``logs/node-N.log`` there.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

import ends
import private

TIMED_OUT = 124
"""As `timeout` of the coreutils ends."""

_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main(argv: list[str]) -> int:
    """Run the job and return its exit code."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--time-limit", type=int, required=True)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    asked = parser.parse_args(argv)
    nodes = _Nodes(Path(os.environ["DEPLOYKIT_RUN_DIR"]), asked.nodes, asked.command)
    signal.alarm(asked.time_limit)
    return nodes.wait()


class _Nodes:
    """The launchers of a run."""

    def __init__(self, folder: Path, count: int, command: list[str]) -> None:
        self._folder = folder
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._code = 0
        self._started = False
        self._early: list[int] = []
        """Signals that came before all launchers had been started."""
        for number in _PASSED_ON:
            signal.signal(number, self._pass_on)
        signal.signal(signal.SIGALRM, self._time_is_over)
        for node in range(count):
            process = self._start(node, count, command)
            self._running[process.pid] = process
        self._started = True
        for number in self._early:
            self._pass_on(number, None)

    def _start(self, node: int, count: int, command: list[str]) -> subprocess.Popen[bytes]:
        place = {"DEPLOYKIT_NODE_RANK": str(node), "DEPLOYKIT_NODES": str(count)}
        launch = [sys.executable, str(Path(__file__).with_name("launch.py")), *command]
        path = self._folder / "logs" / f"node-{node}.log"
        with open(path, "ab", opener=private.opener) as log:
            environ = {**os.environ, **place} if count > 1 else None
            return subprocess.Popen(launch, env=environ, stdout=log, stderr=log)

    def wait(self) -> int:
        """Wait for all launchers; the first that fails stops the others."""
        while self._running:
            pid, status = os.wait()
            code = ends.shell_code(os.waitstatus_to_exitcode(status))
            self._running.pop(pid).returncode = code
            self._code = self._code or code
            if code not in (0, ends.STOPPED):  # with that one, the others may still be saving
                self._pass_on(signal.SIGTERM, None)
        return self._code

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        if not self._started:
            self._early.append(number)
            return
        for pid in self._running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _time_is_over(self, _number: int, _frame: FrameType | None) -> None:
        private.write(self._folder / "timed-out", "")
        self._code = TIMED_OUT
        self._pass_on(signal.SIGTERM, None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
