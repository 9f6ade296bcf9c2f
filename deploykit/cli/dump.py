"""Print the Python stack of every rank of a running run, with identical stacks merged.

Outliers are listed first. The run is not interrupted. The stacks are saved in the run folder; for
a finished run, the last saved stacks are shown.

deploykit dump                  the newest run
deploykit dump exp-1 --native   with C and C++ frames
"""

from __future__ import annotations

import argparse

from deploykit.cli import output
from deploykit.lib import units
from deploykit.observe import stacks
from deploykit.run import enter, registry

SHARED = ("run",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--native", action="store_true", help="also show C and C++ frames (requires py-spy)"
    )
    parser.add_argument("--threads", action="store_true", help="show all threads of each rank")


def run(args: argparse.Namespace) -> int:
    row = registry.get(args.run)
    taken = enter.take_stacks(row, native=args.native)
    if args.json:
        data = {"run": row.run, "kept": taken.kept, **stacks.data(taken.dump)}
        output.emit({**data, "flight_recorder": taken.recorder, "warnings": taken.warnings})
        return 0
    time = output.when(taken.dump.time.timestamp()) if taken.dump.time else "an unknown time"
    ranks = units.plural(len(taken.dump.ranks), "rank")
    ended = " (the run has ended; these are the last saved stacks)" if taken.kept else ""
    output.say(f"{row.run}: {ranks} at {time}{ended}", "")
    output.say(*taken.lines(threads=args.threads))
    output.note(*(f"warning: {text}" for text in taken.warnings))
    output.note(f"saved in {taken.dump.folder}")
    return 0
