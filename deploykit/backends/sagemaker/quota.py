"""What the quotas of the account allow: AWS tells no start time beforehand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from deploykit.backends.sagemaker import aws, requirements
from deploykit.backends.sagemaker.options import Options
from deploykit.capabilities import Start
from deploykit.model import Plan

_UNKNOWN = "AWS does not say when instances will be free"


def starts(plan: Plan) -> Iterator[Start]:
    """Whether the quota allows the job, in its region. Raises as `aws.errors`."""
    options: Options = plan.options
    required = requirements.of_job(plan.job, options, plan.target)
    where = f"{options.training_type} in {plan.target}"
    value = _quota(required.quota, plan.target)
    if value is None:
        reason = f"the quota {required.quota!r} is not listed; {_UNKNOWN}"
        yield Start(where, options, None, reason)
    elif value < required.nodes:
        reason = f"the quota {required.quota!r} is {value:g}, and the job needs {required.nodes}"
        yield Start(where, options, None, reason, possible=False)
    else:
        reason = f"the quota {required.quota!r} is {value:g}; {_UNKNOWN}"
        yield Start(where, options, None, reason)


def _quota(name: str, region: str) -> float | None:
    """The value of a quota of SageMaker's by its name; None where it is not listed."""
    client: Any = aws.client("service-quotas", region)
    with aws.errors(region):
        for page in client.get_paginator("list_service_quotas").paginate(ServiceCode="sagemaker"):
            for one in page.get("Quotas", ()):
                if one.get("QuotaName") == name:
                    return float(one["Value"])
    return None
