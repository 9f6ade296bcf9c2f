"""Send missing metrics to the trackers named in a run's job file.

A restarted job continues the same tracker run. Each step is sent once, so the command is safe to
repeat. While the run continues, the newest step of each metric is held back until the next one
appears. For a job with `track`, `submit` runs the command in the background.

deploykit sync exp-1
deploykit sync exp-1 --follow    keep sending until the run ends
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from deploykit.cli import output
from deploykit.lib import units
from deploykit.run import registry
from deploykit.run import tracking as run_tracking
from deploykit.run.tracking import Sent

SHARED = ("run",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--follow", action="store_true", help="keep sending until the run ends")


def run(args: argparse.Namespace) -> int:
    """Send what is missing; return the exit code of the first tracker that failed."""
    row = registry.get(args.run)
    if args.follow:
        return _follow(row, as_json=args.json)
    sent, problems = run_tracking.sync(row)
    output.note(*(f"could not read {problem}" for problem in problems))
    if args.json:
        output.emit({"run": row.run, "trackers": [run_tracking.data(one) for one in sent]})
    else:
        output.say(*(_line(row.run, one) for one in sent if one.error is None))
        for one in sent:
            if one.error is not None:
                output.error(one.error, as_json=False)
    return _code(sent)


def _follow(row: registry.Run, *, as_json: bool) -> int:
    """Send until the end, with a line for each sending that had something to send."""
    last: Sequence[Sent] = ()

    def report(sent: Sequence[Sent]) -> None:
        nonlocal last
        for one in sent:
            if one.error is not None:
                output.error(one.error, as_json=False)
            elif one.values and not as_json:
                output.say(_line(row.run, one))
        last = sent

    run_tracking.follow(row, report)
    if as_json:
        output.emit({"run": row.run, "trackers": [run_tracking.data(one) for one in last]})
    return _code(last)


def _line(name: str, one: Sent) -> str:
    return f"{name}: {units.plural(one.values, 'value')} sent to {one.tracker}: {one.url}"


def _code(sent: Sequence[Sent]) -> int:
    return next((one.error.exit_code for one in sent if one.error is not None), 0)
