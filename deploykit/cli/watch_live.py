"""The live page of `watch`: drawn with rich on the other screen of the terminal, moved by keys."""

from __future__ import annotations

import time

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from deploykit.cli import watch_lines
from deploykit.cli.keyboard import Keyboard
from deploykit.cli.watch_panes import CancelPane, LogPane, Pane, StackPane
from deploykit.job.model import State
from deploykit.lib import terminal
from deploykit.run.watch import View, Watch

_WITHOUT_KEYS = "Ctrl-C closes this page; the runs continue"
_KEYS = "l log   d stacks   c cancel   q quit; the runs continue"
_SELECT = "up/down run   "


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
        """The lines that fit: too long ones are cut, and the last ones left out."""
        height, width = max(1, self.console.height - 2), self.console.width
        if self._pane is None:
            lines, chosen = watch_lines.lines(self.views), self._selected + 1
            keys = _SELECT * (len(self.views) > 1) + _KEYS
        else:
            lines, chosen = self._pane.lines(self.views[self._selected], height), 0
            keys = self._pane.keys
        if len(lines) > height:
            lines = [*lines[: height - 1], f"... {len(lines) - height + 1} more lines"]
        shown = [_line(terminal.line(line), width) for line in lines]
        if self._pane is None and len(self.views) > 1 and chosen < len(shown):
            shown[chosen].stylize("reverse")
        footer = keys if self._keyboard.is_there else _WITHOUT_KEYS
        return Group(*shown, Text(""), Text(footer, style="dim"))


def _line(line: str, width: int) -> Text:
    text = Text(line, no_wrap=True, overflow="ellipsis")
    text.truncate(width, overflow="ellipsis")
    return text
