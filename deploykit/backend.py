"""The contract of a backend: what it offers to commands, and what its plans tell the nodes.

A backend is a module that meets `Backend`, and may offer capabilities beyond it (capabilities.py).
Commands ask for a backend by name; no command knows which backends there are.

What a plan tells the nodes is the same on every backend: a file to start, its arguments, and
variables. The other side is ``entrypoints/deploykit_node``; the reference is
``docs/reference/node.md``.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from deploykit import paths
from deploykit.decode import Plain
from deploykit.errors import UsageError
from deploykit.model import Bundle, Entry, Handle, JobSpec, LogLine, Plan, Problem, Status

DEFAULT = "local"
"""The backend of a job file that has a section for none."""

FOLDER = ".deploykit"
"""The folder of the node plane in every bundle."""

LAUNCH = f"{FOLDER}/launch.py"

FILES = f"{FOLDER}/files.json"
"""The list of a bundle's other files, by which a node can verify what it has unpacked."""

FOLDERS = ("logs", "output", "checkpoints", "exit_records")
"""Subfolders of a run folder."""

PRICE = "price.json"
"""In a run folder: what an hour of the job costs, where something is billed."""

JOB = "job.json"
"""In a run folder: the job with all overrides and arguments, as a job file for `rerun`."""

NODE_PLANE = ("launch.py", "deploykit_node")
"""The file and the package of ``entrypoints/`` that travel in every bundle."""

DEBUGGER = "DEPLOYKIT_DEBUGGER"
"""In `env`: the number of the rank that waits for an editor's debugger."""

PREFLIGHT = 30
"""Seconds that the network test before the trainer may take."""

SECRET_KINDS = ("env", "file", "ssm", "secretsmanager")

_BUILT_IN = ("local", "slurm", "sagemaker")
"""Modules of `deploykit.backends`."""
_GROUP = "deploykit.backends"
_RESERVED = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
)
_SETTABLE = (
    *("DEPLOYKIT_COLLECT_SECONDS", "DEPLOYKIT_GRACE", "DEPLOYKIT_PORTS"),
    *("DEPLOYKIT_STALL_SECONDS", DEBUGGER),
)


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


def names() -> Iterator[str]:
    """Names of all backends: built in, then installed ones, which take 25 ms to look for."""
    yield from _BUILT_IN
    yield from (point.name for point in _installed() if point.name not in _BUILT_IN)


def find(name: str) -> Backend:
    """Import the backend `name`. Raises UsageError, with the nearest name, when there is none."""
    if name in _BUILT_IN:
        return cast(Backend, importlib.import_module(f"deploykit.backends.{name}"))
    for point in _installed():
        if point.name == name:
            return cast(Backend, point.load())
    from deploykit.spelling import did_you_mean

    known = list(names())
    raise UsageError(
        f"unknown backend {name!r}",
        hint=did_you_mean(name, known) or f"backends: {', '.join(known)}",
    )


def node_plane() -> dict[str, bytes]:
    """The content of the node plane's files, by their path inside the bundle, sorted."""
    here = paths.shipped("entrypoints")
    launch, package = NODE_PLANE
    files = [here / launch, *(here / package).rglob("*.py")]
    return {
        f"{FOLDER}/{path.relative_to(here).as_posix()}": path.read_bytes() for path in sorted(files)
    }


def file_list(entries: Iterable[Entry]) -> Entry:
    """The list of all other files and links, by which a node verifies what it has unpacked.

    Files that are not in the list were added later, and are not hashed.
    """
    listed = {entry.path: entry.target or [entry.mode, entry.size] for entry in entries}
    content = json.dumps(listed, sort_keys=True).encode()
    return Entry(FILES, size=len(content), content=content)


