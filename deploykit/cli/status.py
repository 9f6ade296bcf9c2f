"""Show the state of runs, and the reason. Without RUN: all unfinished runs, or else the newest.

deploykit status
deploykit status exp-1 --json
"""

from __future__ import annotations

import argparse

from deploykit.cli import describe, output
from deploykit.job.model import State
from deploykit.run import diagnosis as run_diagnosis
from deploykit.run import metrics as run_metrics
from deploykit.run import registry
from deploykit.run import state as run_state
from deploykit.run.registry import Run

SHARED = ("runs",)


def run(args: argparse.Namespace) -> int:
    rows = run_state.refresh(registry.selected(args.run))
    if args.json:
        output.emit([output.run_data(row) for row in rows])
    else:
        for row in rows:
            output.run_text(row, run_diagnosis.brief(row), _progress(row))
    return 0


def _progress(row: Run) -> str:
    """How far a run is that is running; empty where its log and files do not tell."""
    if State(row.state) is not State.RUNNING:
        return ""
    return describe.line_or_bar(run_metrics.brief(row), row.folder)
