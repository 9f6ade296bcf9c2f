"""For notebooks: a job file as the SageMaker SDK's own estimator.

    from deploykit.sagemaker import estimator

    estimator("job.yaml").fit()

It needs the SageMaker SDK 2.x (``pip install 'deploykit[sagemaker]'``), which is imported when
`estimator` is called and not before. https://sagemaker.readthedocs.io/en/v2/
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
    """The ready `PyTorch` estimator of a job file; `fit()` sends the request that the plan shows.

    `overrides` are ``a.b=c``, as after ``--set``. `run` names the training job; default: a new
    name. `fit()` uploads the source first; its arguments are those of the SDK, and the inputs and
    the job's name are already those of the job. The job is not in deploykit's list of runs: watch
    it with the estimator.

    Raises JobFileError with every problem of the job, and BackendUnavailable without the SDK.
    """
    from deploykit.backends.sagemaker import sdk, sdk_terms, uploading

    if not sdk.available():
        raise BackendUnavailable(
            "the SageMaker SDK 2.x is not installed", hint="pip install 'deploykit[sagemaker]'"
        )
    plan = lifecycle.prepare(Path(job), overrides, "sagemaker", run).plan
    asked = sdk_terms.arguments(plan.job, plan.options, run=plan.run, bundle=plan.bundle.hash)
    return sdk.estimator(asked, sdk.session(asked), lambda: uploading.upload(plan))
