"""Receivers of messages: how one is addressed, and what it answers.

A web address gets a POST of JSON, by the node plane's own module. All others are Apprise's.
https://appriseit.com
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from deploykit.job.checks import is_secret
from deploykit.lib import paths

_PATIENCE = 40.0
"""Seconds for a receiver; a command may take most of it."""
_PUBLIC = {"http", "https", "mailto", "mailtos"}
"""Schemes of addresses whose host may be shown: for all others, it may be a token."""


class Sent(NamedTuple):
    """What became of a message: `error` is empty if the receiver took it."""

    receiver: str
    """Without a token."""
    error: str = ""
    is_open: bool = False
    """Whether it may have arrived despite the error, so that it is not sent again."""


Receiver = str | Sequence[str]
"""An address or reference as it is written, or a command."""


def name(receiver: Receiver) -> str:
    """A receiver for people, without what may be a token."""
    if not isinstance(receiver, str):
        return f"command {receiver[0]}"
    if is_secret(receiver):
        return receiver
    try:
        parts = urlsplit(receiver)
    except ValueError:
        return "..."
    return f"{parts.scheme}://{parts.hostname if parts.scheme in _PUBLIC else '...'}"


def send(receivers: Sequence[Receiver], message: Mapping[str, Any]) -> list[Sent]:
    """Send a message to receivers, at the same time; none is waited for longer than `_PATIENCE`."""
    return _at_once([(one, partial(_deliver, one, message)) for one in receivers])


def send_once(
    run: Path, key: str, receivers: Sequence[Receiver], message: Mapping[str, Any]
) -> list[Sent]:
    """The same for the receivers to which the message `key` of a run was not sent yet."""
    paths.add_node_plane()
    from deploykit_node import notify

    claims: list[tuple[Receiver, Path]] = []
    failed: list[Sent] = []
    for one in receivers:
        try:
            path = notify.claim(run, key, one)
            claims += [(one, path)] if path else []
        except OSError as error:  # such as a full quota
            failed.append(
                Sent(name(one), f"cannot write to {run / notify.FOLDER}: {error.strerror}")
            )

    def settled(receiver: Receiver, claim: Path) -> Sent:
        sent = Sent("", "interrupted")
        try:
            sent = _deliver(receiver, message)
        finally:
            with contextlib.suppress(OSError):  # then the claim goes stale
                notify.settle(claim, sent=not sent.error or sent.is_open)
        return sent

    results = _at_once([(one, partial(settled, one, path)) for one, path in claims])
    for (_, path), result in zip(claims, results, strict=True):
        if result.is_open:  # perhaps its thread still waits for an answer
            with contextlib.suppress(OSError):
                notify.settle(path, sent=True)
    return failed + results


def is_due(run: Path, key: str, receiver: Receiver) -> bool:
    """Whether a message was not sent to a receiver, and nobody is sending it."""
    paths.add_node_plane()
    from deploykit_node import notify

    return not notify.is_claimed(run, key, receiver)


def is_in_flight(run: Path, key: str, receiver: Receiver) -> bool:
    """Whether another process is sending a message to a receiver, and may fail."""
    paths.add_node_plane()
    from deploykit_node import notify

    return not is_due(run, key, receiver) and not notify.is_settled(run, key, receiver)


def _at_once(tasks: Sequence[tuple[Receiver, Callable[[], Sent]]]) -> list[Sent]:
    sent = [Sent(name(receiver), "timed out waiting for a response", True) for receiver, _ in tasks]

    def work(number: int) -> None:
        sent[number] = tasks[number][1]()

    threads = [
        threading.Thread(target=work, args=(number,), daemon=True) for number in range(len(tasks))
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + _PATIENCE
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return sent


def _deliver(receiver: Receiver, message: Mapping[str, Any]) -> Sent:
    """Send a message to a receiver, and return what became of it."""
    paths.add_node_plane()
    from deploykit_node import notify

    shown = name(receiver)
    try:
        if not isinstance(receiver, str):
            notify.run_command(receiver, message, dict(os.environ))
            return Sent(shown)
        address = notify.resolved(receiver, dict(os.environ))
        if notify.is_web(address):
            notify.post(address, message)
            return Sent(shown)
    except notify.Undelivered as error:
        return Sent(shown, str(error), isinstance(error, notify.Unanswered))
    return Sent(shown, _by_apprise(address, message))


def _by_apprise(address: str, message: Mapping[str, Any]) -> str:
    try:
        import apprise
    except ImportError:
        return "requires the package apprise: pip install 'deploykit[notify]'"
    log = _Complaints()
    logging.getLogger("apprise").addHandler(log)
    logging.getLogger("apprise").propagate = False
    try:
        sender = apprise.Apprise()
        if not sender.add(address):
            return "Apprise does not support this address; see https://appriseit.com"
        title, _, rest = str(message["text"]).partition("\n")
        if sender.notify(title=title, body=rest or title):
            return ""
    except Exception as error:  # noqa: BLE001 - a library's; its text may contain the address
        return f"Apprise raised {type(error).__name__}"
    finally:
        logging.getLogger("apprise").removeHandler(log)
    return log.last.replace(address, "...") or "Apprise could not deliver it"


class _Complaints(logging.Handler):
    """The last warning of this thread: Apprise explains a failure in its log only."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.last = ""
        self._thread = threading.get_ident()

    def emit(self, record: logging.LogRecord) -> None:
        if record.thread == self._thread:
            self.last = record.getMessage()
