"""Wait for runs to end, and exit with the trainer's exit code.

With several runs, exits with the code of the first failed run in the given order. 143: the run was
cancelled. 124: the wait timed out, and the run continues. 81: the run can never start. 83: the
target has had no such job for five minutes.

deploykit wait                           the newest run
deploykit wait exp-1 exp-2 --timeout 2h  both, for two hours at most
deploykit wait exp-1 --notify            and send a message when it ends: see `notify`
"""

from __future__ import annotations

import argparse
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from deploykit.backends import base as backend
from deploykit.cli import arguments, closed_pipe, describe, output, progress_bar
from deploykit.job.model import State
from deploykit.lib import shell, units
from deploykit.lib.errors import DeploykitError, TimedOut
from deploykit.observe.folding import Folding
from deploykit.observe.receivers import Sent
from deploykit.run import diagnosis as run_diagnosis
from deploykit.run import fetch as run_fetch
from deploykit.run import notify as run_notify
from deploykit.run import registry
from deploykit.run import state as run_state
from deploykit.run.metrics import BRIEFLY, RunMetrics
from deploykit.run.registry import Run

if TYPE_CHECKING:
    from deploykit.run.metrics import RunMetrics

_AGAIN = 1.0
"""Seconds between two looks at how far a run is."""
SHARED = ("newest",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--timeout",
        type=arguments.seconds,
        metavar="TIME",
        help="stop waiting after this time, such as 90 (seconds), 90s or 30m",
    )
    parser.add_argument(
        "--fetch",
        action="store_true",
        help="afterwards, copy the results to ./RUN, as `deploykit fetch` does",
    )
    parser.add_argument(
        "--notify",
        action="store_true",
        help="when a run ends, send a message to the receivers in the job or your config file",
    )


def run(args: argparse.Namespace) -> int:
    """Wait; return the exit code of the first run that failed, or 124 on timeout."""
    named = registry.named(args.run) if args.run else [registry.get(None)]
    rows: list[Run] = []
    noted: dict[str, tuple[str, str]] = {}
    position = Position()
    notices = run_notify.Notices(ends=args.notify)
    notices.require(named)
    with closed_pipe.noticed(), output.last_line(lambda: _now(rows, position)) as last:
        for current in run_state.wait_all([row.run for row in named], args.timeout):
            rows[:] = current
            if not args.json and not last.drawn:
                _tell(rows, noted)
            _notify(notices.see, rows)
        _notify(notices.finish, rows)
    fetched = _fetch(rows) if args.fetch else 0
    return _finish(rows, as_json=args.json) or fetched


def _notify(send: Callable[[Sequence[Run]], list[tuple[str, Sent]]], rows: Sequence[Run]) -> None:
    """Send what is due; note which receiver got no message. No error ends the wait."""
    try:
        sent = send(rows)
    except OSError as error:
        output.note(f"messages were not sent: {error}")
        return
    for run, one in sent:
        if one.error:
            output.note(f"{run}: {one.receiver} did not receive the message: {one.error}")


def _fetch(rows: Sequence[Run]) -> int:
    """Copy the results of finished runs that are elsewhere; return the exit code of an error."""
    code = 0
    for row in rows:
        try:
            if not State(row.state).final or row.handle is None:
                continue
            listing = run_fetch.listing(row, ["output"])
            if not (listing.here or listing.files):
                output.note(f"{row.run}: no results were found to copy")
            elif not listing.here:
                target = Path(row.run)
                files = run_fetch.missing(listing.files, target)
                with progress_bar.watching():
                    run_fetch.fetch(row, files, listing.here, target)
                output.note(f"{row.run}: results copied to {target}")
        except DeploykitError as error:
            output.note(f"{row.run}: the results were not copied: {error}")
            code = code or error.exit_code
    return code


def _now(rows: Sequence[Run], position: Position) -> str:
    """One line about the runs: of one, its state; of several, how many are in which state."""
    if len(rows) == 1:
        return _now_one(rows[0], position.of(rows[0]))
    counts = Counter(row.state for row in rows)
    listed = ", ".join(f"{number} {state}" for state, number in counts.items())
    return f"{len(rows)} runs: {listed}" if rows else ""


