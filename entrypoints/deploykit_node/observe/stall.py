"""The stall rule: ranks that make no progress, found from outside, without the script's help.

Signs of progress are what the ranks print and what they write to files. The longest pause so far
says what is usual for this run: a pause is too long when it is several times as long, and longer
than a generous minimum. Then the ranks are looked at twice. Ranks that compute get more time, since
a slow evaluation looks the same as an endless loop; the others are stalled. A record says so, with
the stacks, until there is progress again.

A run that is told to stop is judged sooner, since there is no later. Slurm ends the ranks at the
same moment, so stacks are taken in each long pause.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from deploykit_node import LAUNCH, cluster, records
from deploykit_node.cluster import BadEnvironment, Environ
from deploykit_node.log import now
from deploykit_node.observe import processes, stacks
from deploykit_node.observe.stacks import NoStacks
from deploykit_node.records import StallRecord

MINIMUM = 300.0
"""Seconds: no shorter pause is too long."""
TIMES = 3.0
"""A pause is too long when it is so many times as long as the longest before it."""
BEFORE_OUTPUT = 2.0
"""So much longer may the first pause be: imports, downloads, compilation."""
COMPUTING = 4.0
"""So much longer may a pause be in which a rank computes."""
CONNECTING = 0.4
"""Share of `MINIMUM` after which the ranks are looked at: all may wait in `init_process_group`."""
STOPPED = 0.1
"""Share of `MINIMUM`: a run that is told to stop after such a pause has made no progress, unless
its pauses are usually long."""
_SHARE = 60
"""Looks in the shortest pause that is too long; at most one in `_OFTEN` seconds."""
_OFTEN = 5.0
_REACTION = 1.0
"""Seconds within which a rank answers a signal."""
_LATE = 1.0
"""Seconds after a look within which the next one is on time, or twice what is planned."""
_WRITTEN = 1 << 20
"""Bytes that are a sign of progress, as of a checkpoint."""
_PATIENCE = 60.0
"""Seconds for taking stacks."""
_ASKING = 2
"""Nodes that ask NCCL, which answers for all: the second in case the first hangs."""
_BUSY = 0.05
"""Share of a core above which a process computes."""
_WAITING_IN = ("/torch/distributed/",)
"""Files in whose functions a process waits, although it may use a core: NCCL spins."""
_CALL, _FILE = "_create_c10d_store", "/torch/distributed/rendezvous.py"
_HELPERS = "/multiprocessing/resource_tracker.py"
_CONNECT = 3.0
"""Seconds for a connection to the address where processes wait."""

Stacks = dict[str, Any]
"""A rank or a process in a dump of stacks, as `observe.stacks` writes them."""


@dataclass(frozen=True)
class Settings:
    """What to do about a stall (``report``, ``dump`` or ``restart``), and `MINIMUM` or another."""

    action: str
    minimum: float

    @property
    def every(self) -> float:
        """Seconds between two looks."""
        return min(_OFTEN, self.minimum / _SHARE)


def settings(env: Environ) -> Settings:
    """The settings of the job. Raises BadEnvironment for a minimum that is no number.

    A program that is debugged may stand at a line for any time.
    """
    text = env.get("DEPLOYKIT_STALL_SECONDS", "")
    minimum = 0.0
    with contextlib.suppress(ValueError):
        minimum = float(text) if text else MINIMUM
    if not minimum > 0:
        raise BadEnvironment(
            f"DEPLOYKIT_STALL_SECONDS is {text!r}; it must be a positive number of seconds."
        )
    if env.get("DEPLOYKIT_DEBUGGER"):
        minimum = math.inf
    return Settings(env.get("DEPLOYKIT_ON_STALL", "dump"), minimum)


class Watch:
    """Watches the ranks of this node, which register in `folder`."""

    def __init__(
        self, env: Environ, here: cluster.Cluster, folder: Path, say: Callable[[str], None]
    ) -> None:
        self._env, self._here, self._folder, self._say = env, here, folder, say
        self._settings = settings(env)
        self._signs: tuple[dict[str, int], dict[int, int]] = ({}, {})
        self._heard = False
        self._looked = self._last = time.monotonic()
        """When `look` was last called, and when the last sign of progress was seen."""
        self._longest = self._usual = 0.0
        """The longest pause, and the longest one after the first output."""
        self._running = False
        """Whether the pause that lasts now began after the first output."""
        self._written: int | None = None
        self._dump: subprocess.Popen[bytes] | None = None
        """Stacks that are being taken."""
        self._begun = 0.0
        self._looks: list[Look] = []
        self._count = 0
        self._asked = 0
        """How often this pause was looked at for ranks that wait in `init_process_group`."""
        self._last_look: Look | None = None
        """The last look at the ranks in this pause."""
        self._stalled = self._killed = self._broken = self._told_to_stop = False

    @property
    def every(self) -> float:
        """Seconds until the next `look`."""
        return self._settings.every

    def look(self) -> None:
        """See whether there was progress, and note a stall, or its end.

        An error ends the watch, and never the run.
        """
        if self._broken or self._told_to_stop:
            return
        try:
            self._look()
        except Exception as error:  # noqa: BLE001 - whatever it is, the ranks train on
            self._broken = True
            self._say(f"stall detection failed and is now off: {error!r}")

    def stop(self, patience: float) -> None:
        """Note, before the ranks are told to stop, whether they make no progress.

        Their stacks are taken within `patience` seconds. An error never keeps the run from its end.
        """
        if self._broken or math.isinf(self._settings.minimum):
            return
        try:
            self._stop(patience)
        except Exception as error:  # noqa: BLE001 - whatever it is, the ranks must stop
            self._say(f"stacks could not be taken before the stop: {error!r}")
        self._told_to_stop = True

    def _stop(self, patience: float) -> None:
        moment = self._now()
        quiet = moment - self._last
        if quiet < self._stop_limit or self._progressed_until(time.time() - _REACTION):
            return
        if self._dump is not None:  # Slurm may have ended the ranks already
            self._note(self._newest(moment))
        self._begin_dump()
        if self._dump is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._dump.wait(patience)
            self._dump.kill()
        last = self._last_look
        self._note(self._newest(moment))
        look = self._last_look
        if not self._stalled:
            if look is None:
                return  # the ranks have just ended
            computes = look.computes_since(last or look)
            if computes and quiet < COMPUTING * self._stop_limit:
                return
        self._stall(quiet, None, stopped=True)

    @property
    def _stop_limit(self) -> float:
        """Seconds without a sign after which a run that is told to stop made no progress."""
        share = STOPPED * (1 if self._heard else BEFORE_OUTPUT)
        return max(share * self._settings.minimum, TIMES * self._usual)

    def _progressed_until(self, end: float) -> bool:
        """Whether a rank has printed something or written files between the last look and `end`.

        What comes later may be its answer to the signal that ends it.
        """
        heard, _ = self._signs
        for name, at in self._printed().items():
            if at != heard.get(name) and at < end * 1e9:
                return True
        return self._written is not None and self._bytes() - self._written >= _WRITTEN

    def _newest(self, moment: float) -> Look:
        return Look(moment, self._look_folder, processes.cpu_seconds(self._tree()))

    def _note(self, look: Look) -> None:
        """Keep a look, unless fewer ranks are left than in the last one of this pause."""
        if look.ranks and not (self._last_look and len(self._last_look.ranks) > len(look.ranks)):
            self._last_look = look

    def _now(self) -> float:
        """The time; Slurm may have suspended the job, or the machine slept: that is no pause."""
        moment = time.monotonic()
        late = moment - self._looked - max(2 * self.every, _LATE)
        self._looked = moment
        if late > 0:
            self._last += late
            self._looks = []
        return moment

    def _look(self) -> None:
        moment = self._now()
        if self._progressed(moment):
            self._continue(moment)
        elif self._stalled:
            self._restart()
        elif moment - self._last > self.limit:
            self._examine(moment)
        elif moment - self._last > self._ask_at:
            self._ask(moment)

    @property
    def _ask_at(self) -> float:
        """Seconds without a sign after which `_ask` looks next; first in case that the run ends."""
        return max(self._stop_limit, self._asked * CONNECTING * self._settings.minimum)

    @property
    def limit(self) -> float:
        """Seconds without a sign after which the ranks are looked at."""
        minimum = self._settings.minimum * (1 if self._heard else BEFORE_OUTPUT)
        return max(minimum, TIMES * self._longest)

    def _progressed(self, moment: float) -> bool:
        """Whether a rank has printed, started or ended, or written files, since the last look."""
        signs = heard, living = self._printed(), records.living(self._folder)
        changed, self._signs = signs != self._signs or not living, signs
        self._heard = self._heard or bool(heard)
        if changed or moment - self._last < self._stop_limit / 2:
            return changed  # while there is output, nothing else is looked at
        before, self._written = self._written, self._bytes()
        return before is not None and self._written - before >= _WRITTEN

    def _printed(self) -> dict[str, int]:
        """When each rank has printed last, in nanoseconds."""
        return {path.name: path.stat().st_mtime_ns for path in self._folder.glob("*.heard")}

    def _bytes(self) -> int:
        """What the processes of the ranks have written."""
        return sum(map(processes.written, self._tree()))

    def _continue(self, moment: float) -> None:
        """Begin to wait for the next sign."""
        pause, self._last, self._looks, self._written = moment - self._last, moment, [], None
        self._asked, self._last_look = 0, None
        if self._stalled:
            self._stalled = False
            self._say(f"progress resumed after {pause:.0f} s")
            self._record.unlink(missing_ok=True)
        if not self._killed:
            self._longest = max(self._longest, pause)
            self._usual = max(self._usual, pause if self._running else 0.0)
        self._running = self._heard
        self._killed = False

    def _ask(self, moment: float) -> None:
        """Look whether all processes wait in `init_process_group`: nothing comes of that."""
        if self._dump is None:
            self._begin_dump()
        elif self._dump.poll() is not None or moment - self._begun > _PATIENCE:
            self._dump.kill()
            self._dump, self._asked = None, self._asked + 1
            self._note(self._newest(moment))
            if waiting := _meeting(self._look_folder):
                self._stall(moment - self._last, waiting)

    def _examine(self, moment: float) -> None:
        """Look at the ranks twice, and decide whether they wait or compute."""
        if self._dump is None:
            if not self._looks or moment >= self._looks[-1].moment + max(2 * self.every, 1.0):
                self._begin_dump()
            return
        if self._dump.poll() is None:
            if moment - self._begun > _PATIENCE:
                self._dump.kill()
            return
        self._dump = None
        look = self._newest(moment)
        self._note(look)
        self._looks = [*self._looks[-1:], look]
        if len(self._looks) == 1:
            return
        quiet = moment - self._last
        computes = self._looks[1].computes_since(self._looks[0])
        if not computes or quiet > COMPUTING * self.limit:
            self._stall(quiet, _meeting(self._look_folder))

    def _begin_dump(self) -> None:
        """Have the stacks taken by another process, so that signals are still delivered."""
        if self._dump is not None:
            self._dump.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._dump.wait(_REACTION)
        before = self._folder / f"look-{self._count - 1}"
        if not (self._last_look and self._last_look.folder == before):
            shutil.rmtree(before, ignore_errors=True)
        self._count += 1
        self._begun = time.monotonic()
        words = [sys.executable, LAUNCH, "--dump-stacks"]
        words += [self._env["DEPLOYKIT_RUN_DIR"], str(self._look_folder)]
        words += ["--ras"] if self._here.node < _ASKING else []
        with contextlib.suppress(OSError):
            null = subprocess.DEVNULL
            self._dump = subprocess.Popen(
                words, env=dict(self._env), stdin=null, stdout=null, stderr=null
            )

    @property
    def _look_folder(self) -> Path:
        return self._folder / f"look-{self._count}"

    def _stall(
        self, quiet: float, waiting: Meeting | None = None, *, stopped: bool = False
    ) -> None:
        """Record the stall, keep the stacks, and say so."""
        self._stalled = True
        action, name, kept = self._settings.action, "", ""
        if action != "report" and self._last_look:
            name = time.strftime("%Y%m%dT%H%M%SZ-stall", time.gmtime())
            target = Path(self._env["DEPLOYKIT_RUN_DIR"], "stacks", name)
            with contextlib.suppress(OSError):
                shutil.copytree(self._last_look.folder, target, dirs_exist_ok=True)
                kept = f"; the stacks are in {target}"
        record: StallRecord = {
            "time": now(),
            "seconds": round(quiet),
            "longest": round(self._longest),
            "dump": name,
            "nodes": len(self._here.hosts),
            "attempt": records.attempt(self._env),
            "waiting": waiting.number if waiting else 0,
            "address": waiting.address if waiting else "",
            "refused": waiting.refused if waiting else False,
            "stopped": stopped,
        }
        if stopped and (before := records.read(self._record)):
            for key in ("waiting", "address", "refused"):
                record[key] = before[key]
        with contextlib.suppress(OSError):
            records.write(self._record, record)
        longest = self._usual if stopped else self._longest
        usual = f"the longest previous pause was {longest:.0f} s"
        why = f": {waiting}" if waiting else ""
        end = " when the run was told to stop" if stopped else ""
        self._say(f"no progress for {quiet:.0f} s{end} ({usual}){why}{kept}")

    @property
    def _record(self) -> Path:
        folder = Path(self._env["DEPLOYKIT_RUN_DIR"], records.FOLDER)
        return folder / f"stall-{self._here.number}.json"

    def _restart(self) -> None:
        """Kill the ranks once every node has stalled, if the job asks for that.

        What follows is up to `retries` and `slurm.restarts.error`, as after any other failure.
        """
        if self._settings.action != "restart" or self._killed:
            return
        folder, nodes = self._record.parent, len(self._here.hosts)
        if sum(1 for _ in folder.glob("stall-*.json")) < nodes:  # names alone, as nodes are many
            return
        stalled = records.read_all(folder, "stall-*.json", {"attempt": int})
        attempt = records.attempt(self._env)
        if sum(record["attempt"] == attempt for _, record in stalled) < nodes:
            return
        self._killed = True
        self._say("on_stall: restart: sending SIGKILL to the ranks")
        for relay in records.living(self._folder).values():
            for pid in processes.children(relay)[:1]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _tree(self) -> list[int]:
        """The processes of this node's ranks."""
        relays = records.living(self._folder).values()
        return [pid for relay in relays for pid in processes.children(relay)]


