"""The last line of a terminal, drawn again and again below the lines that scroll."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Self, TextIO

from deploykit.lib import terminal

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
