"""A backend for tests of sweeps: one process in the background, without torchrun, so without torch.

It starts a run once, however often `submit` is called or killed: the shell claims its folder.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from deploykit.backends import base as backend
from deploykit.bundle import archive as bundle
from deploykit.cost.estimate import for_machine
from deploykit.job.model import Handle, Plan, State, Status
from deploykit.lib.errors import SubmitRefused
from deploykit.observe import logfiles

SUMMARY = "a process on this machine"
PROGRAMS = ("sh",)
MODULES = ()
UNLIMITED = True


@dataclass(frozen=True)
class Options:
    """The `plain` section."""

    price: str | None = None
    billed: int = 1
    slots: int = 0
    refuse: str | None = None
    """A file: while it exists, jobs are refused."""


def check(job, options):
    yield from ()


def plan(job, options, *, run, bundle):
    checkpoints = job.checkpoints or "../checkpoints"
    variables = [f"{name}={value}" for name, value in sorted(job.env.items())]
    variables.append(f"DEPLOYKIT_CHECKPOINT_DIR={checkpoints}")
    words = ["env", *variables, sys.executable, *backend.program(job)]
    text = f"set -C; echo $$ > ../claim || exit 0\n{shlex.join(words)} > ../logs/node-0.log 2>&1\n"
    text += "echo $? > ../code.new; mv ../code.new ../code\n"
    return Plan("plain", "here", run, text, "sh", job, options, bundle)


def submit(plan, folder):
    if plan.options.refuse and Path(plan.options.refuse).exists():
        raise SubmitRefused("the queue is full")
    bundle.unpack(bundle.store(plan.bundle), folder / "source")
    for name in backend.FOLDERS:
        (folder / name).mkdir(exist_ok=True)
    (folder / "billed").write_text(str(plan.options.billed))
    (folder / "spawned").touch()
    subprocess.Popen(
        ["sh", "-c", 'sh "$0" &', str(folder / "plan.sh")],
        cwd=folder / "source",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ).wait()
    handle = find(plan.run, folder, "here")
    assert handle is not None
    return handle


def find(run, folder, target):
    end = time.monotonic() + 60
    while (folder / "spawned").exists() and time.monotonic() < end:
        if (folder / "claim").exists() and (folder / "claim").read_text():
            return Handle("plain", "here", run, run, str(folder))
        time.sleep(0.01)
    return None


def status(handles):
    return {handle: _status(Path(handle.folder)) for handle in handles}


def _status(folder):
    billed = float((folder / "billed").read_text())
    if (folder / "code").exists():
        code = int((folder / "code").read_text())
        state = State.FAILED if code else State.SUCCEEDED
        return Status(state, "ended", f"exit code {code}", code, billed=billed)
    if (folder / "cancelled").exists():
        return Status(State.CANCELLED, "cancelled", billed=billed)
    return Status(State.RUNNING, "alive")


def logs(handle, *, follow):
    yield from logfiles.read(Path(handle.folder, "logs"), follow=False, ended=lambda: True)


def cancel(handle):
    folder = Path(handle.folder)
    with contextlib.suppress(ProcessLookupError):
        group = os.getpgid(int((folder / "claim").read_text()))  # of the shell that started it
        os.killpg(group, signal.SIGKILL)
    (folder / "cancelled").touch()


def bills(options):
    return options.price is not None


def cost(job, options):
    return for_machine("this machine", options.price, "plain.price", job.resources.time_limit)


def slots(job, options):
    return [{"FROM_ENV": str(slot)} for slot in range(options.slots)]


def check_function(options):
    """The capability Launch: the run folder is seen."""
    yield from ()


def started(home):
    """How often each run was started, by its id."""
    return {
        path.parent.name: len(path.read_text().splitlines())
        for path in Path(home, "runs").glob("*/starts")
    }
