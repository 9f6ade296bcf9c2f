"""Print all output of commands: JSON for programs, plain text in a pipe, tables on a terminal.

No other module of deploykit writes to standard output or standard error. On a terminal, text is
escaped (terminal.py); in a pipe, it is unchanged, byte for byte.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from io import TextIOWrapper
from typing import TYPE_CHECKING, Any, Self, TextIO

from deploykit.job.decode import encodable
from deploykit.job.model import LogLine, Problem, State
from deploykit.lib import shell, terminal, units
from deploykit.lib.errors import DeploykitError, OutputLost, UsageError
from deploykit.run.registry import Run

if TYPE_CHECKING:
    from deploykit.observe.folding import Folding

STATE_COLORS = {
    State.SUCCEEDED.value: "green",
    State.FAILED.value: "red",
    State.RUNNING.value: "cyan",
    State.QUEUED.value: "yellow",
    State.SUBMITTING.value: "yellow",
    State.STOPPING.value: "magenta",
    State.CANCELLED.value: "magenta",
    State.UNSENT.value: "red",
    State.BLOCKED.value: "red",
}
_SGR = {"red": 31, "green": 32, "yellow": 33, "magenta": 35, "cyan": 36}
"""The numbers of colors in SGR (ECMA-48, 8.3.117)."""
_MARK = re.compile(r" *(error|warning):")
_MARK_COLORS = {"error": "red", "warning": "yellow"}


SCHEMA_VERSION = 1
"""Of the JSON documents (schemas.py). It grows if a key is removed, or gets another meaning."""


def emit(data: Any, *, foreign: bool = False) -> None:
    """Print one JSON document on standard output; one in the form of another program as it is."""
    _json(data if foreign else with_version(data), indent=2)


def with_version(data: Any) -> Any:
    """The document with the version of its schema; of a list, each record."""
    if isinstance(data, dict):
        return {"schema_version": SCHEMA_VERSION, **data}
    return [with_version(each) for each in data]


def say(*texts: str) -> None:
    """Print lines on standard output: the result of the command."""
    _lines(sys.stdout, texts)


def note(*texts: str) -> None:
    """Print lines on standard error: remarks beside the result."""
    _lines(sys.stderr, texts)


def on_terminal() -> bool:
    """Whether a person sees remarks as they are written."""
    return sys.stderr.isatty()


def is_live() -> bool:
    """Whether standard output is a terminal on which a page can be drawn again and again."""
    return is_possible(sys.stdout)


def can_ask() -> bool:
    """Whether a person reads and writes at a terminal."""
    return all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))


def ask(question: str, choices: Sequence[str]) -> str:
    """The choice of the user, by number or name; the first one for an empty line or at the end."""
    note(question, *(f"  {number}  {choice}" for number, choice in enumerate(choices, 1)))
    by_word = {str(number): choice for number, choice in enumerate(choices, 1)}
    by_word |= {choice: choice for choice in choices} | {"": choices[0]}
    while True:
        _write(sys.stderr, "[1]: ")
        sys.stderr.flush()
        line = sys.stdin.readline()
        if line.strip() in by_word:
            return by_word[line.strip()]
        note(f"type a number from 1 to {len(choices)}, or press Enter for 1")


def block(text: str) -> None:
    """Print a text of several lines on standard output, such as a plan or a script."""
    _write(sys.stdout, terminal.lines(text) if sys.stdout.isatty() else text)


def raw(content: bytes) -> None:
    """Print an answer as it came; on a terminal as text, with its control characters escaped.

    Raises UsageError on a terminal for an answer that is not text.
    """
    if sys.stdout.isatty():
        if b"\0" in content:
            raise UsageError("the response is not text", hint="-o FILE writes it to a file")
        block(f"{content.decode(errors='replace').rstrip()}\n")
        return
    try:
        sys.stdout.buffer.write(content)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputLost(str(error.strerror)) from error


def log(
    lines: Iterable[LogLine | str],
    *,
    colors: bool = False,
    aside: bool = False,
    below: Callable[[str], str] | None = None,
) -> None:
    """Print log lines as they arrive, each after its rank, or its node where no rank wrote it.

    A text is whole lines. `colors` keeps their own on a terminal. `aside` prints to standard error.
    A terminal ends with what `below` returns for the newest line, if that is of a progress bar.
    """
    out = sys.stderr if aside else sys.stdout
    if below is None or not out.isatty():
        for line in lines:
            _log(out, line, colors=colors)
        return
    latest = [""]
    with LastLine(out, lambda: below(latest[0])) as last:
        for line in lines:
            latest[0] = str(line) if not isinstance(line, str) and line.bar else ""
            with last.hidden():
                if not (latest[0] and last.drawn):
                    _log(out, line, colors=colors)


def last_line(text: Callable[[], str]) -> LastLine:
    """A context in which standard error ends with what `text` returns, if it is a terminal."""
    return LastLine(sys.stderr, text)


def _log(out: TextIO, line: LogLine | str, *, colors: bool) -> None:
    if isinstance(line, LogLine):
        texts = terminal.log(line.text, colors=colors) if out.isatty() else [line.text]
        line = "".join(f"{line.origin}{text}\n" for text in texts)
    elif out.isatty():
        line = "\n".join(terminal.log(text, colors=colors)[0] for text in line.split("\n"))
    _write(out, line)


def folded(row: Run, folding: Folding) -> None:
    """Note how many lines were left out, and how to see them."""
    if folding.hidden:
        command = shell.command("deploykit", "logs", row.run, "--raw")
        what = "torchrun messages, C++ frames, repeated tracebacks"
        note(f"{units.plural(folding.hidden, 'line')} hidden ({what}); `{command}` shows all")


def log_data(lines: Iterable[LogLine]) -> None:
    """Print log lines as JSON, one document each."""
    for line in lines:
        _json(with_version(line._asdict()))


def error(error: DeploykitError, *, as_json: bool) -> None:
    """Print an error, its hint, and every problem of a job file or a command line."""
    if as_json:
        data = {
            "message": error.message,
            "hint": error.hint,
            "exit_code": error.exit_code,
            "transient": error.transient,
            "problems": [problem._asdict() for problem in error.problems],
        }
        emit({"error": data})
        return
    note(*error_lines(error))


def error_lines(error: DeploykitError) -> list[str]:
    """An error as people read it: the message, every problem, and the hint."""
    lines = [f"error: {error.message}"]
    for problem in error.problems:
        mark = "warning: " if problem.severity == "warning" else ""
        lines += [f"  {text}" for text in _problem(problem, mark)]
    return lines + [f"  {text}" for text in (error.hint or "").split("\n") if text]


def warnings(problems: Iterable[Problem]) -> None:
    """Print warnings as remarks."""
    for problem in problems:
        note(*_problem(problem, "warning: "))


def _problem(problem: Problem, mark: str) -> Iterator[str]:
    line = f"line {problem.line}: " if problem.line else ""
    path = f"{problem.path}: " if problem.path else ""
    place = f"argument {problem.argument}: " if problem.argument else f"{line}{path}"
    hint = f" ({problem.hint})" if problem.hint else ""
    yield f"{mark}{place}{problem.message}{hint}"
    if problem.source:
        yield f"  see {problem.source}"
    if problem.rule:
        yield f"  or `{shell.command('deploykit', 'explain', problem.rule)}`"


def table(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    headings_in_pipe: bool = False,
    optional: Sequence[str] = (),
) -> None:
    """Print rows under headings on a terminal; tab-separated in a pipe, there without headings.

    With `optional`, a terminal gets one line per row: where it is too narrow, these columns are
    left out, in this order, and the last column is cut.
    """
    if not sys.stdout.isatty():
        piped = [headings, *rows] if headings_in_pipe else rows
        say(*("\t".join(row) for row in piped))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    drawn = Table(box=None, header_style="", pad_edge=False)
    colors = STATE_COLORS if terminal.has_colors() else {}
    shown = [
        [Text.assemble((terminal.line(cell), colors.get(cell, ""))) for cell in row] for row in rows
    ]
    columns = [
        (heading, max([len(heading), *(cell.cell_len for cell in cells)]), cells)
        for heading, *cells in zip(headings, *shown, strict=True)
    ]
    if optional:
        columns = _that_fit(columns, console.width, optional)
    for heading, width, _ in columns[:-1]:
        drawn.add_column(heading, no_wrap=True, min_width=width, overflow="fold")
    if optional:  # only the last column is text, and may be broken or cut
        left = max(1, console.width - _taken(columns[:-1]))
        drawn.add_column(headings[-1], no_wrap=True, max_width=left, overflow="ellipsis")
    else:
        drawn.add_column(headings[-1], overflow="fold")
    for row in zip(*(cells for _, _, cells in columns), strict=True):
        drawn.add_row(*row)
    with console.capture() as held:
        console.print(drawn)
    _write(sys.stdout, held.get())


_Column = tuple[str, int, list[Any]]
"""A heading, the columns of the terminal that it takes, and its cells."""
_LEAST_TEXT = 16
"""Columns of the terminal that the last, cut column gets if others can be left out."""


def _that_fit(columns: list[_Column], width: int, optional: Sequence[str]) -> list[_Column]:
    """The columns of a table without those that are too many for the terminal."""
    for name in optional:
        if _taken(columns[:-1]) + min(columns[-1][1], _LEAST_TEXT) <= width:
            break
        columns = [column for column in columns if column[0] != name]
    return columns


def _taken(columns: list[_Column]) -> int:
    """The width of these columns, with two spaces after each."""
    return sum(2 + width for _, width, _ in columns)


def run_line(run: Run) -> None:
    """Print the state of a run, and its exit code."""
    code = f", exit code {run.exit_code}" if run.exit_code is not None else ""
    _write(sys.stdout, f"{_line(sys.stdout, run.run)}: {_state(run)}{code}\n")


def when(seconds: float) -> str:
    """A time since the epoch in UTC, to the second."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _state(run: Run) -> str:
    color = STATE_COLORS.get(run.state)
    return run.state if color is None else _colored(sys.stdout, run.state, color)


