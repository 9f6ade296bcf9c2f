"""What the quotas of the account allow: AWS tells no start time beforehand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from deploykit.backends.base import Start
from deploykit.backends.sagemaker import aws, requirements, spot_history
from deploykit.backends.sagemaker.options import Options
from deploykit.job.model import Plan
from deploykit.lib.errors import DeploykitError

_UNKNOWN = "AWS does not say when instances will be free"


def starts(plan: Plan) -> Iterator[Start]:
    """Whether the quotas allow the job as it is, and on spot instances.

    Where they cannot be read, that is said. Raises NotPermitted without valid credentials, and
    BackendUnavailable if AWS cannot be reached at all.
    """
    quotas: Mapping[str, float] | DeploykitError
    try:
        quotas = _quotas(plan.target)
    except DeploykitError as error:
        if error.__cause__ is None or aws.code(error.__cause__) not in aws.DENIED:
            aws.account(plan.target)
        quotas = error
    options: Options = plan.options
    yield _start(plan, options, quotas)
    other = _on_spot(plan)
    if other is not None:
        wait = f"{other.max_wait}s"
        settings = {"sagemaker.spot": "true", "sagemaker.max_wait": wait}
        yield _start(plan, other, quotas)._replace(settings=settings)


def _on_spot(plan: Plan) -> Options | None:
    """The job on spot instances, which it may await as long as it runs; None where it has them."""
    options: Options = plan.options
    if options.spot or options.training_plan or options.keep_alive or options.instance_groups:
        return None
    longest = plan.job.resources.time_limit * (1 + plan.job.retries)
    return replace(options, spot=True, max_wait=2 * longest)


def _start(plan: Plan, options: Options, quotas: Mapping[str, float] | DeploykitError) -> Start:
    """Whether the quota allows the job with these options."""
    required = requirements.of_job(plan.job, options, plan.target)
    where = f"{options.training_type}{' (spot)' * options.spot} in {plan.target}"
    value = None if isinstance(quotas, DeploykitError) else quotas.get(required.quota)
    if value is not None and value < required.nodes:
        reason = f"the quota {required.quota!r} is {value:g}, and the job needs {required.nodes}"
        return Start(where, options, None, reason, possible=False)
    known = "not listed" if value is None else f"{value:g}"
    if isinstance(quotas, DeploykitError):
        known = f"not known: {quotas.message}"
    more = _UNKNOWN
    if options.spot:
        more = spot_history.sentence(options.training_type, plan.target)
    return Start(where, options, None, f"the quota {required.quota!r} is {known}; {more}")


def _quotas(region: str) -> dict[str, float]:
    """The values of SageMaker's quotas by their names."""
    client: Any = aws.client("service-quotas", region)
    with aws.errors(region):
        pages = client.get_paginator("list_service_quotas").paginate(ServiceCode="sagemaker")
        every = [one for page in pages for one in page.get("Quotas", ())]
    return {
        one["QuotaName"]: float(one["Value"])
        for one in every
        if {"QuotaName", "Value"} <= one.keys()
    }
