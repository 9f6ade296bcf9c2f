"""Endpoints and transform jobs: send what a plan says, ask, call, change and delete them.

Each request is preceded by the question whether its work is done already, so an interrupted command
can be repeated: it never creates anything twice, and never changes what belongs to something else.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from deploykit.backends.deployment import (
    Condition,
    Deployment,
    DeploymentPlan,
    Phase,
    Request,
    Scale,
    ScalePlan,
)
from deploykit.backends.sagemaker import aws, hosting, jobs, uploads
from deploykit.backends.sagemaker.deployment import AUTOSCALING, scaling_requests, scaling_targets
from deploykit.job.model import LogLine
from deploykit.job.spelling import did_you_mean
from deploykit.lib import shell
from deploykit.lib.errors import (
    DeploykitError,
    NotFound,
    NotPermitted,
    SubmitRefused,
    TimedOut,
    TryAgain,
    Uncertain,
    UsageError,
)

_LOGS = "/aws/sagemaker/Endpoints/"
_BATCH_LOGS = "/aws/sagemaker/TransformJobs"
_PHASES = {
    "Creating": Phase.CREATING,
    "Updating": Phase.UPDATING,
    "SystemUpdating": Phase.UPDATING,
    "RollingBack": Phase.UPDATING,
    "InService": Phase.IN_SERVICE,
    "Deleting": Phase.DELETING,
    "Failed": Phase.FAILED,
    "OutOfService": Phase.FAILED,
    "UpdateRollbackFailed": Phase.FAILED,
}
_BATCH_PHASES = {
    "InProgress": Phase.RUNNING,
    "Stopping": Phase.DELETING,
    "Stopped": Phase.STOPPED,
    "Completed": Phase.COMPLETED,
    "Failed": Phase.FAILED,
}
"""State of an endpoint or a transform job in the service -> phase."""
_ANSWER_TIMEOUT = 70.0
"""Seconds: a real-time endpoint has 60 for its answer."""
_POLL_INTERVAL = 2.0
"""Seconds between two looks for an answer in S3."""


class _Created(NamedTuple):
    """What one operation creates."""

    describe: str
    key: str
    """The parameter that names it."""
    what: str


_CREATED = {
    "CreateModel": _Created("describe_model", "ModelName", "model"),
    "CreateEndpointConfig": _Created(
        "describe_endpoint_config", "EndpointConfigName", "endpoint configuration"
    ),
    "CreateTransformJob": _Created("describe_transform_job", "TransformJobName", "transform job"),
}


def may_deploy(plan: DeploymentPlan, own: Collection[str] | None) -> None:
    """Raise SubmitRefused or TryAgain unless the endpoint is free, or serves a configuration of
    `own`; None: it may serve anything. Changes nothing.
    """
    if plan.mode == "batch":
        return
    client = aws.client("sagemaker", plan.target, plan.options.credentials)
    endpoint = _describe(client, "describe_endpoint", plan.target, EndpointName=plan.name)
    _require_free(plan, endpoint, own)


def _require_free(
    plan: DeploymentPlan, endpoint: Mapping[str, Any] | None, own: Collection[str] | None
) -> None:
    updates = any(each.operation == "UpdateEndpoint" for each in plan.requests)
    wait = f"run `deploykit endpoint wait {plan.name}`, then try again"
    if endpoint is None:
        if updates:
            message = f"the endpoint {plan.name} does not exist in {plan.target}"
            raise SubmitRefused(message, hint="deploy without --update to create it")
        return
    served, status = _config(endpoint), endpoint["EndpointStatus"]
    if own is not None and served not in own:
        raise SubmitRefused(
            f"the endpoint {plan.name} already exists in {plan.target} and was not deployed from "
            f"this machine; it serves the configuration {served}, not {plan.config}",
            hint="choose another --name, or pass --update to replace its model",
        )
    if status == "Failed":  # which allows nothing but DeleteEndpoint
        reason = endpoint.get("FailureReason") or "unknown reason"
        hint = f"run `deploykit endpoint rm {plan.name}`, then deploy again"
        raise SubmitRefused(f"the endpoint {plan.name} has failed: {reason}", hint=hint)
    if served == plan.config and status != "Deleting":
        return
    if _PHASES.get(status) in {Phase.CREATING, Phase.UPDATING, Phase.DELETING}:
        raise TryAgain(f"the endpoint {plan.name} is {status} in {plan.target}", hint=wait)
    if not updates:
        message = f"the endpoint {plan.name} was created in the meantime"
        raise TryAgain(message, hint="deploy again to update it")


def _config(endpoint: Mapping[str, Any]) -> str:
    """The configuration that an endpoint serves, or is changing to."""
    pending = endpoint.get("PendingDeploymentSummary") or {}
    return str(pending.get("EndpointConfigName") or endpoint.get("EndpointConfigName", ""))


def deploy(plan: DeploymentPlan, archive: Path, own: Collection[str] | None) -> None:
    """Upload the package and send the plan's requests; see `base.Capabilities.deploy`."""
    uploads.upload_model(plan.options, plan.target, archive, plan.archive)
    try:
        _send_all(plan, own)
    except Uncertain:
        raise
    except DeploykitError:
        with contextlib.suppress(DeploykitError):
            _remove_unused_schedule(plan)
        raise


