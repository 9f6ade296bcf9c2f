"""SageMaker training jobs. The text of a plan is the CreateTrainingJob request itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from deploykit.backends import base as backend
from deploykit.backends.sagemaker import aws
from deploykit.backends.sagemaker.deployment import check_deployment, plan_deployment
from deploykit.backends.sagemaker.downloads import (
    download,
    files,
    remains,
    remove_remains,
    transfer_price,
)
from deploykit.backends.sagemaker.endpoints import (
    conditions,
    deploy,
    deploy_later,
    endpoint_logs,
    invoke,
    may_deploy,
    plan_scale,
    remove_deployment,
    scale,
    switch,
)
from deploykit.backends.sagemaker.inventory import billed_endpoints
from deploykit.backends.sagemaker.jobs import (
    attach,
    cancel,
    dump_by_hand,
    enter,
    find,
    logs,
    metrics,
    pages,
    status,
)
from deploykit.backends.sagemaker.model_packages import plan_registration, register
from deploykit.backends.sagemaker.offers import alternatives, cost, refresh_prices, when
from deploykit.backends.sagemaker.options import Options, bills, environment_region
from deploykit.backends.sagemaker.policy import submitter_policy
from deploykit.backends.sagemaker.rules import check, setting_rules
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
            "no AWS region is set",
            "set sagemaker.region in the job file; for this check: export AWS_REGION=us-east-1",
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
    "billed_endpoints",
    "bills",
    "cancel",
    "check",
    "check_deployment",
    "conditions",
    "cost",
    "deploy",
    "deploy_later",
    "download",
    "dump_by_hand",
    "endpoint_logs",
    "enter",
    "examine",
    "files",
    "find",
    "invoke",
    "logs",
    "may_deploy",
    "metrics",
    "missing",
    "pages",
    "plan",
    "plan_deployment",
    "plan_registration",
    "plan_scale",
    "refresh_prices",
    "register",
    "remains",
    "remove_deployment",
    "remove_remains",
    "scale",
    "setting_rules",
    "status",
    "storage_price",
    "submit",
    "submitter_policy",
    "switch",
    "transfer_price",
    "unsent_data",
    "when",
]
