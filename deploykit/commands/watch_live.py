"""The live page of `watch`: drawn with rich on the other screen of the terminal."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from deploykit import terminal
from deploykit.commands import watch_lines
from deploykit.run_watch import View, Watch

_FOOTER = "Ctrl-C ends the page; the runs go on"


def show(watch: Watch, views: list[View], interval: float) -> list[View]:
    """Draw the runs until all have ended; the last views, to be printed."""
    console = Console()
    with Live(_page(console, views), console=console, screen=True, auto_refresh=False) as live:
        while not watch.final:
            live.update(_page(console, views), refresh=True)
            time.sleep(interval)
            views = watch.look()
    return views


def _page(console: Console, views: Sequence[View]) -> Group:
    """The lines that fit: too long ones are cut, and the last ones left out."""
    lines = watch_lines.lines(views)
    height = max(1, console.height - 2)
    if len(lines) > height:
        lines = [*lines[: height - 1], f"... {len(lines) - height + 1} more lines"]
    shown = [_line(terminal.line(line), console.width) for line in lines]
    return Group(*shown, Text(""), Text(_FOOTER, style="dim"))


def _line(line: str, width: int) -> Text:
    text = Text(line, no_wrap=True, overflow="ellipsis")
    text.truncate(width, overflow="ellipsis")
    return text
