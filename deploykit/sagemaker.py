"""For notebooks: a job file as an estimator of the SageMaker SDK.

    from deploykit.sagemaker import estimator

    estimator("job.yaml").fit()

Requires the SageMaker SDK 2.x (``pip install 'deploykit[sagemaker]'``), which is imported only when
`estimator` is called. https://sagemaker.readthedocs.io/en/v2/
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deploykit import lifecycle
from deploykit.errors import BackendUnavailable


def estimator(
    job: str | Path = "job.yaml", overrides: Sequence[str] = (), *, run: str | None = None
) -> Any:
    """The `PyTorch` estimator of a job file; `fit()` sends the request that the dry run shows.

    `overrides` are ``a.b=c``, as after ``--set``. `run` names the training job; default: a new
    name. `fit()` uploads the source first. Its arguments are the SDK's; the defaults for inputs and
    name are those of the job. The job is not added to deploykit's list of runs: monitor it with the
    estimator.

    Raises JobFileError with every problem of the job, and BackendUnavailable if the SDK is not
    installed.
    """
    from deploykit.backends.sagemaker import sdk, submission

    if not submission.sdk_available():
        raise BackendUnavailable(
            "the SageMaker SDK 2.x is not installed", hint="pip install 'deploykit[sagemaker]'"
        )
    plan = lifecycle.prepare(Path(job), overrides, "sagemaker", run).plan
    arguments = sdk.estimator_arguments(
        plan.job, plan.options, run=plan.run, bundle=plan.bundle.hash
    )
    return sdk.estimator(arguments, sdk.session(arguments), lambda: submission.upload(plan))