def _remove_unused_schedule(plan: DeploymentPlan) -> None:
    """Delete the schedule of an endpoint that could not be created."""
    if any(each.service == hosting.SCHEDULER for each in plan.requests):
        login = plan.options.credentials
        client = aws.client("sagemaker", plan.target, login)
        if _describe(client, "describe_endpoint", plan.target, EndpointName=plan.name) is None:
            scheduler = aws.client(hosting.SCHEDULER, plan.target, login)
            hosting.remove_schedule(scheduler, plan.target, plan.name)


def _send_all(plan: DeploymentPlan, own: Collection[str] | None) -> None:
    """Send the requests that are not `later`, each unless its work is done."""
    options = plan.options
    for request in plan.requests:
        if request.later:
            continue
        client = aws.client(request.service, plan.target, options.credentials)
        if request.service == hosting.SCHEDULER:
            hosting.send_schedule(client, plan.target, request)
        elif request.operation in _CREATED:
            _create(client, plan.target, request)
        elif request.operation in {"CreateEndpoint", "UpdateEndpoint"}:
            endpoint = _describe(client, "describe_endpoint", plan.target, EndpointName=plan.name)
            _require_free(plan, endpoint, own)
            if endpoint is None or _config(endpoint) != plan.config:
                _send_once(client, plan.target, request, partial(_serves, client, plan))
        else:
            _send(client, plan.target, request)


def _serves(client: Any, plan: DeploymentPlan) -> bool:
    endpoint = _describe(client, "describe_endpoint", plan.target, EndpointName=plan.name)
    return endpoint is not None and _config(endpoint) == plan.config


def _create(client: Any, region: str, request: Request) -> None:
    """Create what a request describes, unless it exists. Raises SubmitRefused if that differs."""
    created = _CREATED[request.operation]
    name = request.parameters[created.key]

    def exists() -> bool:
        actual = _describe(client, created.describe, region, **{created.key: name})
        if actual is None:
            return False
        wanted = {key: value for key, value in request.parameters.items() if key != "Tags"}
        if differing := list(_differing(wanted, actual, "")):
            verb = "differs" if len(differing) == 1 else "differ"
            raise SubmitRefused(
                f"a different {created.what} {name} already exists in {region}: "
                f"{', '.join(differing)} {verb} from the plan",
                hint="choose another --name",
            )
        return True

    if not exists():
        _send_once(client, region, request, exists)


def _differing(wanted: Any, actual: Any, path: str) -> Iterator[str]:
    """The paths at which a description differs from a request, among the fields that it has.

    The service adds defaults, and leaves out what it does not store.
    """
    if isinstance(wanted, Mapping) and isinstance(actual, Mapping):
        for name in wanted.keys() & actual.keys():
            yield from _differing(wanted[name], actual[name], f"{path}.{name}".lstrip("."))
    elif isinstance(wanted, list) and isinstance(actual, list) and len(wanted) == len(actual):
        for number, (one, other) in enumerate(zip(wanted, actual, strict=True)):
            yield from _differing(one, other, f"{path}[{number}]")
    elif wanted != actual:
        yield path