def _colored(out: TextIO, text: str, color: str) -> str:
    colored = out.isatty() and terminal.has_colors()
    return f"\x1b[{_SGR[color]}m{text}\x1b[0m" if colored else text


def _lines(out: TextIO, texts: Iterable[str]) -> None:
    _write(out, "".join(f"{_marked(out, _line(out, text))}\n" for text in texts))


def _marked(out: TextIO, line: str) -> str:
    """Color the ``error:`` or ``warning:`` that a line begins with."""
    mark = _MARK.match(line)
    if mark is None:
        return line
    return _colored(out, mark[0], _MARK_COLORS[mark[1]]) + line[mark.end() :]


def _line(out: TextIO, text: str) -> str:
    return terminal.line(text) if out.isatty() else text


def _json(data: Any, indent: int | None = None) -> None:
    out = sys.stdout
    unicode = (out.encoding or "utf-8").lower().startswith("utf")  # a StringIO has none
    text = json.dumps(data, indent=indent, ensure_ascii=not unicode, default=str)
    if not encodable(text):  # each surrogate becomes U+FFFD
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    _write(out, f"{terminal.data(text) if out.isatty() else text}\n")


def _write(out: TextIO, text: str) -> None:
    """Write to a stream at once: a pipe's reader may wait for it, as an editor does.

    Raises OutputLost, or BrokenPipeError where the reader has gone.
    """
    if isinstance(out, TextIOWrapper) and out.errors in _PYTHONS:
        out.reconfigure(errors=_UNENCODABLE)
    try:
        out.write(text)
        out.flush()
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


