"""SageMaker training jobs. The text of a plan is the CreateTrainingJob request itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from deploykit import backend
from deploykit.backends.sagemaker.monitor import cancel, find, logs, metrics, status
from deploykit.backends.sagemaker.options import Options, environment_region, region
from deploykit.backends.sagemaker.oracle import check
from deploykit.backends.sagemaker.submission import plan, submit
from deploykit.errors import DeploykitError, NotFound, UsageError
from deploykit.model import Handle, JobSpec

if TYPE_CHECKING:
    from deploykit.cost.estimate import Estimate
    from deploykit.finding import Finding

SUMMARY = "Amazon SageMaker training jobs, through its SDK or plain boto3"
PROGRAMS: tuple[str, ...] = ()
MODULES = ("boto3",)
PREFLIGHT = backend.PREFLIGHT


def attach(run: str, folder: Path, target: str | None) -> Handle:
    """The training job of that name in a region, by default the environment's.

    Raises UsageError where no region is chosen, NotFound where it has no such job.
    """
    where = target or environment_region()
    if not where:
        raise UsageError("no region is chosen", hint="--target REGION, or AWS_REGION")
    handle = find(run, folder, where)
    if handle is None:
        raise NotFound(f"SageMaker has no job {run} in {where}", hint="is it in another region?")
    return handle


def missing(absent: Sequence[str]) -> Iterator[tuple[str, str]]:
    """What is missing to submit from this machine; see `deploykit.capabilities.Ready`."""
    if absent:
        yield from ((each, "pip install 'deploykit[sagemaker]', or boto3 alone") for each in absent)
        return
    from deploykit.backends.sagemaker import aws

    where = environment_region()
    if not where:
        yield "no region", "export AWS_REGION=us-east-1, or sagemaker.region in the job file"
    try:
        aws.identify(where)
    except DeploykitError as error:
        yield str(error), error.hint or "aws sts get-caller-identity shows who you are to AWS"


def remains(handle: Handle, output: str) -> Iterator[tuple[str, str]]:
    """The results in S3; the source archive there is shared with other runs."""
    from deploykit import shell

    above, found, _ = output.partition(f"/{handle.run}/")
    if found and above.startswith("s3://"):
        prefix = f"{above}{found}"
        yield prefix, shell.command("aws", "s3", "rm", "--recursive", prefix)


def dump_by_hand(handle: Handle) -> tuple[str, str]:
    """Why no stacks can be taken from here; see `deploykit.capabilities.DumpByHand`."""
    from deploykit.backends.sagemaker import remote_debug

    return remote_debug.dump_by_hand(handle)


def enter(handle: Handle, rank: int, command: Sequence[str], *, terminal: bool) -> Sequence[str]:
    """A shell in the container of a rank's node; see `deploykit.capabilities.Shell`."""
    from deploykit.backends.sagemaker import remote_debug

    return remote_debug.enter(handle, rank, command, terminal=terminal)


def examine(
    job: JobSpec, options: Options, *, saved: Path | None, save: Path | None
) -> Iterator[Finding]:
    """Findings about the AWS account and network; see `deploykit.capabilities.Doctor`."""
    from deploykit.backends.sagemaker import doctor

    yield from doctor.examine(job, options, saved, save)


def bills(options: Options) -> bool:  # noqa: ARG001 - the contract
    """Always."""
    return True


def cost(job: JobSpec, options: Options) -> Estimate:
    """What the job may cost; see `deploykit.capabilities.Cost`."""
    from deploykit.backends.sagemaker import job_cost

    return job_cost.estimate(job, options)


def refresh_prices(job: JobSpec, options: Options) -> str:  # noqa: ARG001 - the contract
    """Ask AWS's price list for the prices of the region; see `deploykit.capabilities.Prices`."""
    from deploykit.backends.sagemaker import price_list

    return price_list.refresh(region(options))


__all__ = [
    "MODULES",
    "PREFLIGHT",
    "PROGRAMS",
    "SUMMARY",
    "Options",
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
]
