"""Tell the receivers of a run what happened to it: which events are due, and what a message says.

`submit` starts `follow` in the background; `wait` sends what is due as well, and so does the
launcher on the node if nobody follows (``entrypoints/deploykit_node/notify.py``). Each message goes
to a receiver once, whoever sends it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from deploykit.backends import base as backend
from deploykit.job.decode import decode
from deploykit.job.model import Notify, State
from deploykit.lib import paths, shell
from deploykit.lib.errors import DeploykitError, NotFound, TryAgain
from deploykit.observe import exit_records, receivers, stacks
from deploykit.observe.receivers import Receiver, Sent
from deploykit.run import budgets, config, registry
from deploykit.run import diagnosis as run_diagnosis
from deploykit.run import state as run_state
from deploykit.run.metrics import logs_are_here
from deploykit.run.registry import Run

_MIN_PAUSE, _MAX_PAUSE = 0.5, 60.0
"""Seconds between two checks of a run; less than `FRESH` in the node's module."""
_END_PAUSE = 5.0
"""Seconds between the first two attempts after the end; doubled each time, up to `_MAX_PAUSE`."""
_MAX_ROUNDS = 8
"""Attempts after the end of a run to reach a receiver that fails, or that another process claims.

Their pauses outlast `STALE` in the node's module.
"""
_MAX_MISSING = 20
"""Checks after which a run that its target does not know is given up."""
_NODES_TIME = 10.0
"""Seconds that a node may take to send a message, and its record to be fetched."""
_FOLLOWED = "notify.followed"
_PREEMPTED = "preemption"
_INTERRUPTED = "interrupted: "
"""Begins the reason of a run whose spot instances were reclaimed."""
_CAPPED = "cost cap"
"""In the reason of a run that was stopped at its cap."""
_ENDS = ("failed", "succeeded", "cap", "budget", "cancelled", "lost")


class Due(NamedTuple):
    event: str
    key: str
    """The same on the node: it names the message in the run folder."""


def settings(row: Run) -> Notify | None:
    """`notify` of the job of a run; None without it."""
    data = row.job_data().get("notify")
    return decode(Notify, data)[0] if data else None


def of_user() -> Notify:
    """`notify` of the user's config file. Raises ConfigError, or NotFound without receivers."""
    notify = config.notify()
    if notify is None:
        raise NotFound(
            "no receivers: `notify` is missing from the job file and your config file",
            hint=f"in {paths.config()}, add [notify] and, below it, "
            'to = ["secret:env:SLACK_WEBHOOK"]',
        )
    return notify


def _receivers(notify: Notify) -> list[Receiver]:
    return [*notify.to, *([notify.command] if notify.command else [])]


def test(notify: Notify) -> list[Sent]:
    """Send a test message to each receiver."""
    return receivers.send(_receivers(notify), message("test", run="deploykit", state="running"))


