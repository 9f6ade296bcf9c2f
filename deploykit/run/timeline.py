"""The time of a run: when it waited, when each attempt ran, and what happened meanwhile."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deploykit.observe import exit_records
from deploykit.run.facts import RunFacts
from deploykit.run.registry import Run, now

_EVENT = re.compile(
    r"no progress for |there is progress again|on_stall: |the cost cap is near|"
    r"SIG[A-Z0-9]{1,8} arrived|the ranks did not exit in time|preflight: (?:passed|stopped|FAILED)"
)
"""What of the launchers' lines belongs into the timeline."""
_RESTART = re.compile(r"restart (\d{1,6}) \(")
_PREFLIGHT = "preflight: "
_MOST_EVENTS = 60


@dataclass(frozen=True)
class Event:
    """Something that happened to a run, in seconds since the epoch."""

    time: float
    text: str


@dataclass(frozen=True)
class Span:
    """A part of a run's time: it waited (attempt None), or an attempt ran."""

    begin: float
    end: float
    attempt: int | None


def events(facts: RunFacts, starts: Mapping[int, float]) -> list[Event]:
    """What happened, in the order of time; `starts` are the `attempt_starts`."""
    return sorted(_events(facts, starts), key=lambda one: one.time)[:_MOST_EVENTS]


def _events(facts: RunFacts, starts: Mapping[int, float]) -> Iterator[Event]:
    row = facts.row
    yield Event(row.created, "submitted")
    for attempt, time in starts.items():
        yield Event(time, f"attempt {attempt + 1} started" if len(starts) > 1 else "started")
    for number, why, moment in exit_records.restart_times(Path(row.folder)):
        yield Event(moment.timestamp(), f"restart {number}: {why.replace('_', ' ')}")
    for line in facts.remarks:
        repeated = line.text.startswith(_PREFLIGHT) and line.node  # each node says the same
        if line.rank is None and line.time and not repeated and _EVENT.match(line.text):
            yield Event(line.time.timestamp(), f"{line.origin}{line.text}")
    if row.finished is not None:
        yield Event(row.finished, f"{row.state}{f': {row.reason}' if row.reason else ''}")


def spans(facts: RunFacts, starts: Mapping[int, float]) -> list[Span]:
    """How long it waited before each attempt, and how long each ran, as far as that is known.

    `starts` are the `attempt_starts`.
    """
    row = facts.row
    end = row.finished or now()
    ends = {number - 1: time for number, time in _restarts(row)}
    begun = {attempt: time for attempt, time in starts.items() if time < end}
    return list(_spans(row.created, end, begun, ends))


def seconds(facts: RunFacts, parts: Sequence[Span] | None = None) -> float | None:
    """How long it ran: of a run with restarts all attempts, of which a scheduler tells the last.

    `parts` are the `spans` where they are known.
    """
    if not facts.restarts:
        return facts.seconds
    parts = spans(facts, attempt_starts(facts)) if parts is None else parts
    return sum(one.end - one.begin for one in parts if one.attempt is not None)


def _spans(
    begin: float, end: float, starts: Mapping[int, float], ends: Mapping[int, float]
) -> Iterator[Span]:
    """Times in between; an attempt of which no restart tells lasts until the next one."""
    order = sorted(starts, key=lambda attempt: starts[attempt])
    for number, attempt in enumerate(order, 1):
        start = max(begin, starts[attempt])
        latest = starts[order[number]] if number < len(order) else end
        if start > begin:
            yield Span(begin, start, None)
        begin = max(start, min(ends.get(attempt, latest), latest))
        yield Span(start, begin, attempt)
    if end > begin:
        yield Span(begin, end, None)


def attempt_starts(facts: RunFacts) -> dict[int, float]:
    """When each attempt began: by the launchers' own lines, else as the backend tells.

    A scheduler that starts a job again tells the last start only.
    """
    row = facts.row
    begun: dict[int, float] = {}
    for line in facts.remarks:
        if line.time is not None and line.node is not None:
            again = _RESTART.match(line.text)
            begun.setdefault(int(again[1]) if again else 0, line.time.timestamp())
    if row.started is not None and facts.restarts in {0, *begun}:
        begun[facts.restarts] = row.started
    elif row.started is not None and len(begun) <= 1:
        begun = {0: row.started, **dict(_restarts(row)[: facts.restarts])}
    return dict(sorted(begun.items()))


def _restarts(row: Run) -> list[tuple[int, float]]:
    """Number and time of each restart."""
    listed = exit_records.restart_times(Path(row.folder))
    return [(number, moment.timestamp()) for number, _, moment in listed]
