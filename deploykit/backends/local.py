"""The local backend: torchrun in the background, one node or several emulated on loopback.

A run is alive as long as its shell holds the lock on ``<run folder>/alive``: unlike a process id,
a lock cannot belong to another run.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from deploykit.backends import base as backend
from deploykit.backends import checkpoints, ranks
from deploykit.backends.base import RemoteFile, Serving, Start
from deploykit.bundle import archive as bundles
from deploykit.cost import cap
from deploykit.cost.estimate import Estimate, for_machine
from deploykit.doctor import local as doctor
from deploykit.job import checks, environments, machine
from deploykit.job.decode import NOT_EMPTY, Help
from deploykit.job.model import (
    MONEY,
    Bundle,
    Handle,
    JobSpec,
    LogLine,
    Plan,
    Problem,
    State,
    Status,
)
from deploykit.lib import paths, shell
from deploykit.lib.errors import BackendUnavailable, NotPermitted
from deploykit.lib.finding import Finding
from deploykit.observe import exit_records, logfiles, stacks

SUMMARY = "this machine, through torchrun; several nodes are emulated on loopback"
PROGRAMS = ("sh",)
MODULES = ("torch",)
PREFLIGHT = backend.PREFLIGHT
UNLIMITED = True

_DUMP = 120.0
"""Seconds to take the stacks of all ranks."""
_START = 10
"""Seconds in which a started shell must claim its run."""
_RANKS_PER_CORE = 4
"""Above which a job on this machine is probably meant for another one."""


@dataclass(frozen=True)
class Options:
    """The `local` section of a job file."""

    python: Annotated[
        str | None,
        Help("Python that runs the trainer. Default: the one that runs deploykit."),
        NOT_EMPTY,
    ] = None
    price: Annotated[
        str | None,
        Help("Hourly price of this machine, if it is rented. Default: no charge.", "2.50 USD"),
        MONEY,
    ] = None


def check(job: JobSpec, options: Options) -> Iterator[Problem]:
    """Refuse addresses as locations, and warn about limits that are not enforced."""
    yield from backend.check_addresses(
        job,
        "{location} is not a folder on this machine",
        "use a folder, for example with --set {path}=FOLDER",
    )
    yield from backend.check_checkpoint_bucket(job)
    python: str | None = _python(options)
    installed = environments.on_nodes(job)
    if job.environment is not None:
        yield from environments.module_problems(job.environment)
    if installed:
        yield from environments.on_nodes_problems(job, installed)
        yield from environments.no_uv(installed)
        if "script" in installed and python:
            yield from checks.check_declared_torch(job, Path(python))
        python = None
    elif job.environment is not None:
        yield from environments.conflict(job, "local.python", options.python)
        prepared = bool(job.environment.modules)
        yield from environments.problems(job.environment, prepared=prepared)
        python = environments.python(job.environment)
    yield from _check_python(_python(options))
    yield from backend.check_program(job, Path(python) if python else None)
    if python:
        yield from checks.check_torch(job, Path(python))
        yield from checks.check_boto3(job, Path(python))
    yield from backend.missing_data(job)
    yield from backend.check_ranks(job)
    wants_nsys = (job.profile or "").startswith("nsys") and job.environment is None
    if wants_nsys and shutil.which("nsys", path=job.env.get("PATH")) is None:
        hint = "install Nsight Systems, or use PyTorch's profiler: torch:20:25"
        yield Problem("profile", "nsys is not on PATH", hint)
    yield from _check_machine(job)
    for name in ("cpus_per_node", "memory"):
        if getattr(job.resources, name) is not None:
            path, message = f"resources.{name}", "is not enforced on this machine"
            yield Problem(path, message, severity="warning")


def _check_python(text: str) -> Iterator[Problem]:
    """Whether the trainer's Python is a program."""
    python, hint = Path(text), "use the path that `command -v python3` prints"
    if shutil.which(text) and (python.is_absolute() or len(python.parts) == 1):
        return
    if python.is_absolute():
        message = f"{python} {'is not executable' if python.exists() else 'was not found'}"
    elif text.startswith("~"):
        message = f"{text}: the home folder of {python.parts[0]} was not found"
    elif len(python.parts) > 1:
        message = f"{python} is a relative path, but the job starts in a copy of the source"
        hint = f"use an absolute path such as {Path.cwd() / python}"
    else:
        message = f"{text} is not on PATH"
    yield Problem("local.python", message, hint)


