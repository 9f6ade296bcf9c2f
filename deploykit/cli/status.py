"""Show the state of runs, with the reason.

Without RUN, shows all unfinished runs, or else the newest run.

deploykit status
deploykit status exp-1 -q '[0].exit_code'
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from deploykit.backends import base as backend
from deploykit.cli import describe, output, query
from deploykit.job.model import State, Status
from deploykit.lib import units
from deploykit.lib.errors import UsageError
from deploykit.observe import exit_records
from deploykit.run import diagnosis as run_diagnosis
from deploykit.run import metrics as run_metrics
from deploykit.run import registry
from deploykit.run import state as run_state
from deploykit.run.registry import Run

SHARED = ("runs", "query")
_MAX_TASKS = 100
"""Tasks of a job array that are printed."""


def run(args: argparse.Namespace) -> int:
    rows = run_state.refresh(registry.selected(args.run), run_state.PATIENCE)
    if query.is_data(args):
        records = [data(row) for row in rows]
        query.emit(args, records, records)
        return 0
    for row in rows:
        describe.run_text(row, run_diagnosis.brief(row), _progress(row))
        tasks = _tasks(row)
        for number, status, count in tasks[:_MAX_TASKS]:
            code = f", exit code {status.exit_code}" if status.exit_code is not None else ""
            reason = f": {status.reason}" if status.reason else ""
            files = "" if count is None else f", {units.plural(count, 'file')}"
            output.say(f"  task {number}: {status.state.value}{code}{files}{reason}")
        if len(tasks) > _MAX_TASKS:
            output.say(f"  and {len(tasks) - _MAX_TASKS} more tasks; --json lists all")
    return 0


def _tasks(row: Run) -> list[tuple[int, Status, int | None]]:
    """Each task of a job array: its number, status and, if it ended, how many files it wrote."""
    try:
        engine = backend.find(row.backend)
    except UsageError:  # the backend is no longer installed
        return []
    unanswered = row.reason.startswith(registry.LAST_KNOWN)
    if row.handle is None or unanswered or not backend.offers(engine, "task_status"):
        return []
    tasks = []
    for number, status in engine.task_status(row.handle).items():
        record = exit_records.written(Path(row.folder, "tasks", str(number)))
        places = (record.output, record.checkpoints, record.working_folder) if record else ()
        count = sum(place.count for place in places) if record else None
        tasks.append((number, status, count))
    return tasks


def data(row: Run) -> dict[str, Any]:
    """A run as JSON, with the tasks of a job array."""
    tasks = [
        {
            "task": number,
            "state": status.state.value,
            "exit_code": status.exit_code,
            "reason": status.reason,
            "files": count,
        }
        for number, status, count in _tasks(row)
    ]
    return {**describe.run_data(row), **({"tasks": tasks} if tasks else {})}


def _progress(row: Run) -> str:
    """How far a run is that is running; empty where its log and files do not tell."""
    if State(row.state) is not State.RUNNING:
        return ""
    return describe.line_or_bar(run_metrics.brief(row), row.folder)