def environment(  # noqa: PLR0913 - one keyword for each location of the contract
    job: JobSpec,
    *,
    backend: str,
    run: str,
    output: str,
    checkpoints: str,
    data: Mapping[str, str],
    folder: str | None = None,
) -> dict[str, str]:
    """The variables that a plan sets on each node, sorted by name.

    `output`, `checkpoints` and `data` are folders as the node sees them. `folder` is the run's,
    where the nodes can see it: there the launcher writes its exit record. Secrets are not resolved:
    ``DEPLOYKIT_SECRETS`` carries the references, and the node looks them up.
    """
    plain = {name: value for name, value in job.env.items() if not is_secret(value)}
    secret = {name: value for name, value in sorted(job.env.items()) if is_secret(value)}
    variables = {
        "DEPLOYKIT_BACKEND": backend,
        "DEPLOYKIT_CHECKPOINT_DIR": checkpoints,
        "DEPLOYKIT_OUTPUT_DIR": output,
        "DEPLOYKIT_RUN": run,
        **{f"DEPLOYKIT_DATA_{name.upper()}": location for name, location in data.items()},
    }
    if secret:
        variables["DEPLOYKIT_SECRETS"] = json.dumps(secret)
    if folder is not None:
        variables["DEPLOYKIT_RUN_DIR"] = folder
    if job.outputs:
        variables["DEPLOYKIT_OUTPUTS"] = json.dumps(job.outputs)
    if job.on_stall != "dump":
        variables["DEPLOYKIT_ON_STALL"] = job.on_stall
    if job.profile:
        variables["DEPLOYKIT_PROFILE"] = job.profile
    if job.debug:
        variables["DEPLOYKIT_DEBUG"] = "1"
    if job.preflight:
        variables["DEPLOYKIT_PREFLIGHT"] = str(PREFLIGHT)
    return dict(sorted({**plain, **variables}.items()))


def in_folder(job: JobSpec, backend: str, run: str, folder: Path) -> dict[str, str]:
    """`environment` for a backend whose nodes see the run's folder."""
    return environment(
        job,
        backend=backend,
        run=run,
        output=job.output or str(folder / "output"),
        checkpoints=job.checkpoints or str(folder / "checkpoints"),
        data=job.data,
        folder=str(folder),
    )


def locations(job: JobSpec) -> dict[str, str]:
    """The locations that a job file names, by their path in it."""
    data = {f"data.{name}": location for name, location in job.data.items()}
    others = {"output": job.output, "checkpoints": job.checkpoints}
    return data | {path: location for path, location in others.items() if location is not None}


def addresses(job: JobSpec) -> dict[str, str]:
    """The `locations` that are addresses."""
    return {
        path: location for path, location in locations(job).items() if paths.is_address(location)
    }


def command(job: JobSpec) -> list[str]:
    """The arguments of ``launch.py``: torchrun's options, ``--``, the program and its arguments.

    The launcher adds what only the node knows: address, port, node rank.
    """
    return [
        "torchrun",
        f"--nnodes={job.resources.node_range}",
        f"--nproc-per-node={job.resources.processes}",
        f"--max-restarts={job.retries}",
        "--",
        *program(job),
    ]


def program(job: JobSpec) -> list[str]:
    """The user's program and its exact arguments: ``train.py a b`` or ``-m package a b``."""
    entry = job.entrypoint
    if entry.module is not None:
        return ["-m", entry.module, *entry.args]
    return [entry.script or "", *entry.args]


def is_secret(value: str) -> bool:
    """Whether an environment value is a reference, ``secret:KIND:NAME``."""
    return value.startswith("secret:")


def spread_nodes(tree: dict[str, Any]) -> None:
    """Replace ``nodes: 2:4`` in a job by ``nodes: 4`` and ``min_nodes: 2``, in place."""
    resources = tree.get("resources")
    if not isinstance(resources, dict) or not isinstance(resources.get("nodes"), str):
        return
    least, _, most = resources["nodes"].partition(":")
    if least.isdecimal() and most.isdecimal():
        tree["resources"] = {**resources, "nodes": Plain(most), "min_nodes": Plain(least)}


def check_nodes(job: JobSpec) -> Iterator[Problem]:
    """Whether the fewest nodes are at most the most."""
    least, most = job.resources.min_nodes, job.resources.nodes
    if least is not None and least > most:
        message = f"the minimum, {least} nodes, exceeds the maximum, {most}"
        yield Problem("resources.min_nodes", message, f"nodes: {most}:{least}")


