"""A dump as text and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from deploykit.observe.inspect import places
from deploykit.observe.inspect.places import Group
from deploykit.observe.inspect.stacks import Dump, Frame, Process, Thread


def lines(dump: Dump, *, threads: bool = False) -> Iterator[str]:
    """Each place with its ranks, the odd one out first, and the stack of the first rank there.

    With `threads`, the stacks of its other threads too.
    """
    for group in places.groups(dump.ranks):
        yield f"{group.label}: {group.place}"
        process = group.ranks[0].process
        for number, thread in enumerate(process.threads if threads else process.threads[:1]):
            yield from _thread(thread) if number else map(_frame, thread.frames)
        yield from _children(group)
        yield ""
    yield from _remarks(dump)


def data(dump: Dump) -> dict[str, Any]:
    """The same with every thread of every rank."""
    merged = places.groups(dump.ranks)
    return {
        "time": dump.time and dump.time.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "folder": str(dump.folder),
        "summary": places.sentence(merged) if merged else "",
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
    line = f":{frame.line}" if frame.line else ""
    source = f"  {frame.source}" if frame.source and places.is_users(frame) else ""
    return f"    {frame.name} ({places.file(frame)}{line}){source}"


def _thread(thread: Thread) -> Iterator[str]:
    yield f"  {thread.name}"
    yield from map(_frame, thread.frames)


def _children(group: Group) -> Iterator[str]:
    """Where the processes stand that the ranks have started, those at the same place as one."""
    children = [child for one in group.ranks for child in one.children]
    counted = Counter(
        (child.name, str(places.place(child)) if child.threads else "not a Python process")
        for child in children
    )
    for (name, place), count in sorted(counted.items(), key=lambda item: item[1]):
        yield f"  {count} child process{'' if count == 1 else 'es'} {name}: {place}"


def _remarks(dump: Dump) -> Iterator[str]:
    """Ranks without a stack, and why another way was taken."""
    if dump.absent:
        why = "it has ended or not started, or its node did not answer"
        yield f"{places.label(dump.absent)}: no process; {why}"
    for problem, ranks in _problems(dump):
        yield f"{places.label(ranks)}: {problem}"


def _problems(dump: Dump) -> Sequence[tuple[str, list[int]]]:
    ranks: dict[str, list[int]] = {}
    for one in dump.ranks:
        if one.problem:
            with_tool = f"by {one.tool}, since {one.problem}" if one.tool else one.problem
            ranks.setdefault(with_tool, []).append(one.rank)
    return list(ranks.items())


def _group_data(group: Group) -> dict[str, Any]:
    function, caller = group.place.function, group.place.caller
    return {
        "ranks": group.numbers,
        "function": function and function.name,
        "called_at": caller and {"file": caller.file, "line": caller.line, "text": caller.source},
        "state": group.place.state or None,
    }


def _process_data(process: Process) -> dict[str, Any]:
    return {
        "pid": process.pid,
        "name": process.name,
        "threads": [
            {"name": thread.name, "frames": [vars(frame) for frame in thread.frames]}
            for thread in process.threads
        ],
    }