@dataclass(frozen=True)
class Look:
    """The stacks in a folder, and the CPU time of each process until then, in seconds."""

    moment: float
    folder: Path
    cpu: dict[int, float]

    @cached_property
    def ranks(self) -> list[Stacks]:
        """The ranks whose stacks could be read."""
        return [rank for rank in _ranks(self.folder) if rank["process"]["threads"]]

    def computes_since(self, before: Look) -> bool:
        """Whether any rank, or a process of it, has computed since the look before.

        On a machine with too few cores it may only have been ready to.
        """
        seconds = max(self.moment - before.moment, 0.1)
        seen: dict[int, Stacks] = {}
        for rank in self.ranks:
            seen |= {it["pid"]: it for it in (rank["process"], *rank["children"])}
        busy = {
            pid for pid, cpu in self.cpu.items() if cpu - before.cpu.get(pid, cpu) > _BUSY * seconds
        }
        busy |= {pid for pid, one in seen.items() if one["state"] == "R"}
        return any(not _communicates(seen.get(pid)) for pid in busy)


def _communicates(process: Stacks | None) -> bool:
    """Whether the innermost Python call is one that waits for other ranks."""
    if not process or not process["threads"]:
        return False
    calls = [frame["file"] for frame in process["threads"][0]["frames"]]
    return any(part in file for file in calls[:1] for part in _WAITING_IN)