def _send_once(client: Any, region: str, request: Request, done: Callable[[], bool]) -> None:
    """Send a request; where it fails, `done` says whether it has been carried out all the same.

    Raises Uncertain if neither is known.
    """
    with aws.errors(region):
        try:
            _call(client, request)
        except Exception as error:
            try:
                if done():
                    return
            except SubmitRefused:
                raise
            except DeploykitError as second:
                if not aws.may_have_succeeded(error):
                    raise error from second
                raise Uncertain(
                    f"{request.operation} failed, and AWS may still have carried it out: {error}",
                    hint="run the same command again; completed steps are not repeated",
                ) from second
            raise


def _send(client: Any, region: str, request: Request) -> None:
    """Send a request that can be repeated."""
    with aws.errors(region):
        try:
            _call(client, request)
        except Exception as error:
            if not _is_gone(error):
                raise


def _call(client: Any, request: Request) -> Any:
    from botocore import xform_name

    return getattr(client, xform_name(request.operation))(**request.parameters)


def _is_gone(error: BaseException) -> bool:
    """Whether an error says that what is to be deleted or deregistered does not exist."""
    no_target = "No scalable target found" in aws.message(error)
    return no_target or aws.code(error) == "ObjectNotFoundException" or jobs.is_missing(error)


def _describe(client: Any, operation: str, region: str, **name: str) -> Any:
    """The service's description; None if there is none. Raises what `aws.errors` raises."""
    with aws.errors(region):
        try:
            return getattr(client, operation)(**name)
        except Exception as error:
            if _is_gone(error):
                return None
            raise


def deploy_later(deployment: Deployment) -> None:
    """Register the autoscaling of an endpoint; see `base.Capabilities`."""
    for request in deployment.request_list:
        if request.later:
            client = _client(deployment, request.service)
            with aws.errors(deployment.target):
                _call(client, request)


def _client(deployment: Deployment, service: str = "sagemaker", **settings: Any) -> Any:
    return aws.client(service, deployment.target, _credentials(deployment), **settings)


def _credentials(deployment: Deployment) -> aws.Credentials:
    """Those that sent it."""
    given = deployment.given
    return aws.Credentials(given.get("profile"), given.get("assume_role"))


def conditions(deployments: Sequence[Deployment]) -> list[Condition]:
    """The condition of each, with one request for each endpoint; see `base.Capabilities`."""
    known: dict[tuple[str, ...], Condition] = {}
    answers = []
    for each in deployments:
        key = (each.target, each.account, each.name)
        if key not in known:
            known[key] = _condition(each)
        answers.append(known[key])
    return answers


def _condition(deployment: Deployment) -> Condition:
    described = _described(deployment)
    if described is None:
        _require_account(deployment)
        return Condition(Phase.STOPPED if deployment.is_batch else Phase.DELETED)
    reason = str(described.get("FailureReason") or "")
    if deployment.is_batch:
        native = described["TransformJobStatus"]
        phase = _BATCH_PHASES.get(native, Phase.UNKNOWN)
        return Condition(phase, native, reason, deployment.config)
    native = described["EndpointStatus"]
    phase = _PHASES.get(native, Phase.UNKNOWN)
    return Condition(phase, native, reason, _config(described), _variants(described))


def _described(deployment: Deployment) -> Any:
    client = _client(deployment)
    if deployment.is_batch:
        name = {"TransformJobName": deployment.name}
        return _describe(client, "describe_transform_job", deployment.target, **name)
    name = {"EndpointName": deployment.name}
    return _describe(client, "describe_endpoint", deployment.target, **name)


def _require_account(deployment: Deployment) -> None:
    """Raise NotPermitted with the credentials of another account, which cannot tell."""
    account = aws.account(deployment.target, _credentials(deployment))
    if account != deployment.account:
        raise NotPermitted(
            f"you are logged in to account {account}, but {deployment.name} belongs to account "
            f"{deployment.account}",
            hint=jobs.OTHER_ACCOUNT,
        )


def _variants(endpoint: Mapping[str, Any]) -> dict[str, str]:
    """Instances and weight of each variant, in words."""
    variants = {}
    for each in endpoint.get("ProductionVariants") or ():
        current, desired = each.get("CurrentInstanceCount"), each.get("DesiredInstanceCount")
        parts = []
        if desired is not None:
            parts.append(f"{current if current is not None else '?'} of {desired} instances")
        if each.get("CurrentWeight") is not None:
            parts.append(f"weight {each['CurrentWeight']:g}")
        variants[str(each["VariantName"])] = ", ".join(parts)
    return variants


