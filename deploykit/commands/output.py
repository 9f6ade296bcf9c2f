"""How commands print: JSON for programs, plain text when piped, tables on a terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from deploykit.errors import DeploykitError, JobFileError, UsageError
from deploykit.model import Problem, State
from deploykit.runs import Run


def emit(data: Any) -> None:
    """One JSON document on standard output."""
    print(json.dumps(data, indent=2, ensure_ascii=False, default=str))


def say(text: str) -> None:
    """An answer, on standard output."""
    print(text)


def note(text: str) -> None:
    """A remark for the person, beside what the command is asked for."""
    print(text, file=sys.stderr)


def error(error: DeploykitError, *, as_json: bool) -> None:
    """What went wrong and what to do; every problem of a job file or a command line."""
    problems = error.problems if isinstance(error, JobFileError | UsageError) else ()
    if as_json:
        data = {
            "message": str(error),
            "hint": error.hint,
            "exit_code": error.exit_code,
            "transient": error.transient,
            "problems": [vars(problem) for problem in problems],
        }
        emit({"error": data})
        return
    note(f"error: {error}")
    for problem in problems:
        mark = "warning: " if problem.severity == "warning" else ""
        note(f"  {mark}{_problem(problem)}")
    if error.hint:
        note(f"  {error.hint}")


def warnings(problems: Iterable[Problem]) -> None:
    """What is doubtful about a job, as remarks."""
    for problem in problems:
        note(f"warning: {_problem(problem)}")


def _problem(problem: Problem) -> str:
    place = f"line {problem.line}: " if problem.line else ""
    path = f"{problem.path}: " if problem.path else ""
    hint = f" ({problem.hint})" if problem.hint else ""
    source = f"\n    see {problem.source}" if problem.source else ""
    return f"{place}{path}{problem.message}{hint}{source}"


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Rows under headings: drawn on a terminal, tab-separated without headings in a pipe."""
    if not sys.stdout.isatty():
        for row in rows:
            print("\t".join(row))
        return
    from rich.console import Console
    from rich.table import Table

    drawn = Table(box=None, header_style="bold", pad_edge=False)
    for heading, *cells in zip(headings, *rows, strict=True):
        whole = heading != headings[-1]  # only the last column is text, and may be broken
        width = max(map(len, cells), default=0) if whole else None
        drawn.add_column(heading, no_wrap=whole, min_width=width, overflow="fold")
    for row in rows:
        drawn.add_row(*row)
    Console().print(drawn)


def run_data(run: Run) -> dict[str, Any]:
    """A run as JSON."""
    return {
        "run": run.run,
        "name": run.name,
        "backend": run.backend,
        "handle": str(run.handle) if run.handle else None,
        "state": run.state,
        "native": run.native,
        "reason": run.reason,
        "exit_code": run.exit_code,
        "final": State(run.state).final,
        "created": when(run),
        "folder": run.folder,
        "output": run.output,
        "bundle": run.bundle,
        "commit": run.revision,
    }


def run_text(run: Run, diagnosis: str | None = None) -> None:
    """A run as a few lines for a person; last, why it failed where that was found."""
    code = f", exit code {run.exit_code}" if run.exit_code is not None else ""
    print(f"{run.run}: {run.state}{code}")
    for label, value in (
        ("why", run.reason),
        ("where", str(run.handle or f"{run.backend}://{run.place}, not confirmed")),
        ("sent", when(run)),
        ("folder", run.folder),
        ("output", run.output),
        ("logs", f"deploykit logs {run.run}" if run.handle else ""),
        ("cause", diagnosis),
    ):
        if value:
            print(f"  {label:<7} {value}")


def when(run: Run) -> str:
    """The time of submission, in UTC, to the second."""
    return datetime.fromtimestamp(run.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
