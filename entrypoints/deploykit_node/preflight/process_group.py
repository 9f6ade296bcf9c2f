"""The ranks of the test's process group on one node, forked from a process that imports torch."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from deploykit_node import LAUNCH, signals
from deploykit_node.preflight import rank_server
from deploykit_node.preflight.messages import MARK, Record

_SERVER = (sys.executable, LAUNCH, "--preflight-ranks")
_LAUNCHERS = ("TORCHELASTIC_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_")
_LAST = 3
"""Lines of a rank's output that are kept for the report."""


@dataclass
class _Member:
    """What a process prints, and takes. It has ended when it prints no more."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter | None = None
    output: list[str] = field(default_factory=list)
    ended: bool = False

    async def answer(self, deadline: float, mark: str = MARK) -> str | None:
        """The rest of the next line with the mark; others are kept. None if it ends or is late."""
        while (left := deadline - time.monotonic()) > 0:
            try:
                line = await asyncio.wait_for(self.reader.readline(), left)
            except asyncio.TimeoutError:  # noqa: UP041 - not TimeoutError in Python 3.10
                return None
            except ConnectionError:
                line = b""
            if not line:
                self.ended = True
                return None
            text = line.decode(errors="replace")
            if text.startswith(mark):
                return text.removeprefix(mark)
            self.output.append(text.strip())
        return None

    def close(self) -> None:
        """End its stdin."""
        if self.writer is not None:
            self.writer.close()


class Ranks:
    """The ranks of one node. `address` is node 0's, which keeps their store.

    `server` is the program that forks them, to which the number of a socket is added.
    """

    def __init__(
        self,
        node: int,
        processes: int,
        address: str,
        env: Mapping[str, str],
        server: Sequence[str] = _SERVER,
    ) -> None:
        self._node, self._address, self._program = node, address, server
        self._numbers = range(node * processes, (node + 1) * processes)
        self._env = {name: value for name, value in env.items() if not name.startswith(_LAUNCHERS)}
        self._env.setdefault("NCCL_DEBUG", "WARN")
        self._env.setdefault("OMP_NUM_THREADS", "1")
        self._requests, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._process: asyncio.subprocess.Process | None = None
        self._store: _Member | None = None
        self._members: list[_Member] = []

    async def start(self) -> None:
        """Start the process that imports PyTorch (`group_member`)."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        self._process = await asyncio.create_subprocess_exec(
            *(*self._program, str(self._theirs.fileno())),
            env=self._env,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            pass_fds=[self._theirs.fileno()],
            preexec_fn=signals.child_setup(before, signal.SIGKILL),
        )
        self._theirs.close()

    async def versions(self, seconds: float) -> Record:
        """The versions that PyTorch reports, and the port of the store, within `seconds`."""
        deadline = time.monotonic() + seconds
        assert self._process is not None  # noqa: S101 - `start` comes first
        assert self._process.stdout is not None  # noqa: S101 - PIPE above
        server = _Member(self._process.stdout)
        if await server.answer(deadline, rank_server.READY) is None:
            return self._failure(self._numbers[0], server, seconds)
        if not self._node:
            self._store = await self._request({"store": self._address, "stays": True}, {})
        await self._fork({})
        answers = await self._answers(deadline)
        merged = self._merged(answers, seconds)
        if "torch" not in merged:
            return merged
        known = [answer for answer in answers if answer]
        speeds = {answer["device"]: answer["speed"] for answer in known}
        correct = all(answer["correct"] for answer in known)
        port = await self._store.answer(deadline) if self._store else None
        kept = json.loads(port) if port else {"port": None}
        return {**merged, "speeds": speeds, "correct": correct, **kept}

    async def again(self, env: Mapping[str, str], seconds: float) -> None:
        """End the ranks, and start others with these variables."""
        self._requests.send(rank_server.END)
        for member in self._members:
            member.close()
        await self._fork(env)
        await self._answers(time.monotonic() + seconds)

    async def order(self, order: Record, seconds: float) -> Record:
        """Give an order to the ranks. The record holds the first one's result, or the failure."""
        line = json.dumps({**order, "seconds": seconds}).encode() + b"\n"
        for member in self._members:
            assert member.writer is not None  # noqa: S101 - `_request` gives one
            member.writer.write(line)
        answers = await self._answers(time.monotonic() + seconds)
        merged = self._merged(answers, seconds)
        if "busy" in merged:
            merged["busy"] = max(answer["busy"] for answer in answers if answer)
        return merged

    async def stop(self) -> None:
        """Kill the processes that still run."""
        for member in (*self._members, *([self._store] if self._store else ())):
            member.close()
        self._requests.close()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()

    async def _fork(self, env: Mapping[str, str]) -> None:
        count = len(self._numbers)
        self._members = [
            await self._request({"rank": rank, "local_rank": local, "processes": count}, env)
            for local, rank in enumerate(self._numbers)
        ]

    async def _request(self, request: Record, env: Mapping[str, str]) -> _Member:
        """Ask for a process, whose stdin and output is the other end of a socket."""
        own, other = socket.socketpair()
        with other:
            text = json.dumps({**request, "env": dict(env)}).encode()
            socket.send_fds(self._requests, [text], [other.fileno()])
        return _Member(*await asyncio.open_connection(sock=own))

    def _merged(self, answers: list[Record | None], seconds: float) -> Record:
        """The first rank's record, or the first failure."""
        failed = [at for at, answer in enumerate(answers) if answer is None]
        if not failed:
            return answers[0] or {}
        return self._failure(self._numbers[failed[0]], self._members[failed[0]], seconds)

    @staticmethod
    def _failure(rank: int, member: _Member, seconds: float) -> Record:
        output = member.output[-_LAST:]
        return {"rank": rank, "ended": member.ended, "seconds": seconds, "output": output}

    async def _answers(self, deadline: float) -> list[Record | None]:
        lines = await asyncio.gather(*(member.answer(deadline) for member in self._members))
        return [json.loads(line) if line else None for line in lines]