def endpoint_logs(deployment: Deployment, *, follow: bool) -> Iterator[LogLine]:
    """The lines of all instances in CloudWatch; see `base.Capabilities`."""
    batch = deployment.is_batch
    yield from jobs.group_lines(
        deployment.target,
        _credentials(deployment),
        _BATCH_LOGS if batch else f"{_LOGS}{deployment.name}",
        f"{deployment.name}/" if batch else "",
        ended=lambda: not follow or conditions([deployment])[0].phase.ended,
        absent=lambda: _require_account(deployment),
        follow=follow,
    )


def invoke(  # noqa: PLR0913 - the parts of a request
    deployment: Deployment,
    body: bytes,
    *,
    content_type: str,
    accept: str,
    variant: str = "",
    timeout: float | None = None,
) -> tuple[bytes, str]:
    """The answer to a request; see `base.Capabilities`."""
    if deployment.is_batch:
        message = f"{deployment.name} is a batch job, which does not accept single requests"
        raise UsageError(message, hint="deploy the model without `batch`")
    if deployment.mode == "asynchronous":
        if variant:
            message = f"{deployment.name} is asynchronous, so a request cannot choose a variant"
            raise UsageError(
                message, hint="omit --variant; `endpoint scale --weight` splits requests"
            )
        return _invoke_later(deployment, body, content_type, accept, timeout)
    client = _client(deployment, "sagemaker-runtime", attempts=1, timeout=_ANSWER_TIMEOUT)
    request = {"ContentType": content_type, "Accept": accept, "Body": body}
    if variant:
        request["TargetVariant"] = variant
    with aws.errors(deployment.target):
        try:
            answer = client.invoke_endpoint(EndpointName=deployment.name, **request)
        except Exception as error:
            if refused := _refused_request(deployment, error):
                raise refused from error
            raise
        return answer["Body"].read(), str(answer.get("ContentType", ""))


def _refused_request(deployment: Deployment, error: Exception) -> DeploykitError | None:
    """The error of a request that the model refused, or that has no endpoint; None for others."""
    if aws.code(error) == "ModelError":
        response: Mapping[str, Any] = getattr(error, "response", {})
        status = response.get("OriginalStatusCode", "an error")
        return SubmitRefused(
            f"the model behind {deployment.name} returned {status}: "
            f"{response.get('OriginalMessage') or aws.message(error)}",
            hint=f"`deploykit endpoint logs {deployment.name}` shows the traceback",
        )
    if "not found" in aws.message(error):
        return NotFound(
            f"no endpoint {deployment.name} is in service in {deployment.target}",
            hint=f"`deploykit endpoint status {deployment.name}` shows its state",
        )
    return None


def _invoke_later(
    deployment: Deployment, body: bytes, content_type: str, accept: str, timeout: float | None
) -> tuple[bytes, str]:
    """The answer of an asynchronous endpoint, or its address if it may not be waited for."""
    given = deployment.given
    bucket, key = given["bucket"], _input_key(deployment, body)
    owner = {"ExpectedBucketOwner": given["owner"]}
    store = _client(deployment, "s3")
    client = _client(deployment, "sagemaker-runtime", attempts=1, timeout=_ANSWER_TIMEOUT)
    with aws.errors(deployment.target):
        store.put_object(Bucket=bucket, Key=key, Body=body, ContentType=content_type, **owner)
        try:
            answer = client.invoke_endpoint_async(
                EndpointName=deployment.name,
                InputLocation=f"s3://{bucket}/{key}",
                ContentType=content_type,
                Accept=accept,
            )
        except Exception as error:
            if refused := _refused_request(deployment, error):
                raise refused from error
            raise
        places = {
            name: str(answer.get(name) or "") for name in ("OutputLocation", "FailureLocation")
        }
        output = places["OutputLocation"]
        if timeout is None:
            return output.encode(), ""
        until = time.monotonic() + timeout
        while True:
            for name, place in places.items():
                content = _object(store, place, given) if place else None
                if content is not None and name == "FailureLocation":
                    text = content.decode(errors="replace").strip()
                    raise SubmitRefused(f"the model behind {deployment.name} failed: {text}")
                if content is not None:
                    return content, accept
            if time.monotonic() >= until:
                message = f"{deployment.name} has not answered yet; the answer will be in {output}"
                raise TimedOut(message, hint=shell.command("aws", "s3", "cp", output, "-"))
            time.sleep(_POLL_INTERVAL)


