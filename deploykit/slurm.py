"""Submit Python functions to Slurm through submitit, with the resources of a job.

Use it for many small calls, one process each, or for arrays of calls. To call one function on all
ranks of a distributed job, use `deploykit.launch`.

    from deploykit.slurm import executor

    executor("job.yaml").submit(train, lr=0.1).result()
    executor("job.yaml").map_array(train, [0.1, 0.01])     # one sbatch
    executor("job.yaml", ["resources.nodes=2"]).submit(train).results()  # one for each process

submitit's own defaults are removed: its wckey, its time limit of five minutes, and its throttling
of arrays and submits. States come from squeue instead of sacct, which is not available at every
site.
https://github.com/facebookincubator/submitit
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from submitit.core import core, utils
from submitit.slurm import slurm

from deploykit.backends import base as backend
from deploykit.backends.slurm import commands, script, states
from deploykit.backends.slurm.options import Options
from deploykit.job import checks
from deploykit.job.file import Overrides, title
from deploykit.job.job import Job, source
from deploykit.job.model import JobSpec, Problem
from deploykit.lib import paths
from deploykit.lib.errors import JobFileError
from deploykit.run import lifecycle


def executor(
    job: str | os.PathLike[str] | Job = "job.yaml",
    overrides: Overrides = (),
    *,
    folder: str | Path | None = None,
) -> Any:
    """Return a `submitit.SlurmExecutor` with a job's resources, environment and `slurm` section.

    `job` is a job file or a `deploykit.Job`. `overrides` are ``a.b=c``, as after ``--set``.
    `folder` stores functions, logs and results, and must be on a file system shared with the nodes;
    the default is `functions` in deploykit's folder. A function runs once for each process of the
    job, as a task of srun. `deploykit list` does not show these jobs.

    Raises JobFileError with every problem of the job file.
    """
    file = lifecycle.load(source(job), overrides, ["slurm"])
    lifecycle.check(file, "slurm")
    options = file.sections["slurm"]
    if problems := list(_unsupported(file.job, options)):
        raise JobFileError(title(file.path), problems)
    location = Path(folder) if folder else paths.state() / "functions" / file.job.name
    return _FunctionExecutor(location, file.job, options)


def _unsupported(job: JobSpec, options: Options) -> Iterator[Problem]:
    """Settings that only a script can have."""
    hint = "submit a script instead"
    for name in ("host", "container"):
        if getattr(options, name) is not None:
            yield Problem(f"slurm.{name}", "is not supported for functions", hint)
    if job.outputs:
        yield Problem("outputs", "is not supported for functions", hint)
    if job.environment is not None and job.environment.node_local:
        yield Problem("environment.node_local", "is not supported for functions", hint)
    for name in backend.staged(job):
        yield Problem(f"data.{name}.stage", "is not supported for functions", hint)
    if backend.checkpoint_bucket(job):
        yield Problem("checkpoints", "a bucket is not supported for functions", hint)
    if job.keep_checkpoints is not None:
        yield Problem("keep_checkpoints", "is not supported for functions", hint)
    for name, value in job.env.items():
        if checks.is_secret(value):
            yield Problem(f"env.{name}", "secrets are not supported for functions", hint)


class _SqueueWatcher(slurm.SlurmInfoWatcher):
    """The states of all jobs from one squeue, which includes jobs that ended recently."""

    def _make_command(self) -> list[str] | None:
        if not self._registered - self._finished:
            return None
        options = ["--me", "--array", "--states=all", "--noheader"]
        return ["squeue", *options, "--format=%i|%T"]

    def read_info(self, string: bytes | str) -> dict[str, dict[str, str]]:
        """Read the output of squeue into submitit's record of each registered job.

        submitit treats a state that it does not know as final, so that every other state is given
        as RUNNING, and a job that squeue does not list as NO_RECORD.
        """
        text = string.decode() if isinstance(string, bytes) else string
        records = {job: {"JobID": job, "State": "NO_RECORD"} for job in self._registered}
        for line in text.splitlines():
            job, _, native = line.partition("|")
            state = native if states.is_final(native) else "RUNNING"
            records[job] = {"JobID": job, "State": state}
        return records


class _FunctionJob(slurm.SlurmJob[Any]):
    """A function that was submitted, and its result."""

    watcher = _SqueueWatcher(delay_s=15)


class _FunctionExecutor(slurm.SlurmExecutor):
    """Submits functions. An array costs one sbatch, whatever its length."""

    job_class = _FunctionJob

    def __init__(self, folder: Path, job: JobSpec, options: Options) -> None:
        paths.private_folder(folder)  # replacing a pickle in it means running code as the user
        super().__init__(folder, python=script.function_python(job, options))
        self._throttling = 0.0
        self.update_parameters(**script.function_parameters(job, options))

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        paths.make_private(submission_file_path)
        text = submission_file_path.read_text()
        argv = super()._make_submission_command(submission_file_path)
        return [*commands.clean_environment(text), *argv]

    def _internal_process_submissions(
        self, delayed_submissions: list[utils.DelayedSubmission]
    ) -> list[core.Job[Any]]:
        """As in submitit, which would use a plain SlurmExecutor for an array."""
        if len(delayed_submissions) == 1:
            jobs = super()._internal_process_submissions(delayed_submissions)
            paths.make_private(jobs[0].paths.submitted_pickle)
            return jobs
        folder = Path(self.folder)
        prefix = folder / uuid.uuid4().hex
        for number, delayed in enumerate(delayed_submissions):
            delayed.set_timeout(self.parameters["time"], self.max_num_timeout)
            delayed.dump(f"{prefix}-{number}.pkl")
            paths.make_private(Path(f"{prefix}-{number}.pkl"))
        array = self._submit_array(len(delayed_submissions))
        jobs = []
        for number in range(len(delayed_submissions)):
            name = f"{array.job_id}_{number}"
            os.rename(f"{prefix}-{number}.pkl", f"{folder}/{name}_submitted.pkl")  # noqa: PTH104
            jobs.append(_FunctionJob(folder, name, range(self._num_tasks())))
        return jobs

    def _submit_array(self, count: int) -> core.Job[Any]:
        array = {"map_count": count, "array_parallelism": count}
        self.parameters.update(array)
        try:
            return self._submit_command(self._submitit_command_str)
        finally:
            for name in array:
                del self.parameters[name]
