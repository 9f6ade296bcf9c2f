"""Stacks of the ranks of a run: the dumps that its nodes wrote, read, merged, and shown."""

from __future__ import annotations

import contextlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from deploykit.job.decode import read_json
from deploykit.lib.units import plural
from deploykit.observe import exit_records

FOLDER = "stacks"
"""In a run folder: a folder for each dump, named by its time, with a file for each node."""


@dataclass(frozen=True)
class Frame:
    """One call. `line` is 0 if unknown, as for C and C++."""

    name: str
    file: str
    line: int
    source: str = ""
    """The line of the file; empty if the node could not read it."""


@dataclass(frozen=True)
class Thread:
    """One thread of a process, its innermost call first."""

    name: str
    frames: tuple[Frame, ...]


@dataclass(frozen=True)
class Process:
    """A process; `state` is the kernel's letter, such as ``S`` for sleeping."""

    pid: int
    name: str
    state: str
    threads: tuple[Thread, ...]
    """The main thread first; none if it does not run Python."""

    @property
    def frames(self) -> tuple[Frame, ...]:
        """Those of the main thread."""
        return self.threads[0].frames if self.threads else ()


@dataclass(frozen=True)
class RankStacks:
    """The program of one rank and its child processes."""

    rank: int
    host: str
    tool: str
    """The tool that read the stacks; empty if none could."""
    problem: str
    """Why a better tool did not work."""
    process: Process
    children: tuple[Process, ...] = ()


@dataclass(frozen=True)
class Dump:
    """The stacks of the ranks of a run that were running, by rank."""

    folder: Path
    time: datetime | None
    ranks: tuple[RankStacks, ...]
    world_size: int
    """Ranks that the run should have; 0 if unknown."""

    @property
    def absent(self) -> list[int]:
        """Ranks without a running process on a node that answered."""
        present = {one.rank for one in self.ranks}
        return [rank for rank in range(self.world_size) if rank not in present]


def read(folder: Path) -> Dump:
    """Read the dump in a folder, without incomplete files."""
    nodes = []
    ranks: dict[int, RankStacks] = {}
    for path in sorted(folder.glob("*.json")):
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            node = read_json(path)
            ranks |= {data["rank"]: _rank(node["host"], data) for data in node["ranks"]}
            nodes.append(node)
    size = max((node.get("world_size", 0) for node in nodes), default=0)
    times = [time for node in nodes if (time := exit_records.moment(node.get("time")))]
    ordered = tuple(ranks[rank] for rank in sorted(ranks))
    return Dump(folder, max(times, default=None), ordered, size)


def newest(run_folder: Path) -> Path | None:
    """The folder of the last dump of a run, if any."""
    folders = [path for path in (run_folder / FOLDER).glob("*") if any(path.glob("*.json"))]
    return max(folders, key=lambda path: path.name, default=None)


def _rank(host: str, data: dict[str, Any]) -> RankStacks:
    process, *children = map(_process, (data["process"], *data["children"]))
    return RankStacks(data["rank"], host, data["tool"], data["problem"], process, tuple(children))


def _process(data: dict[str, Any]) -> Process:
    threads = [
        Thread(thread["name"], tuple(Frame(**frame) for frame in thread["frames"]))
        for thread in data["threads"]
    ]
    return Process(data["pid"], data["name"], data["state"], tuple(threads))


_STATES = {
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "D": "waiting in the kernel, for example for an unresponsive file system",
    "Z": "ended",
    "X": "ended",
}
"""States of a process (proc_pid_stat(5)) that its stack does not show."""
_INSTALLED = re.compile(r".*/(?:site|dist)-packages/")
_STANDARD = re.compile(r"(?:.*/lib(?:64)?/python3\.\d+/|<frozen )")
_SOURCE = re.compile(r".*/runs/[^/]+/source/")
_FORK = "multiprocessing/process.py"
_MAX_GROUPS = 3
"""Most groups in a sentence."""


@dataclass(frozen=True)
class Place:
    """Where a process is: a function that a reader knows, and the user's line that called it.

    Both are the same frame where the process is in the user's own code.
    """

    function: Frame | None
    caller: Frame | None
    state: str = ""
    """Another reason why it does not continue; empty for a process that runs or sleeps."""

    def __str__(self) -> str:
        words = [self.state] if self.state else []
        if self.function is not None:
            words.append(_call(self.function, self.caller))
        return ", ".join(words) or "no Python stack"

    @property
    def brief(self) -> str:
        """The place without the source line."""
        if self.function is None:
            return self.state or "without a Python stack"
        caller = f" ({location(self.caller)})" if self.caller else ""
        state = f"{self.state} in " if self.state else "in "
        return f"{state}{self.function.name}{caller}"


@dataclass(frozen=True)
class Group:
    """Ranks at the same place; `ranks` is not empty, and the first represents all."""

    place: Place
    ranks: tuple[RankStacks, ...]

    @property
    def numbers(self) -> list[int]:
        """The ranks' numbers, in order."""
        return [one.rank for one in self.ranks]

    @property
    def label(self) -> str:
        """``rank 3`` or ``ranks 0-2,4``."""
        return label(self.numbers)

    @property
    def sentence(self) -> str:
        """``ranks 0-2 are in all_reduce (train.py:15)``."""
        return f"{self.label} {'is' if len(self.ranks) == 1 else 'are'} {self.place.brief}"


