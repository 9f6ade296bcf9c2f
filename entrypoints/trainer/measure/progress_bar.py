"""A progress bar on the terminal; piped output stays plain lines."""

from __future__ import annotations

import sys
from typing import Any

from trainer.parallel.process_group import DistributedContext


class ProgressBar:
    """tqdm's bar on rank 0 if standard output is a terminal; otherwise all methods do nothing."""

    def __init__(self, context: DistributedContext, total: int, completed: int) -> None:
        visible = context.is_rank_zero and sys.stdout.isatty()
        self._bar = _tqdm(total, completed) if visible else None

    def update(self, step: int) -> None:
        """Show that `step` steps are done; redraws at most ten times a second."""
        if self._bar is not None:
            self._bar.update(step - self._bar.n)

    def clear(self) -> None:
        """Remove the bar until the next update, to print a line of text."""
        if self._bar is not None:
            self._bar.clear()

    def close(self) -> None:
        """Remove the bar for good."""
        if self._bar is not None:
            self._bar.close()


def _tqdm(total: int, completed: int) -> Any:
    """A bar, or None with a notice if tqdm is not installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        print("tqdm is not installed: no progress bar", flush=True)
        return None
    return tqdm(
        total=total,
        initial=completed,
        unit="step",
        file=sys.stdout,
        dynamic_ncols=True,
        leave=False,
    )
