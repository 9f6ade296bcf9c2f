"""Wait until a run has ended, and exit with the exit code of the trainer.

143 when the run was cancelled, 124 on timeout (the run continues), 81 when it can never start.
"""

from __future__ import annotations

import argparse
import threading

from deploykit import backend, lifecycle, registry, run_diagnosis, shell
from deploykit.commands import output
from deploykit.decode import DURATION
from deploykit.errors import DeploykitError
from deploykit.folding import Folding
from deploykit.model import State
from deploykit.registry import Run

_TIMED_OUT = 124
SHARED = ("run",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare --timeout."""
    parser.add_argument(
        "--timeout", type=_seconds, metavar="TIME", help="stop waiting after 90, 90s or 30m"
    )


def _seconds(text: str) -> float:
    """Seconds, from a number or a time such as 30m. Raises ArgumentTypeError."""
    try:
        seconds = float(text) if text.replace(".", "", 1).isdecimal() else DURATION.parse(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 90s or 30m") from None
    return float(seconds)


def run(args: argparse.Namespace) -> int:
    """Wait; return the run's exit code, or 124 on timeout."""
    name = registry.get(args.run).run
    for last in lifecycle.wait(name, args.timeout):
        if not args.json and not State(last.state).final:
            output.note(f"{name}: {last.state}{f' - {last.reason}' if last.reason else ''}")
    return _finish(last, as_json=args.json)


def follow(row: Run, *, as_json: bool, timeout: float | None) -> int:
    """Wait for a run and print its log lines (to standard error with `as_json`)."""
    printer = threading.Thread(
        target=_print_logs, args=(row,), kwargs={"aside": as_json}, daemon=True
    )
    printer.start()
    try:
        *_, last = lifecycle.wait(row.run, timeout)
    except KeyboardInterrupt:
        stop = shell.command("deploykit", "cancel", row.run)
        output.note("", f"{row.run} is still running; `{stop}` stops it")
        raise
    if State(last.state).final:
        printer.join()
    return _finish(last, as_json=as_json)


def _print_logs(row: Run, *, aside: bool) -> None:
    """Print the lines as they arrive. An error is noted: it does not affect the run."""
    if row.handle is None:
        return
    try:
        folding = Folding()
        lines = backend.find(row.backend).logs(row.handle, follow=True)
        output.log(folding.fold(lines), aside=aside)
        output.folded(row, folding)
    except BrokenPipeError:
        return  # the reader has gone; the next write fails the same way
    except DeploykitError as error:
        output.note(f"the logs of {row.run} are no longer available: {error}; the run continues")


def _finish(row: Run, *, as_json: bool) -> int:
    state = State(row.state)
    if as_json:
        output.emit(output.run_data(row))
    else:
        output.run_text(row, run_diagnosis.brief(row))
    if state is State.BLOCKED:
        remove = shell.command("deploykit", "cancel", row.run)
        output.note(f"{row.run} is still in the queue; to remove it: {remove}")
    ended = state.final or state is State.BLOCKED
    return lifecycle.exit_code(row) if ended else _TIMED_OUT
