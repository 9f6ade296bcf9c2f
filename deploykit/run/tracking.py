"""Send the metrics of a run to its trackers: once, or until the run ends.

This runs on the machine that submits. `tracking.json` in the run folder remembers what was sent. An
interrupted sync is completed by the next one, and a repeated one changes nothing.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, cast

from deploykit.job.decode import decode, read_json
from deploykit.job.model import State, Track
from deploykit.job.settings import settings
from deploykit.lib import paths
from deploykit.lib.errors import DeploykitError, NotFound, TryAgain
from deploykit.observe import exit_records
from deploykit.observe.trackers import contract
from deploykit.observe.trackers.contract import (
    About,
    Ending,
    Memory,
    ModelVersion,
    Registration,
    Registry,
    Selection,
)
from deploykit.run import state as run_state
from deploykit.run.metrics import RunMetrics, logs_are_here
from deploykit.run.registry import Run, now

KEPT = "tracking.json"
_LOCK, _FOLLOWED = "tracking.lock", "tracking.followed"
_BATCH = 1000
"""Values between two writes of `KEPT`."""
_MIN_PAUSE, _MAX_PAUSE = 1.0, 30.0
"""Seconds between two checks of a running run."""
_MAX_IDLE_PAUSE = 300.0
"""Seconds while a run is queued, its log is elsewhere, or a tracker does not answer."""
_MAX_FAILURES = 5
"""Failed attempts to reach a tracker after the end of a run."""
_NOT_PARAMETERS = ("env.", "track.", "metrics.")
"""Keys of a job that are not sent as parameters."""


class Sent(NamedTuple):
    tracker: str
    url: str
    values: int
    error: DeploykitError | None = None


class Tracking:
    """The trackers of one run, to which each `sync` sends what is new."""

    def __init__(self, row: Run) -> None:
        """Raises NotFound if the job names no tracker."""
        self._where = _chosen(row)
        if not self._where:
            raise NotFound(
                f"the job of {row.run} has no `track`",
                hint="add a tracker to the job file, such as track: {mlflow: https://...}",
            )
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
        return self._metrics.problems

    def sync(self, row: Run) -> list[Sent]:
        """Send what is new to each tracker; a tracker that fails does not stop the others.

        `row` is the run as it is now. Waits for another process that sends the same run.
        """
        folder, final = Path(row.folder), State(row.state).final
        before, self._is_here = self._is_here, logs_are_here(row)
        if not (before and self._is_here):
            self._begin(row)  # what is fetched is the whole log
        self._metrics.row = row
        points = chain(self._metrics.new(), self._metrics.final() if final else ())
        while batch := list(islice(points, _BATCH)):
            for selection in self._selections.values():
                selection.add(batch)
        with paths.locked(folder / _LOCK):
            memories = _memories(row)
            return [self._send(kind, row, folder / KEPT, memories) for kind in self._selections]

    def _send(self, kind: str, row: Run, kept: Path, memories: dict[str, Memory]) -> Sent:
        final = State(row.state).final
        selection, memory = self._selections[kind], memories.setdefault(kind, {})

        def remember() -> None:
            new = kept.with_name(f"{kept.name}.new")
            paths.write(new, json.dumps(memories))
            new.replace(kept)

        tracker = contract.make(kind, self._where[kind], _about(row), memory)
        if kind in contract.AT_END and not final:
            return Sent(kind, tracker.url, 0)
        count = 0
        try:
            steps = dict(tracker.begin())
            remember()
            due = selection.due(dict(steps), final=final)
            while batch := list(islice(due, _BATCH)):
                tracker.send(batch)
                steps.update({point.name: point.step for point in batch})
                count += len(batch)
                remember()
            tracker.end(_ending(row) if final else None)
            selection.forget(steps)
        except DeploykitError as error:
            return Sent(kind, self._where[kind], count, error)
        finally:
            remember()
        return Sent(kind, tracker.url, count)


def model_registry(row: Run) -> str | None:
    """The tracker of a run that also registers models; None if its job names none."""
    return next((kind for kind in _chosen(row) if kind in contract.REGISTRIES), None)


def registration(row: Run, model: Registration) -> Mapping[str, Any]:
    """What `register` will send, as far as it is known without asking the tracker."""
    kind = str(model_registry(row))
    return {"tracker": _chosen(row)[kind], "requests": _registry(row, kind).registration(model)}


def register(row: Run, model: Registration) -> ModelVersion:
    """Register a model of a run with its tracker, which first gets the run's metrics.

    Raises what the tracker raises.
    """
    kind = str(model_registry(row))
    for sent in sync(row)[0]:
        if sent.tracker == kind and sent.error is not None:
            raise sent.error
    with paths.locked(Path(row.folder, _LOCK)):
        return _registry(row, kind).register(model)


def _registry(row: Run, kind: str) -> Registry:
    memory = _memories(row).get(kind, {})
    return cast("Registry", contract.make(kind, _chosen(row)[kind], _about(row), memory))


def _chosen(row: Run) -> Mapping[str, str]:
    """The address of each tracker that the job of a run names."""
    track, _ = decode(Track, row.job_data().get("track") or {}, "track")
    return {} if track is None else track.chosen


def _memories(row: Run) -> dict[str, Memory]:
    """What is remembered of the run at each tracker; nothing where that was lost."""
    with contextlib.suppress(OSError, ValueError):  # the trackers are asked then
        memories: dict[str, Memory] = read_json(Path(row.folder, KEPT))
        return memories
    return {}


def pages(row: Run) -> dict[str, str]:
    """Where a run is seen at each tracker that has been sent something; queries nothing."""
    where, memories = _chosen(row), _memories(row)
    addresses: dict[str, str] = {}
    for kind in where.keys() & memories.keys():
        with contextlib.suppress(DeploykitError):  # a package that is missing here
            addresses[kind] = contract.make(kind, where[kind], _about(row), memories[kind]).url
    return dict(sorted(addresses.items()))


def sync(row: Run) -> tuple[list[Sent], list[str]]:
    """Send what is new to the trackers of a run; also return which metrics could not be read.

    Raises NotFound if the job names no tracker, or was never sent.
    """
    (row,) = run_state.refresh([row])
    if row.handle is None:
        raise NotFound(f"{row.run} was never sent", hint=row.reason or None)
    tracking = Tracking(row)
    return tracking.sync(row), tracking.problems


def follow(row: Run, report: Callable[[Sequence[Sent]], None]) -> None:
    """Send what is new until the run has ended, and then the rest; `report` gets what was sent.

    Raises TryAgain if another process follows it. A tracker that does not answer is asked again,
    after the end of the run a few times.
    """
    pause, failures = _MIN_PAUSE, 0
    try:
        with paths.locked(Path(row.folder) / _FOLLOWED, wait=False):
            tracking = Tracking(row)
            while Path(row.folder).exists():
                (row,) = run_state.refresh([row])
                sent = tracking.sync(row)
                report(sent)
                failures = failures + 1 if any(result.error for result in sent) else 0
                if State(row.state).final and (not failures or failures > _MAX_FAILURES):
                    return
                is_cheap = State(row.state) is State.RUNNING and logs_are_here(row)
                time.sleep(pause)
                longest = _MAX_PAUSE if is_cheap and not failures else _MAX_IDLE_PAUSE
                pause = min(1.5 * pause, longest)
    except BlockingIOError as error:
        raise TryAgain(f"another process is already following {row.run}") from error
    except FileNotFoundError:
        if Path(row.folder).exists():
            raise  # else the run was removed meanwhile


def _about(row: Run) -> About:
    known = settings(row.job_data())
    params = {key: text for key, text in known if not key.startswith(_NOT_PARAMETERS)}
    tags = {"backend": row.backend, **({"commit": row.revision} if row.revision else {})}
    return About(row.run, row.name, Path(row.folder), row.created, params, tags)


def _ending(row: Run) -> Ending:
    """How the run ended; the time from its exit records if the target does not report it."""
    ends = [record.finished.timestamp() for record in exit_records.read(Path(row.folder))]
    return Ending(row.state, row.finished or max(ends, default=0.0) or now())


def data(sent: Sent) -> Mapping[str, Any]:
    error = None if sent.error is None else str(sent.error)
    return {"tracker": sent.tracker, "url": sent.url, "values": sent.values, "error": error}
