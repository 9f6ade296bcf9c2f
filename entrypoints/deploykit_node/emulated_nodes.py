"""Run all nodes of a job on this machine: one launcher per node, supervised to their end.

    launch.py --emulated-nodes --nodes=2 --time-limit=600 torchrun --nnodes=2 ... -- train.py

Signals go to every launcher. When one fails or the time limit (in seconds) is over, the others are
told to stop. The exit code is that of the launcher that failed first, or 124 at the time limit.
With ``--nodes=2:4`` a launcher that is killed is a lost node, which comes back after some seconds.
Processes that the program has left running, such as a daemon, are ended as well.
Needs DEPLOYKIT_RUN_DIR: launcher N writes to ``logs/node-N.log`` there.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from deploykit_node import LAUNCH, records, signals
from deploykit_node.observe import processes

TIMED_OUT = 124
"""Exit code at the time limit, that of coreutils' `timeout`."""

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


_AWAY = 5
"""Seconds until a lost node comes back."""
_RETURNS = 100
"""How often nodes come back in all."""
_ORPHANS_GRACE = 5.0
"""Seconds that processes get to exit after SIGTERM that the program has left running."""


@dataclass(frozen=True)
class Options:
    """The command line: nodes, time limit in seconds (0: none), arguments of each launcher."""

    nodes: int
    elastic: bool
    """Whether the job can do without some of them."""
    time_limit: int
    command: tuple[str, ...]


def main(argv: Sequence[str]) -> int:
    """Run the job and return its exit code."""
    options = parse(argv)
    signals.adopt_orphans()
    nodes = _Nodes(Path(os.environ["DEPLOYKIT_RUN_DIR"]), options)
    signal.alarm(options.time_limit)
    code = nodes.wait()
    signal.alarm(0)
    _end_orphans()
    return code


def _end_orphans() -> None:
    """End the processes that the program has left running, and name them."""
    for _ in range(20):
        if not _children_remain():
            return
        time.sleep(0.05)  # a helper of its own, such as a worker that loads data, is about to exit
    left = processes.children(os.getpid())
    names = (f"{state.name} ({pid})" for pid in left if (state := processes.stat(pid)))
    print("deploykit: stopped processes left running:", ", ".join(names), file=sys.stderr)
    signalled: set[int] = set()
    begun = time.monotonic()
    while _children_remain() and (waited := time.monotonic() - begun) < 2 * _ORPHANS_GRACE:
        number = signal.SIGTERM if waited < _ORPHANS_GRACE else signal.SIGKILL
        for pid in processes.children(os.getpid()):
            if pid not in signalled or number == signal.SIGKILL:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
                signalled.add(pid)
        time.sleep(0.05)


def _children_remain() -> bool:
    """Whether a child of this process is left; reaps those that have ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        return True
    return False


def parse(argv: Sequence[str]) -> Options:
    """The options in `argv`. Exits with 2 if they are wrong."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--nodes", required=True)
    parser.add_argument("--time-limit", type=int, required=True)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    values = parser.parse_args(argv)
    least, _, most = values.nodes.partition(":")
    return Options(int(most or least), bool(most), values.time_limit, tuple(values.command))


class _Nodes:
    """The launchers of a run."""

    def __init__(self, folder: Path, options: Options) -> None:
        self._folder, self._options = folder, options
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._code = 0
        self._started = self._stopping = False
        self._returns = 0
        self._early: list[int] = []
        """Signals received before all launchers were started."""
        for forwarded in _FORWARDED:
            signal.signal(forwarded, self._forward)
        signal.signal(signal.SIGALRM, self._time_out)
        self._node: dict[int, int] = {}
        """The number of each running launcher's node."""
        for node in range(options.nodes):
            self._start(node)
        self._started = True
        for number in self._early:
            self._forward(number, None)

    def _start(self, node: int, after: int = 0) -> None:
        count = self._options.nodes
        variables = {"DEPLOYKIT_NODE_RANK": str(node), "DEPLOYKIT_NODES": str(count)}
        argv = [sys.executable, LAUNCH, *self._options.command]
        if after:
            argv = ["sh", "-c", f'sleep {after}; exec "$@"', "sh", *argv]
        path = self._folder / "logs" / f"node-{node}.log"
        with open(path, "ab", opener=records.private) as log:
            environ = {**os.environ, **variables} if count > 1 else None
            process = subprocess.Popen(argv, env=environ, stdout=log, stderr=log)
        self._running[process.pid], self._node[process.pid] = process, node

    def wait(self) -> int:
        """Wait for all launchers and return the exit code; the first failure stops the others."""
        while self._running:
            pid, status = os.wait()
            if pid not in self._running:
                continue  # a process that the program has left
            returncode = os.waitstatus_to_exitcode(status)
            code = signals.shell_code(returncode)
            self._running.pop(pid).returncode = code
            if returncode < 0 and self._comes_back():
                self._start(self._node[pid], after=_AWAY)
                continue
            self._code = self._code or code
            if code not in (0, records.STOPPED):  # after 75 the others may still be saving
                self._forward(signal.SIGTERM, None)
        return self._code

    def _comes_back(self) -> bool:
        """Whether a node that was lost comes back."""
        if not self._options.elastic or self._stopping or self._returns == _RETURNS:
            return False
        self._returns += 1
        return True

    def _forward(self, number: int, _frame: FrameType | None) -> None:
        if not self._started:
            self._early.append(number)
            return
        self._stopping = self._stopping or number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        for pid in self._running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _time_out(self, _number: int, _frame: FrameType | None) -> None:
        records.write_text(self._folder / "timed-out", "")
        self._code = TIMED_OUT
        self._forward(signal.SIGTERM, None)