def groups(ranks: Iterable[RankStacks]) -> list[Group]:
    """The ranks by place, the smallest group first, because outliers are the most telling."""
    by_key: dict[object, list[RankStacks]] = defaultdict(list)
    for one in ranks:
        by_key[_key(one.process)].append(one)
    merged = [Group(place(members[0].process), tuple(members)) for members in by_key.values()]
    return sorted(merged, key=lambda group: (len(group.ranks), group.numbers[0]))


def sentence(merged: Sequence[Group]) -> str:
    """``rank 3 is in DataLoader.__next__ (train.py:12), ranks 0-2 are in all_reduce``."""
    if len(merged) == 1 and len(merged[0].ranks) > 1:
        return f"all {len(merged[0].ranks)} ranks are {merged[0].place.brief}"
    parts = [group.sentence for group in merged[:_MAX_GROUPS]]
    left = sum(len(group.ranks) for group in merged[_MAX_GROUPS:])
    return ", ".join([*parts, *([f"{plural(left, 'more rank')} elsewhere"] if left else [])])


def place(process: Process) -> Place:
    """Where the main thread of a process is."""
    frames = _own(process.frames)
    caller = next((frame for frame in frames if is_users(frame)), None)
    outer = _from_known(frames)
    return Place(outer[0] if outer else None, caller, _STATES.get(process.state, ""))


def label(numbers: Sequence[int]) -> str:
    """``rank 3`` or ``ranks 0-2,4``."""
    return f"rank{'s' if len(numbers) > 1 else ''} {spans(numbers)}"


def spans(numbers: Iterable[int]) -> str:
    """``0-2,4`` for 0, 1, 2 and 4."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def file_name(frame: Frame) -> str:
    """The path of a file relative to the source folder or to the folder of packages."""
    for folder in (_SOURCE, _INSTALLED, _STANDARD):
        if match := folder.match(frame.file):
            return frame.file[match.end() :].rstrip(">")
    return frame.file


def _key(process: Process) -> object:
    """What ranks at the same place have in common: the calls down to the known function.

    Within a library the lines differ from moment to moment; in the user's code they matter.
    """
    calls = tuple(
        (frame.name, frame.file, frame.line if is_users(frame) else 0)
        for frame in _from_known(process.frames)
        if _is_python(frame)
    )
    return calls, _STATES.get(process.state)


def _own(frames: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """The frames without those inherited by a forked process."""
    for number, frame in enumerate(frames):
        if frame.name.endswith("_bootstrap") and frame.file.endswith(_FORK):
            return frames[:number]
    return frames


def _from_known(frames: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """The frames from the innermost function that a reader may know: the user's, or public.

    Without one, from the innermost of an installed package.
    """
    installed = 0
    for number, frame in enumerate(frames):
        is_installed = _is_python(frame) and _INSTALLED.match(frame.file) is not None
        name = frame.name.rpartition(".")[2]
        hidden = "<" in frame.name or (name.startswith("_") and not name.startswith("__"))
        if is_users(frame) or (is_installed and not hidden):
            return frames[number:]
        if not installed and is_installed:
            installed = number
    return frames[installed:]


def is_users(frame: Frame) -> bool:
    """Whether a frame is in the user's code, not in a package or in Python itself."""
    library = _INSTALLED.match(frame.file) or _STANDARD.match(frame.file)
    return _is_python(frame) and not library


def _is_python(frame: Frame) -> bool:
    return frame.file.endswith(".py")


def _call(function: Frame, caller: Frame | None) -> str:
    if caller is None:
        return f"{function.name} ({location(function)})"
    called = "" if caller == function else ", called"
    source = f": {caller.source}" if caller.source else ""
    return f"{function.name}{called} at {location(caller)}{source}"


def location(frame: Frame) -> str:
    """``train.py:9``."""
    return f"{file_name(frame)}:{frame.line}" if frame.line else file_name(frame)


def lines(dump: Dump, *, threads: bool = False) -> Iterator[str]:
    """Each place with its ranks, outliers first, and the stack of the first rank there.

    With `threads`, the stacks of its other threads too. At the end, the ranks without a stack, and
    why another tool was used.
    """
    for group in groups(dump.ranks):
        yield f"{group.label}: {group.place}"
        for number, thread in enumerate(group.ranks[0].process.threads):
            if number and not threads:
                break
            if number:
                yield f"  {thread.name}"
            yield from map(_frame, thread.frames)
        yield from _children(group)
        yield ""
    if dump.absent:
        why = "it has ended or not started yet, or its node did not respond"
        yield f"{label(dump.absent)}: no process; {why}"
    problems: dict[str, list[int]] = defaultdict(list)
    for one in dump.ranks:
        if one.problem:
            with_tool = f"read with {one.tool}, because {one.problem}" if one.tool else one.problem
            problems[with_tool].append(one.rank)
    yield from (f"{label(ranks)}: {problem}" for problem, ranks in problems.items())