class Notices:
    """Sends what is due for runs while a command looks at them.

    With `ends`, the end of each run is reported even if its job file does not say so.
    """

    def __init__(self, *, ends: bool = False) -> None:
        self._ends = ends
        self._settings: dict[str, Notify | None] = {}
        self._first_seen: dict[tuple[str, str], float] = {}

    def see(self, rows: Sequence[Run]) -> list[tuple[str, Sent]]:
        """Send what is due for these runs; return the id of the run with each message."""
        sent: list[tuple[str, Sent]] = []
        for row in rows:
            if (notify := self._of(row)) is not None:
                for due in self._wanted(row, notify):
                    if not self._may_come_from_node(row, due):
                        sent += [(row.run, result) for result in _send(row, due, notify)]
        return sent

    def finish(self, rows: Sequence[Run]) -> list[tuple[str, Sent]]:
        """Send what other processes were sending when the runs ended, and then failed to send.

        With `ends`, also report runs whose job is gone.
        """
        held = [row for row in rows if State(row.state).final and self.is_in_flight(row)]
        deadline = time.monotonic() + _NODES_TIME
        while any(map(self.is_in_flight, held)) and time.monotonic() < deadline:
            time.sleep(_MIN_PAUSE)
        sent = self.see(held)
        for row in rows:
            notify = self._of(row)
            if self._ends and notify is not None and run_state.is_missing(row):
                sent += [(row.run, one) for one in _send(row, Due("lost", "lost"), notify)]
        return sent

    def is_in_flight(self, row: Run) -> bool:
        """Whether another process is sending a message about a run, and may fail."""
        notify = self._of(row)
        return notify is not None and any(
            receivers.is_in_flight(Path(row.folder), due.key, one)
            for due in self._wanted(row, notify)
            for one in _receivers(notify)
        )

    def require(self, rows: Sequence[Run]) -> None:
        """Raise NotFound if a run has no receivers."""
        for row in rows:
            self._of(row)

    def _wanted(self, row: Run, notify: Notify) -> list[Due]:
        """The events to report, the first one of each key."""
        wanted: dict[str, Due] = {}
        for due in _due(row):
            if due.event in notify.events or (self._ends and due.event in _ENDS):
                wanted.setdefault(due.key, due)
        return list(wanted.values())

    def _may_come_from_node(self, row: Run, due: Due) -> bool:
        """Whether the launcher may just be sending, and its record is not here yet.

        At the end of a run it is: the job ends after that.
        """
        if due.event in _ENDS or logs_are_here(row):
            return False
        first = self._first_seen.setdefault((row.run, due.key), time.monotonic())
        return time.monotonic() - first < _NODES_TIME

    def _of(self, row: Run) -> Notify | None:
        if row.run not in self._settings:
            own = settings(row)
            self._settings[row.run] = of_user() if own is None and self._ends else own
        return self._settings[row.run]


def _due(row: Run) -> Iterator[Due]:
    """The events that a run has seen, as far as its row and its records show them."""
    folder, state = Path(row.folder), State(row.state)
    attempt = exit_records.attempt(folder) or 0
    ended = state in {State.SUCCEEDED, State.FAILED, State.CANCELLED}
    end = _end_key(attempt, succeeded=state is State.SUCCEEDED)
    if state is State.RUNNING:
        yield Due("started", "started-0")
        if row.reason.startswith(stacks.STALLED):
            yield Due("stalled", f"stalled-{attempt}")
    for number, why, _ in exit_records.restart_times(folder):
        if why == _PREEMPTED:
            yield Due("preempted", f"preempted-{number}")
    if row.reason.startswith(_INTERRUPTED):
        yield Due("preempted", "interrupted")
    if state is State.UNSENT and row.reason.startswith(budgets.REFUSED):
        yield Due("budget", "budget")
    elif ended and _CAPPED in row.reason:
        yield Due("cap", end)
    if ended:
        yield Due(state.value, end)


def _end_key(attempt: int, *, succeeded: bool) -> str:
    paths.add_node_plane()
    from deploykit_node import notify

    return notify.end_key(attempt, succeeded=succeeded)


def send(folder: Path, key: str, notify: Notify, about: Mapping[str, Any]) -> list[Sent]:
    """Send the message `key` of a run or sweep to each receiver that did not get it yet."""
    return receivers.send_once(folder, key, _receivers(notify), about)


def _send(row: Run, due: Due, notify: Notify) -> list[Sent]:
    folder = Path(row.folder)
    if not any(receivers.is_due(folder, due.key, one) for one in _receivers(notify)):
        return []  # what is known of a failure takes a while to read
    return send(folder, due.key, notify, of_run(row, due.event))


