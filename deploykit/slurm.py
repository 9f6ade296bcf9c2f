"""For Python code: a job file as submitit's own executor of functions.

    from deploykit.slurm import executor

    executor("job.yaml").submit(train, lr=0.1).result()
    executor("job.yaml").map_array(train, [0.1, 0.01])     # one call of sbatch

https://github.com/facebookincubator/submitit
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from deploykit import contract, lifecycle, paths
from deploykit.backends.slurm.options import Options
from deploykit.errors import JobFileError
from deploykit.model import JobSpec, Problem


def executor(
    job: str | Path = "job.yaml", overrides: Sequence[str] = (), *, folder: str | Path | None = None
) -> Any:
    """A `submitit.SlurmExecutor` with the resources, the environment and the `slurm` section.

    `overrides` are ``a.b=c``, as after ``--set``. Functions, logs and results lie in `folder`,
    which every node must see; default: `functions` in deploykit's own. A function runs once for
    each process of the job, as a task of srun. The jobs are not in deploykit's list of runs.

    Raises JobFileError with every problem of the job.
    """
    path = Path(job)
    file = lifecycle.load(path, overrides, ["slurm"])
    lifecycle.check(file, "slurm")
    options = file.sections["slurm"]
    if problems := list(_only_for_scripts(file.job, options)):
        raise JobFileError(str(path), problems)
    from deploykit.backends.slurm.functions import Functions

    place = Path(folder) if folder else paths.state() / "functions" / file.job.name
    return Functions(place, file.job, options)


def _only_for_scripts(job: JobSpec, options: Options) -> Iterator[Problem]:
    for name in ("host", "container"):
        if getattr(options, name) is not None:
            yield Problem(f"slurm.{name}", "a function cannot be sent with it", "send a script")
    for name, value in job.env.items():
        if contract.is_secret(value):
            yield Problem(f"env.{name}", "a function gets no secrets", "send a script")
