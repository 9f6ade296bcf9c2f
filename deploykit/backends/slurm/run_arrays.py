"""Submit several runs as the tasks of one job array: one sbatch, and one bundle.

Each run keeps a folder and a batch script of its own. The task goes on with that script as if it
had been submitted alone. `array_record` describes the array's own folder.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from deploykit.backends.slurm import array_record, client, lookup, script
from deploykit.backends.slurm.options import Options
from deploykit.bundle import archive as bundles
from deploykit.bundle import node_plane as bundle_node_plane
from deploykit.job.model import Handle, Plan
from deploykit.lib import paths


def largest(options: Options) -> int:
    """The most runs that the cluster takes as one array; 0 where these options do not allow it.

    Raises BackendUnavailable when the controller does not answer.
    """
    if options.host is not None or options.array is not None:
        return 0
    match = re.search(r"^MaxArraySize\s*=\s*(\d+)", client.config(), re.MULTILINE)
    return int(match[1]) if match else 0


def submit(plans: Sequence[Plan], folder: Path, name: str, at_once: int) -> list[Handle]:
    """Queue the plans as one array; see `base.Capabilities.submit_array`."""
    first = plans[0]
    client.check_prerequisites(first)
    _unpack(first, folder)
    tasks = paths.private_folder(folder / "tasks")
    run_folders = [paths.run_folder(plan.run) for plan in plans]
    for number, run_folder in enumerate(run_folders):
        (tasks / str(number)).symlink_to(run_folder)
        array_record.write(run_folder, folder, number)
    paths.write(folder / "name", name + "\n")
    paths.write(folder / "cluster", client.cluster_name() + "\n")
    paths.private_folder(folder / "sbatch")
    text = _text(first, folder, name, f"0-{len(plans) - 1}%{at_once}")
    request = client.Request(text, folder, f"`deploykit sweep resume {name}`")
    job = client.queue(request, lambda: lookup.find_by_name(name, None, str(folder)))
    paths.write(folder / "job", job + "\n")
    return [
        Handle("slurm", plan.target, f"{job}_{number}", plan.run, str(run_folders[number]))
        for number, plan in enumerate(plans)
    ]


def _unpack(plan: Plan, folder: Path) -> None:
    """Unpack the source once. A container sees only the run's folder, which then has all of it."""
    source = folder / "source"
    bundles.unpack(bundles.store(plan.bundle), source)
    if plan.options.container is None:
        node_plane = folder / bundle_node_plane.FOLDER
        (source / bundle_node_plane.FOLDER).rename(node_plane)
        (source / bundle_node_plane.FOLDER).symlink_to(node_plane)


def _text(plan: Plan, folder: Path, name: str, tasks: str) -> str:
    """The batch script of the array: the directives of one of its runs, but for their places."""
    values = script.parameters(plan.job, plan.options, name, folder)
    values["additional_parameters"] |= {
        "array": tasks,
        "chdir": str(folder),
        "output": str(folder / "tasks" / "%a" / "logs" / "slurm.log"),
    }
    template = (paths.shipped("templates") / "slurm_array.sh").read_text(encoding="utf-8")
    return script.batch_script(
        values, f"ARRAY_FOLDER={shlex.quote(str(folder))}\n{template.rstrip()}"
    )


def step_id(handle: Handle) -> str:
    """The id of a run's job for srun, which knows no tasks such as ``38_5``.

    Raises BackendUnavailable.
    """
    if "_" not in handle.id:
        return handle.id
    argv = ["squeue", "--noheader", f"--jobs={handle.id}", "--format=%A"]
    return client.output(argv).strip() or handle.id
