"""What a key opens on the live page of `watch`: the log of a rank, the stacks, a question."""

from __future__ import annotations

import textwrap
import time
from typing import Protocol

from deploykit.lib import terminal
from deploykit.lib.errors import DeploykitError
from deploykit.observe.folding import Folding
from deploykit.run import enter, log_selection
from deploykit.run import state as run_state
from deploykit.run.log_selection import Selection
from deploykit.run.metrics import logs_are_here
from deploykit.run.registry import Run
from deploykit.run.watch import LOGS_AGAIN, View

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

    keys = "y cancel it   any other key: back"

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
            self.keys = "any key: back"
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
    kept = " (it has ended; these were kept)" if taken.kept else ""
    warnings = [f"warning: {text}" for text in taken.warnings]
    return [f"{row.run}: stacks{kept}", "", *taken.lines(threads=False), *warnings]


def _explained(error: Exception) -> list[str]:
    """What went wrong and what to do, in lines that fit a narrow terminal."""
    hint = getattr(error, "hint", None)
    return [line for text in (str(error), hint) if text for line in textwrap.wrap(text, _NARROW)]