def _input_key(deployment: Deployment, body: bytes) -> str:
    """Where the body of an asynchronous request is stored: by its content, so once."""
    digest = hashlib.sha256(body).hexdigest()
    return f"{deployment.given['prefix']}/async/{deployment.name}/input/{digest}"


def _object(store: Any, location: str, given: Mapping[str, Any]) -> bytes | None:
    """The content of an object; None if there is none yet.

    The job's bucket must belong to its owner: another account may have taken over its name.
    """
    bucket, _, key = location.removeprefix("s3://").partition("/")
    owner = {"ExpectedBucketOwner": given["owner"]} if bucket == given["bucket"] else {}
    try:
        return bytes(store.get_object(Bucket=bucket, Key=key, **owner)["Body"].read())
    except Exception as error:
        if aws.code(error) in {"NoSuchKey", "404"}:
            return None
        raise


def plan_scale(deployment: Deployment, wanted: Scale, seconds: int | None) -> ScalePlan:
    """The machines after a change, and their cost; see `base.Capabilities`."""
    _check_scale(deployment, wanted)
    first, *others = deployment.machine_list
    instances = first.instances if wanted.instances is None else wanted.instances
    most = instances if wanted.instances is not None else wanted.most or first.most
    changed = first._replace(instances=min(max(instances, wanted.least or 0), most), most=most)
    machines = (changed, *others)
    return ScalePlan(machines, hosting.estimate(machines, deployment.target, seconds), seconds)


def scale(deployment: Deployment, wanted: Scale) -> None:
    """Change the endpoint as it is; see `base.Capabilities`."""
    variants = _variant_names(deployment)
    changes: dict[str, dict[str, Any]] = {}
    if wanted.instances is not None:
        changes.setdefault(variants[0], {})["DesiredInstanceCount"] = wanted.instances
    for name, weight in wanted.weights.items():
        changes.setdefault(name, {})["DesiredWeight"] = float(weight)
    if changes:
        desired = [{"VariantName": name, **change} for name, change in changes.items()]
        parameters = {"EndpointName": deployment.name, "DesiredWeightsAndCapacities": desired}
        client = _client(deployment)
        with aws.errors(deployment.target):
            _call(client, Request("sagemaker", "UpdateEndpointWeightsAndCapacities", parameters))
    limits = {"MinCapacity": wanted.least, "MaxCapacity": wanted.most}
    limits = {name: value for name, value in limits.items() if value is not None}
    for request in scaling_requests(deployment) if limits else ():
        client = _client(deployment, AUTOSCALING)
        changed = request._replace(parameters={**_target(request), **limits})  # others stay
        with aws.errors(deployment.target):
            _call(client, changed)


def _variant_names(deployment: Deployment) -> list[str]:
    """Names of the variants that answer requests; that of the deployed model first, if it does."""
    for request in deployment.request_list:
        if request.operation == "CreateEndpointConfig":
            return [each["VariantName"] for each in request.parameters["ProductionVariants"]]
    return []


def _check_scale(deployment: Deployment, wanted: Scale) -> None:
    """Raise UsageError if the endpoint cannot be changed so."""
    name, variants = deployment.name, _variant_names(deployment)
    scaled = bool(scaling_requests(deployment))
    if deployment.is_batch:
        raise UsageError(f"{name} is a batch job, whose instances cannot be changed")
    if deployment.mode == "serverless" and (wanted.instances or wanted.least or wanted.most):
        hint = "change serverless.max_concurrency in the job file, and deploy again"
        raise UsageError(f"{name} is serverless and has no instances", hint=hint)
    if wanted.instances is not None and scaled:
        message = f"autoscaling sets the number of instances of {name}"
        raise UsageError(message, hint="use --min and --max to change its limits")
    if (wanted.least is not None or wanted.most is not None) and not scaled:
        hint = "add `autoscaling` to the job file, and deploy again; or use --instances"
        raise UsageError(f"{name} has no autoscaling", hint=hint)
    if wanted.least is not None and wanted.most is not None and wanted.least > wanted.most:
        raise UsageError(f"--min {wanted.least} is greater than --max {wanted.most}")
    for variant in wanted.weights:
        if variant not in variants:
            hint = did_you_mean(variant, variants) or f"variants: {', '.join(variants)}"
            raise UsageError(f"{name} has no variant {variant!r}", hint=hint)


