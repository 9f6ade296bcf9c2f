"""What every tracker offers, what it is told of a run, and which values it gets."""

from __future__ import annotations

import heapq
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

from deploykit.job.model import Handle
from deploykit.observe.metrics.points import SAGEMAKER_SOURCE, Point, Value
from deploykit.observe.metrics.series import Steps

_LAST = ("log (", SAGEMAKER_SOURCE)
"""Beginnings of sources after all files; the second has last values alone."""
_MAX_SERIES = 2000
"""Series of one run; an untrusted file may hold any number of names."""


class Selection:
    """The values of a run that may still have to be sent.

    Of several sources of one name a file comes before the log, and that before a service. The
    newest step of each series waits for the next one, or for the end of the run, since it may still
    get another value.
    """

    def __init__(self, clean: Callable[[str], str]) -> None:
        """`clean` makes a name one that the tracker takes."""
        self._clean = clean
        self._series: dict[str, dict[str, _Series]] = {}
        """By name, by source."""

    def add(self, points: Iterable[Point]) -> None:
        """Add points, of which those of one source come in their order."""
        for point in points:
            name = self._clean(point.name)
            if name in self._series or len(self._series) < _MAX_SERIES:
                sources = self._series.setdefault(name, {})
                key = f"{point.source}\0{point.name}"
                if key not in sources:
                    sources[key] = _Series(point)
                sources[key].add(point)

    def due(self, sent: Mapping[str, int], *, final: bool) -> Iterator[Value]:
        """The values to send, by step; `sent` is the last step of each name that was sent."""
        chosen = {name: sources[min(sources, key=_place)] for name, sources in self._series.items()}
        values = (
            series.after(name, sent.get(name, -1), whole=final) for name, series in chosen.items()
        )
        return heapq.merge(*values, key=lambda one: one.step)

    def forget(self, sent: Mapping[str, int]) -> None:
        """Drop the values up to those steps."""
        for name, sources in self._series.items():
            for series in sources.values():
                series.steps.forget(series.steps.count_to(sent.get(name, -1)))


class _Series:
    """The points of one name in one source, by step.

    The first point decides what counts as the step: the step, the whole epoch, or else the number
    of the point.
    """

    def __init__(self, first: Point) -> None:
        self.steps = Steps()
        self._added = 0
        self._counts: Callable[[Point], int | None] = lambda _: self._added
        if first.step is not None:
            self._counts = lambda point: point.step
        elif _epoch(first) is not None:
            self._counts = _epoch

    def add(self, point: Point) -> None:
        """Add a point, unless it does not tell what counts as its step."""
        step = self._counts(point)
        if step is not None:
            self._added += 1
            self.steps.add(point._replace(step=step))

    def after(self, name: str, step: int, *, whole: bool) -> Iterator[Value]:
        """The values after a step; with `whole` the newest too."""
        stop = len(self.steps) - (not whole)
        for point in self.steps.points(self.steps.count_to(step), stop):
            yield Value(name, point.value, point.step or 0, point.time)


def _place(source: str) -> tuple[int, str]:
    """Where a source stands among those of one name, of which the first counts."""
    late = (number for number, begin in enumerate(_LAST, 1) if source.startswith(begin))
    return next(late, 0), source


def _epoch(point: Point) -> int | None:
    """The epoch of a point, where it is a whole number."""
    epoch = point.epoch
    return int(epoch) if epoch is not None and 0 <= epoch == int(epoch) else None


Memory = dict[str, Any]
"""What a tracker remembers of a run, as JSON: the id of its run there, and so on."""


class About(NamedTuple):
    """What a tracker is told of a run."""

    run: str
    job: str
    """The name of its job."""
    folder: Path
    """The run folder."""
    started: float
    """Seconds since the epoch; that of the submission where the start is not known."""
    params: Mapping[str, str]
    tags: Mapping[str, str]


class Ending(NamedTuple):
    """How and when a run ended."""

    state: str
    """``succeeded``, ``failed`` or ``cancelled``."""
    time: float
    """Seconds since the epoch."""


class Registration(NamedTuple):
    """A packaged model that becomes a version of a registered one."""

    name: str
    """Of the registered model, or of the group of its versions."""
    package: Path
    """The folder of `deploykit export`."""
    hash: str
    """Of the package. A registry gets each package once."""
    approval: str
    """``pending``, ``approved`` or ``rejected``; empty: pending, or as it is in the registry."""
    facts: Mapping[str, str]
    """Where it comes from: run, checkpoint, commit, data, and so on."""
    metrics: Mapping[str, float]
    """The results of the run."""
    job: Handle | None = None
    """The job that trained it, if its run is known here."""

    @property
    def description(self) -> str:
        """One line; it identifies the package in a list of versions."""
        source = f"{self.facts.get('checkpoint', 'model')} of {self.facts['run']}"
        return f"{source}, packaged by deploykit: {self.hash[:12]}"


class ModelVersion(NamedTuple):
    """A version of a registered model."""

    registry: str
    """``mlflow``, or the name of a backend."""
    name: str
    version: str
    approval: str
    address: str
    """Its ARN, or the page where a person sees it."""
    is_new: bool


class Tracker(Protocol):
    """One run at one tracker. Every method may raise a DeploykitError."""

    def begin(self) -> Mapping[str, int]:
        """Find or make the run there; the last step of each metric that it has."""

    def clean(self, name: str) -> str:
        """The name of a metric as the tracker takes it."""

    def send(self, values: Sequence[Value]) -> None:
        """Send values, of each metric in ascending steps. They are kept when this returns."""

    def end(self, ending: Ending | None) -> None:
        """Finish this sending; with `ending` also the run there."""

    @property
    def url(self) -> str:
        """Where a person sees the run."""


class Registry(Protocol):
    """A run at a tracker that also registers models. Every method may raise a DeploykitError."""

    def registration(self, model: Registration) -> Mapping[str, Any]:
        """The requests that register a model, as far as they are known. Pure."""

    def register(self, model: Registration) -> ModelVersion:
        """Make the package a version of a registered model, unless it is one already.

        The tracker has the run.
        """


REGISTRIES = ("mlflow",)
"""Trackers that are a `Registry`."""
AT_END = {"wandb"}
"""Those that get a run when it has ended."""


def make(kind: str, where: str, about: About, memory: Memory) -> Tracker:
    """The tracker of a kind, which reads and changes `memory`; its module is named like it."""
    module = importlib.import_module(f"deploykit.observe.trackers.{kind}")
    return cast("Tracker", module.make(where, about, memory))
