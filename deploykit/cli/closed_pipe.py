"""End a waiting command as soon as the reader of its output closes the pipe."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import stat
import threading
from collections.abc import Iterator
from typing import NoReturn

_OUTPUT = 1
"""The file descriptor of standard output."""
_AGAIN = 0.5
"""Seconds until the main thread is told once more: it may have been about to handle an error."""


@contextlib.contextmanager
def noticed() -> Iterator[None]:
    """Raise BrokenPipeError in the main thread as soon as the reader of standard output is gone."""
    if not _is_pipe() or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGPIPE, _raise)
    end, stop = os.pipe()
    watch = threading.Thread(target=_watch, args=(end,), daemon=True)
    try:
        try:
            watch.start()
            yield
        finally:
            signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # or it could interrupt what follows
    except ReaderGone:
        raise BrokenPipeError from None
    finally:
        os.close(stop)
        watch.join()
        os.close(end)
        signal.signal(signal.SIGPIPE, before)


def _is_pipe() -> bool:
    """Whether this process writes its standard output to a pipe."""
    mode = os.fstat(_OUTPUT).st_mode  # `main` has opened it, if it was closed
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def _watch(end: int) -> None:
    """Send the main thread SIGPIPE once the pipe has no reader, until `end` is closed."""
    both = select.poll()
    both.register(_OUTPUT, 0)  # errors alone
    both.register(end, select.POLLIN)
    ended = select.poll()
    ended.register(end, select.POLLIN)
    ready = dict(both.poll())
    while end not in ready:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGPIPE)
        ready = dict(ended.poll(_AGAIN * 1000))


class ReaderGone(BaseException):
    """Passes what handles errors of files and programs, as KeyboardInterrupt does.

    `noticed` makes it BrokenPipeError; a signal that comes while it does so is left to `main`.
    """


def _raise(*_: object) -> NoReturn:
    raise ReaderGone