def switch(earlier: Deployment, current: Deployment) -> None:
    """Let the endpoint serve an earlier configuration; see `base.Capabilities`."""
    client, region = _client(current), current.target
    name = {"EndpointConfigName": earlier.config}
    if _describe(client, "describe_endpoint_config", region, **name) is None:
        message = f"the configuration {earlier.config} no longer exists in {region}"
        raise NotFound(message, hint="deploy the run again")
    endpoint = _described(current)
    if endpoint is None:
        _require_account(current)
        raise NotFound(f"the endpoint {current.name} does not exist in {region}")
    if _config(endpoint) == earlier.config:
        return
    if _PHASES.get(endpoint["EndpointStatus"]) in {Phase.CREATING, Phase.UPDATING, Phase.DELETING}:
        raise TryAgain(
            f"the endpoint {current.name} is {endpoint['EndpointStatus']} in {region}",
            hint=f"run `deploykit endpoint wait {current.name}`, then try again",
        )
    _deregister(current, keep=scaling_targets(earlier) if _same_machines(earlier, current) else ())
    request = Request("sagemaker", "UpdateEndpoint", {"EndpointName": current.name, **name})

    def done() -> bool:
        now = _described(current)
        return now is not None and _config(now) == earlier.config

    _send_once(client, region, request, done)


def _same_machines(one: Deployment, other: Deployment) -> bool:
    return one.machine_list[0].instance_type == other.machine_list[0].instance_type


def _deregister(deployment: Deployment, keep: Collection[str] = ()) -> None:
    """End the autoscaling of an endpoint, which deletes its policies and alarms."""
    for request in scaling_requests(deployment):
        if request.parameters["ResourceId"] in keep:
            continue
        client, target = _client(deployment, AUTOSCALING), _target(request)
        _send(client, deployment.target, Request(AUTOSCALING, "DeregisterScalableTarget", target))


def _target(request: Request) -> dict[str, Any]:
    """The scalable target of a request, without its limits."""
    names = ("ServiceNamespace", "ResourceId", "ScalableDimension")
    return {name: request.parameters[name] for name in names}


def remove_deployment(deployments: Sequence[Deployment]) -> None:
    """Delete an endpoint and all that its deployments created; see `base.Capabilities`."""
    first = deployments[0]
    client, region = _client(first), first.target
    described = _described(first)
    if described is None:
        _require_account(first)
        for each in deployments:  # a schedule that deletes an endpoint leaves its autoscaling
            _deregister(each)
    elif not first.is_batch:
        _delete_endpoint(client, deployments, described)
    elif described["TransformJobStatus"] == "InProgress":
        stop = Request("sagemaker", "StopTransformJob", {"TransformJobName": first.name})
        _send(client, region, stop)
    if any(each.given.get("until") for each in deployments):
        hosting.remove_schedule(_client(first, hosting.SCHEDULER), region, first.name)
    for each in deployments:
        if not each.is_batch:
            name = {"EndpointConfigName": each.config}
            _send(client, region, Request("sagemaker", "DeleteEndpointConfig", name))
    for model in dict.fromkeys(each.model for each in deployments):
        _send(client, region, Request("sagemaker", "DeleteModel", {"ModelName": model}))


def _delete_endpoint(
    client: Any, deployments: Sequence[Deployment], described: Mapping[str, Any]
) -> None:
    """Delete an endpoint that serves one of the deployments; never another one."""
    first, served = deployments[0], _config(described)
    if served in {each.config for each in deployments}:
        for each in deployments:
            _deregister(each)
        status = described["EndpointStatus"]
        if status == "Deleting":
            return
        try:
            delete = Request("sagemaker", "DeleteEndpoint", {"EndpointName": first.name})
            _send(client, first.target, delete)
        except SubmitRefused as error:
            if _PHASES.get(status) not in {Phase.CREATING, Phase.UPDATING}:
                raise
            raise TryAgain(
                f"the endpoint {first.name} is {status} and cannot be deleted yet: {error.message}",
                hint=f"run `deploykit endpoint wait {first.name}`, then try again",
            ) from error
    elif any(each.phase != Phase.SENDING.value for each in deployments):
        raise SubmitRefused(
            f"the endpoint {first.name} serves {served}, which was not deployed from this machine; "
            "nothing was deleted",
            hint=f"aws sagemaker describe-endpoint --endpoint-name {first.name}",
        )
