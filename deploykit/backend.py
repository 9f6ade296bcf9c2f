"""What a backend is: a module with the members of `Backend`. And how one is found by name."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from deploykit.errors import UsageError
from deploykit.model import Handle, JobSpec, LogLine, Plan, Problem, Status

if TYPE_CHECKING:
    from deploykit.bundle import Bundle


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
        """Yield every problem that can be seen without asking anybody. Pure."""

    def plan(self, job: JobSpec, options: Any, *, run: str, bundle: Bundle) -> Plan:
        """Render the text of the plan. Pure: no network, credentials, subprocess or write."""

    def submit(self, plan: Plan, folder: Path) -> Handle:
        """Send exactly `plan.text`, with its bundle.

        `folder` is the run's; it exists and holds the text as ``plan.sh`` or ``plan.json``.

        Raises SubmitRefused, BackendUnavailable or TryAgain when nothing was started, and
        Uncertain when that cannot be known.
        """

    def find(self, run: str, folder: Path, target: str) -> Handle | None:
        """The job of that run id on the far side, or None where there is certainly none.

        `target` is the plan's. Raises BackendUnavailable when it cannot tell.
        """

    def status(self, handles: Sequence[Handle]) -> Mapping[Handle, Status]:
        """The status of many runs in one call to the far side."""

    def logs(self, handle: Handle, *, follow: bool) -> Iterator[LogLine]:
        """Lines of all ranks, oldest first. `follow` goes on until the job has ended."""

    def cancel(self, handle: Handle) -> None:
        """Ask for the job to stop; returns once the far side has accepted that."""


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
        f"there is no backend {name!r}",
        hint=did_you_mean(name, known) or f"backends: {', '.join(known)}",
    )


def _installed() -> Iterator[Any]:
    from importlib.metadata import entry_points

    return iter(entry_points(group=_GROUP))


if TYPE_CHECKING:
    from deploykit.backends import local, sagemaker, slurm

    _COMPLETE: tuple[Backend, ...] = (local, slurm, sagemaker)
