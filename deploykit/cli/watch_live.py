"""The live page of `watch` and `sweep watch`, drawn with rich on the terminal's alternate screen.

The page shows a title with a clock, the runs, and the keys that choose a run and open its log or
stacks.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import sys
import termios
import textwrap
import time
import tty
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from deploykit.cli import describe, output, watch_lines
from deploykit.job.model import State
from deploykit.lib import terminal
from deploykit.lib.errors import DeploykitError
from deploykit.observe.folding import Folding
from deploykit.run import enter, log_selection
from deploykit.run import state as run_state
from deploykit.run.log_selection import Selection
from deploykit.run.metrics import logs_are_here
from deploykit.run.registry import Run
from deploykit.run.watch import LOGS_AGAIN, View, Watch

_ARROWS = {"A": "up", "B": "down", "C": "right", "D": "left", "5": "page up", "6": "page down"}
"""What follows ``ESC [`` or ``ESC O`` (ECMA-48, 8.3; xterm's keypad)."""
_REST = 0.05
"""Seconds within which the rest of such a sequence comes."""


class Keyboard:
    """Reads keys as they are pressed; without a terminal at standard input none comes."""

    def __init__(self) -> None:
        self.is_there = sys.stdin.isatty()
        self._waiting = ""
        """What was read and is no key yet."""

    @contextlib.contextmanager
    def open(self) -> Iterator[Keyboard]:
        """Have keys delivered at once and not shown; Ctrl-C still interrupts."""
        if not self.is_there:
            yield self
            return
        before = termios.tcgetattr(sys.stdin)
        try:
            tty.setcbreak(sys.stdin)
            yield self
        finally:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)

    def key(self, seconds: float) -> str | None:
        """The next key; None if none is pressed within `seconds`."""
        if not self._waiting and not self._read(seconds):
            return None
        key, self._waiting = self._waiting[0], self._waiting[1:]
        if key != "\x1b":
            return key
        if not self._waiting:
            self._read(_REST)
        if self._waiting[:1] not in {"[", "O"} or len(self._waiting) < len("[A"):
            return "escape"
        name, rest = _ARROWS.get(self._waiting[1], ""), self._waiting[2:]
        self._waiting = rest.removeprefix("~") if name.startswith("page") else rest
        return name

    def _read(self, seconds: float) -> bool:
        """Wait for something, and read all that is there."""
        if not self.is_there:
            time.sleep(seconds)
            return False
        if select.select([sys.stdin], [], [], max(0.0, seconds))[0]:
            piece = os.read(sys.stdin.fileno(), 1 << 10)
            self.is_there = bool(piece)  # else the terminal is gone
            self._waiting += piece.decode(errors="replace")
        return bool(self._waiting)


_MOST = 200
"""Lines of a log that are kept to scroll in."""
_NARROW = 78
"""Columns of an error."""


class Pane(Protocol):
    """A part of the page about one run, which takes keys."""

    keys: str
    """What the keys do, in a line."""

    def lines(self, row: Run, height: int) -> list[str]:
        """The lines that fit."""

    def press(self, key: str) -> bool:
        """Handle a key; whether the pane stays open."""


class _Scroll:
    """Which lines are shown of many; 0 lines are hidden at the end at first, or at the start."""

    def __init__(self, *, at_end: bool) -> None:
        self._at_end, self._hidden, self._page = at_end, 0, 1

    def press(self, key: str) -> None:
        """Move by a line or a page."""
        steps = {"up": -1, "k": -1, "down": 1, "j": 1, "page up": -self._page, " ": self._page}
        step = {**steps, "page down": self._page}.get(key, 0)
        self._hidden = max(0, self._hidden + (-step if self._at_end else step))

    def cut(self, lines: list[str], height: int) -> list[str]:
        """The part that fits into `height` lines."""
        self._page = height
        self._hidden = min(self._hidden, max(0, len(lines) - height))
        if not self._at_end:
            return lines[self._hidden : self._hidden + height]
        end = len(lines) - self._hidden
        return lines[max(0, end - height) : end]


class LogPane:
    """The last lines of a rank."""

    keys = "left/right other rank   up/down scroll   q back"

    def __init__(self, rank: int = 0) -> None:
        self._rank = rank
        self._scroll = _Scroll(at_end=True)
        self._read: list[str] = []
        self._due = 0.0

    def lines(self, row: Run, height: int) -> list[str]:
        """The log as it is now; one that is elsewhere is asked for seldom."""
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + (0 if logs_are_here(row) else LOGS_AGAIN)
            self._read = _log(row, self._rank)
        shown = self._scroll.cut(self._read, height - 1)
        return [f"{row.run}: log of rank {self._rank}", *shown]

    def press(self, key: str) -> bool:
        """Choose another rank, or scroll."""
        step = {"left": -1, "h": -1, "right": 1, "l": 1}.get(key, 0)
        if step:
            self._rank, self._due = max(0, self._rank + step), 0.0
            self._scroll = _Scroll(at_end=True)
        self._scroll.press(key)
        return key not in {"q", "escape"}


class StackPane:
    """Where each rank stands, taken once."""

    keys = "up/down scroll   d refresh   q back"

    def __init__(self) -> None:
        self._scroll = _Scroll(at_end=False)
        self._taken: list[str] | None = None

    def lines(self, row: Run, height: int) -> list[str]:
        """The stacks; taking them needs some seconds."""
        if self._taken is None:
            self._taken = _stacks(row)
        return self._scroll.cut(self._taken, height)

    def press(self, key: str) -> bool:
        """Scroll, or take them again."""
        self._scroll.press(key)
        if key == "d":
            self._scroll, self._taken = _Scroll(at_end=False), None
        return key not in {"q", "escape"}


class CancelPane:
    """Asks whether to stop a run, and does it."""

    keys = "y cancel it   n back"

    def __init__(self, row: Run) -> None:
        self._row = row
        self._error: list[str] = []

    def lines(self, row: Run, height: int) -> list[str]:
        """The question, or what became of it."""
        question = (
            f"Cancel {self._row.run}? Its ranks receive SIGTERM and can save a checkpoint. (y/n)"
        )
        return ["", *(self._error or [question]), "", f"Its state is {row.state}."][:height]

    def press(self, key: str) -> bool:
        """Stop the run at ``y``; an error stays until the next key."""
        if key.lower() != "y" or self._error:
            return False
        try:
            run_state.cancel(self._row)
        except DeploykitError as error:
            self._error = _explained(error)
            self.keys = "q back"
            return True
        return False


def _log(row: Run, rank: int) -> list[str]:
    wanted = Selection(rank=rank)
    try:
        lines = log_selection.tail(
            row, wanted, _MOST, lambda new: Folding().fold(new), follow=False
        )
        return [text for line in lines for text in terminal.log(line.text, colors=False)[-1:]]
    except (DeploykitError, OSError) as error:
        return _explained(error)


def _stacks(row: Run) -> list[str]:
    try:
        taken = enter.take_stacks(row)
    except DeploykitError as error:
        return _explained(error)
    kept = " (the run has ended; these are the last saved stacks)" if taken.kept else ""
    warnings = [f"warning: {text}" for text in taken.warnings]
    return [f"{row.run}: stacks{kept}", "", *taken.lines(threads=False), *warnings]


def _explained(error: Exception) -> list[str]:
    """What went wrong and what to do, in lines that fit a narrow terminal."""
    hint = getattr(error, "hint", None)
    return [line for text in (str(error), hint) if text for line in textwrap.wrap(text, _NARROW)]


_WITHOUT_KEYS = "Ctrl-C closes this page"
_KEYS = "l log   d stacks   c cancel   q quit"
_SELECT = "up/down run   "
_SENTENCE = re.compile(r"  (reason|cause|slowest) +|[^ ]+: ")
_NARROWEST = 40
"""Columns in which a sentence is wrapped at least."""
_KEY = re.compile(r"^\S+|(?<=   )\S+")
"""A key in a line of keys."""
_COLORS = {
    **output.STATE_COLORS,
    "pruned": "magenta",
    "finished": "green",
    "stopped": "magenta",
    "capped": "yellow",
    "interrupted": "red",
}
"""Of the states of runs, trials and sweeps."""


class Content(Protocol):
    """What the page shows."""

    afterwards: str
    """What the keys say of closing the page, such as ``the runs continue``."""

    @property
    def title(self) -> str: ...

    @property
    def rows(self) -> Sequence[Run]:
        """The runs that keys can choose."""

    @property
    def first(self) -> int:
        """The line of the first of `rows`, each of which has a line; 0 if they have none."""

    @property
    def final(self) -> bool:
        """Whether nothing changes any more."""

    def lines(self, width: int) -> list[str]:
        """All lines; those too long are cut, and those too many scroll."""

    def look(self) -> None:
        """Query the runs again."""


class Runs:
    """The page of `watch`: one run in detail, or several as a table."""

    afterwards = "the runs continue"

    def __init__(self, watch: Watch, views: list[View]) -> None:
        self._watch, self.views = watch, views

    @property
    def title(self) -> str:
        return f"{len(self.views)} runs" if len(self.views) > 1 else self.views[0].row.run

    @property
    def rows(self) -> Sequence[Run]:
        return [view.row for view in self.views]

    @property
    def first(self) -> int:
        return int(len(self.views) > 1)  # after the headings

    @property
    def final(self) -> bool:
        return self._watch.final

    def lines(self, width: int) -> list[str]:
        """Long sentences are wrapped."""
        return [part for one in watch_lines.lines(self.views) for part in wrapped(one, width)]

    def look(self) -> None:
        """Query each backend once."""
        self.views = self._watch.look()


def show(content: Content, interval: float) -> None:
    """Draw the page until nothing changes any more, or `q` is pressed."""
    keyboard = Keyboard()
    page = _Page(Console(), content, keyboard)
    with (
        keyboard.open(),
        Live(page.draw(), console=page.console, screen=True, auto_refresh=False) as live,
    ):
        while page.goes_on:
            live.update(page.draw(), refresh=True)
            end = time.monotonic() + interval
            while page.goes_on and (left := end - time.monotonic()) > 0:
                if key := keyboard.key(left):
                    page.press(key)
                    live.update(page.draw(), refresh=True)
            if not content.final:
                content.look()


class _Page:
    """What is on the screen: the content, or a pane about the chosen run."""

    def __init__(self, console: Console, content: Content, keyboard: Keyboard) -> None:
        self.console, self._content, self._keyboard = console, content, keyboard
        self._chosen: Run | None = None
        self._pane: Pane | None = None
        self._quit = False

    @property
    def goes_on(self) -> bool:
        """Whether a run still runs, or someone reads a pane."""
        return not self._quit and (self._pane is not None or not self._content.final)

    def press(self, key: str) -> None:
        """Handle a key."""
        if self._pane is not None:
            self._pane = self._pane if self._pane.press(key) else None
        elif key in {"q", "escape"}:
            self._quit = True
        elif self._content.rows:
            at = self._position()
            step = {"up": -1, "k": -1, "down": 1, "j": 1}.get(key, 0)
            self._chosen = self._content.rows[min(max(0, at + step), len(self._content.rows) - 1)]
            self._pane = self._opened(key, self._chosen)

    def _position(self) -> int:
        """The place of the chosen run among all; that of the first once the chosen one is gone."""
        runs = [row.run for row in self._content.rows]
        return runs.index(self._chosen.run) if self._chosen and self._chosen.run in runs else 0

    def _opened(self, key: str, row: Run) -> Pane | None:
        if key in {"l", "\r", "\n"}:
            return LogPane()
        if key == "d":
            return StackPane()
        return CancelPane(row) if key == "c" and not State(row.state).final else None

    def draw(self) -> Group:
        """A title, the lines that fit, and the keys at the bottom of the screen."""
        height, width = max(1, self.console.height - 4), self.console.width
        if self._pane is not None and self._chosen is not None:
            shown = self._of_pane(self._pane, self._chosen, height, width)
            keys = self._pane.keys
        else:
            shown = self._overview(height, width)
            keys = f"{_KEYS if self._content.rows else 'q quit'}; {self._content.afterwards}"
            keys = _SELECT * (len(self._content.rows) > 1) + keys
        if not self._keyboard.is_there:
            keys = f"{_WITHOUT_KEYS}; {self._content.afterwards}"
        footer = _line(keys, width)
        footer.highlight_regex(_KEY, "cyan")
        rest = [Text("")] * (height - len(shown) + 1)
        return Group(self._title(width), Text(""), *shown, *rest, footer)

    def _of_pane(self, pane: Pane, row: Run, height: int, width: int) -> list[Text]:
        """The pane stays with its run, also if that is no longer among those of the page."""
        row = next((one for one in self._content.rows if one.run == row.run), row)
        return [_line(terminal.line(line), width) for line in pane.lines(row, height)]

    def _overview(self, height: int, width: int) -> list[Text]:
        lines = [_line(terminal.line(line), width) for line in self._content.lines(width)]
        _color(lines)
        first = self._content.first
        if not first or not self._content.rows:
            return _fitting(lines, height, 0, 0)
        chosen = first + self._position()
        lines[chosen].stylize("reverse")
        return _fitting(lines, height, first, chosen)

    def _title(self, width: int) -> Text:
        """What the page is about, and the time: UTC, as all times that deploykit shows."""
        clock = datetime.now(UTC).strftime("%H:%M:%S UTC")
        left = _line(f" deploykit watch: {self._content.title}", max(1, width - len(clock) - 2))
        return Text.assemble(left.plain.ljust(width - len(clock) - 1), clock, " ", style="reverse")


def _fitting(lines: list[Text], height: int, top: int, chosen: int) -> list[Text]:
    """The lines that fit: the first `top`, and of the others a part with the chosen one."""
    if len(lines) <= height:
        return lines
    top = min(top, max(0, height - 2))
    room = max(1, height - top - 1)
    start = max(top, chosen - room + 1)
    shown = [*lines[:top], *lines[start : start + room]]
    return [*shown, Text(f"... {len(lines) - len(shown)} more lines")][:height]


def wrapped(line: str, width: int) -> list[str]:
    """A sentence, or the notes about one of several runs, in lines that fit; others unchanged."""
    label = _SENTENCE.match(line)
    if label is None:
        return [line]
    indent = " " * (len(label[0]) if line[0] == " " else 2)
    return textwrap.wrap(terminal.line(line), max(width, _NARROWEST), subsequent_indent=indent)


def _line(line: str, width: int) -> Text:
    text = Text(line, no_wrap=True, overflow="ellipsis")
    text.truncate(width, overflow="ellipsis")
    return text


def _color(lines: Sequence[Text]) -> None:
    """Color states and bars, and the labels of errors."""
    for line in lines:
        for state, color in _COLORS.items():
            line.highlight_regex(rf"^\S+(: |  +)(?P<{color}>{state})\b", style_prefix="")
        line.highlight_regex(f"{describe.FILLED}+", "green")
        line.highlight_regex(f"{describe.EMPTY}+", "bright_black")
        line.highlight_regex(r"^  (cause|error|reason)(?=  )", "red")
