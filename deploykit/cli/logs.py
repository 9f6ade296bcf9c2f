"""Print the log lines of a run's ranks, oldest first.

deploykit logs -f                        follow the newest run
deploykit logs exp-1 -n 50 --rank 0      the last 50 lines of rank 0
deploykit logs exp-1 --since 10m
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import TypeVar

from deploykit.cli import arguments, closed_pipe, describe, output
from deploykit.job.decode import DURATION
from deploykit.job.model import LogLine, State
from deploykit.observe.folding import Folding
from deploykit.run import diagnosis as run_diagnosis
from deploykit.run import log_selection, registry
from deploykit.run import state as run_state
from deploykit.run.log_selection import Selection
from deploykit.run.registry import Run

SHARED = ("run",)
_Line = TypeVar("_Line", LogLine, LogLine | str)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-f", "--follow", action="store_true", help="keep printing new lines until the run ends"
    )
    parser.add_argument(
        *("-n", "--tail"),
        type=arguments.count,
        metavar="N",
        help="print only the last N lines; with -f, new lines as well",
    )
    parser.add_argument(
        "--rank", type=int, metavar="N", help="print only lines from this global rank"
    )
    parser.add_argument(
        "--task", type=int, metavar="N", help="print only lines from this task of a job array"
    )
    parser.add_argument(
        "--node", type=int, metavar="N", help="print only lines from this node; the first is 0"
    )
    parser.add_argument(
        "--attempt",
        type=int,
        metavar="N",
        help="print only lines from this attempt; the first is 0",
    )
    parser.add_argument(
        "--first-error",
        action="store_true",
        help="print only the first traceback or error of any rank",
    )
    parser.add_argument(
        "--since",
        type=_moment,
        metavar="WHEN",
        help="print only lines since this time: 10m for 10 minutes ago, or 2026-11-21T01:46 (UTC)",
    )
    parser.add_argument(
        "--raw",
        action="store_true",
        help="print every line, including torchrun's messages",
    )
    parser.add_argument(
        "--color",
        action="store_true",
        help="keep the log's own colors on a terminal; in a pipe, lines are never changed",
    )


def run(args: argparse.Namespace) -> int:
    row = run_state.refresh([registry.get(args.run)])[0]
    foldings = [Folding()]
    nothing = _none_message(args, is_over=State(row.state).final)
    with closed_pipe.noticed() if args.follow else contextlib.nullcontext():
        if args.json:
            output.log_data(_or_note(_lines(row, args, foldings), nothing))
        else:
            _print(row, _or_note(_texts(row, args, foldings), nothing), args, foldings)
    return 0


def _lines(row: Run, args: argparse.Namespace, foldings: list[Folding]) -> Iterator[LogLine]:
    """The run's lines that were asked for, folded by the last one of `foldings`."""

    def folded(lines: Iterable[LogLine]) -> Iterator[LogLine]:
        foldings.append(Folding())
        return foldings[-1].fold(lines) if _folds(args) else iter(lines)

    wanted = _selection(args)
    if args.tail is not None:
        return log_selection.tail(row, wanted, args.tail, folded, follow=args.follow)
    return folded(log_selection.of_run(row, wanted, follow=args.follow))


def _texts(row: Run, args: argparse.Namespace, foldings: list[Folding]) -> Iterator[LogLine | str]:
    """The same, where possible many lines at once."""
    if args.tail is not None:
        yield from _lines(row, args, foldings)
        return
    folding = foldings[-1] if _folds(args) else None
    yield from log_selection.texts(row, _selection(args), folding, follow=args.follow)


def _selection(args: argparse.Namespace) -> Selection:
    return Selection(
        **{field.name: getattr(args, field.name) for field in dataclasses.fields(Selection)}
    )


def _folds(args: argparse.Namespace) -> bool:
    return not (args.raw or args.first_error or args.json)


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


def _print(
    row: Run, lines: Iterable[LogLine | str], args: argparse.Namespace, foldings: Sequence[Folding]
) -> None:
    """Print the lines, then the cause where the run failed."""
    output.log(lines, colors=args.color, below=_bar_of(row) if args.follow else None)
    output.folded(row, foldings[-1])
    if args.follow:
        (row,) = run_state.refresh([row])
    if cause := run_diagnosis.brief(row):
        output.note(f"cause: {cause}")


def _bar_of(row: Run) -> Callable[[str], str]:
    """The progress bar of a run: that of its folder, else the one that is in its log."""
    return lambda bar: describe.bar(row.folder) or bar


def _none_message(args: argparse.Namespace, *, is_over: bool) -> str:
    """What to print where no line matches; a run that is not over may still print some."""
    selected = {"task": args.task, "rank": args.rank, "node": args.node, "attempt": args.attempt}
    parts = [f"from {name} {value}" for name, value in selected.items() if value is not None]
    what = "no error" if args.first_error else "no lines"
    return " ".join([what, *(parts or ([] if is_over else ["yet"]))])


def _or_note(lines: Iterable[_Line], message: str) -> Iterator[_Line]:
    """The lines; where there is none, print a note."""
    line = None
    for line in lines:
        yield line
    if line is None:
        output.note(message)
