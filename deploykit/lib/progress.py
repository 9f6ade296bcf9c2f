"""Progress of packing and uploading, for a progress bar. In a pipe there is none."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

Show = Callable[[str, int, int], None]
"""Called with what is done (``packing``), and the bytes so far and in all."""
show: Show | None = None


@contextlib.contextmanager
def shown_by(chosen: Show) -> Iterator[None]:
    """Report to `chosen` meanwhile."""
    global show  # noqa: PLW0603 - one process packs and sends one job
    show = chosen
    try:
        yield
    finally:
        show = None
