"""Submit Python functions to Slurm through submitit, with the resources of a job.

For many small calls, one process each, or arrays of them. `deploykit.launch` calls one function on
all ranks of a distributed job instead.

    from deploykit.slurm import executor

    executor("job.yaml").submit(train, lr=0.1).result()
    executor("job.yaml").map_array(train, [0.1, 0.01])     # one sbatch

https://github.com/facebookincubator/submitit
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
    """A `submitit.SlurmExecutor` with the resources, environment and `slurm` section of `job`,
    a job file or a `deploykit.Job`.

    `overrides` are ``a.b=c``, as after ``--set``. `folder` stores functions, logs and results, and
    must be on a file system shared with the nodes; the default is `functions` in deploykit's
    folder. A function runs once for each process of the job, as a task of srun. `deploykit list`
    does not show these jobs.

    Raises JobFileError with every problem of the job file.
    """
    file = lifecycle.load(source(job), overrides, ["slurm"])
    lifecycle.check(file, "slurm")
    options = file.sections["slurm"]
    if problems := list(_unsupported(file.job, options)):
        raise JobFileError(title(file.path), problems)
    from deploykit.backends.slurm.functions import FunctionExecutor

    location = Path(folder) if folder else paths.state() / "functions" / file.job.name
    return FunctionExecutor(location, file.job, options)


def _unsupported(job: JobSpec, options: Options) -> Iterator[Problem]:
    """Settings that only a script can have."""
    hint = "submit a script instead"
    for name in ("host", "container"):
        if getattr(options, name) is not None:
            yield Problem(f"slurm.{name}", "is not supported for functions", hint)
    if job.outputs:
        yield Problem("outputs", "is not supported for functions", hint)
    for name, value in job.env.items():
        if checks.is_secret(value):
            yield Problem(f"env.{name}", "secrets are not supported for functions", hint)
