"""Sending the metrics of a run to its trackers: once, or as long as it lives.

This runs on the machine that submits. `tracking.json` in the run folder remembers what was sent; a
sending that is interrupted is completed by the next one, and one that is repeated changes nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from deploykit.job.decode import decode, from_json
from deploykit.job.model import State
from deploykit.job.sections import Track
from deploykit.lib import paths
from deploykit.lib.errors import DeploykitError, NotFound, TryAgain
from deploykit.observe import exit_records
from deploykit.observe.metrics.points import Point
from deploykit.observe.trackers import contract
from deploykit.observe.trackers.contract import About, Ending, Memory, Selection
from deploykit.run import facts as run_facts
from deploykit.run import state as run_state
from deploykit.run.metrics import RunMetrics, logs_are_here
from deploykit.run.registry import Run, now

KEPT = "tracking.json"
_LOCK, _FOLLOWED = "tracking.lock", "tracking.followed"
_LARGEST = 1 << 24
_BATCH = 1000
"""Values between two writes of `KEPT`."""
_PAUSE = (1.0, 30.0)
"""Shortest and longest pause between two looks at a run that runs, in seconds."""
_RARELY = 300.0
"""The longest pause while a run is queued, its log is elsewhere, or a tracker does not answer."""
_LAST_TRIES = 5
"""Of a tracker that does not answer after the end of a run."""
_NOT_TOLD = ("env.", "track.", "metrics.")
"""Keys of a job that are no parameters."""


class Sent(NamedTuple):
    """What one tracker got."""

    tracker: str
    url: str
    values: int
    error: DeploykitError | None = None


def trackers(row: Run) -> dict[str, str]:
    """Where the metrics of a run go, by tracker. Raises NotFound where its job names none."""
    track, _ = decode(Track, run_facts.job_data(Path(row.folder)).get("track") or {}, "track")
    if track is None or not track.chosen:
        raise NotFound(
            f"the job of {row.run} has no `track`",
            hint="name a tracker in the job file, such as track: {mlflow: https://...}",
        )
    return track.chosen


class Tracking:
    """The trackers of one run, to which each `sync` sends what is new."""

    def __init__(self, row: Run) -> None:
        """Raises NotFound where the job names no tracker."""
        self._where = trackers(row)
        self._is_here = False
        self._begin(row)

    def _begin(self, row: Run) -> None:
        about = _about(row)
        self._metrics = RunMetrics(row)
        self._selections = {
            kind: Selection(contract.make(kind, where, about, {}).clean)
            for kind, where in self._where.items()
        }

    @property
    def problems(self) -> list[str]:
        """What of the metrics could not be read."""
        return self._metrics.problems

    def sync(self, row: Run) -> list[Sent]:
        """Send to each tracker what it lacks; a tracker that fails does not stop the others.

        `row` is the run as it is now. Waits for another process that sends the same run.
        """
        folder, final = Path(row.folder), State(row.state).final
        before, self._is_here = self._is_here, logs_are_here(row)
        if not (before and self._is_here):
            self._begin(row)  # what is fetched is the whole log
        self._metrics.row = row
        points = self._metrics.new()
        while batch := list(islice(points, _BATCH)):
            self._select(batch)
        self._select(self._metrics.final() if final else [])
        with _locked(folder / _LOCK):
            kept = _Kept(folder / KEPT)
            return [self._send(kind, row, kept) for kind in self._selections]

    def _select(self, points: Sequence[Point]) -> None:
        for selection in self._selections.values():
            selection.add(points)

    def _send(self, kind: str, row: Run, kept: _Kept) -> Sent:
        final = State(row.state).final
        selection, memory = self._selections[kind], kept.of(kind)
        tracker = contract.make(kind, self._where[kind], _about(row), memory)
        if kind in contract.AT_END and not final:
            return Sent(kind, tracker.url, 0)
        count = 0
        try:
            steps = dict(tracker.begin())
            kept.write()
            due = selection.due(dict(steps), final=final)
            while batch := list(islice(due, _BATCH)):
                tracker.send(batch)
                steps.update({one.name: one.step for one in batch})
                count += len(batch)
                kept.write()
            tracker.end(_ending(row) if final else None)
            selection.forget(steps)
        except DeploykitError as error:
            return Sent(kind, self._where[kind], count, error)
        finally:
            kept.write()
        return Sent(kind, tracker.url, count)


def sync(row: Run) -> tuple[list[Sent], list[str]]:
    """Send what the trackers of a run lack; and what of its metrics could not be read.

    Raises NotFound where the job names no tracker, or was never sent.
    """
    (row,) = run_state.refresh([row])
    if row.handle is None:
        raise NotFound(f"{row.run} was never sent", hint=row.reason or None)
    tracking = Tracking(row)
    return tracking.sync(row), tracking.problems


def follow(row: Run, report: Callable[[Sequence[Sent]], None]) -> None:
    """Send what is new until the run has ended, and then the rest; `report` gets what was sent.

    Raises TryAgain where another process follows it. A tracker that does not answer is asked again,
    and after the end of the run a few times more.
    """
    try:
        with _alone(row):
            _follow(row, report)
    except FileNotFoundError:
        if Path(row.folder).exists():
            raise  # else the run was removed meanwhile


def _follow(row: Run, report: Callable[[Sequence[Sent]], None]) -> None:
    tracking, pause, failures = Tracking(row), _PAUSE[0], 0
    while Path(row.folder).exists():
        (row,) = run_state.refresh([row])
        sent = tracking.sync(row)
        report(sent)
        failures = failures + 1 if any(one.error for one in sent) else 0
        if State(row.state).final and (not failures or failures > _LAST_TRIES):
            return
        longest = _PAUSE[1] if not failures and _is_near(row) else _RARELY
        time.sleep(pause)
        pause = min(1.5 * pause, longest)


def _is_near(row: Run) -> bool:
    """Whether a look at the run costs little, and may find something."""
    return State(row.state) is State.RUNNING and logs_are_here(row)


def _about(row: Run) -> About:
    settings = run_facts.settings(run_facts.job_data(Path(row.folder)))
    params = {key: text for key, text in settings if not key.startswith(_NOT_TOLD)}
    tags = {"backend": row.backend, **({"commit": row.revision} if row.revision else {})}
    return About(row.run, row.name, Path(row.folder), row.created, params, tags)


def _ending(row: Run) -> Ending:
    """How the run ended; the time from its exit records where the target does not tell."""
    ends = [one.finished.timestamp() for one in exit_records.read(Path(row.folder))]
    return Ending(row.state, row.finished or max(ends, default=0.0) or now())


class _Kept:
    """The file that remembers what each tracker got."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            data: Any = from_json(paths.read_below(path.parent, path.name, _LARGEST) or b"{}")
        except ValueError:
            data = {}
        self._data: dict[str, Any] = data if isinstance(data, dict) else {}

    def of(self, kind: str) -> Memory:
        """What was remembered of a tracker, to be changed."""
        memory = self._data.get(kind)
        if not isinstance(memory, dict):
            memory = self._data[kind] = {}
        return memory

    def write(self) -> None:
        """Replace the file, in one step."""
        new = self._path.with_name(f"{self._path.name}.new")
        paths.write(new, json.dumps(self._data))
        new.replace(self._path)


@contextlib.contextmanager
def _locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold a lock, which ends with the process. Raises BlockingIOError without `wait`."""
    with open(path, "w", encoding="utf-8", opener=paths.private_opener) as file:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield


@contextlib.contextmanager
def _alone(row: Run) -> Iterator[None]:
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(_locked(Path(row.folder) / _FOLLOWED, wait=False))
        except BlockingIOError as error:
            raise TryAgain(f"another process already follows {row.run}") from error
        yield


def data(sent: Sent) -> Mapping[str, Any]:
    """The same as JSON."""
    error = None if sent.error is None else str(sent.error)
    return {"tracker": sent.tracker, "url": sent.url, "values": sent.values, "error": error}
