"""Wait a limited time for work that cannot be interrupted."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import TypeVar

from deploykit.lib import shell

T = TypeVar("T")


def within(seconds: float, work: Callable[[], T]) -> T:
    """What `work` returns or raises. Raises TimeoutError if it takes longer.

    It runs in a thread, which is then abandoned: it ends with this process, if not before. The
    programs that it has started are killed.
    """
    results: list[T] = []
    errors: list[Exception] = []
    programs = shell.Programs()

    def run() -> None:
        shell.programs.set(programs)
        try:
            results.append(work())
        except Exception as error:  # noqa: BLE001 - raised where it is waited for
            errors.append(error)

    thread = Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        programs.abandon()
        raise TimeoutError
    return results[0]
