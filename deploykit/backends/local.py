"""The local backend: torchrun in the background, one node or several emulated on loopback.

A run is alive as long as its shell holds the lock on ``<run folder>/alive``: unlike a process id,
a lock is never mistaken for another run's.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from deploykit import bundle as bundles
from deploykit import contract, exit_records, logfiles, paths, private, render
from deploykit.bundle import Bundle
from deploykit.errors import BackendUnavailable, NotPermitted
from deploykit.fields import NOT_EMPTY, Help
from deploykit.model import Handle, JobSpec, LogLine, Plan, Problem, State, Status

SUMMARY = "this machine, through torchrun; several nodes are emulated on loopback"
PROGRAMS = ("sh",)
MODULES = ("torch",)

_START = 10
"""Seconds within which a started shell claims its run."""


@dataclass(frozen=True)
class Options:
    """The `local` section of a job file."""

    python: Annotated[
        str | None,
        Help("Python that runs the trainer. Default: the one that runs deploykit."),
        NOT_EMPTY,
    ] = None


def check(job: JobSpec, options: Options) -> Iterator[Problem]:  # noqa: ARG001 - the contract's
    for path, place in contract.locations(job).items():
        if "://" in place:
            yield Problem(
                path,
                f"this machine cannot use the address {place} as a folder",
                f"name a folder, for example with --set {path}=FOLDER",
            )
    for name in ("cpus_per_node", "memory"):
        if getattr(job.resources, name) is not None:
            path, message = f"resources.{name}", "is not enforced on this machine"
            yield Problem(path, message, severity="warning")


def plan(job: JobSpec, options: Options, *, run: str, bundle: Bundle) -> Plan:
    folder = paths.run_folder(run)
    output = job.output or str(folder / "output")
    text = render.shell(
        "local.sh.j2",
        run=run,
        folder=folder,
        environment=contract.in_folder(job, "local", run, folder),
        nodes=job.resources.nodes,
        python=options.python or sys.executable,
        launch=contract.LAUNCH,
        command=contract.command(job),
        seconds=_seconds(job),
    )
    return Plan("local", os.uname().nodename, run, text, "sh", job, options, bundle, output)


def _seconds(job: JobSpec) -> int:
    return job.resources.time_limit


def submit(plan: Plan, folder: Path) -> Handle:
    bundles.unpack(plan.bundle.store(), folder / "source")
    for name in contract.FOLDERS:
        private.folder(folder / name)
    with (
        open(folder / "alive", "w", encoding="utf-8", opener=private.opener) as alive,
        open(folder / "logs/job.log", "a", encoding="utf-8", opener=private.opener) as log,
    ):
        fcntl.flock(alive, fcntl.LOCK_EX)
        subprocess.run(
            [
                "sh",
                "-c",
                'sh "$0" &',
                str(folder / "plan.sh"),
            ],  # the job outlives us, as nobody's child
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
    end = time.monotonic() + _START
    while not (folder / "claim").exists() or not _pid(folder):
        if not _alive(folder) or time.monotonic() > end:
            return None
        time.sleep(0.02)
    return Handle("local", target, run, run, str(folder))


def status(handles: Sequence[Handle]) -> Mapping[Handle, Status]:
    return {handle: _status(handle) for handle in handles}


def logs(handle: Handle, *, follow: bool) -> Iterator[LogLine]:
    folder = logfiles.whole(handle)
    return logfiles.read(folder / "logs", follow=follow, ended=lambda: not _alive(folder))


def cancel(handle: Handle) -> None:
    _here(handle)
    folder = Path(handle.folder)
    if not _alive(folder):
        return
    private.touch(folder / "cancelled")
    with contextlib.suppress(ProcessLookupError):
        try:
            os.kill(_pid(folder), signal.SIGTERM)
        except PermissionError as error:
            raise NotPermitted(f"{handle.run} was started by another user") from error


def _status(handle: Handle) -> Status:
    folder = Path(handle.folder)
    if handle.target != os.uname().nodename and not (folder / "exit_records").exists():
        return Status(State.UNKNOWN, "", f"it was started on the machine {handle.target}")
    if _alive(folder):
        stopping = (folder / "cancelled").exists()
        return Status(State.STOPPING if stopping else State.RUNNING, "alive")
    if (folder / "cancelled").exists():
        return Status(State.CANCELLED, "ended", "cancelled by `deploykit cancel`")
    return _ended(folder)


def _ended(folder: Path) -> Status:
    found = exit_records.read(folder)
    end = found[0] if found else None
    finished = end.finished if end else None
    if (folder / "timed-out").exists():
        reason = "stopped at its time limit; raise resources.time_limit"
        return Status(State.FAILED, "timed out", reason, 124, finished=finished)
    if end is None:
        return _vanished(folder)
    state = State.SUCCEEDED if end.exit_code == 0 else State.FAILED
    return Status(state, "ended", end.reason, end.exit_code, finished=finished)


def _vanished(folder: Path) -> Status:
    """No launcher could say how it ended; perhaps the shell did."""
    if not folder.exists():
        return Status(State.FAILED, "vanished", "how it ended is not known any more")
    try:
        said = (folder / "logs/job.log").read_text(errors="replace").strip()
    except OSError as error:
        said = f"{folder}/logs/job.log cannot be read: {error.strerror}"
    reason = said.splitlines()[-1] if said else "killed, or the machine restarted"
    return Status(State.FAILED, "vanished", f"it ended without a word: {reason}")


def _alive(folder: Path) -> bool:
    """Whether somebody holds the lock on the run."""
    try:
        with (folder / "alive").open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _pid(folder: Path) -> int:
    """The process id of the run's shell; 0 while it is not written."""
    return int((folder / "claim").read_text() or 0)


def _here(handle: Handle) -> None:
    if handle.target != os.uname().nodename:
        raise BackendUnavailable(
            f"{handle.run} runs on the machine {handle.target}", hint="run this command there"
        )
