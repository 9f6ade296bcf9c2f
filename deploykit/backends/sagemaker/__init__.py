"""SageMaker training jobs: an artifact that is the CreateTrainingJob request itself."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from deploykit import contract
from deploykit.backends.sagemaker import checks
from deploykit.backends.sagemaker import request as rendering
from deploykit.backends.sagemaker.options import Options as Options
from deploykit.backends.sagemaker.options import region as region_of
from deploykit.doctor.finding import Finding
from deploykit.errors import JobFileError, NotFound, UsageError
from deploykit.model import Handle, JobSpec, LogLine, Plan, Problem, Status

if TYPE_CHECKING:
    from deploykit.model import Bundle

SUMMARY = "Amazon SageMaker training jobs, through its SDK or plain boto3"
PROGRAMS: tuple[str, ...] = ()
MODULES = ("boto3",)
PREFLIGHT = contract.PREFLIGHT

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
        target=region_of(options) or "",
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


def attach(run: str, folder: Path, target: str | None) -> Handle:
    """The training job of that name in a region, by default the environment's."""
    region = target or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
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
    "Problem",
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
