"""Everything that commands print: JSON for programs, plain text in a pipe, tables on a terminal.

Nothing else in deploykit writes to standard output or standard error. On a terminal every text is
made safe (terminal.py); a pipe gets it unchanged, byte for byte.
"""

from __future__ import annotations

import codecs
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from io import TextIOWrapper
from typing import Any, TextIO

from deploykit import shell, terminal
from deploykit.decode import SURROGATE
from deploykit.errors import DeploykitError, OutputLost
from deploykit.folding import Folding
from deploykit.model import LogLine, Problem, State
from deploykit.registry import Run


def emit(data: Any) -> None:
    """Print one JSON document on standard output."""
    _json(data, indent=2)


def say(*texts: str) -> None:
    """Print lines on standard output: the result of the command."""
    _lines(sys.stdout, texts)


def note(*texts: str) -> None:
    """Print lines on standard error: remarks beside the result."""
    _lines(sys.stderr, texts)


def block(text: str) -> None:
    """Print a text of several lines on standard output, such as a plan or a script."""
    _write(sys.stdout, terminal.lines(text) if sys.stdout.isatty() else text)


def log(lines: Iterable[LogLine], *, colors: bool = False, aside: bool = False) -> None:
    """Print log lines as they arrive, each after its rank, or its node where no rank wrote it.

    `colors` keeps their own colors on a terminal. `aside` prints to standard error.
    """
    out = sys.stderr if aside else sys.stdout
    for line in lines:
        texts = terminal.log(line.text, colors=colors) if out.isatty() else [line.text]
        for text in texts:
            _write(out, f"{line.origin}{text}\n")
        out.flush()


def folded(row: Run, folding: Folding) -> None:
    """Note how many lines were left out, and how to see them."""
    if folding.hidden:
        command = shell.command("deploykit", "logs", row.run, "--raw")
        note(f"{folding.hidden} lines of torchrun and of equal tracebacks are folded: `{command}`")


def log_data(lines: Iterable[LogLine]) -> None:
    """Print log lines as JSON, one document each."""
    for line in lines:
        _json(vars(line))
        sys.stdout.flush()


def error(error: DeploykitError, *, as_json: bool) -> None:
    """Print an error, its hint, and every problem of a job file or a command line."""
    if as_json:
        data = {
            "message": error.message,
            "hint": error.hint,
            "exit_code": error.exit_code,
            "transient": error.transient,
            "problems": [vars(problem) for problem in error.problems],
        }
        emit({"error": data})
        return
    note(f"error: {error.message}")
    for problem in error.problems:
        mark = "warning: " if problem.severity == "warning" else ""
        note(*(f"  {text}" for text in _problem(problem, mark)))
    note(*(f"  {text}" for text in (error.hint or "").split("\n") if text))


def warnings(problems: Iterable[Problem]) -> None:
    """Print warnings as remarks."""
    for problem in problems:
        note(*_problem(problem, "warning: "))


def _problem(problem: Problem, mark: str) -> Iterator[str]:
    yield f"{mark}{problem.text}"
    if problem.source:
        yield f"  see {problem.source}"


def table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], *, headings_in_pipe: bool = False
) -> None:
    """Print rows under headings on a terminal; tab-separated in a pipe, there without headings."""
    if not sys.stdout.isatty():
        piped = [headings, *rows] if headings_in_pipe else rows
        say(*("\t".join(row) for row in piped))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=None, header_style="", pad_edge=False)
    shown = [[Text(terminal.line(cell)) for cell in row] for row in rows]
    for heading, *cells in zip(headings, *shown, strict=True):
        whole = heading != headings[-1]  # only the last column is text, and may be broken
        width = max((cell.cell_len for cell in cells), default=0) if whole else None
        drawn.add_column(heading, no_wrap=whole, min_width=width, overflow="fold")
    for row in shown:
        drawn.add_row(*row)
    console = Console()
    with console.capture() as held:
        console.print(drawn)
    _write(sys.stdout, held.get())


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
    """Print a run as a few lines; `diagnosis` is the cause of its failure, if known."""
    code = f", exit code {run.exit_code}" if run.exit_code is not None else ""
    say(f"{run.run}: {run.state}{code}")
    for label, value in (
        ("reason", run.reason),
        ("handle", str(run.handle or f"{run.backend}://{run.target}, not confirmed")),
        ("sent", when(run)),
        ("folder", run.folder),
        ("output", run.output),
        ("logs", shell.command("deploykit", "logs", run.run) if run.handle else ""),
        ("cause", diagnosis),
    ):
        if value:
            say(f"  {label:<7} {value}")


def when(run: Run) -> str:
    """The time of submission, in UTC, to the second."""
    return datetime.fromtimestamp(run.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _lines(out: TextIO, texts: Iterable[str]) -> None:
    shown = map(terminal.line, texts) if out.isatty() else texts
    for text in shown:
        _write(out, f"{text}\n")


def _json(data: Any, indent: int | None = None) -> None:
    out = sys.stdout
    unicode = out.encoding.lower().startswith("utf")
    text = json.dumps(data, indent=indent, ensure_ascii=not unicode, default=str)
    text = SURROGATE.sub("\ufffd", text)
    _write(out, f"{terminal.data(text) if out.isatty() else text}\n")


def _write(out: TextIO, text: str) -> None:
    """Write to a stream. Raises OutputLost, or BrokenPipeError where the reader has gone."""
    if isinstance(out, TextIOWrapper) and out.errors in _PYTHONS:
        out.reconfigure(errors=_UNENCODABLE)
    try:
        out.write(text)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputLost(str(error.strerror)) from error


def _encoded(error: UnicodeError) -> tuple[bytes, int]:
    """Encode undecodable bytes as they came in, and what the encoding lacks as escapes."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    odd = error.object[error.start : error.end]
    try:
        return odd.encode(error.encoding, "surrogateescape"), error.end
    except UnicodeEncodeError:
        return odd.encode("ascii", "backslashreplace"), error.end


_UNENCODABLE = "deploykit"
_PYTHONS = {"strict", "backslashreplace"}
"""Python's own error handlers, unless the user has chosen another."""
codecs.register_error(_UNENCODABLE, _encoded)