def _check_machine(job: JobSpec) -> Iterator[Problem]:
    """Whether this machine has what the emulated nodes together need."""
    nodes, gpus = job.resources.nodes, job.resources.gpus_per_node
    available = machine.gpus(machine.visible(job.env)) if gpus else 0
    if gpus and available == 0:
        message = "this machine has no usable GPU, so the ranks run on the CPU"
        hint = "to train on the CPU, set gpus_per_node: 0 and processes_per_node"
        yield Problem("resources.gpus_per_node", message, hint, severity="warning")
    elif available is not None and nodes * gpus > available:
        each = f"{gpus} on each of {nodes} emulated nodes" if nodes > 1 else str(gpus)
        message = f"the job requests {each} GPUs, but only {available} are usable on this machine"
        if gpus <= available:
            hint = f"set nodes: {available // gpus}"
            yield Problem("resources.nodes", message, hint, severity="warning")
            return
        too_many = (job.resources.processes_per_node or 0) > available
        hint = f"set gpus_per_node: {available}" + f", processes_per_node: {available}" * too_many
        yield Problem("resources.gpus_per_node", message, hint)
    ranks, cores = job.resources.world_size, machine.cpus()
    if not gpus and ranks > _RANKS_PER_CORE * cores:
        message = f"{ranks} ranks would share {cores} CPU cores"
        yield Problem("resources.processes_per_node", message, severity="warning")


def plan(job: JobSpec, options: Options, *, run: str, bundle: Bundle) -> Plan:
    """Render the shell script that starts one launcher for each node."""
    folder = paths.run_folder(run)
    output = job.output or str(folder / "output")
    text = _script(job, options, run, folder)
    return Plan("local", os.uname().nodename, run, text, "sh", job, options, bundle, output)


def _script(job: JobSpec, options: Options, run: str, folder: Path) -> str:
    """The shell text ``templates/local.sh`` between what differs, with every value quoted."""
    environment = backend.in_folder(job, "local", run, folder)
    if job.stop_at_cap:
        environment |= cap.variables(job, cost(job, options))
    run_folder = environment.pop("DEPLOYKIT_RUN_DIR")
    nodes, seconds = job.resources.node_range, job.resources.time_limit
    sizes = f"--emulated-nodes --nodes={nodes} --time-limit={seconds}"
    python = shlex.quote(_python(options))
    prepared: list[str] = []
    installed = environments.on_nodes(job)
    if job.environment is not None:
        prepared += environments.module_lines(job.environment.modules, "environment.modules")
    if installed:
        prepared += environments.comment(installed)
    elif job.environment is not None and job.environment.python is not None:
        prepared += environments.lines(job.environment)
        python = environments.PYTHON
    lines = [
        *("#!/bin/sh", f"# deploykit run {shlex.quote(run)}", ""),
        "# shellcheck disable=SC2016 # text in single quotes is literal",
        f"export DEPLOYKIT_RUN_DIR={shlex.quote(run_folder)}",
        (paths.shipped("templates") / "local.sh").read_text(encoding="utf-8"),
        *backend.staging_comments(job),
        *(f"export {name}={shlex.quote(value)}" for name, value in environment.items()),
        "",
        *prepared,
        "# one launcher per node; each adds its address, port and node rank to the command",
        f"exec {python} {backend.LAUNCH} {sizes} \\",
        f"    {shlex.join(backend.command(job, installed))}",
    ]
    return "\n".join([*lines, ""])


def _python(options: Options) -> str:
    """The Python that runs the trainer, with its home folder filled in."""
    return paths.expanded(options.python) if options.python else sys.executable


def submit(plan: Plan, folder: Path) -> Handle:
    """Unpack the source and start the script in the background.

    Raises BackendUnavailable where its shell does not start.
    """
    bundles.unpack(bundles.store(plan.bundle), folder / "source")
    for name in backend.FOLDERS:
        paths.private_folder(folder / name)
    with (
        open(folder / "alive", "w", encoding="utf-8", opener=paths.private_opener) as alive,
        open(folder / "logs/job.log", "a", encoding="utf-8", opener=paths.private_opener) as log,
    ):
        fcntl.flock(alive, fcntl.LOCK_EX)
        subprocess.run(
            ["sh", "-c", 'sh "$0" &', str(folder / "plan.sh")],  # the job outlives this process
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=[alive.fileno()],
            check=True,
        )
    handle = find(plan.run, folder, plan.target)
    if handle is None:
        raise BackendUnavailable("the job's shell did not start", hint=f"see {folder}/logs/job.log")
    return handle


