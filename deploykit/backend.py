"""The contract of a backend, the capabilities that it may offer beyond it, and how it is found.

A backend is a module. Commands ask for a backend, or for a capability of one, by name; no command
knows which backends there are.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast, runtime_checkable

from deploykit.errors import UsageError
from deploykit.model import Bundle, Handle, JobSpec, LogLine, Plan, Problem, Profile, Status

if TYPE_CHECKING:
    from deploykit.doctor.finding import Finding

DEFAULT = "local"
"""The backend of a job file that has a section for none."""


class Backend(Protocol):
    """Seven functions and four facts. `deploykit/backends/local.py` is the one to read first."""

    @property
    def SUMMARY(self) -> str:
        """One line for ``deploykit backends``."""

    @property
    def PROGRAMS(self) -> tuple[str, ...]:
        """Programs that must be on PATH to submit (never to plan)."""

    @property
    def MODULES(self) -> tuple[str, ...]:
        """Python modules that must be importable to submit (never to plan)."""

    @property
    def Options(self) -> type[Any]:
        """Frozen dataclass of the backend's section in the job file."""

    def check(self, job: JobSpec, options: Any) -> Iterator[Problem]:
        """Yield every problem that can be found offline. Pure."""

    def plan(self, job: JobSpec, options: Any, *, run: str, bundle: Bundle) -> Plan:
        """Render the text of the plan of a job without errors. Pure: no network, no writes.

        Raises JobFileError for what shows only in the rendered text.
        """

    def submit(self, plan: Plan, folder: Path) -> Handle:
        """Send exactly `plan.text`, with its bundle.

        `folder` is the run's; it exists and holds the text as ``plan.sh`` or ``plan.json``.

        Raises SubmitRefused, BackendUnavailable or TryAgain when nothing was started, and
        Uncertain when the job may exist.
        """

    def find(self, run: str, folder: Path, target: str) -> Handle | None:
        """The job of that run id at the target; None where there is certainly none.

        `target` is the plan's. Raises BackendUnavailable when it cannot tell.
        """

    def status(self, handles: Sequence[Handle]) -> Mapping[Handle, Status]:
        """The status of many runs, with one query to each target if the target allows it."""

    def logs(self, handle: Handle, *, follow: bool) -> Iterator[LogLine]:
        """Lines of all ranks, oldest first; with `follow`, until the job has ended."""

    def cancel(self, handle: Handle) -> None:
        """Request that the job stop; return once the target has accepted the request."""


@runtime_checkable
class Doctor(Protocol):
    """A backend whose target can be examined before a job is sent."""

    def examine(
        self, job: JobSpec, options: Any, *, saved: Path | None, save: Path | None
    ) -> Iterator[Finding]:
        """Findings about the target, for a job that has passed `check`. Changes nothing there.

        `saved` is a folder of facts to judge instead of asking the target; `save` is a folder to
        write the facts to. Raises NotFound where `saved` has no valid facts.
        """


@runtime_checkable
class Attach(Protocol):
    """A backend whose jobs can be found by the run id alone, from any machine."""

    def attach(self, run: str, folder: Path, target: str | None) -> Handle:
        """The job of that run id; `target` None means the default of the environment.

        `folder` is the run's on this machine, which may not exist yet. Raises NotFound where there
        is no such job, UsageError where no target is known.
        """


@runtime_checkable
class Probe(Protocol):
    """A backend that can record what a target has and allows, for use offline."""

    def probe(self, target: str | None) -> Profile:
        """Query the target, by default the one of the environment, and store its profile."""


@runtime_checkable
class Tasks(Protocol):
    """A backend on which one run can be an array of tasks."""

    def tasks(self, handle: Handle) -> int | None:
        """The number of tasks of a run; None where it is not an array."""


@runtime_checkable
class Preflight(Protocol):
    """A backend whose nodes run deploykit's launcher, and so the network test of `preflight`."""

    @property
    def PREFLIGHT(self) -> int:
        """Seconds that the network test may take."""


CAPABILITIES: tuple[type, ...] = (Doctor, Attach, Probe, Tasks, Preflight)
"""What a backend may offer; it does so by having the member that the protocol describes."""

T = TypeVar("T")

_BUILT_IN = {
    "local": "deploykit.backends.local",
    "slurm": "deploykit.backends.slurm",
    "sagemaker": "deploykit.backends.sagemaker",
}
_GROUP = "deploykit.backends"


def names() -> Iterator[str]:
    """Names of all backends: built in, then installed ones, which take 25 ms to look for."""
    yield from _BUILT_IN
    yield from (point.name for point in _installed() if point.name not in _BUILT_IN)


def find(name: str) -> Backend:
    """Import the backend `name`. Raises UsageError, with the nearest name, when there is none."""
    if name in _BUILT_IN:
        return cast(Backend, importlib.import_module(_BUILT_IN[name]))
    for point in _installed():
        if point.name == name:
            return cast(Backend, point.load())
    from deploykit.decode import did_you_mean

    known = list(names())
    raise UsageError(
        f"unknown backend {name!r}",
        hint=did_you_mean(name, known) or f"backends: {', '.join(known)}",
    )


def require(name: str, capability: type[T]) -> T:
    """The backend `name`, as one that offers `capability`.

    Raises UsageError where it does not, with the backends that do.
    """
    engine = find(name)
    if isinstance(engine, capability):
        return engine
    offering = [other for other in names() if isinstance(find(other), capability)]
    raise UsageError(
        f"backend {name} does not offer `{verb(capability)}`",
        hint=f"offered by: {', '.join(offering) or 'no installed backend'}",
    )


def verb(capability: type) -> str:
    """The name of a capability on the command line: ``doctor`` for `Doctor`."""
    return capability.__name__.lower()


def _installed() -> Iterator[Any]:
    from importlib.metadata import entry_points

    return iter(entry_points(group=_GROUP))


if TYPE_CHECKING:
    from deploykit.backends import local, sagemaker, slurm

    _COMPLETE: tuple[Backend, ...] = (local, slurm, sagemaker)
    _DOCTOR: tuple[Doctor, ...] = (local, slurm, sagemaker)
    _ATTACH: tuple[Attach, ...] = (sagemaker,)
    _PROBE: tuple[Probe, ...] = (slurm,)
    _TASKS: tuple[Tasks, ...] = (slurm,)
    _PREFLIGHT: tuple[Preflight, ...] = (local, slurm, sagemaker)
