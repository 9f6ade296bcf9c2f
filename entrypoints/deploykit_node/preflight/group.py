"""The ranks of the test's process group on one node, forked from one process that imports torch.

Where NCCL does not form the group, it is tried without one part after another (`Bisection`).

The launcher (`Ranks`) asks that process (`serve`) for each rank by a message on a Unix socket, with
the socket that becomes the rank's standard input and output.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

from deploykit_node import LAUNCH, signals
from deploykit_node.preflight.peers import Record

MARK = "preflight "
"""Start of a line that a rank prints for the launcher; NCCL prints to the same place."""
_READY = "ready"
"""The line that says that requests are taken."""
_END = b"end"
"""The message that kills the ranks of earlier requests."""
_LONGEST = 1 << 14
"""Bytes of a request."""
_SERVER = (sys.executable, LAUNCH, "--preflight-ranks")
_LAUNCHERS = ("TORCHELASTIC_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_")
_LAST = 3
"""Lines of a rank's output that are kept for the report."""


_P2P = {"NCCL_P2P_DISABLE": "1"}
_SHM = {"NCCL_SHM_DISABLE": "1"}
_NET = {"NCCL_IB_DISABLE": "1", "NCCL_NET": "Socket"}


class Trial(NamedTuple):
    """What is different from the job's own settings."""

    env: Mapping[str, str]
    part: str
    """What is probably broken if this helps."""
    backend: str | None = None


TRIALS = (
    Trial(_P2P, "direct access between GPUs (PCIe or NVLink: check ACS, IOMMU and Xids)"),
    Trial({**_P2P, **_SHM}, "shared memory (check the size of /dev/shm, and a container's --ipc)"),
    Trial({**_P2P, **_SHM, **_NET}, "InfiniBand, RoCE, EFA or an NCCL network plugin"),
    Trial({}, "", "gloo"),
    Trial(_SHM, "shared memory (check the size of /dev/shm, and a container's --ipc)"),
    Trial(_NET, "InfiniBand, RoCE, EFA or an NCCL network plugin"),
)
_GLOO = 3
_ALONE = {1: 4, 2: 5}
"""The trial with the part alone that a trial left out last."""


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
        """Start the process that imports PyTorch (`members`)."""
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
        if await server.answer(deadline, _READY) is None:
            return _failure(self._numbers[0], server, seconds)
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
        self._requests.send(_END)
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
        for member, rank, answer in zip(self._members, self._numbers, answers, strict=True):
            if answer is None:
                return _failure(rank, member, seconds)
        return answers[0] or {}

    async def _answers(self, deadline: float) -> list[Record | None]:
        lines = await asyncio.gather(*(member.answer(deadline) for member in self._members))
        return [json.loads(line) if line else None for line in lines]


def _failure(rank: int, member: _Member, seconds: float) -> Record:
    output = member.output[-_LAST:]
    return {"rank": rank, "ended": member.ended, "seconds": seconds, "output": output}


def part(number: int) -> str:
    """The name of a trial's part of the test."""
    return f"trial {number}"


class Bisection:
    """The trials that were made, as node 0 knows them."""

    def __init__(self) -> None:
        self._next: int | None = None
        self._helped: int | None = None

    def after(self, passed: bool) -> tuple[int | None, str]:  # noqa: FBT001 - the only argument
        """The next trial after one that has passed or not, or else what all of them have shown.

        The first call is about the group as the job has it.
        """
        last = self._next
        if last is None:
            self._next = 0
        elif passed:
            self._helped, self._next = last, _ALONE.get(last)
        else:
            self._next = last + 1 if last < _GLOO else None
        return self._next, "" if self._next is not None else _answer(self._helped)


def _answer(helped: int | None) -> str:
    """What the trials have shown, and the variables that help."""
    if helped is None:
        return "It fails with Gloo as well, so NCCL is not the cause: check interfaces and ports"
    best = TRIALS[helped]
    if best.backend == "gloo":
        return (
            "NCCL hangs even over plain sockets, but Gloo works: check NCCL_SOCKET_IFNAME, and "
            "that the driver supports this NCCL version; NCCL_DEBUG=INFO logs more. In the "
            "meantime, use init_process_group('gloo')"
        )
    variables = " ".join(f"{name}={value}" for name, value in best.env.items())
    return (
        f"NCCL hangs, but works with {variables}: the fault is in {best.part}. "
        "In the meantime, set that under env in the job file to train, more slowly"
    )


def serve(control: int, rank: Callable[[Record], None]) -> None:
    """Call `rank` with each request that comes on the socket `control`, in a process of its own.

    The variables in its ``env`` are set there. One with ``stays`` outlives `_END`. The fork has
    only this thread, and no GPU is used before it. Ends when stdin is closed; the ranks end too.
    """
    running: list[int] = []
    setup = signals.child_setup(signal.pthread_sigmask(signal.SIG_BLOCK, []), signal.SIGKILL)
    print(_READY, flush=True)
    with socket.socket(fileno=control) as requests:
        while sys.stdin.fileno() not in select.select([requests, sys.stdin], [], [])[0]:
            text, sockets, _, _ = socket.recv_fds(requests, _LONGEST, 1)
            if text == _END:
                for pid in running:
                    os.kill(pid, signal.SIGKILL)  # none was waited for, so no number is used anew
                # those that have not ended yet, as one that waits for a driver
                running = [pid for pid in running if os.waitpid(pid, os.WNOHANG) == (0, 0)]
                continue
            request = json.loads(text)
            pid = os.fork()
            if not pid:
                setup()
                _become(sockets[0], request, rank)
            os.close(sockets[0])
            if not request.get("stays"):
                running.append(pid)


def _become(own: int, request: Record, rank: Callable[[Record], None]) -> NoReturn:
    """Be the rank that was requested, with `own` as its stdin and output."""
    code = 1
    try:
        for descriptor in range(3):
            os.dup2(own, descriptor)
        os.environ.update(request["env"])
        rank(request)
        code = 0
    except BaseException:  # noqa: BLE001 - a fork must not return
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
