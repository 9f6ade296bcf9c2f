"""Single keys of a terminal, as names: ``up``, ``escape``, ``l``."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator

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
