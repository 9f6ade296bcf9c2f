"""Ranks that stand at the same place, merged, and each place in a few words."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from deploykit.observe.inspect.stacks import Frame, Process, RankStacks

_STATES = {
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "D": "waiting in the kernel, for example for a file system that does not respond",
    "Z": "ended",
    "X": "ended",
}
"""States of a process (proc_pid_stat(5)) in which its stack is not the whole story."""
_INSTALLED = re.compile(r".*/(?:site|dist)-packages/")
_STANDARD = re.compile(r"(?:.*/lib(?:64)?/python3\.\d+/|<frozen )")
_SOURCE = re.compile(r".*/runs/[^/]+/source/")
_FORK = "multiprocessing/process.py"
_NAMED = 3
"""Most groups in a sentence."""


@dataclass(frozen=True)
class Place:
    """Where a process stands: a function that a reader knows, and the user's line that called it.

    Both are the same frame where the process is in the user's own code.
    """

    function: Frame | None
    caller: Frame | None
    state: str = ""
    """What else keeps it, as words; empty for a process that runs or sleeps."""

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
        location = f" ({_location(self.caller)})" if self.caller else ""
        state = f"{self.state} in " if self.state else "in "
        return f"{state}{self.function.name}{location}"


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


def groups(ranks: Iterable[RankStacks]) -> list[Group]:
    """The ranks by place, the smallest group first: a rank that differs is the first to look at."""
    by_key: dict[object, list[RankStacks]] = defaultdict(list)
    for one in ranks:
        by_key[_key(one.process)].append(one)
    merged = [Group(place(members[0].process), tuple(members)) for members in by_key.values()]
    return sorted(merged, key=lambda group: (len(group.ranks), group.numbers[0]))


def sentence(merged: Sequence[Group]) -> str:
    """``rank 3 is in DataLoader.__next__ (train.py:12), ranks 0-2 are in all_reduce``."""
    if len(merged) == 1:
        group = merged[0]
        whole = group.label if len(group.ranks) == 1 else f"all {len(group.ranks)} ranks"
        return f"{whole} {_be(group)} {group.place.brief}"
    parts = [f"{group.label} {_be(group)} {group.place.brief}" for group in merged[:_NAMED]]
    left = sum(len(group.ranks) for group in merged[_NAMED:])
    return ", ".join([*parts, *([f"{left} more ranks elsewhere"] if left else [])])


def place(process: Process) -> Place:
    """Where the main thread of a process stands."""
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


def file(frame: Frame) -> str:
    """A file as a reader knows it: below the source folder, or below where packages are."""
    for folder in (_SOURCE, _INSTALLED, _STANDARD):
        if match := folder.match(frame.file):
            return frame.file[match.end() :].rstrip(">")
    return frame.file


def _key(process: Process) -> object:
    """What ranks at the same place have in common: the calls down to the known function.

    Within a library the lines differ from moment to moment; in the user's code they tell.
    """
    calls = tuple(
        (frame.name, frame.file, frame.line if is_users(frame) else 0)
        for frame in _from_known(process.frames)
        if _is_python(frame)
    )
    return calls, _STATES.get(process.state)


def _own(frames: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """The frames without those that a forked process has inherited."""
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
        if is_users(frame) or (_is_installed(frame) and _is_public(frame)):
            return frames[number:]
        if not installed and _is_installed(frame):
            installed = number
    return frames[installed:]


def is_users(frame: Frame) -> bool:
    """Whether a frame is in the user's code, not in a package or in Python itself."""
    return _is_python(frame) and not (_is_installed(frame) or _STANDARD.match(frame.file))


def _is_installed(frame: Frame) -> bool:
    return _is_python(frame) and _INSTALLED.match(frame.file) is not None


def _is_python(frame: Frame) -> bool:
    return frame.file.endswith(".py")


def _is_public(frame: Frame) -> bool:
    name = frame.name.rpartition(".")[2]
    hidden = name.startswith("_") and not name.startswith("__")
    return not hidden and "<" not in frame.name


def _call(function: Frame, caller: Frame | None) -> str:
    if caller is None:
        return f"{function.name} ({_location(function)})"
    called = "" if caller == function else ", called"
    source = f": {caller.source}" if caller.source else ""
    return f"{function.name}{called} at {_location(caller)}{source}"


def _location(frame: Frame) -> str:
    return f"{file(frame)}:{frame.line}" if frame.line else file(frame)


def _be(group: Group) -> str:
    return "is" if len(group.ranks) == 1 else "are"
