"""Wait until a run has ended, and end with its exit code: the trainer's own.

143 when it was cancelled, 124 when --timeout ran out (the run goes on).
"""

from __future__ import annotations

import argparse
import threading

from deploykit import backend, lifecycle, quoting, runs
from deploykit.commands import arguments, diagnose, output
from deploykit.errors import DeploykitError
from deploykit.model import State
from deploykit.runs import Run

_TIMED_OUT = 124


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.one_run(parser)
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="stop waiting after this")


def run(args: argparse.Namespace) -> int:
    name = runs.get(args.run).run
    for last in lifecycle.wait(name, args.timeout):
        if not args.json and not State(last.state).final:
            output.note(f"{name}: {last.state}{f' - {last.reason}' if last.reason else ''}")
    return _finish(last, as_json=args.json)


def follow(row: Run, *, as_json: bool, timeout: float | None) -> int:
    """Wait for a run while its log lines go by (to standard error with `as_json`)."""
    printer = threading.Thread(
        target=_print_logs, args=(row,), kwargs={"aside": as_json}, daemon=True
    )
    printer.start()
    try:
        *_, last = lifecycle.wait(row.run, timeout)
    except KeyboardInterrupt:
        stop = quoting.command("deploykit", "cancel", row.run)
        output.note("", f"{row.run} goes on; `{stop}` stops it")
        raise
    printer.join()
    return _finish(last, as_json=as_json)


def _print_logs(row: Run, *, aside: bool) -> None:
    """The run's lines as they come. Where they cannot be had any more, or read, the run goes on."""
    if row.handle is None:
        return
    try:
        output.log(backend.find(row.backend).logs(row.handle, follow=True), aside=aside)
    except BrokenPipeError:
        return  # the reader has gone; the next write fails the same way
    except DeploykitError as error:
        output.note(f"{row.run} goes on, without its logs: {error}")


def _finish(row: Run, *, as_json: bool) -> int:
    if as_json:
        output.emit(output.run_data(row))
    else:
        output.run_text(row, diagnose.brief(row))
    return lifecycle.exit_code(row) if State(row.state).final else _TIMED_OUT
