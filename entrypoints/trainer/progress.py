"""A line on the terminal that shows how far the training has come."""

from __future__ import annotations

import sys
import time

from trainer.group import Place

WIDTH = 30
EVERY = 0.1
"""Seconds between two drawings."""


class Bar:
    """Drawn on rank 0, and only where somebody looks: standard output is a terminal."""

    def __init__(self, place: Place, steps: int) -> None:
        self._drawn = place.first and sys.stdout.isatty()
        self._steps = steps
        self._next = 0.0

    def show(self, step: int) -> None:
        now = time.monotonic()
        if self._drawn and now >= self._next:
            self._next = now + EVERY
            done = WIDTH * step // self._steps
            print(f"\r{'#' * done}{'.' * (WIDTH - done)} {step}/{self._steps}", end="", flush=True)

    def clear(self) -> None:
        """Make way for a line of text."""
        if self._drawn:
            print("\r\033[K", end="", flush=True)
