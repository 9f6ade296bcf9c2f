"""What every tracker offers, and what it is told of a run."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

from deploykit.observe.trackers.selection import Value

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


_MODULES = {
    "mlflow": "deploykit.observe.trackers.mlflow",
    "tensorboard": "deploykit.observe.trackers.tensorboard",
    "trackio": "deploykit.observe.trackers.trackio",
    "wandb": "deploykit.observe.trackers.wandb",
}
AT_END = {"wandb"}
"""Those that get a run when it has ended."""


def make(kind: str, where: str, about: About, memory: Memory) -> Tracker:
    """The tracker of a kind, which reads and changes `memory`."""
    return cast("Tracker", importlib.import_module(_MODULES[kind]).make(where, about, memory))