class Meeting(NamedTuple):
    """How many processes wait; `address` is ``HOST:PORT`` where that could be read."""

    number: int
    address: str = ""
    refused: bool = False
    """Whether nobody listens there."""

    def __str__(self) -> str:
        who = f"{self.number} of {self.number} processes are waiting"
        if not self.address:
            return f"{who} in init_process_group"
        if self.refused:
            return f"{who} to connect to {self.address}, where nothing is listening"
        return f"{who} for others at {self.address}"


def _meeting(folder: Path) -> Meeting | None:
    """What the processes in a dump of this node wait for; None if any of them is elsewhere."""
    programs = [process for rank in _ranks(folder) for process in _programs(rank)]
    if not programs or not all(map(_waits, programs)):
        return None
    address = _address(programs[0]["pid"])
    if address is None:
        return Meeting(len(programs))
    host, port = address
    return Meeting(len(programs), f"{host}:{port}", _is_refused(host, port))


def _programs(rank: Stacks) -> Iterator[Stacks]:
    """The process of a rank, or those that it has started and waits for."""
    started = [one for one in rank["children"] if _frames(one) and not _helps(one)]
    yield from started if any(map(_waits, started)) else [rank["process"]]


def _frames(process: Stacks) -> list[Stacks]:
    threads = process["threads"]
    return threads[0]["frames"] if threads else []


def _helps(process: Stacks) -> bool:
    return any(_HELPERS in frame["file"] for frame in _frames(process))


def _waits(process: Stacks) -> bool:
    return any(
        frame["name"] == _CALL and frame["file"].endswith(_FILE) for frame in _frames(process)
    )


def _address(pid: int) -> tuple[str, int] | None:
    """The host and port that a process was given, if py-spy can read them."""
    program = stacks.spy_program()
    if program is None:
        return None
    try:
        values = stacks.local_variables(program, pid, _CALL)
        host, port = json.loads(values["hostname"]), int(values["port"])
    except (NoStacks, LookupError, TypeError, ValueError):
        return None
    return (host, port) if isinstance(host, str) and 0 < port < 1 << 16 else None


def _is_refused(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), _CONNECT).close()
    except OSError as error:
        return error.errno == errno.ECONNREFUSED
    return False


def _ranks(folder: Path) -> list[Stacks]:
    """The ranks in a dump of stacks."""
    nodes = [records.read(path) or {} for path in folder.glob("*.json")]
    return [rank for node in nodes for rank in node.get("ranks", ())]