def find(run: str, folder: Path, target: str) -> Handle | None:
    """The run, if its shell has started; waits up to `_START` seconds for that."""
    end = time.monotonic() + _START
    while not (folder / "claim").exists() or not _pid(folder):
        if not _alive(folder) or time.monotonic() > end:
            return None
        time.sleep(0.02)
    return Handle("local", target, run, run, str(folder))


def status(handles: Sequence[Handle]) -> Mapping[Handle, Status]:
    """The status of each run, from the files of its run folder."""
    return {handle: _with_times(handle, _status(handle)) for handle in handles}


def logs(handle: Handle, *, follow: bool) -> Iterator[LogLine]:
    """Lines of all logs. Raises NotFound where the run folder was deleted."""
    folder = logfiles.whole(handle)
    return logfiles.read(folder / "logs", follow=follow, ended=lambda: not _alive(folder))


def logs_elsewhere(handle: Handle) -> bool:  # noqa: ARG001 - the contract
    """Never: the logs of a run on this machine are here."""
    return False


def files(handle: Handle, part: str) -> Sequence[RemoteFile] | None:
    """The checkpoints in a bucket; all else is on this machine; see `base.Capabilities.files`."""
    bucket = checkpoints.location(handle) if part == "checkpoints" else None
    return checkpoints.files(handle, bucket) if bucket else None


def download(
    handle: Handle, files: Sequence[RemoteFile], folder: Path, done: Callable[[int], None]
) -> None:
    """Copy checkpoints from their bucket; see `base.Capabilities.download`."""
    if bucket := checkpoints.location(handle):
        checkpoints.download(handle, bucket, files, folder, done)


def cancel(handle: Handle) -> None:
    """Send SIGTERM to the shell of the run, which stops its launchers."""
    _require_this_machine(handle)
    folder = Path(handle.folder)
    if not _alive(folder):
        return
    paths.touch(folder / "cancelled")
    with contextlib.suppress(ProcessLookupError):
        try:
            os.kill(_pid(folder), signal.SIGTERM)
        except PermissionError as error:
            raise NotPermitted(f"{handle.run} belongs to another user") from error


def dump(handle: Handle, folder: Path, *, native: bool) -> Sequence[str]:
    """Write the stacks of all ranks; see `base.Capabilities.dump`."""
    _require_this_machine(handle)
    processes = exit_records.processes(Path(handle.folder))
    first = ranks.require_processes(processes, handle.run)[0]
    folders = (handle.folder, str(folder))
    done = shell.run(ranks.dump_command(first, "local", folders, native=native), timeout=_DUMP)
    return [done.err.strip().rpartition("\n")[2]] if done.code else []


def enter(handle: Handle, rank: int, command: Sequence[str], *, terminal: bool) -> Sequence[str]:  # noqa: ARG001 - the contract
    """Run a command beside a rank; see `base.Capabilities.enter`."""
    _require_this_machine(handle)
    processes = exit_records.processes(Path(handle.folder))
    process = ranks.rank_process(processes, handle.run, rank)
    return ranks.enter_command(process, "local", handle.folder, command)


def examine(
    job: JobSpec, options: Options, *, saved: Path | None, save: Path | None
) -> Iterator[Finding]:
    """Findings about this machine; see `base.Capabilities.examine`."""
    chosen = environments.python(job.environment) if job.environment else None
    python = paths.expanded(options.python) if options.python else chosen
    facts = doctor.load(saved) if saved else doctor.inspect(python)
    if save:
        doctor.save(facts, save)
    yield from doctor.findings(job, facts)


