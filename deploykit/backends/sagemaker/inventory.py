"""The endpoints of an account that deploykit made, from any machine: age, price, last request.

Each has the tag `hosting.TAG`. If metrics or schedules cannot be read, they are unknown, and the
rest is still shown.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from deploykit.backends.deployment import Billed, Deployment, Machines
from deploykit.backends.sagemaker import aws, hosting, jobs
from deploykit.backends.sagemaker.options import environment_region
from deploykit.lib.errors import DeploykitError

_DAYS = 15
"""How far back requests are looked for."""
_HOUR = 3600
_QUERIES = 500
"""In one GetMetricData."""


def billed_endpoints(
    deployments: Sequence[Deployment],
) -> tuple[list[Billed], list[DeploykitError]]:
    """The endpoints in these regions and that of the environment; see `base.Capabilities`."""
    names: dict[tuple[str, aws.Credentials], list[str]] = {}
    if region := environment_region():
        names[region, aws.ENVIRONMENT] = []
    for each in deployments:
        given = each.given
        login = aws.Credentials(given.get("profile"), given.get("assume_role"))
        names.setdefault((each.target, login), []).append(each.name)
    billed: dict[tuple[str, str, str], Billed] = {}
    errors: list[DeploykitError] = []
    for (target, login), known in names.items():
        try:
            for one in _endpoints(target, login, known):
                billed.setdefault((one.target, one.account, one.name), one)
        except DeploykitError as error:
            if target not in error.message:
                error.message = f"{target}: {error.message}"
            errors.append(error)
    return list(billed.values()), errors


def _endpoints(target: str, credentials: aws.Credentials, known: Sequence[str]) -> list[Billed]:
    """Those in a region with deploykit's tag, and those of the names `known`."""
    client = aws.client("sagemaker", target, credentials)
    with aws.errors(target):
        described = list(_described(client, known))
    used = _last_requests(target, credentials, [each for each, _, _ in described])
    scheduler = aws.client(hosting.SCHEDULER, target, credentials)
    listed = []
    for endpoint, config, run in described:
        name = endpoint["EndpointName"]
        machines = tuple(_machines(endpoint, config))
        estimate = hosting.estimate(machines, target)
        until, until_known = _until(scheduler, target, name)
        listed.append(
            Billed(
                name=name,
                target=target,
                account=endpoint["EndpointArn"].split(":")[4],
                run=run,
                native=endpoint["EndpointStatus"],
                created=endpoint["CreationTime"].timestamp(),
                machines=machines,
                hourly=estimate.always if machines and not estimate.unknown else None,
                currency=estimate.currency,
                used=None if used is None else used.get(name),
                used_days=None if used is None else _DAYS,
                until=until,
                until_known=until_known,
            )
        )
    return listed


def _described(
    client: Any, known: Sequence[str]
) -> Iterator[tuple[dict[str, Any], dict[str, Any], str]]:
    """Each endpoint, its configuration and its run."""
    for page in client.get_paginator("list_endpoints").paginate():
        for summary in page.get("Endpoints", ()):
            name, arn = summary["EndpointName"], summary["EndpointArn"]
            tagged = _present(client.list_tags, ResourceArn=arn)
            if tagged is None:  # deleted meanwhile
                continue
            tags = tagged.get("Tags", ())
            run = next((tag["Value"] for tag in tags if tag["Key"] == hosting.TAG), None)
            if run is None and name not in known:
                continue
            endpoint = _present(client.describe_endpoint, EndpointName=name)
            if endpoint is None:
                continue
            chosen = endpoint["EndpointConfigName"]
            config = _present(client.describe_endpoint_config, EndpointConfigName=chosen)
            yield endpoint, config or {}, run or ""


def _present(describe: Callable[..., Any], **name: str) -> Any:
    """The description of what exists; None if it does not."""
    try:
        return describe(**name)
    except Exception as error:
        if jobs.is_missing(error):
            return None
        raise


def _machines(endpoint: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[Machines]:
    """The machines that run now, by variant."""
    variants = [*config.get("ProductionVariants", ()), *config.get("ShadowProductionVariants", ())]
    running = {
        each["VariantName"]: each.get("CurrentInstanceCount")
        for kind in ("ProductionVariants", "ShadowProductionVariants")
        for each in endpoint.get(kind) or ()
    }
    for variant in variants:
        serverless = variant.get("ServerlessConfig")
        if serverless:
            kept, most = serverless.get("ProvisionedConcurrency", 0), serverless["MaxConcurrency"]
            yield Machines("", kept, most, serverless["MemorySizeInMB"])
            continue
        now = running.get(variant["VariantName"])
        count = variant.get("InitialInstanceCount", 1) if now is None else now
        yield Machines(variant.get("InstanceType", ""), count, count)


def _last_requests(
    target: str, credentials: aws.Credentials, endpoints: Sequence[Mapping[str, Any]]
) -> dict[str, float] | None:
    """When each endpoint got its last request; None if CloudWatch does not tell."""
    pairs = [
        (endpoint["EndpointName"], variant["VariantName"])
        for endpoint in endpoints
        for variant in endpoint.get("ProductionVariants") or ()
    ]
    if not pairs:
        return {}
    now = dt.datetime.now(dt.UTC)
    span = {"StartTime": now - dt.timedelta(days=_DAYS), "EndTime": now}
    last: dict[str, float] = {}
    try:
        client = aws.client("cloudwatch", target, credentials)
        with aws.errors(target):
            for start in range(0, len(pairs), _QUERIES):
                some = pairs[start : start + _QUERIES]
                queries = [_query(number, *pair) for number, pair in enumerate(some)]
                pages = client.get_paginator("get_metric_data").paginate(
                    MetricDataQueries=queries, ScanBy="TimestampDescending", **span
                )
                for page in pages:
                    for result in page.get("MetricDataResults", ()):
                        name = some[int(result["Id"].removeprefix("m"))][0]
                        values = zip(result["Timestamps"], result["Values"], strict=False)
                        times = [time.timestamp() for time, value in values if value]
                        last[name] = max([last.get(name, 0.0), *times])
    except DeploykitError:
        return None
    return {name: time for name, time in last.items() if time}


def _query(number: int, endpoint: str, variant: str) -> dict[str, Any]:
    dimensions = [
        {"Name": "EndpointName", "Value": endpoint},
        {"Name": "VariantName", "Value": variant},
    ]
    metric = {"Namespace": "AWS/SageMaker", "MetricName": "Invocations", "Dimensions": dimensions}
    statistic = {"Metric": metric, "Period": _HOUR, "Stat": "Sum"}
    return {"Id": f"m{number}", "MetricStat": statistic}


def _until(client: Any, target: str, name: str) -> tuple[float | None, bool]:
    """When a schedule deletes the endpoint, and whether that is known."""
    try:
        described = hosting.described(client, target, name)
    except DeploykitError:
        return None, False
    if described is None or not hosting.deletes(described, name):
        return None, True
    due = hosting.due(described)
    return due, due is not None
