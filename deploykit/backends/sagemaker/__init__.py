"""SageMaker training jobs. The text of a plan is the CreateTrainingJob request itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from deploykit.backends import base as backend
from deploykit.backends.sagemaker import aws
from deploykit.backends.sagemaker.downloads import (
    download,
    files,
    remains,
    remove_remains,
    transfer_price,
)
from deploykit.backends.sagemaker.jobs import (
    attach,
    cancel,
    dump_by_hand,
    enter,
    find,
    logs,
    metrics,
    status,
)
from deploykit.backends.sagemaker.offers import alternatives, cost, refresh_prices, when
from deploykit.backends.sagemaker.options import Options, bills, environment_region
from deploykit.backends.sagemaker.policy import submitter_policy
from deploykit.backends.sagemaker.rules import check
from deploykit.backends.sagemaker.submission import plan, submit
from deploykit.backends.sagemaker.uploads import storage_price, unsent_data
from deploykit.job.model import JobSpec
from deploykit.lib.errors import DeploykitError

if TYPE_CHECKING:
    from deploykit.lib.finding import Finding

SUMMARY = "Amazon SageMaker training jobs, through boto3"
PROGRAMS: tuple[str, ...] = ()
MODULES = ("boto3",)
PREFLIGHT = backend.PREFLIGHT


def missing(absent: Sequence[str]) -> Iterator[tuple[str, str]]:
    if absent:
        yield from ((name, f"pip install {name}") for name in absent)
        return
    where = environment_region()
    if not where:
        yield (
            "no region",
            "set sagemaker.region in a job file; for this check: export AWS_REGION=us-east-1",
        )
    try:
        aws.identify(where)
    except DeploykitError as error:
        yield str(error), error.hint or "`aws sts get-caller-identity` shows your AWS identity"


def examine(
    job: JobSpec, options: Options, *, saved: Path | None, save: Path | None
) -> Iterator[Finding]:
    """Findings about the AWS account and network; see `base.Capabilities.examine`."""
    from deploykit.backends.sagemaker import doctor  # the verb's own module

    yield from doctor.examine(job, options, saved, save)


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
    "download",
    "dump_by_hand",
    "enter",
    "examine",
    "files",
    "find",
    "logs",
    "metrics",
    "missing",
    "plan",
    "refresh_prices",
    "remains",
    "remove_remains",
    "status",
    "storage_price",
    "submit",
    "submitter_policy",
    "transfer_price",
    "unsent_data",
    "when",
]