def of_run(row: Run, event: str) -> dict[str, Any]:
    """The message about an event of a run: what `status`, `cost` and `diagnose` know."""
    paths.add_node_plane()
    from deploykit_node import notify

    cause, where, fix = row.reason, "", ""
    if event in {"started", "succeeded"}:
        cause = ""
    elif event == "preempted" and row.state == State.RUNNING.value:
        cause = "it was restarted"
    elif event == "failed":
        with contextlib.suppress(DeploykitError, OSError):  # the reason is enough
            causes = run_diagnosis.of_run(row).causes
            if causes:
                evidence = causes[0].evidence
                proof = next((one for one in evidence if one.at), evidence[0])
                cause = f"{causes[0].rule.label}: {causes[0].rule.means}: {proof.text}"
                where = proof.at or run_diagnosis.source(proof, row.folder)
                fix = causes[0].fix
    spent, seconds = row.spent(), row.seconds(registry.now())
    return message(
        event,
        run=row.run,
        state=row.state,
        seconds=None if seconds is None else round(seconds, 1),
        cost=spent and spent.total,
        cause=cause,
        where=where,
        fix=fix,
        next=shell.command("deploykit", notify.NEXT.get(event, "status"), row.run),
    )


def message(event: str, *, run: str, state: str, **known: Any) -> dict[str, Any]:
    """A message about a run or a sweep, with its `text`."""
    paths.add_node_plane()
    from deploykit_node import notify

    empty = {"seconds": None, "cost": None, "cause": "", "where": "", "fix": "", "next": ""}
    return notify.message({"run": run, "state": state, "event": event, **empty, **known})


def announce(folder: Path) -> None:
    """Show the launcher on the node that the messages are sent from here."""
    paths.add_node_plane()
    from deploykit_node import notify

    kept = paths.private_folder(folder / notify.FOLDER)
    (kept / notify.FOLLOWER).touch(mode=0o600)


def withdraw(folder: Path) -> None:
    """Leave the messages to others."""
    paths.add_node_plane()
    from deploykit_node import notify

    (folder / notify.FOLDER / notify.FOLLOWER).unlink(missing_ok=True)


def follow(row: Run, report: Callable[[Sequence[tuple[str, Sent]]], None]) -> bool:
    """Send what is due until the run has ended; `report` gets what was sent.

    Returns whether the last messages were delivered. Raises TryAgain if another process follows
    the run. A receiver that fails is tried again, after the end of the run for a few minutes.
    """
    folder = Path(row.folder)
    try:
        with paths.locked(folder / _FOLLOWED, wait=False):
            try:
                return _follow(row, report)
            finally:
                withdraw(folder)
    except BlockingIOError as error:
        raise TryAgain(f"another process is already following {row.run}") from error
    except FileNotFoundError:
        if folder.exists():
            raise  # else the run was removed meanwhile
    return True


def _follow(row: Run, report: Callable[[Sequence[tuple[str, Sent]]], None]) -> bool:
    folder, notices, pause, rounds, missing = Path(row.folder), Notices(), _MIN_PAUSE, 0, 0
    end_pause, delivered = _END_PAUSE, True
    while folder.exists() and missing < _MAX_MISSING:
        announce(folder)
        (row,) = run_state.refresh([row])
        sent = notices.see([row])
        report(sent)
        if sent:
            delivered = not any(result.error for _, result in sent)
        missing = missing + 1 if run_state.is_missing(row) else 0
        if State(row.state).final:
            has_failed = any(result.error and not result.is_open for _, result in sent)
            rounds += 1
            if rounds == _MAX_ROUNDS or not (has_failed or notices.is_in_flight(row)):
                break
            pause, end_pause = end_pause, min(2 * end_pause, _MAX_PAUSE)
        _sleep(row, pause)
        pause = min(1.5 * pause, _MAX_PAUSE)
    return delivered


def _sleep(row: Run, seconds: float) -> None:
    """Sleep until the run may have ended, but at most `seconds`."""
    engine = backend.find(row.backend)
    first = min(seconds, _MIN_PAUSE)  # `await_end` may return at once
    time.sleep(first)
    seconds -= first
    unfinished = not State(row.state).final
    if row.handle is not None and unfinished and backend.offers(engine, "await_end"):
        engine.await_end([row.handle], seconds)
    else:
        time.sleep(seconds)