def serve(package: Path, serving: Serving) -> Sequence[str]:
    """The server of this machine, a program of the node plane; see `base.Capabilities.serve`."""
    options = {
        "host": serving.host,
        "port": serving.port,
        "replicas": serving.replicas,
        "device": serving.device or "",
        "max-body": serving.max_body,
        "concurrency": serving.concurrency,
        "timeout": serving.timeout,
        "max-batch-size": serving.max_batch_size,
        "batch-timeout": serving.batch_timeout,
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    program = paths.shipped("entrypoints") / "serve.py"
    return [serving.python, str(program), str(package), *words]


def bills(options: Options) -> bool:
    """Whether this machine has a price."""
    return options.price is not None


def cost(job: JobSpec, options: Options) -> Estimate:
    """What the job may cost on a rented machine: its time, whether or not the ranks use all."""
    return for_machine("this machine", options.price, "local.price", job.resources.time_limit)


def when(plan: Plan) -> Iterator[Start]:
    """At once: nothing queues on this machine; see `base.Capabilities.when`."""
    yield Start("this machine", plan.options, datetime.now(UTC))


def slots(job: JobSpec, options: Options) -> Sequence[Mapping[str, str]]:  # noqa: ARG001
    """The GPUs of each job that can run at once; see `base.Capabilities.slots`."""
    each = job.resources.nodes * job.resources.gpus_per_node
    groups = machine.gpu_groups(each, machine.visible(job.env))
    return [{"CUDA_VISIBLE_DEVICES": names} for names in groups]


def await_end(handles: Sequence[Handle], timeout: float) -> None:
    """Wait for the end of a run's shell; see `base.Capabilities.await_end`."""
    machine.await_end([Path(handle.folder, "claim") for handle in handles], timeout)


def check_function(options: Options) -> Iterator[Problem]:  # noqa: ARG001 - the contract
    """Every function's results come back: the run folder is on this machine."""
    yield from ()


def _with_times(handle: Handle, status: Status) -> Status:
    """The status with its start, when the shell claimed the run, and its end, if recorded."""
    folder = Path(handle.folder)
    started = None
    with contextlib.suppress(OSError):
        started = datetime.fromtimestamp((folder / "claim").stat().st_mtime, UTC)
    records = exit_records.read(folder) if status.state.final else []
    last = max((record.finished for record in records), default=None)
    billed = max(0.0, (last - started).total_seconds()) if last and started else None
    return status._replace(started=started, finished=last, billed=billed)


def _status(handle: Handle) -> Status:
    """The status without its times, from the first of the files that decides."""
    folder = Path(handle.folder)
    cancelled = (folder / "cancelled").exists()
    if handle.target != os.uname().nodename and not (folder / "exit_records").exists():
        reason = f"the run was started on {handle.target}; run this command there"
        return Status(State.UNKNOWN, "", reason)
    if _alive(folder):
        reason = "" if cancelled else stacks.stall_reason(folder) or exit_records.staging(folder)
        reason = reason or ("" if cancelled else exit_records.restarting(folder))
        return Status(State.STOPPING if cancelled else State.RUNNING, "alive", reason)
    if cancelled:
        return Status(State.CANCELLED, "ended", "cancelled by `deploykit cancel`")
    if (folder / "timed-out").exists():
        instead = stacks.stall_reason(folder, ended=True) or "raise resources.time_limit"
        reason = f"stopped at its time limit; {instead}"
        return Status(State.FAILED, "timed out", reason, 124)
    for first in exit_records.read(folder):
        state = State.SUCCEEDED if first.exit_code == 0 else State.FAILED
        return Status(state, "ended", first.reason, first.exit_code)
    return _without_record(folder)


def _without_record(folder: Path) -> Status:
    """The status of a run without exit records: the reason is the last line of its shell."""
    if refusal := logfiles.refusal(folder / "logs/job.log"):
        return Status(State.FAILED, "ended", refusal, 78)
    if not folder.exists():
        return Status(State.FAILED, "vanished", "its exit status is unknown")
    try:
        log = logfiles.end(folder / "logs/job.log").strip()
    except OSError as error:
        log = f"{folder}/logs/job.log cannot be read: {error.strerror}"
    reason = log.splitlines()[-1] if log else "it was killed, or the machine restarted"
    return Status(State.FAILED, "vanished", f"exited without recording a status: {reason}")


def _alive(folder: Path) -> bool:
    """Whether a process holds the lock on the run."""
    try:
        with (folder / "alive").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # there is no such file
        return False
    return False


def _pid(folder: Path) -> int:
    """The process id of the run's shell; 0 until it is written."""
    try:
        return int((folder / "claim").read_text())
    except (OSError, ValueError):
        return 0


def _require_this_machine(handle: Handle) -> None:
    if handle.target != os.uname().nodename:
        message = f"{handle.run} runs on {handle.target}"
        raise BackendUnavailable(message, hint="run this command there")
