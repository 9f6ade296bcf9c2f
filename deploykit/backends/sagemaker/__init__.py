"""SageMaker training jobs. The text of a plan is the CreateTrainingJob request itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from deploykit.backends import base as backend
from deploykit.backends.sagemaker.job_cost import alternatives
from deploykit.backends.sagemaker.job_cost import estimate as cost
from deploykit.backends.sagemaker.monitor import cancel, find, logs, metrics, status
from deploykit.backends.sagemaker.options import Options, bills, environment_region
from deploykit.backends.sagemaker.oracle import check
from deploykit.backends.sagemaker.submission import plan, submit
from deploykit.job.model import Handle, JobSpec, Plan
from deploykit.lib.errors import DeploykitError, NotFound, UsageError

if TYPE_CHECKING:
    from deploykit.backends.base import Start
    from deploykit.lib.finding import Finding

SUMMARY = "Amazon SageMaker training jobs, through its SDK or plain boto3"
PROGRAMS: tuple[str, ...] = ()
MODULES = ("boto3",)
PREFLIGHT = backend.PREFLIGHT


def attach(run: str, folder: Path, target: str | None) -> Handle:
    """The training job of that name in a region, by default the environment's.

    Raises UsageError if no region is chosen, NotFound if it has no such job.
    """
    region = target or environment_region()
    if not region:
        raise UsageError("no region is chosen", hint="--target REGION, or AWS_REGION")
    handle = find(run, folder, region)
    if handle is None:
        raise NotFound(f"SageMaker has no job {run} in {region}", hint="is it in another region?")
    return handle


def missing(absent: Sequence[str]) -> Iterator[tuple[str, str]]:
    """What is missing to submit from this machine; see `base.Capabilities.missing`."""
    if absent:
        yield from ((each, "pip install 'deploykit[sagemaker]', or boto3 alone") for each in absent)
        return
    from deploykit.backends.sagemaker import aws

    region = environment_region()
    if not region:
        yield (
            "no region",
            "a job file may set sagemaker.region; for this check: export AWS_REGION=us-east-1",
        )
    try:
        aws.identify(region)
    except DeploykitError as error:
        yield str(error), error.hint or "aws sts get-caller-identity shows who you are to AWS"


def remains(handle: Handle, output: str) -> Iterator[tuple[str, str]]:
    """The results in S3; the source archive there is shared with other runs."""
    from deploykit.lib import shell

    above, of_run, _ = output.partition(f"/{handle.run}/")
    if of_run and above.startswith("s3://"):
        prefix = f"{above}{of_run}"
        yield prefix, shell.command("aws", "s3", "rm", "--recursive", prefix)


def dump_by_hand(handle: Handle) -> tuple[str, str]:
    """Why no stacks can be taken from here; see `base.Capabilities.dump_by_hand`."""
    from deploykit.backends.sagemaker import remote_debug

    return remote_debug.dump_by_hand(handle)


def enter(handle: Handle, rank: int, command: Sequence[str], *, terminal: bool) -> Sequence[str]:
    """A shell in the container of a rank's node; see `base.Capabilities.enter`."""
    from deploykit.backends.sagemaker import remote_debug

    return remote_debug.enter(handle, rank, command, terminal=terminal)


def examine(
    job: JobSpec, options: Options, *, saved: Path | None, save: Path | None
) -> Iterator[Finding]:
    """Findings about the AWS account and network; see `base.Capabilities.examine`."""
    from deploykit.backends.sagemaker import doctor

    yield from doctor.examine(job, options, saved, save)


def when(plan: Plan) -> Iterator[Start]:
    """What the quotas allow, what spot instances cost, and which training plans are on offer."""
    from deploykit.backends.sagemaker import plan_offers, quota

    yield from quota.starts(plan)
    yield from plan_offers.starts(plan)


def refresh_prices(job: JobSpec, options: Options) -> str:  # noqa: ARG001 - the contract
    """Ask AWS's price list for the prices of the region; see `base.Capabilities.refresh_prices`."""
    from deploykit.backends.sagemaker import price_list
    from deploykit.backends.sagemaker.options import region

    return price_list.refresh(region(options))


__all__ = [
    "MODULES",
    "PREFLIGHT",
    "PROGRAMS",
    "SUMMARY",
    "Options",
    "alternatives",
    "attach",
    "bills",
    "cancel",
    "check",
    "cost",
    "dump_by_hand",
    "enter",
    "examine",
    "find",
    "logs",
    "metrics",
    "missing",
    "plan",
    "refresh_prices",
    "remains",
    "status",
    "submit",
    "when",
]
