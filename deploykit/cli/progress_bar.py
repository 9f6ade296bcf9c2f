"""A progress bar for packing and uploading large sources."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

from deploykit.lib import progress

_LEAST = 1_000_000
"""Bytes below which there is nothing to watch."""


class _Bar:
    """One bar for each thing that is done, one after the other; it goes when that is done."""

    def __init__(self) -> None:
        self._drawn: Progress | None = None
        self._finished: set[str] = set()

    def show(self, what: str, done: int, total: int) -> None:
        """Draw how far `what` has come."""
        if total < _LEAST or what in self._finished:
            return
        if self._drawn is None:
            columns = "{task.description}", BarColumn(), DownloadColumn(), TimeRemainingColumn()
            self._drawn = Progress(*columns, console=Console(stderr=True), transient=True)
            self._drawn.start()
            self._drawn.add_task(what, total=total)
        self._drawn.update(self._drawn.task_ids[0], completed=min(done, total))
        if done >= total:
            self._finished.add(what)
            self.close()

    def close(self) -> None:
        """Take the bar away."""
        if self._drawn is not None:
            self._drawn.stop()
            self._drawn = None


@contextlib.contextmanager
def watching() -> Iterator[None]:
    """Draw bars on standard error meanwhile."""
    bar = _Bar()
    with contextlib.closing(bar), progress.shown_by(bar.show):
        yield
