"""Stop runs. Runs that have already ended are not changed.

Ranks receive SIGTERM and can save a checkpoint, except on SageMaker, whose launchers do not forward
signals.

deploykit cancel exp-1 exp-2
"""

from __future__ import annotations

import argparse

from deploykit.cli import describe, output
from deploykit.lib.errors import DeploykitError
from deploykit.run import registry
from deploykit.run import state as run_state
from deploykit.run.registry import Run

SHARED = ("exact_runs",)


def run(args: argparse.Namespace) -> int:
    rows = {row.run: row for row in map(registry.get_to_stop, args.run)}.values()
    stopped: list[Run] = []
    errors: list[DeploykitError] = []
    for row in rows:
        try:
            stopped.append(run_state.cancel(row))
        except DeploykitError as error:
            errors.append(error)
    if args.json and stopped:
        data = [describe.run_data(row) for row in stopped]
        output.emit(data[0] if len(rows) == 1 else data)
    elif not args.json:
        for row in stopped:
            describe.run_brief(row)
    if errors:
        for other in errors[1:]:
            output.error(other, as_json=False)
        raise errors[0]
    return 0
