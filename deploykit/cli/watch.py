"""Watch runs live: state, step, time left, loss, restarts, first error. Changes nothing.

Without RUN, shows all unfinished runs, or else the newest run. On a terminal, the page updates
until all runs have ended or you press Ctrl-C; in a pipe, it is printed once. Each update queries
each backend once.

deploykit watch                      all unfinished runs
deploykit watch exp-1 exp-2          two runs as a table
deploykit watch exp-1 --once --json  for programs
"""

from __future__ import annotations

import argparse

from deploykit.cli import arguments, output, watch_lines
from deploykit.job.model import State
from deploykit.run import registry
from deploykit.run.watch import Watch

_INTERVAL = 2.0
SHARED = ("runs",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--once",
        action="store_true",
        help="print the current state once, and exit; implied by --json",
    )
    parser.add_argument(
        "--interval",
        type=arguments.seconds,
        default=_INTERVAL,
        metavar="TIME",
        help=f"time between updates, such as 30s (default {_INTERVAL:g}s)",
    )


def run(args: argparse.Namespace) -> int:
    rows = {row.run: row for row in registry.selected(args.run)}
    watch = Watch(rows.values())
    ended = all(State(row.state).final for row in rows.values())
    goes_on = output.is_live() and not (args.once or args.json or ended)
    views = watch.look(whole=not goes_on)
    if args.json:
        output.emit([watch_lines.data(view) for view in views])
        return 0
    if goes_on and not watch.final:
        from deploykit.cli import watch_live  # rich, only on a terminal

        page = watch_live.Runs(watch, views)
        watch_live.show(page, max(args.interval, _SHORTEST))
        views = page.views
    output.say(*watch_lines.lines(views))
    return 0


_SHORTEST = 0.5
"""Seconds between two looks at least."""
