"""What a backend may offer beyond the contract; it does so by having the member described here.

A command asks for a capability with `require`, or uses it where a backend has it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, runtime_checkable

from deploykit.backends import base as backend
from deploykit.job.model import Handle, JobSpec, Plan, Problem
from deploykit.lib.errors import UsageError

if TYPE_CHECKING:
    from deploykit.cost.estimate import Estimate
    from deploykit.lib.finding import Finding
    from deploykit.observe.metrics.points import Point

T = TypeVar("T")


class Profile(NamedTuple):
    """What a target has and allows, as `probe` recorded it."""

    path: Path
    """The file that keeps it."""
    facts: Mapping[str, Any]
    """The same as plain data."""
    summary: tuple[str, ...]
    """The same as lines for a person."""


class Start(NamedTuple):
    """Where a job could run, and when it would start there."""

    where: str
    """``partition gpu``, ``ml.g5.xlarge in us-east-1``, ``this machine``."""
    options: Any
    """The backend's section with which it runs there."""
    at: datetime | None
    """When the target expects it to start; None where it does not tell."""
    reason: str = ""
    """Why it cannot start there, or what else is known."""
    possible: bool = True
    settings: Mapping[str, str] = {}
    """Keys of the job file that choose it, such as ``slurm.partition``; none where it is chosen."""


@runtime_checkable
class When(Protocol):
    """A backend that can say when a job would start, and where else it could."""

    def when(self, plan: Plan) -> Iterator[Start]:
        """Where the job could run. Asks the target, and submits nothing.

        Raises BackendUnavailable, NotPermitted or TryAgain.
        """


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
class NamedPython(Protocol):
    """A backend whose `examine` runs a Python of this machine that the job file may name."""

    def named_python(self, job: JobSpec, options: Any) -> str | None:
        """The path of that Python; None where the job file names none."""


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
class Arrays(Protocol):
    """A backend that takes several runs as one job array, of which each task is a run."""

    def largest_array(self, options: Any) -> int:
        """The most runs in one array; 0: none with these options. Asks the target.

        Raises BackendUnavailable.
        """

    def submit_array(
        self, plans: Sequence[Plan], folder: Path, name: str, at_once: int
    ) -> Sequence[Handle]:
        """Send exactly these plans, which differ in their arguments only, as one array.

        `folder` is new and the array's own; the folder of each run holds its text. At most
        `at_once` run at the same time. The run ids begin with `name` and a hyphen. Later `find`
        finds each run by its folder. Raises as `Backend.submit`.
        """

    def cancel_all(self, handles: Sequence[Handle]) -> None:
        """As `Backend.cancel` for many runs, with few commands."""


@runtime_checkable
class Preflight(Protocol):
    """A backend whose nodes run deploykit's launcher, and so the network test of `preflight`."""

    @property
    def PREFLIGHT(self) -> int:
        """Seconds that the network test may take."""


@runtime_checkable
class NodeNames(Protocol):
    """A backend whose nodes have names, and may be excluded by them: its options have `exclude`."""

    def node_names(self, options: Any) -> Collection[str]:
        """The names of all nodes of the target. Asks it. Raises BackendUnavailable."""


@runtime_checkable
class Ready(Protocol):
    """A backend that can tell whether a job could be submitted from this machine now."""

    def missing(self, absent: Sequence[str]) -> Iterator[tuple[str, str]]:
        """What is missing, each with how to get it; `absent` are its programs and modules.

        Asks the target where that takes a few seconds at most. Changes nothing there.
        """


@runtime_checkable
class Launch(Protocol):
    """A backend whose nodes see the run folder, where `deploykit.launch` keeps its results."""

    def check_function(self, options: Any) -> Iterator[Problem]:
        """Yield the problems of settings with which no result would come back. Pure."""


@runtime_checkable
class Unlimited(Protocol):
    """A backend on which a job needs no time limit."""

    @property
    def UNLIMITED(self) -> bool:
        """True."""


@runtime_checkable
class Metrics(Protocol):
    """A backend whose service extracts metrics from the log of a job."""

    def metrics(self, handle: Handle) -> Iterator[Point]:
        """The last value of each metric. Asks the service."""


