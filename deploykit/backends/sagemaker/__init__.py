"""SageMaker training jobs: an artifact that is the CreateTrainingJob request itself."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from deploykit.backends.sagemaker import checks
from deploykit.backends.sagemaker import request as rendering
from deploykit.backends.sagemaker.options import Options as Options
from deploykit.backends.sagemaker.options import region
from deploykit.errors import JobFileError
from deploykit.model import Handle, JobSpec, LogLine, Plan, Problem, Status

if TYPE_CHECKING:
    from deploykit.bundle import Bundle

SUMMARY = "Amazon SageMaker training jobs, through its SDK or plain boto3"
PROGRAMS: tuple[str, ...] = ()
MODULES = ("boto3",)

check = checks.check


def plan(job: JobSpec, options: Options, *, run: str, bundle: Bundle) -> Plan:
    """The request, validated. Raises JobFileError with everything the service would refuse."""
    problems = [p for p in checks.check(job, options) if p.severity == "error"]
    problems += checks.bundled(options, bundle)
    if not problems:
        request = rendering.render(job, options, run=run, bundle=bundle.hash)
        problems = list(checks.described(request))
    if problems:
        raise JobFileError("the job for SageMaker", problems)
    return Plan(
        backend="sagemaker",
        target=region(options) or "",
        run=run,
        text=json.dumps(request, indent=2) + "\n",
        language="json",
        job=job,
        options=options,
        bundle=bundle,
        output=rendering.results(request),
    )


def submit(plan: Plan, folder: Path) -> Handle:
    """Upload the source unless it is there, compare with the SDK, send exactly `plan.text`."""
    from deploykit.backends.sagemaker.sending import submit as send

    return send(plan, folder)


def find(run: str, folder: Path, target: str) -> Handle | None:
    """The training job named `run`; None where the service says that there is none."""
    from deploykit.backends.sagemaker.watching import find as ask

    return ask(run, folder, target)


def status(handles: Sequence[Handle]) -> Mapping[Handle, Status]:
    """The status of many runs: one request each, over one connection a region.

    The service lists jobs only by one common part of their names, so there is no single call.
    """
    from deploykit.backends.sagemaker.watching import status as ask

    return ask(handles)


def logs(handle: Handle, *, follow: bool) -> Iterator[LogLine]:
    """The job's lines in CloudWatch, from all machines, by time."""
    from deploykit.backends.sagemaker.watching import logs as ask

    return ask(handle, follow=follow)


def cancel(handle: Handle) -> None:
    """Stop the training job. One that has ended is left as it is."""
    from deploykit.backends.sagemaker.watching import cancel as ask

    ask(handle)


__all__ = [
    "MODULES",
    "PROGRAMS",
    "SUMMARY",
    "Options",
    "Problem",
    "cancel",
    "check",
    "find",
    "logs",
    "plan",
    "status",
    "submit",
]
