"""The stacks of a job's ranks: one short step beside them on each of their nodes."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from deploykit.backends import base
from deploykit.backends.slurm import client, complaints, remote, run_arrays, ssh
from deploykit.job.model import Handle
from deploykit.lib import paths, shell
from deploykit.lib.errors import UsageError
from deploykit.observe import exit_records
from deploykit.observe.inspect.stacks import FOLDER

_PATIENCE = 120.0
"""Seconds for all nodes."""


def dump(handle: Handle, folder: Path, *, native: bool) -> Sequence[str]:
    """Have each node write the stacks of its ranks; see `base.Capabilities.dump`."""
    if client.tasks(handle) is not None:
        raise UsageError(
            f"{handle.run} is a job array, whose tasks `dump` cannot tell apart yet",
            hint=f"log in to the task's node and run `py-spy dump --pid PID` ({handle.id}_TASK)",
        )
    processes = exit_records.processes(Path(handle.folder))
    base.require_processes(processes, handle.run)
    remote_folder = remote.recorded_folder(Path(handle.folder))
    run_folder = remote_folder.folder if remote_folder else handle.folder
    stacks_folder = f"{run_folder}/{FOLDER}/{folder.name}"
    command = base.dump_command(processes[0], "slurm", (run_folder, stacks_folder), native=native)
    argv = [
        *srun_argv(run_arrays.step_id(handle), sorted({one.host for one in processes})),
        *command,
    ]
    if remote_folder is None:
        unset = (word for name in client.unwanted(os.environ, "") for word in ("-u", name))
        done = shell.run(["env", *unset, *argv], timeout=_PATIENCE)
        return _complaints(done.code, done.err)
    script = f"{shlex.join(argv)}; code=$?; cat {shlex.quote(stacks_folder)}/*.json; exit $code"
    code, out, err = ssh.run(remote_folder.host, script)
    paths.make_folder(folder.parent)
    paths.make_folder(folder)
    for number, line in enumerate(out.splitlines()):
        paths.write(folder / f"node-{number}.json", line + b"\n")
    return _complaints(code, err)


def srun_argv(job: str, hosts: Sequence[str]) -> list[str]:
    """A step of the job with one task on each host, beside the steps that run there.

    https://slurm.schedmd.com/srun.html#OPT_overlap
    """
    count = len(hosts)
    return [
        *("srun", f"--jobid={job}", "--overlap", "--quiet", "--input=none"),
        *(f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1"),
        *(f"--nodelist={','.join(hosts)}", "--kill-on-bad-exit=0"),
    ]


def _complaints(code: int, err: str) -> list[str]:
    return [f"srun: {complaints.in_one_line(err)}"] if code else []
