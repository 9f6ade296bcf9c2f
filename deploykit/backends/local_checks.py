"""Whether this machine can run a job: its Python, its GPUs and its processors."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from deploykit.job import machine
from deploykit.job.model import JobSpec, Problem

_RANKS_PER_CORE = 4
"""Above which a job on this machine is probably meant for another one."""


def check_python(text: str) -> Iterator[Problem]:
    """Whether the trainer's Python is a program."""
    python, hint = Path(text), "the path that `command -v python3` prints"
    if python.is_absolute():
        if not (python.is_file() and os.access(python, os.X_OK)):
            message = f"{python} {'is not executable' if python.exists() else 'was not found'}"
            yield Problem("local.python", message, hint)
    elif text.startswith("~"):
        message = f"{text}: the home folder of {python.parts[0]} was not found"
        yield Problem("local.python", message, hint)
    elif len(python.parts) > 1:
        message = f"{python} is relative, and the job starts in a copy of the source"
        yield Problem("local.python", message, f"an absolute path, such as {Path.cwd() / python}")
    elif shutil.which(text) is None:
        yield Problem("local.python", f"{text} is not on PATH", hint)


def check_machine(job: JobSpec) -> Iterator[Problem]:
    """Whether this machine has what the emulated nodes together need."""
    nodes, gpus = job.resources.nodes, job.resources.gpus_per_node
    available = machine.gpus(machine.visible(job.env)) if gpus else 0
    if gpus and available == 0:
        message = "this machine has no usable GPU: the ranks run without one"
        hint = "gpus_per_node: 0 with processes_per_node, to train on the CPU"
        yield Problem("resources.gpus_per_node", message, hint, severity="warning")
    elif available is not None and nodes * gpus > available:
        each = f"{gpus} on each of {nodes} emulated nodes" if nodes > 1 else str(gpus)
        message = f"this machine has {available} GPUs that the job can use, and it requests {each}"
        if gpus <= available:
            hint = f"nodes: {available // gpus}"
            yield Problem("resources.nodes", message, hint, severity="warning")
            return
        too_many = (job.resources.processes_per_node or 0) > available
        hint = f"gpus_per_node: {available}" + f", processes_per_node: {available}" * too_many
        yield Problem("resources.gpus_per_node", message, hint)
    ranks, cores = job.resources.world_size, machine.cpus()
    if not gpus and ranks > _RANKS_PER_CORE * cores:
        message = f"{ranks} ranks would share {cores} CPU cores"
        yield Problem("resources.processes_per_node", message, severity="warning")