_PAUSE = 0.25
"""Seconds between two drawings."""
_WIDTH = 80
"""Columns of a terminal that does not tell."""
_ERASE = "\r\x1b[K"
"""Back to the start of the line, and erase it (ECMA-48, 8.3.41)."""


def is_possible(out: TextIO) -> bool:
    """Whether a line of this stream can be overwritten."""
    return out.isatty() and os.environ.get("TERM") not in {None, "", "dumb", "unknown"}


class LastLine:
    """A context in which the terminal `out` ends with the line that `text` returns.

    Write other lines inside `hidden`. Where `out` is no such terminal, nothing is drawn.
    """

    def __init__(self, out: TextIO, text: Callable[[], str]) -> None:
        self._out, self._text = out, text
        self.drawn = is_possible(out)
        """Whether the line is drawn here."""
        self._shown = ""
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        if self.drawn:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        if self.drawn:
            self._thread.join()
            self._draw("")

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """A block in which the line is not there."""
        with self._lock:
            shown = self._shown
            self._draw("")
            yield
            self._draw(shown)

    def _run(self) -> None:
        while not self._end.wait(_PAUSE):
            text = self._text()
            with self._lock:
                self._draw(text)

    def _draw(self, text: str) -> None:
        if text == self._shown or not self.drawn:
            return
        from rich.cells import set_cell_size  # only on a terminal

        with contextlib.suppress(OSError, ValueError):  # a terminal that was closed
            width = os.get_terminal_size(self._out.fileno()).columns or _WIDTH
            shown = set_cell_size(terminal.line(text), max(1, width - 1)).rstrip()
            self._out.write(f"{_ERASE}{shown}")
            self._out.flush()
        self._shown = text
