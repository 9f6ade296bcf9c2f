"""Jobs as objects of the SageMaker SDK, for notebooks and pipelines that use it.

`deploykit.submit` sends the same request without the SDK, and returns a run.

    from deploykit.sagemaker import estimator, model_trainer

    estimator("job.yaml").fit()  # version 2 of the SDK: sagemaker<3
    model_trainer("job.yaml").train()  # version 3: sagemaker>=3

The SDK is imported only when one of the two is called: https://sagemaker.readthedocs.io/
"""

from __future__ import annotations

import json
import os
from typing import Any

from deploykit.backends.sagemaker import estimator as sdk
from deploykit.backends.sagemaker import model_trainer as sdk3
from deploykit.backends.sagemaker import uploads
from deploykit.job.file import Overrides
from deploykit.job.job import Job, source
from deploykit.run import lifecycle


def estimator(
    job: str | os.PathLike[str] | Job = "job.yaml",
    overrides: Overrides = (),
    *,
    run: str | None = None,
    yes: bool = False,
) -> Any:
    """Return a job's `PyTorch` estimator; `fit()` sends the request that the dry run shows.

    `job` is a job file or a `deploykit.Job`. `overrides` are ``a.b=c``, as after ``--set``. `run`
    names the training job; the default is a new name. `fit()` first uploads the source and this
    machine's data; `yes` confirms more than 10 GB of data. `fit()` takes the SDK's arguments;
    inputs and name default to those of the job. The job is not added to deploykit's list of runs:
    monitor it with the estimator.

    Raises JobFileError with every problem of the job, BackendUnavailable if the SDK is not
    installed, and UsageError for more than 10 GB of data without `yes`.
    """
    sdk.require()
    plan = lifecycle.prepare(source(job), overrides, "sagemaker", run).plan
    if not yes:
        lifecycle.require_confirmation(plan)
    return sdk.estimator(
        plan.job,
        plan.options,
        json.loads(plan.text),
        sdk.session(plan),
        lambda: uploads.upload(plan),
    )


def model_trainer(
    job: str | os.PathLike[str] | Job = "job.yaml",
    overrides: Overrides = (),
    *,
    run: str | None = None,
    yes: bool = False,
    sagemaker_session: Any = None,
) -> Any:
    """Return a job's `ModelTrainer` for version 3 of the SDK; `train()` sends its request.

    `job`, `overrides`, `run` and `yes` are those of `estimator`. `sagemaker_session` is a session
    of the SDK, such as a `PipelineSession` for a pipeline step; the default is a session for the
    job's region and bucket. `train()` first uploads the source and the data. The job is not added
    to deploykit's list of runs: monitor it with the trainer, or with `deploykit attach`.

    The request is that of the dry run, with two exceptions: version 3 starts its own launcher,
    which starts ``launch.py`` below torchrun, and it adds the channels `code` and `sm_drivers`.

    Raises JobFileError with every problem of the job, including settings that version 3 does not
    support (mpirun, SMDDP, `image_entrypoint`, `request`); BackendUnavailable if the SDK is not
    installed; and UsageError for more than 10 GB of data without `yes`.
    """
    sdk3.require()
    plan = lifecycle.prepare(source(job), overrides, "sagemaker", run).plan
    if not yes:
        lifecycle.require_confirmation(plan)
    sdk3.check(plan.job, plan.options)
    return sdk3.model_trainer(
        plan,
        json.loads(plan.text),
        sagemaker_session or sdk3.session(plan),
        lambda: uploads.upload(plan),
    )
