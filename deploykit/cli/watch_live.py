"""The live page of `watch`: drawn with rich on the other screen of the terminal, moved by keys."""

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

    def lines(self, view: View, height: int) -> list[str]:
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

    def lines(self, view: View, height: int) -> list[str]:
        """The log as it is now; one that is elsewhere is asked for seldom."""
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + (0 if logs_are_here(view.row) else LOGS_AGAIN)
            self._read = _log(view.row, self._rank)
        shown = self._scroll.cut(self._read, height - 1)
        return [f"{view.row.run}: log of rank {self._rank}", *shown]

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

    keys = "up/down scroll   d again   q back"

    def __init__(self) -> None:
        self._scroll = _Scroll(at_end=False)
        self._taken: list[str] | None = None

    def lines(self, view: View, height: int) -> list[str]:
        """The stacks; taking them needs some seconds."""
        if self._taken is None:
            self._taken = _stacks(view.row)
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

    def lines(self, view: View, height: int) -> list[str]:
        """The question, or what became of it."""
        question = f"Cancel {self._row.run}? Its ranks get SIGTERM and time to save. (y/n)"
        return ["", *(self._error or [question]), "", f"Its state is {view.row.state}."][:height]

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
    kept = " (the run has ended; these are the last saved)" if taken.kept else ""
    warnings = [f"warning: {text}" for text in taken.warnings]
    return [f"{row.run}: stacks{kept}", "", *taken.lines(threads=False), *warnings]


def _explained(error: Exception) -> list[str]:
    """What went wrong and what to do, in lines that fit a narrow terminal."""
    hint = getattr(error, "hint", None)
    return [line for text in (str(error), hint) if text for line in textwrap.wrap(text, _NARROW)]


_WITHOUT_KEYS = "Ctrl-C closes this page; the runs continue"
_KEYS = "l log   d stacks   c cancel   q quit; the runs continue"
_SELECT = "up/down run   "
_SENTENCE = re.compile(r"  (reason|cause|slowest) +|[^ ]+: ")
_NARROWEST = 40
"""Columns in which a sentence is wrapped at least."""
_KEY = re.compile(r"^\S+|(?<=   )\S+")
"""A key in a line of keys."""


def show(watch: Watch, views: list[View], interval: float) -> list[View]:
    """Draw the runs until all have ended, or `q` is pressed; the last views, to be printed."""
    keyboard = Keyboard()
    page = _Page(Console(), views, keyboard)
    with (
        keyboard.open(),
        Live(page.draw(), console=page.console, screen=True, auto_refresh=False) as live,
    ):
        while page.goes_on(watch):
            live.update(page.draw(), refresh=True)
            end = time.monotonic() + interval
            while page.goes_on(watch) and (left := end - time.monotonic()) > 0:
                if key := keyboard.key(left):
                    page.press(key)
                    live.update(page.draw(), refresh=True)
            page.views = watch.look() if not watch.final else page.views
    return page.views


class _Page:
    """What is on the screen: the runs, or a pane about the selected one."""

    def __init__(self, console: Console, views: list[View], keyboard: Keyboard) -> None:
        self.console, self.views, self._keyboard = console, views, keyboard
        self._selected = 0
        self._pane: Pane | None = None
        self._quit = False

    def goes_on(self, watch: Watch) -> bool:
        """Whether a run still runs, or someone reads a pane."""
        return not self._quit and (self._pane is not None or not watch.final)

    def press(self, key: str) -> None:
        """Handle a key."""
        if self._pane is not None:
            self._pane = self._pane if self._pane.press(key) else None
        elif key in {"q", "escape"}:
            self._quit = True
        elif key in {"up", "k", "down", "j"}:
            step = -1 if key in {"up", "k"} else 1
            self._selected = min(max(0, self._selected + step), len(self.views) - 1)
        else:
            self._pane = self._opened(key)

    def _opened(self, key: str) -> Pane | None:
        row = self.views[self._selected].row
        if key in {"l", "\r", "\n"}:
            return LogPane()
        if key == "d":
            return StackPane()
        return CancelPane(row) if key == "c" and not State(row.state).final else None

    def draw(self) -> Group:
        """A title, the lines that fit, and the keys at the bottom of the screen.

        Long sentences are wrapped, other long lines cut, and the last ones left out.
        """
        height, width = max(1, self.console.height - 4), self.console.width
        if self._pane is None:
            lines = [part for one in watch_lines.lines(self.views) for part in wrapped(one, width)]
            chosen = self._selected + 1
            keys = _SELECT * (len(self.views) > 1) + _KEYS
        else:
            lines, chosen = self._pane.lines(self.views[self._selected], height), 0
            keys = self._pane.keys
        if len(lines) > height:
            lines = [*lines[: height - 1], f"... {len(lines) - height + 1} more lines"]
        shown = [_line(terminal.line(line), width) for line in lines]
        if self._pane is None:
            _color(shown, self.views)
            if len(self.views) > 1 and chosen < len(shown):
                shown[chosen].stylize("reverse")
        footer = _line(keys if self._keyboard.is_there else _WITHOUT_KEYS, width)
        footer.highlight_regex(_KEY, "cyan")
        rest = [Text("")] * (height - len(shown) + 1)
        return Group(self._title(width), Text(""), *shown, *rest, footer)

    def _title(self, width: int) -> Text:
        """What the page is about, and the time: UTC, as all times that deploykit shows."""
        runs = f"{len(self.views)} runs" if len(self.views) > 1 else self.views[0].row.run
        clock = datetime.now(UTC).strftime("%H:%M:%S UTC")
        left = _line(f" deploykit watch: {runs}", max(1, width - len(clock) - 2))
        return Text.assemble(left.plain.ljust(width - len(clock) - 1), clock, " ", style="reverse")


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


def _color(lines: Sequence[Text], views: Sequence[View]) -> None:
    """Color states and bars; names before values become dim."""
    first = 0 if len(views) == 1 else 1  # after the headings
    for line, view in zip(lines[first:], views, strict=False):
        color = output.STATE_COLORS.get(view.row.state, "bold")
        line.highlight_regex(rf"^\S+ +(?P<{color}>{view.row.state})", style_prefix="")
    for line in lines:
        line.highlight_regex(f"{describe.FILLED}+", "green")
        line.highlight_regex(f"{describe.EMPTY}+", "bright_black")
        line.highlight_regex(r"^  (cause|error|reason)(?=  )", "red")