def check_variables(job: JobSpec) -> Iterator[Problem]:
    """Problems of what becomes variables on the nodes, the same on every backend."""
    yield from _same_variable(job.data)
    kind, *steps = (job.profile or "").split(":")  # those of `torch:FIRST:LAST`
    if steps and int(steps[1]) < int(steps[0]):
        hint = f"for example {kind}:{steps[1]}:{steps[0]}"
        yield Problem("profile", "ends before it begins", hint)
    yield from _check_debugger(job)
    for name, value in job.env.items():
        if name in _RESERVED or (name.startswith("DEPLOYKIT_") and name not in _SETTABLE):
            yield Problem(
                f"env.{name}",
                "is set by the launcher on each rank and cannot be overridden",
                "remove it; the trainer reads what the launcher has set",
            )
        if is_secret(value) and _kind(value) is None:
            yield Problem(
                f"env.{name}",
                f"expected secret:KIND:NAME, with KIND one of {', '.join(SECRET_KINDS)}",
                "for example secret:env:HF_TOKEN",
            )


def _check_debugger(job: JobSpec) -> Iterator[Problem]:
    """Whether the rank that waits for a debugger is one of the job."""
    rank, count = job.env.get(DEBUGGER), job.resources.nodes * job.resources.processes
    if rank is not None and rank not in map(str, range(count)):
        message = f"{rank!r} is no rank of this job"
        yield Problem(f"env.{DEBUGGER}", message, f"its ranks are 0 to {count - 1}")


def check_ranks(job: JobSpec) -> Iterator[Problem]:
    """Warnings about several ranks on one GPU, which NCCL refuses, and a profile that needs one.

    https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/communicators.html
    """
    ranks, gpus = job.resources.processes, job.resources.gpus_per_node
    if 0 < gpus < ranks:
        message = f"{ranks} ranks on each node would share its {gpus} GPU(s); NCCL refuses that"
        path = "resources.processes_per_node"
        yield Problem(path, message, f"processes_per_node: {gpus}", severity="warning")
    if (job.profile or "").startswith("nsys:") and not gpus:
        message = "nsys sees steps through CUDA only, and the job requests no GPU"
        yield Problem("profile", message, "nsys, to profile the whole run", severity="warning")


def check_metrics(job: JobSpec) -> Iterator[Problem]:
    """Problems of the patterns for metrics in the log, which no backend reads."""
    if job.metrics:
        from deploykit.metrics import patterns  # few jobs have any

        yield from patterns.problems(job.metrics)


def check_track(job: JobSpec) -> Iterator[Problem]:
    """Problems of the trackers, to which this machine sends the metrics."""
    if job.track is not None:
        from deploykit.trackers import checks  # few jobs have any

        yield from checks.problems(job.track)


def missing_data(job: JobSpec) -> Iterator[tuple[str, str, str]]:
    """The folders of `data` that this machine does not have: path, message, hint."""
    for name, location in job.data.items():
        if not paths.is_address(location) and not os.path.exists(location):  # noqa: PTH110 - too long
            from deploykit import presence  # only where something is wrong

            message = f"{location} was not found on this machine"
            yield f"data.{name}", message, presence.near_folder(location)


def check_module(job: JobSpec, python: Path | None = None) -> Iterator[Problem]:
    """Whether the job's module can be found; `python` runs the job, where it is on this machine."""
    if job.entrypoint.module is not None:
        from deploykit import presence  # few jobs run a module

        yield from presence.check_module(job, python)


def check_nsys(job: JobSpec) -> Iterator[Problem]:
    """Whether Nsight Systems, if the job asks for it, is on the PATH of a job on this machine."""
    wanted = (job.profile or "").startswith("nsys") and job.environment is None
    if wanted and shutil.which("nsys", path=job.env.get("PATH")) is None:
        hint = "install Nsight Systems, or torch:20:25, which PyTorch's own profiler records"
        yield Problem("profile", "nsys is not on PATH", hint)


def _installed() -> Iterator[Any]:
    from importlib.metadata import entry_points

    return iter(entry_points(group=_GROUP))


def _same_variable(names: Iterable[str]) -> Iterator[Problem]:
    """Problems of channels that would share a variable."""
    first: dict[str, str] = {}
    for name in names:
        other = first.setdefault(name.upper(), name)
        if other != name:
            yield Problem(
                f"data.{name}",
                f"sets the same variable as {other!r}, DEPLOYKIT_DATA_{name.upper()}",
                "choose names that differ in more than case",
            )


def _kind(reference: str) -> str | None:
    _, kind, name = (*reference.split(":", 2), "", "")[:3]
    return kind if kind in SECRET_KINDS and name else None