def _now_one(row: Run, progress: str) -> str:
    """The state of a run, for how long, and how far it is where that is known."""
    seconds, reason = row.seconds(registry.now()), row.reason
    parts = [f"{row.run}: {row.state}"]
    if row.state == State.RUNNING.value:
        parts += [units.span(seconds)] if seconds is not None else []
        parts += [progress]
    elif not State(row.state).final:
        parts += [units.span(registry.now() - row.created), reason]
    return ", ".join(filter(None, parts))


class Position:
    """How far a run is, read again at most once a second."""

    def __init__(self) -> None:
        self._read: RunMetrics | None = None
        self._text = ""
        self._due = 0.0

    def of(self, row: Run) -> str:
        """The text for a run that runs; empty where its log and files do not tell."""
        if row.state != State.RUNNING.value or time.monotonic() < self._due:
            return self._text
        self._due = time.monotonic() + _AGAIN
        self._read = self._read or RunMetrics(row, most=BRIEFLY)
        self._read.refresh(fetch=False)
        self._text = describe.line_or_bar(self._read.progress(), row.folder)
        return self._text


def _tell(rows: Sequence[Run], noted: dict[str, tuple[str, str]]) -> None:
    """Note each state that is new; `noted` has the last one of each run."""
    for row in rows:
        current = (row.state, row.reason)
        if noted.get(row.run) != current and not State(row.state).final:
            output.note(f"{row.run}: {row.state}{f' - {row.reason}' if row.reason else ''}")
        noted[row.run] = current


def follow(row: Run, *, as_json: bool, timeout: float | None) -> int:
    """Wait for a run and print its log lines (to standard error with `as_json`)."""
    rows, position, notices = [row], Position(), run_notify.Notices()
    printer = threading.Thread(
        target=_print_logs,
        args=(row,),
        kwargs={"aside": as_json, "state": lambda: _now(rows, position)},
        daemon=True,
    )
    printer.start()
    try:
        with closed_pipe.noticed():
            for rows[:] in run_state.wait_all([row.run], timeout):
                _notify(notices.see, rows)  # the printer shows their state
            _notify(notices.finish, rows)
    except KeyboardInterrupt:
        stop = shell.command("deploykit", "cancel", row.run)
        output.note("", f"{row.run} is still running; `{stop}` stops it")
        raise
    if State(rows[0].state).final:
        printer.join()
    return _finish(rows, as_json=as_json)


def _print_logs(row: Run, *, aside: bool, state: Callable[[], str]) -> None:
    """Print the lines as they arrive. An error is noted: it does not affect the run."""
    if row.handle is None:
        return

    def below(bar: str) -> str:
        return describe.bar(row.folder) or bar or state()

    try:
        folding = Folding()
        lines = backend.find(row.backend).logs(row.handle, follow=True)
        output.log(folding.fold(lines), aside=aside, below=below)
        output.folded(row, folding)
    except BrokenPipeError:
        return  # the reader has gone; the next write fails the same way
    except DeploykitError as error:
        output.note(f"the logs of {row.run} are no longer available: {error}; the run continues")


def _finish(rows: Sequence[Run], *, as_json: bool) -> int:
    if as_json:
        data = [describe.run_data(row) for row in rows]
        output.emit(data if len(data) > 1 else data[0])
    else:
        for row in rows:
            describe.run_brief(row, run_diagnosis.brief(row))
    return next(filter(None, map(_code, rows)), 0)


def _code(row: Run) -> int:
    """The exit code for a run, which may not have ended."""
    state = State(row.state)
    if state is State.BLOCKED:
        remove = shell.command("deploykit", "cancel", row.run)
        output.note(f"{row.run} is still queued; `{remove}` removes it")
    elif not state.final and not run_state.is_missing(row):
        return TimedOut.exit_code
    return run_state.exit_code(row)
