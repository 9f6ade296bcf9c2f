"""Training plans that AWS offers now: machines reserved for a time, and paid in advance."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from deploykit.backends.base import Start
from deploykit.backends.sagemaker import aws
from deploykit.backends.sagemaker.options import Options
from deploykit.job.model import Plan
from deploykit.lib.errors import DeploykitError

_HOUR = 3600
_SEARCH = "SearchTrainingPlanOfferings"
"""https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_SearchTrainingPlanOfferings.html"""


def starts(plan: Plan) -> Iterator[Start]:
    """When the job would start with each offer for its machines; none that it could use unbought.

    Machines that are not sold in plans have none. Where AWS refuses to tell, that is the reason.
    """
    options: Options = plan.options
    if options.training_plan:
        return
    options = replace(options, training_plan="on offer")  # its cost is unknown
    client: Any = aws.client("sagemaker", plan.target)
    shape = client.meta.service_model.operation_model(_SEARCH).input_shape
    if options.training_type not in shape.members["InstanceType"].enum:
        return
    try:
        with aws.errors(plan.target):
            response = client.search_training_plan_offerings(
                InstanceType=options.training_type,
                InstanceCount=plan.job.resources.nodes,
                DurationHours=-(-(plan.job.resources.time_limit or 1) // _HOUR),
                TargetResources=["training-job"],
            )
    except DeploykitError as error:
        where = f"training plans in {plan.target}"
        yield Start(where, options, None, error.message, possible=False)
        return
    for offer in response["TrainingPlanOfferings"]:
        for part in offer.get("ReservedCapacityOfferings", ())[:1]:
            yield _start(options, offer, part, plan.target)


def _start(
    options: Options, offer: Mapping[str, Any], part: Mapping[str, Any], region: str
) -> Start:
    fee = f"{offer.get('UpfrontFee', 'an unknown sum')} {offer.get('CurrencyCode', '')}".strip()
    length = f"{offer['DurationHours']} h" if "DurationHours" in offer else "an unknown time"
    reason = (
        f"on offer for {length} at {fee}, paid in advance: `aws sagemaker create-training-plan "
        f"--training-plan-offering-id {offer['TrainingPlanOfferingId']}`, then set "
        "sagemaker.training_plan"
    )
    where = f"training plan in {part.get('AvailabilityZone', region)}"
    return Start(where, options, part.get("StartTime"), reason, possible=False)
