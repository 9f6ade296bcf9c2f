"""The Slurm backend: one batch job, with one launcher on each node.

`check` and `plan` need no Slurm. What asks a cluster is imported when it is used, so that a dry run
does not pay for it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from deploykit.backends import base as backend
from deploykit.backends.slurm.arrays import choose_tasks as choose_tasks
from deploykit.backends.slurm.arrays import tasks as tasks
from deploykit.backends.slurm.checks import bills as bills
from deploykit.backends.slurm.checks import check as check
from deploykit.backends.slurm.checks import check_function as check_function
from deploykit.backends.slurm.options import Options as Options
from deploykit.backends.slurm.script import plan as plan

if TYPE_CHECKING:
    from deploykit.backends.slurm.commands import missing as missing
    from deploykit.backends.slurm.commands import node_names as node_names
    from deploykit.backends.slurm.doctor import examine as examine
    from deploykit.backends.slurm.jobs import cancel as cancel
    from deploykit.backends.slurm.jobs import cancel_all as cancel_all
    from deploykit.backends.slurm.jobs import dump as dump
    from deploykit.backends.slurm.jobs import enter as enter
    from deploykit.backends.slurm.jobs import logs as logs
    from deploykit.backends.slurm.jobs import status as status
    from deploykit.backends.slurm.jobs import task_status as task_status
    from deploykit.backends.slurm.remote import download as download
    from deploykit.backends.slurm.remote import files as files
    from deploykit.backends.slurm.remote import logs_elsewhere as logs_elsewhere
    from deploykit.backends.slurm.remote import remains as remains
    from deploykit.backends.slurm.remote import remove_remains as remove_remains
    from deploykit.backends.slurm.sbatch import find as find
    from deploykit.backends.slurm.sbatch import largest_array as largest_array
    from deploykit.backends.slurm.sbatch import submit as submit
    from deploykit.backends.slurm.sbatch import submit_array as submit_array
    from deploykit.backends.slurm.sbatch import when as when
    from deploykit.backends.slurm.site import cost as cost
    from deploykit.backends.slurm.site import probe as probe

SUMMARY = "a Slurm cluster, through sbatch; one launcher per node"
PROGRAMS = ("sbatch", "squeue", "scontrol", "scancel", "srun")
MODULES = ("submitit",)
PREFLIGHT = backend.PREFLIGHT

_HOMES = {
    **dict.fromkeys(("missing", "node_names"), "commands"),
    **dict.fromkeys(("status", "task_status", "logs", "cancel", "cancel_all"), "jobs"),
    **dict.fromkeys(("dump", "enter"), "jobs"),
    **dict.fromkeys(("submit", "find", "largest_array", "submit_array", "when"), "sbatch"),
    **dict.fromkeys(("download", "files", "logs_elsewhere", "remains", "remove_remains"), "remote"),
    **dict.fromkeys(("cost", "probe"), "site"),
    "examine": "doctor",
}
"""The modules of the functions that a dry run does not call."""


if not TYPE_CHECKING:  # to mypy each other name is an error

    def __getattr__(name: str) -> Any:
        """Import what is used (PEP 562)."""
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
