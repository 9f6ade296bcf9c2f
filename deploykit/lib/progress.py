"""What is reported while something goes on: progress of packing and uploading, and warnings."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

Show = Callable[[str, int, int], None]
"""Called with what is done (``packing``), and the bytes so far and in all."""
show: Show | None = None
"""Shows a progress bar; None in a pipe."""


@contextlib.contextmanager
def shown_by(chosen: Show) -> Iterator[None]:
    """Report to `chosen` meanwhile."""
    global show  # noqa: PLW0603 - one process packs and sends one job
    show = chosen
    try:
        yield
    finally:
        show = None


def warn(text: str) -> None:
    """Log a warning. Without a handler, Python prints it to standard error."""
    import logging  # a tenth of all that a dry run imports

    logging.getLogger("deploykit").warning("%s", text)
