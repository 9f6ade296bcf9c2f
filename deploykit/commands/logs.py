"""Print the log lines of a run's ranks, oldest first."""

from __future__ import annotations

import argparse
import itertools
import re
from collections import deque
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta

from deploykit import backend, lifecycle, runs
from deploykit.commands import arguments, diagnose, output
from deploykit.decode import DURATION
from deploykit.errors import NotFound, UsageError
from deploykit.folding import Folding, plain
from deploykit.model import Handle, LogLine
from deploykit.runs import Run

_AGAIN = re.compile(r"restart (\d{1,9})\b")
_TRACEBACK = re.compile(r"Traceback \(most recent call last\)")
_ERROR = re.compile(rf"{_TRACEBACK.pattern}|(\w+\.)*\w*(Error|Exception)\b|terminate called|Fatal ")
SHARED = ("run",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what to select of the run's lines."""
    parser.add_argument(
        "-f", "--follow", action="store_true", help="follow until the run has ended"
    )
    parser.add_argument(
        *("-n", "--tail"),
        type=arguments.count,
        metavar="N",
        help="only the last N lines, and with -f those that follow",
    )
    parser.add_argument("--rank", type=int, metavar="N", help="only this global rank")
    parser.add_argument("--task", type=int, metavar="N", help="only this task of a job array")
    parser.add_argument("--node", type=int, metavar="N", help="only this node, from 0")
    parser.add_argument(
        "--attempt",
        type=int,
        metavar="N",
        help="only this attempt; 0 is the first",
    )
    parser.add_argument(
        "--first-error",
        action="store_true",
        help="only the first traceback or error of any rank",
    )
    parser.add_argument(
        "--since",
        type=_moment,
        metavar="WHEN",
        help="only lines since then: 10m for 10 minutes ago, or 2026-11-21T01:46 (UTC)",
    )
    parser.add_argument(
        "--raw", action="store_true", help="fold nothing: torchrun's own lines, every traceback"
    )
    parser.add_argument(
        "--color",
        action="store_true",
        help="keep the colors of the lines on a terminal; a pipe gets the lines unchanged",
    )


def run(args: argparse.Namespace) -> int:
    """Print the selected lines; a note where there are none."""
    row = lifecycle.refresh([runs.get(args.run)])[0]
    if row.handle is None:
        raise NotFound(f"{row.run} has no logs: it is {row.state}", hint=row.reason or None)
    if args.task is not None:
        _refuse_unknown_task(row.handle, args.task)
    folding = Folding()
    lines = _shown(row.handle, args, folding, follow=args.follow)
    if args.tail is not None and args.follow:
        count = sum(1 for _ in _shown(row.handle, args, Folding(), follow=False))
        lines = itertools.islice(lines, max(0, count - args.tail), None)
    elif args.tail is not None:
        lines = deque(lines, args.tail)
    _print(row, _or_note(lines, _none_message(args)), args, folding)
    return 0


def _shown(
    handle: Handle, args: argparse.Namespace, folding: Folding, *, follow: bool
) -> Iterable[LogLine]:
    """The run's lines that were asked for, folded."""
    lines = _selected(backend.find(handle.backend).logs(handle, follow=follow), args)
    return lines if args.raw or args.first_error or args.json else folding.fold(lines)


def _selected(lines: Iterable[LogLine], args: argparse.Namespace) -> Iterable[LogLine]:
    if args.task is not None:
        lines = (line for line in lines if line.task == args.task)
    if args.attempt is not None:
        lines = _attempt(lines, args.attempt)
    if args.rank is not None:
        lines = (line for line in lines if line.rank == args.rank)
    if args.node is not None:
        lines = (line for line in lines if line.node == args.node)
    if args.since is not None:
        lines = _since(lines, args.since)
    return _first_error(lines) if args.first_error else lines


def _moment(text: str) -> datetime:
    """A time in UTC: a duration before now (10m, 2h) or a date (2026-11-21T01:46).

    Raises ArgumentTypeError.
    """
    try:
        return datetime.now(UTC) - timedelta(seconds=DURATION.parse(text))
    except (ValueError, OverflowError):
        pass
    try:
        parsed = datetime.fromisoformat(text)
    except ValueError:
        message = f"{text!r} is not a time such as 10m (ago) or 2026-11-21T01:46"
        raise argparse.ArgumentTypeError(message) from None
    return parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)


def _refuse_unknown_task(handle: Handle, task: int) -> None:
    """Raise UsageError where the run has no task of that number."""
    count = backend.require(handle.backend, backend.Tasks).tasks(handle)
    if count is None:
        raise UsageError(f"{handle.run} is not a job array", hint="omit --task")
    if task not in range(count):
        raise UsageError(f"{handle.run} has no task {task}", hint=f"its tasks are 0 to {count - 1}")


def _print(row: Run, lines: Iterable[LogLine], args: argparse.Namespace, folding: Folding) -> None:
    """Print the lines, then the cause where the run failed."""
    if args.json:
        output.log_data(lines)
        return
    output.log(lines, colors=args.color, folder=row.folder if args.follow else "")
    output.folded(row, folding)
    if args.follow:
        (row,) = lifecycle.refresh([row])
    if cause := diagnose.brief(row):
        output.note(f"cause: {cause}")


def _since(lines: Iterable[LogLine], moment: datetime) -> Iterator[LogLine]:
    """Lines since `moment`. A line without a time has that of the previous line of its node."""
    reached: set[int | None] = set()
    for line in lines:
        if line.time is not None and line.time >= moment:
            reached.add(line.node)
        if line.node in reached:
            yield line


def _attempt(lines: Iterable[LogLine], number: int) -> Iterator[LogLine]:
    """Lines of one attempt: each node's launcher logs ``restart N`` before all but the first."""
    reached: dict[tuple[int | None, int | None], int] = {}
    for line in lines:
        if line.rank is None and (again := _AGAIN.match(line.text)):
            reached[line.task, line.node] = int(again[1])
        if reached.get((line.task, line.node), 0) == number:
            yield line


def _first_error(lines: Iterable[LogLine]) -> Iterator[LogLine]:
    """The first traceback, complete, or the first line that names an error."""
    first = None
    for line in lines:
        if first is None and line.rank is not None and _ERROR.match(plain(line)):
            first = line
        if first is None or (line.task, line.rank) != (first.task, first.rank):
            continue
        yield line
        if line is not first and not plain(line).startswith(" "):
            return
        if not _TRACEBACK.match(plain(first)):
            return


def _none_message(args: argparse.Namespace) -> str:
    """What to print where no line matches."""
    selected = {"task": args.task, "rank": args.rank, "node": args.node, "attempt": args.attempt}
    parts = [f"of {name} {value}" for name, value in selected.items() if value is not None]
    return " ".join(["no error" if args.first_error else "no line", *(parts or ["yet"])])


def _or_note(lines: Iterable[LogLine], message: str) -> Iterator[LogLine]:
    """The lines; where there is none, print a note."""
    line = None
    for line in lines:
        yield line
    if line is None:
        output.note(message)
