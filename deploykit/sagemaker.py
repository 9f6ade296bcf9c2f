"""For notebooks that use the SageMaker SDK: a job as one of its estimators.

`deploykit.submit` sends the same request without the SDK, and returns a run.

    from deploykit.sagemaker import estimator

    estimator("job.yaml").fit()

Requires the SageMaker SDK 2.x (``sagemaker<3``), which is imported only when `estimator` is called:
https://sagemaker.readthedocs.io/en/v2/
"""

from __future__ import annotations

import json
import os
from typing import Any

from deploykit.backends.sagemaker import estimator as sdk
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
    names the training job; default: a new name. `fit()` uploads the source and the data of this
    machine first; `yes` confirms more than 10 GB of data. Its arguments are the SDK's; the defaults
    for inputs and name are those of the job. The job is not added to deploykit's list of runs:
    monitor it with the estimator.

    Raises JobFileError with every problem of the job, BackendUnavailable if the SDK is not
    installed, and UsageError for much data without `yes`.
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
