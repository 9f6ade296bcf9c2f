"""A command beside a rank: a short step of the job on the rank's node, with its output here."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from deploykit.backends import base
from deploykit.backends.slurm import client, remote, run_arrays, ssh
from deploykit.job.model import Handle
from deploykit.lib.errors import UsageError
from deploykit.observe import exit_records


def argv(handle: Handle, rank: int, command: Sequence[str], *, terminal: bool) -> Sequence[str]:
    """The command line of this machine; see `base.Capabilities.enter`."""
    if client.tasks(handle) is not None:
        raise UsageError(
            f"{handle.run} is a job array, whose tasks `exec` and `shell` cannot tell apart yet",
            hint=f"srun --overlap --pty --jobid={handle.id}_TASK bash",
        )
    folder = Path(handle.folder)
    process = base.rank_process(exit_records.processes(folder), handle.run, rank)
    remote_folder = remote.recorded_folder(folder)
    if remote_folder is None:
        base.require_enter(folder, handle.run)
    inner = base.enter_command(
        process, "slurm", remote_folder.folder if remote_folder else str(folder), command
    )
    step = [*_step(run_arrays.step_id(handle), process.host, terminal=terminal), *inner]
    if remote_folder is None:
        unset = (word for name in client.unwanted(os.environ, "") for word in ("-u", name))
        return ["env", *unset, *step]
    needed = shlex.quote(f"{remote_folder.folder}/source/{base.ENTER}")
    lacks = "deploykit: the bundle of this run cannot be entered"
    script = f"[ -e {needed} ] || {{ echo {shlex.quote(lacks)} >&2; exit 69; }}; "
    return ssh.attached(remote_folder.host, f"{script}exec {shlex.join(step)}", terminal=terminal)


def _step(job: str, host: str, *, terminal: bool) -> list[str]:
    """A step with one task on `host`, beside the steps that run there.

    https://slurm.schedmd.com/srun.html#OPT_overlap
    """
    return [
        *("srun", f"--jobid={job}", "--overlap", "--quiet", "--nodes=1", "--ntasks=1"),
        *(f"--nodelist={host}", *(["--pty"] if terminal else [])),
    ]