@runtime_checkable
class LogsElsewhere(Protocol):
    """A backend that says where its logs are: in the run folder, or elsewhere with a copy there."""

    def logs_elsewhere(self, handle: Handle) -> bool:
        """Whether the logs in the run folder are a copy that `logs` brings up to date."""


@runtime_checkable
class Remains(Protocol):
    """A backend whose jobs leave files elsewhere than in the run folder on this machine."""

    def remains(self, handle: Handle, output: str) -> Iterator[tuple[str, str]]:
        """Each location where a run left files, and the command that removes them. Offline.

        `output` is the location of its results. The run may never have been sent.
        """


@runtime_checkable
class Cost(Protocol):
    """A backend that can say what a job may cost."""

    def bills(self, options: Any) -> bool:
        """Whether anything is billed. Imports nothing: every dry run asks it."""

    def cost(self, job: JobSpec, options: Any) -> Estimate:
        """What a job that has passed `check` may cost. Pure: reads at most files with prices."""


@runtime_checkable
class Prices(Protocol):
    """A backend whose prices can be asked for, and are then kept in a file."""

    def refresh_prices(self, job: JobSpec, options: Any) -> str:
        """Ask for the prices of the job's region and store them. Returns a line for people.

        Raises BackendUnavailable, NotPermitted or TryAgain.
        """

    def alternatives(self, job: JobSpec, options: Any) -> Mapping[str, Estimate]:
        """What the job may cost bought in other ways, by their names, such as ``spot``."""


@runtime_checkable
class Dump(Protocol):
    """A backend on whose nodes the stacks of running ranks can be taken."""

    def dump(self, handle: Handle, folder: Path, *, native: bool) -> Sequence[str]:
        """Have each node write the stacks of its ranks into `folder`, a file for each node.

        `folder` is one of ``stacks/`` in the run folder, and does not exist yet. `native` asks for
        calls of C and C++ too. Returns what went wrong, as sentences; the program is not disturbed.
        Raises TryAgain where no rank is running, BackendUnavailable where no node can be reached.
        """


@runtime_checkable
class DumpByHand(Protocol):
    """A backend that `dump` cannot reach, and that can say why."""

    def dump_by_hand(self, handle: Handle) -> tuple[str, str]:
        """Why no stacks can be taken from here, and what a person can do instead. Offline."""


@runtime_checkable
class Slots(Protocol):
    """A backend on which jobs that run at the same time must be told apart."""

    def slots(self, job: JobSpec, options: Any) -> Sequence[Mapping[str, str]]:
        """Variables for each of the jobs that can run at once; none where there is no limit.

        Asks nothing but this machine.
        """


@runtime_checkable
class Ends(Protocol):
    """A backend that notices when a job ends, without asking for its status again and again."""

    def await_end(self, handles: Sequence[Handle], timeout: float) -> None:
        """Return once one of the running jobs seems to have ended, after `timeout` s at the latest.

        It may return too early.
        """


@runtime_checkable
class Shell(Protocol):
    """A backend on whose nodes a command can be run beside a rank."""

    def enter(
        self, handle: Handle, rank: int, command: Sequence[str], *, terminal: bool
    ) -> Sequence[str]:
        """The command line of this machine that runs `command` on the rank's node.

        It runs in the rank's working folder with its environment; without `command` it is a shell.
        `terminal` says that a person types and reads. Starts nothing. Raises TryAgain where the
        rank is not running, UsageError where the job or the backend does not allow it.
        """


REQUESTED: tuple[type, ...] = (
    *(Doctor, Attach, Probe, Tasks, Preflight, Launch, Cost, When, Dump, Shell),
)
"""Those that a user asks for, which ``deploykit backends`` lists; the others are used unasked."""


def require(name: str, capability: type[T]) -> T:
    """The backend `name`, as one that offers `capability`.

    Raises UsageError where it does not, with the backends that do.
    """
    engine = backend.find(name)
    if isinstance(engine, capability):
        return engine
    others = (other for other in backend.names() if isinstance(backend.find(other), capability))
    raise UsageError(
        f"backend {name} does not offer `{verb(capability)}`",
        hint=f"offered by: {', '.join(others) or 'no installed backend'}",
    )


def verb(capability: type) -> str:
    """The name of a capability, as users write it: ``doctor`` for `Doctor`."""
    return capability.__name__.lower()
