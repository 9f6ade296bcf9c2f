"""submitit's executor with a job file's resources and options: Python functions as Slurm jobs.

None of submitit's own defaults is left in: no wckey, no limit of five minutes, no throttle of
arrays or of submits, and squeue in the place of sacct, which not every site has.
"""

from __future__ import annotations

import os
import shlex
import uuid
from pathlib import Path
from typing import Any

from submitit.core import core, utils
from submitit.slurm import slurm

from deploykit import paths
from deploykit.backends.slurm import script, sending, states
from deploykit.backends.slurm.options import Options
from deploykit.model import JobSpec


class Watcher(slurm.SlurmInfoWatcher):
    """States of all jobs by one squeue, which also knows those that have ended of late."""

    def _make_command(self) -> list[str] | None:
        if not self._registered - self._finished:
            return None
        chosen = ["--me", "--array", "--states=all", "--noheader"]
        return ["squeue", *chosen, "--format=%i|%T"]

    def read_info(self, string: bytes | str) -> dict[str, dict[str, str]]:
        text = string.decode() if isinstance(string, bytes) else string
        found = {}
        for line in text.splitlines():
            job, _, native = line.partition("|")
            # submitit takes any word that it does not know for an end
            final = states.is_final(native)
            found[job] = {"JobID": job, "State": native if final else "RUNNING"}
        gone = self._registered.difference(found)
        return {**{job: {"JobID": job, "State": "FORGOTTEN"} for job in gone}, **found}


class FunctionJob(slurm.SlurmJob[Any]):
    """A function that was sent, and its result."""

    watcher = Watcher(delay_s=15)


class Functions(slurm.SlurmExecutor):
    """Sends functions. An array is one call of sbatch, whatever its length."""

    job_class = FunctionJob

    def __init__(self, folder: Path, job: JobSpec, options: Options) -> None:
        paths.private_folder(folder)  # a pickle in it that was exchanged would run as the user
        super().__init__(folder, python=shlex.quote(options.python) if options.python else None)
        self._throttling = 0.0
        self.update_parameters(**script.function_parameters(job, options))

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        paths.make_private(submission_file_path)
        text = submission_file_path.read_text()
        drop = sending.unwanted(os.environ, text)
        argv = super()._make_submission_command(submission_file_path)
        return ["env", *(word for name in drop for word in ("-u", name)), *argv]

    def _internal_process_submissions(
        self, delayed_submissions: list[utils.DelayedSubmission]
    ) -> list[core.Job[Any]]:
        """As submitit does it, without a plain executor in the place of this one for an array."""
        if len(delayed_submissions) == 1:
            jobs = super()._internal_process_submissions(delayed_submissions)
            paths.make_private(jobs[0].paths.submitted_pickle)
            return jobs
        folder = Path(self.folder)
        waiting = folder / uuid.uuid4().hex
        for number, delayed in enumerate(delayed_submissions):
            delayed.set_timeout(self.parameters["time"], self.max_num_timeout)
            delayed.dump(f"{waiting}-{number}.pkl")
            paths.make_private(Path(f"{waiting}-{number}.pkl"))
        array = self._send_array(len(delayed_submissions))
        jobs = []
        for number in range(len(delayed_submissions)):
            name = f"{array.job_id}_{number}"
            os.rename(f"{waiting}-{number}.pkl", f"{folder}/{name}_submitted.pkl")  # noqa: PTH104
            jobs.append(FunctionJob(folder, name, range(self._num_tasks())))
        return jobs

    def _send_array(self, count: int) -> core.Job[Any]:
        array = {"map_count": count, "array_parallelism": count}
        self.parameters.update(array)
        try:
            return self._submit_command(self._submitit_command_str)
        finally:
            for name in array:
                del self.parameters[name]
