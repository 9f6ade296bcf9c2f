"""The ranks of the test's process group on one node, each a process, as torch is large."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from deploykit_node import signals
from deploykit_node.preflight.messages import MARK, Record

_LAUNCH = Path(__file__).resolve().parents[2] / "launch.py"
_LAUNCHERS = ("TORCHELASTIC_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_")
_LAST = 3
"""Lines of a rank's output that are kept for the report."""


class Ranks:
    """The ranks of one node. `address` is node 0's, where rank 0 keeps their store."""

    def __init__(self, node: int, processes: int, address: str, env: Mapping[str, str]) -> None:
        self._address = address
        self._numbers = range(node * processes, (node + 1) * processes)
        self._env = {name: value for name, value in env.items() if not name.startswith(_LAUNCHERS)}
        self._env.setdefault("NCCL_DEBUG", "WARN")
        self._env.setdefault("OMP_NUM_THREADS", "1")
        self._running: list[asyncio.subprocess.Process] = []
        self._output: list[list[str]] = [[] for _ in self._numbers]

    async def start(self) -> None:
        """Start the processes (`group_member`)."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        for local_rank, rank in enumerate(self._numbers):
            numbers = map(str, (rank, local_rank, len(self._numbers)))
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, str(_LAUNCH), "--preflight-rank", *numbers, self._address),
                env=self._env,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                preexec_fn=signals.child_setup(before, signal.SIGKILL),
            )
            self._running.append(process)

    async def versions(self, seconds: float) -> Record:
        """The versions that PyTorch reports, and the port of rank 0's store, within `seconds`."""
        answers = await self._answers(seconds)
        merged = self._merged(answers, seconds)
        if "torch" in merged:
            known = [answer for answer in answers if answer]
            merged["speeds"] = {answer["device"]: answer["speed"] for answer in known}
            merged["correct"] = all(answer["correct"] for answer in known)
        return merged

    async def reduce(self, order: Record, seconds: float) -> Record:
        """Join the group and run an all_reduce. The record holds the result or the failure."""
        line = json.dumps({**order, "seconds": seconds}).encode() + b"\n"
        for process in self._running:
            assert process.stdin is not None  # noqa: S101 - PIPE above
            process.stdin.write(line)
        return self._merged(await self._answers(seconds), seconds)

    async def stop(self) -> None:
        """Kill the processes that still run."""
        for process in self._running:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def _merged(self, answers: list[Record | None], seconds: float) -> Record:
        """The first rank's record, or the first failure."""
        failed = [at for at, answer in enumerate(answers) if answer is None]
        if not failed:
            return answers[0] or {}
        first = failed[0]
        ended = self._running[first].returncode is not None
        return {
            "rank": self._numbers[first],
            "ended": ended,
            "seconds": seconds,
            "output": self._output[first][-_LAST:],
        }

    async def _answers(self, seconds: float) -> list[Record | None]:
        deadline = time.monotonic() + seconds
        reading = (self._answer(at, deadline) for at in range(len(self._running)))
        return await asyncio.gather(*reading)

    async def _answer(self, at: int, deadline: float) -> Record | None:
        """The next record of one rank; its other lines are kept. None if it exits or is late."""
        process = self._running[at]
        assert process.stdout is not None  # noqa: S101 - PIPE above
        while (left := deadline - time.monotonic()) > 0:
            try:
                line = (await asyncio.wait_for(process.stdout.readline(), left)).decode()
            except asyncio.TimeoutError:  # noqa: UP041 - not TimeoutError in Python 3.10
                return None
            if not line:
                await process.wait()
                return None
            if line.startswith(MARK):
                record: Record = json.loads(line.removeprefix(MARK))
                return record
            self._output[at].append(line.strip())
        return None