def data(dump: Dump) -> dict[str, Any]:
    """The same with every thread of every rank."""
    merged = groups(dump.ranks)
    return {
        "time": dump.time and dump.time.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "folder": str(dump.folder),
        "summary": sentence(merged) if merged else "",
        "groups": [_group_data(group) for group in merged],
        "ranks": [
            {
                "rank": one.rank,
                "host": one.host,
                "tool": one.tool or None,
                "problem": one.problem or None,
                **_process_data(one.process),
                "children": [_process_data(child) for child in one.children],
            }
            for one in dump.ranks
        ],
        "absent": dump.absent,
    }


def _frame(frame: Frame) -> str:
    source = f"  {frame.source}" if frame.source and is_users(frame) else ""
    return f"    {frame.name} ({location(frame)}){source}"


def _children(group: Group) -> Iterator[str]:
    """Where the child processes of the ranks are, one line a place."""
    counted = Counter(
        (child.name, str(place(child)) if child.threads else "not a Python process")
        for one in group.ranks
        for child in one.children
    )
    for (name, state), count in sorted(counted.items(), key=lambda item: item[1]):
        yield f"  {plural(count, 'child process', 'child processes')} {name}: {state}"


def _group_data(group: Group) -> dict[str, Any]:
    function, caller = group.place.function, group.place.caller
    return {
        "ranks": group.numbers,
        "function": function and function.name,
        "called_at": caller and {"file": caller.file, "line": caller.line, "text": caller.source},
        "state": group.place.state or None,
    }


def _process_data(process: Process) -> dict[str, Any]:
    threads = [
        {"name": thread.name, "frames": [vars(frame) for frame in thread.frames]}
        for thread in process.threads
    ]
    return {"pid": process.pid, "name": process.name, "threads": threads}


_STEP_MINUTES = 5
"""From this many minutes, the time is given in steps of as many."""


STALLED = "no progress for "
"""How the reason of a run that stalls begins."""


def stall_reason(folder: Path, *, ended: bool = False) -> str:
    """``no progress for 4 min: rank 3 is in ...``; empty while a node makes progress.

    Of a run that has `ended`: whether it made none when it was told to stop, and did not save.
    """
    if ended and any(
        one.exit_code in {0, exit_records.STOPPED} for one in exit_records.read(folder)
    ):
        return ""
    stalled = [record for record in _stalls(folder) if record["stopped"] or not ended]
    if not stalled or not 0 < stalled[0]["nodes"] <= len(stalled):
        return ""
    noted = {
        number: time
        for number, record in enumerate(stalled)
        if (time := exit_records.moment(record["time"]))
    }
    begins = [time - timedelta(seconds=stalled[n]["seconds"]) for n, time in noted.items()]
    now = max(noted.values(), default=datetime.now(UTC)) if ended else datetime.now(UTC)
    seconds = (now - max(begins, default=now)).total_seconds()
    text = f"{STALLED}{_span(seconds)}"
    if ended:
        brief = seconds < 60 * _STEP_MINUTES
        text = f"{STALLED}{f'{seconds:.0f} s' if brief else _span(seconds)} before it was stopped"
    if all(record["waiting"] for record in stalled):
        return f"{text}: {_waiting(stalled)}"
    where = _where(folder)
    return f"{text}: {where}" if where else text


def _stalls(folder: Path) -> list[dict[str, Any]]:
    """The records of stalls of a run's last attempt that has one."""
    records = [record for _, record in exit_records.numbered(folder, "stall")]
    last = max((record["attempt"] for record in records), default=0)
    return [record for record in records if record["attempt"] == last]


def stall_folders(folder: Path) -> list[Path]:
    """The folders of the stacks that the nodes of a run kept when it last stalled."""
    names = sorted({record["dump"] for record in _stalls(folder) if record["dump"]})
    return [folder / FOLDER / name for name in names]


def _where(folder: Path) -> str:
    """Where the ranks are, by the stacks that were kept; empty without any."""
    ranks = [one for kept in stall_folders(folder) for one in read(kept).ranks]
    return sentence(groups(ranks)) if ranks else ""


def _waiting(stalled: Sequence[dict[str, Any]]) -> str:
    """``4 of 4 processes are waiting to connect to HOST:PORT, where nothing is listening``."""
    count = sum(record["waiting"] for record in stalled)
    who = f"{count} of {count} processes are waiting"
    address = next((record["address"] for record in stalled if record["address"]), "")
    if not address:
        return f"{who} in init_process_group"
    if all(record["refused"] for record in stalled if record["address"]):
        return f"{who} to connect to {address}, where nothing is listening"
    return f"{who} for others at {address}"


def _span(seconds: float) -> str:
    """A rounded time, so that the reason of a run seldom changes."""
    minutes = int(seconds // 60)
    if minutes < 1:
        return "less than 1 min"
    if minutes >= 60:  # noqa: PLR2004 - minutes of an hour
        return f"{minutes // 60} h"
    return f"{minutes if minutes < _STEP_MINUTES else minutes // _STEP_MINUTES * _STEP_MINUTES} min"
