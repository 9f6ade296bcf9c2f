"""SageMaker training jobs. The text of a plan is the CreateTrainingJob request itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from deploykit import backend
from deploykit.backends.sagemaker import oracle, request, service_model
from deploykit.backends.sagemaker.monitor import cancel, find, logs, status
from deploykit.backends.sagemaker.options import Options, environment_region
from deploykit.backends.sagemaker.options import region as region_of
from deploykit.backends.sagemaker.submission import submit
from deploykit.errors import JobFileError, NotFound, UsageError
from deploykit.model import Bundle, Handle, JobSpec, Plan, Problem

if TYPE_CHECKING:
    from deploykit.finding import Finding

SUMMARY = "Amazon SageMaker training jobs, through its SDK or plain boto3"
PROGRAMS: tuple[str, ...] = ()
MODULES = ("boto3",)
PREFLIGHT = backend.PREFLIGHT
_ANY_RUN, _ANY_BUNDLE = "r" * 63, "0" * 64
"""As long as a run id and a hash can be: a request that is valid with these is valid with any."""


def check(job: JobSpec, options: Options) -> Iterator[Problem]:
    """Every problem of a job: the oracle's, then those of the request that would be sent.

    Pure, except that the date decides which images still receive patches. Raises
    BackendUnavailable if botocore is not installed.
    """
    errors = False
    for consequence in oracle.consequences(job, options):
        problem = consequence.problem()
        if problem is not None:
            errors |= problem.severity == "error"
            yield problem
    if not errors:
        rendered = request.render(job, options, run=_ANY_RUN, bundle=_ANY_BUNDLE)
        yield from service_model.problems(rendered)


def plan(job: JobSpec, options: Options, *, run: str, bundle: Bundle) -> Plan:
    """Render the request. The job must have passed `check`, which is not repeated here.

    Raises JobFileError if the container would install the source instead of running it.
    """
    if options.by_torchrun and any(entry.path == "setup.py" for entry in bundle.entries):
        raise JobFileError("the job for SageMaker", [_SETUP_PY])
    rendered = request.render(job, options, run=run, bundle=bundle.hash)
    return Plan(
        backend="sagemaker",
        target=region_of(options) or "",
        run=run,
        text=json.dumps(rendered, indent=2) + "\n",
        language="json",
        job=job,
        options=options,
        bundle=bundle,
        output=request.results(rendered),
    )


_SETUP_PY = Problem(
    "source",
    "contains setup.py: the container would treat the source as a package to install, and refuse "
    "to run it with torch_distributed",
    "add setup.py to .deploykitignore, or choose another source folder",
)


def attach(run: str, folder: Path, target: str | None) -> Handle:
    """The training job of that name in a region, by default the environment's.

    Raises UsageError where no region is chosen, NotFound where it has no such job.
    """
    region = target or environment_region()
    if not region:
        raise UsageError("no region is chosen", hint="--target REGION, or AWS_REGION")
    handle = find(run, folder, region)
    if handle is None:
        raise NotFound(f"SageMaker has no job {run} in {region}", hint="is it in another region?")
    return handle


def examine(
    job: JobSpec, options: Options, *, saved: Path | None, save: Path | None
) -> Iterator[Finding]:
    """Findings about the AWS account and network; see `deploykit.backend.Doctor`."""
    from deploykit.backends.sagemaker import doctor

    yield from doctor.examine(job, options, saved, save)


__all__ = [
    "MODULES",
    "PREFLIGHT",
    "PROGRAMS",
    "SUMMARY",
    "Options",
    "attach",
    "cancel",
    "check",
    "examine",
    "find",
    "logs",
    "plan",
    "status",
    "submit",
]
