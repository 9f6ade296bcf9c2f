"""`sagemaker.deploy` as requests: a model behind an endpoint, or a batch transform job. Pure.

Each name contains a hash of what it names, so an earlier model or configuration is never changed,
and the same deployment always has the same names.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from pathlib import Path
from typing import Any

from deploykit.backends.deployment import (
    Deployment,
    DeploymentPlan,
    Machines,
    Package,
    Request,
    recorded,
)
from deploykit.backends.sagemaker import catalog, hardware, hosting, service_model
from deploykit.backends.sagemaker.options import Deploy, Options, Variant
from deploykit.backends.sagemaker.options import region as region_of
from deploykit.backends.sagemaker.request import leaves, merge
from deploykit.cost import money
from deploykit.cost.estimate import Estimate
from deploykit.job import checks
from deploykit.job.model import Problem
from deploykit.job.spelling import did_you_mean

AUTOSCALING = "application-autoscaling"
_SECTION = "sagemaker.deploy"
_CODE = "/opt/ml/model/code"
"""The folder into which AWS's image unpacks ``code/`` of the package."""
_LOG_LEVEL = "20"
_MAX_NAME = 63
_DIGITS = 10
"""Of the hash in a name."""
_GB = 1024
"""MB in a GB of `serverless.memory`."""
_DIMENSION = "sagemaker:variant:DesiredInstanceCount"
_REQUESTS = "SageMakerVariantInvocationsPerInstance"
_WAITING = "ApproximateBacklogSizePerInstance"
"""Metrics that autoscaling follows: requests a minute, and requests that wait."""
_VARIANT = "ProductionVariant"
"""The key of `request` for fields of the model's own variant."""
_OPERATIONS = (
    *("CreateModel", "CreateEndpointConfig", "CreateEndpoint", "UpdateEndpoint"),
    *("CreateTransformJob", _VARIANT),
)
_STAND_IN = Package(Path(), "0" * 64, "r" * _MAX_NAME, "")
"""As long as a package's values can be, to check a job file without one."""
_KEYS = {
    "PrimaryContainer.Image": "image_uri",
    "PrimaryContainer.Environment": "env",
    "ProductionVariants[0].InstanceType": "instance_type",
    "ShadowProductionVariants[0].InstanceType": "instance_type",
    "TransformResources.InstanceType": "instance_type",
    "ProductionVariants": "variants",
    "KmsKeyId": "volume_kms_key",
    "TransformInput": "batch",
    "TransformOutput": "batch",
    "AsyncInferenceConfig": "async",
    "DataCaptureConfig": "capture",
    "EndpointName": "name",
    "TransformJobName": "name",
}
"""Path in a request -> key of the section."""


def plan_deployment(
    options: Options,
    package: Package,
    *,
    name: str,
    exists: bool = False,
    earlier: Deployment | None = None,
) -> DeploymentPlan:
    """Render the requests; `check_deployment` must have found no errors.

    `exists` says that there is an endpoint of this name, and `earlier` what it serves, if known.
    """
    deploy = options.deploy or Deploy()
    archive = archive_location(options, package)
    model = model_request(options, deploy, package, archive)
    model_name = _named(name, model)
    requests = [_request("CreateModel", {"ModelName": model_name, **model})]
    if deploy.batch is not None:
        job = _transform_job(options, deploy, name, model_name)
        config = job["TransformJobName"]
        requests.append(_request("CreateTransformJob", job))
    else:
        settings = _config(options, deploy, name, model_name)
        config = _named(name, settings)
        settings = {"EndpointConfigName": config, **settings}
        requests.append(_request("CreateEndpointConfig", settings))
        requests += _endpoint(
            options,
            deploy,
            name,
            config,
            earlier if exists else None,
            exists=exists,
            run=package.run,
        )
    machines = _machines(deploy)
    where, seconds = region_of(options) or "", deploy.delete_after
    estimate = hosting.estimate(machines, where, seconds, batch=deploy.batch is not None)
    return DeploymentPlan(
        backend="sagemaker",
        target=where,
        account=options.role.split(":")[4],
        name=config if deploy.batch is not None else name,
        config=config,
        mode=deploy.mode,
        model=model_name,
        package=package,
        archive=archive,
        requests=tuple(requests),
        machines=machines,
        options=options,
        settings=_settings(options, estimate, requests),
        estimate=estimate,
        seconds=seconds,
        summary=_summary(options, deploy, machines),
    )


def _settings(options: Options, estimate: Estimate, requests: Sequence[Request]) -> dict[str, Any]:
    """The record that later commands about the deployment need."""
    names = ("profile", "assume_role", "bucket", "prefix", "owner")
    return {
        **{name: getattr(options, name) for name in names},
        "price": None if estimate.unknown else money.exact(estimate.always),
        "until": next(filter(None, map(hosting.end, requests)), None),
    }


def archive_location(options: Options, package: Package) -> str:
    """The address of the package's archive, named by its content, which is uploaded once."""
    return f"s3://{options.bucket}/{options.prefix}/models/{package.hash}/model.tar.gz"


def _named(name: str, content: Mapping[str, Any]) -> str:
    """A name for what `content` describes."""
    text = json.dumps(content, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]
    return f"{name[: _MAX_NAME - 1 - _DIGITS].rstrip('-')}-{digest}"


def _request(operation: str, parameters: Mapping[str, Any]) -> Request:
    return Request("sagemaker", operation, parameters)


def _with_more(deploy: Deploy, operation: str, planned: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of an operation, with those of `request`."""
    return merge(planned, deploy.request.get(operation) or {})


def model_request(
    options: Options, deploy: Deploy, package: Package, archive: str
) -> dict[str, Any]:
    """CreateModel without its name."""
    environment = {
        "SAGEMAKER_PROGRAM": "inference.py",
        "SAGEMAKER_SUBMIT_DIRECTORY": _CODE,
        "SAGEMAKER_CONTAINER_LOG_LEVEL": _LOG_LEVEL,
        "SAGEMAKER_REGION": region_of(options) or "",
        **deploy.env,
    }
    model: dict[str, Any] = {
        "PrimaryContainer": {
            "Image": _image(options, deploy, package),
            "Environment": dict(sorted(environment.items())),
            "ModelDataUrl": archive,
        },
        "ExecutionRoleArn": options.role,
    }
    if options.subnets:
        model["VpcConfig"] = {
            "SecurityGroupIds": list(options.security_group_ids),
            "Subnets": list(options.subnets),
        }
    if options.network_isolation:
        model["EnableNetworkIsolation"] = True
    return _with_more(deploy, "CreateModel", model | _tags(options))


def _tags(options: Options, run: str | None = None) -> dict[str, Any]:
    own = {} if run is None else {hosting.TAG: run}
    tags = [{"Key": key, "Value": value} for key, value in {**options.tags, **own}.items()]
    return {"Tags": tags} if tags else {}


def framework_version(deploy: Deploy, package: Package) -> str | None:
    """The PyTorch version of the image: the chosen one, else the package's; None without one."""
    if deploy.framework_version is not None:
        return deploy.framework_version if deploy.framework_version in catalog.INFERENCE else None
    own = catalog.minor(package.torch.partition("+")[0])
    return next((v for v in reversed(catalog.INFERENCE) if catalog.minor(v) == own), None)


def _image(options: Options, deploy: Deploy, package: Package) -> str:
    if deploy.image_uri is not None:
        return deploy.image_uri
    version = framework_version(deploy, package) or next(reversed(catalog.INFERENCE))
    return catalog.inference_image_for(
        region_of(options) or "", version, deploy.instance_type or ""
    )


def _config(options: Options, deploy: Deploy, name: str, model: str) -> dict[str, Any]:
    """CreateEndpointConfig without its name."""
    own = Variant(deploy.variant, model, deploy.weight, None, deploy.instance_count, deploy.shadow)
    variants = [(own.shadow, _own_variant(deploy, own))]
    variants += [(other.shadow, _variant(deploy, other)) for other in deploy.variants]
    config: dict[str, Any] = {"ProductionVariants": [one for shadow, one in variants if not shadow]}
    if shadows := [one for shadow, one in variants if shadow]:
        config["ShadowProductionVariants"] = shadows
    if deploy.volume_kms_key is not None:
        config["KmsKeyId"] = deploy.volume_kms_key
    if deploy.async_ is not None:
        config["AsyncInferenceConfig"] = _asynchronous(options, deploy, name)
    if deploy.capture is not None:
        config["DataCaptureConfig"] = _capture(options, deploy, name)
    return _with_more(deploy, "CreateEndpointConfig", config | _tags(options))


def _variant(deploy: Deploy, variant: Variant) -> dict[str, Any]:
    return {
        "VariantName": variant.name,
        "ModelName": variant.model,
        "InstanceType": variant.instance_type or deploy.instance_type,
        "InitialInstanceCount": variant.instance_count,
        "InitialVariantWeight": float(variant.weight),
    }


def _own_variant(deploy: Deploy, own: Variant) -> dict[str, Any]:
    """The variant of the deployed model."""
    variant = _variant(deploy, own)
    if deploy.serverless is not None:
        del variant["InstanceType"], variant["InitialInstanceCount"]
        variant["ServerlessConfig"] = _present(
            MemorySizeInMB=deploy.serverless.memory * _GB,
            MaxConcurrency=deploy.serverless.max_concurrency,
            ProvisionedConcurrency=deploy.serverless.provisioned_concurrency,
        )
    variant |= _present(
        ContainerStartupHealthCheckTimeoutInSeconds=deploy.startup_timeout,
        VolumeSizeInGB=deploy.volume_size,
    )
    return _with_more(deploy, _VARIANT, variant)


def _present(**values: Any) -> dict[str, Any]:
    """Those that are set."""
    return {name: value for name, value in values.items() if value is not None}


def _below(options: Options, folder: str, name: str) -> str:
    """The default address of what an endpoint writes."""
    return f"s3://{options.bucket}/{options.prefix}/{folder}/{name}"


def _asynchronous(options: Options, deploy: Deploy, name: str) -> dict[str, Any]:
    chosen = deploy.async_
    assert chosen is not None  # noqa: S101 - for mypy
    output = _present(
        S3OutputPath=chosen.output or _below(options, "async", f"{name}/output"),
        S3FailurePath=chosen.failures,
        KmsKeyId=options.output_kms_key,
    )
    topics = _present(SuccessTopic=chosen.success_topic, ErrorTopic=chosen.error_topic)
    if topics:
        output["NotificationConfig"] = topics
    config: dict[str, Any] = {"OutputConfig": output}
    if chosen.max_concurrency is not None:
        limit = {"MaxConcurrentInvocationsPerInstance": chosen.max_concurrency}
        config["ClientConfig"] = limit
    return config


def _capture(options: Options, deploy: Deploy, name: str) -> dict[str, Any]:
    chosen = deploy.capture
    assert chosen is not None  # noqa: S101 - for mypy
    modes = {"both": ("Input", "Output"), "input": ("Input",), "output": ("Output",)}
    return {
        "EnableCapture": True,
        "InitialSamplingPercentage": chosen.percent,
        "DestinationS3Uri": chosen.to or _below(options, "captured", name),
        "CaptureOptions": [{"CaptureMode": mode} for mode in modes[chosen.what]],
        **_present(KmsKeyId=options.output_kms_key),
    }


def _endpoint(  # noqa: PLR0913 - as `plan_deployment`
    options: Options,
    deploy: Deploy,
    name: str,
    config: str,
    earlier: Deployment | None,
    *,
    exists: bool,
    run: str,
) -> Iterator[Request]:
    """The requests that create or update the endpoint and its autoscaling."""
    names: dict[str, Any] = {"EndpointName": name, "EndpointConfigName": config}
    resource = f"endpoint/{name}/variant/{deploy.variant}"
    target = _target(resource)
    schedule: list[Request] = []
    if deploy.delete_after is not None and deploy.scheduler_role is not None:
        schedule = [hosting.schedule(name, deploy.scheduler_role, deploy.delete_after)]
    if not exists:
        yield from schedule  # before the endpoint, which never exists without it
        parameters = _with_more(deploy, "CreateEndpoint", names | _tags(options, run))
        yield _request("CreateEndpoint", parameters)
    else:
        kept = earlier is not None and _keeps_scaling(deploy, resource, earlier)
        for old in scaling_targets(earlier) if earlier and not kept else ():
            yield Request(AUTOSCALING, "DeregisterScalableTarget", _target(old))
        if kept:
            excluded = ("DesiredWeight", "DataCaptureConfig")
            names["RetainAllVariantProperties"] = True
            names["ExcludeRetainedVariantProperties"] = [
                {"VariantPropertyType": each} for each in excluded
            ]
        yield _request("UpdateEndpoint", _with_more(deploy, "UpdateEndpoint", names))
        yield from schedule  # a failed update changes nothing
    if deploy.autoscaling is not None:
        limits = {"MinCapacity": deploy.autoscaling.min, "MaxCapacity": deploy.autoscaling.max}
        yield Request(AUTOSCALING, "RegisterScalableTarget", target | limits, later=True)
        yield Request(AUTOSCALING, "PutScalingPolicy", _policy(deploy, name, target), later=True)


def _target(resource: str) -> dict[str, Any]:
    return {
        "ServiceNamespace": "sagemaker",
        "ResourceId": resource,
        "ScalableDimension": _DIMENSION,
    }


def scaling_requests(deployment: Deployment) -> list[Request]:
    """The requests that register the variants of a deployment for autoscaling."""
    requests = deployment.request_list
    return [each for each in requests if each.operation == "RegisterScalableTarget"]


def scaling_targets(deployment: Deployment) -> list[str]:
    """The resources that a deployment registers for autoscaling."""
    return [each.parameters["ResourceId"] for each in scaling_requests(deployment)]


def _keeps_scaling(deploy: Deploy, resource: str, earlier: Deployment) -> bool:
    """Return whether autoscaling can continue during the update: same variant, same machines.

    https://docs.aws.amazon.com/sagemaker/latest/dg/endpoint-scaling-update.html
    """
    if deploy.autoscaling is None or scaling_targets(earlier) != [resource]:
        return False
    return earlier.machine_list[0].instance_type == deploy.instance_type


def _policy(deploy: Deploy, name: str, target: Mapping[str, Any]) -> dict[str, Any]:
    scaling = deploy.autoscaling
    assert scaling is not None  # noqa: S101 - for mypy
    metric: dict[str, Any] = {"PredefinedMetricSpecification": {"PredefinedMetricType": _REQUESTS}}
    if deploy.async_ is not None:
        waiting = {
            "MetricName": _WAITING,
            "Namespace": "AWS/SageMaker",
            "Dimensions": [{"Name": "EndpointName", "Value": name}],
            "Statistic": "Average",
        }
        metric = {"CustomizedMetricSpecification": waiting}
    tracking = {
        "TargetValue": float(scaling.target),
        **metric,
        **_present(
            ScaleInCooldown=scaling.scale_in_cooldown, ScaleOutCooldown=scaling.scale_out_cooldown
        ),
    }
    return {
        "PolicyName": f"deploykit-{deploy.variant}",
        **target,
        "PolicyType": "TargetTrackingScaling",
        "TargetTrackingScalingPolicyConfiguration": tracking,
    }


def _transform_job(options: Options, deploy: Deploy, name: str, model: str) -> dict[str, Any]:
    """The CreateTransformJob request. Without `deploy.name`, the job's name contains a hash."""
    batch = deploy.batch
    assert batch is not None  # noqa: S101 - for mypy
    source = {"S3DataSource": {"S3DataType": batch.input_type, "S3Uri": batch.input}}
    job: dict[str, Any] = {
        "ModelName": model,
        **_present(
            MaxConcurrentTransforms=batch.max_concurrency,
            MaxPayloadInMB=batch.max_payload,
            BatchStrategy=batch.strategy,
        ),
        "TransformInput": {
            "DataSource": source,
            "ContentType": batch.content_type,
            "SplitType": batch.split,
            "CompressionType": batch.compression,
        },
        "TransformOutput": {
            "S3OutputPath": batch.output or _below(options, "batch", model),
            "AssembleWith": batch.assemble,
            **_present(Accept=batch.accept, KmsKeyId=options.output_kms_key),
        },
        "TransformResources": {
            "InstanceType": deploy.instance_type,
            "InstanceCount": deploy.instance_count,
            **_present(VolumeKmsKeyId=deploy.volume_kms_key),
        },
    }
    job = _with_more(deploy, "CreateTransformJob", job | _tags(options))
    return {"TransformJobName": deploy.name or _named(name, job), **job}


def _machines(deploy: Deploy) -> tuple[Machines, ...]:
    """The machines of each variant; the deployed model's first."""
    if deploy.serverless is not None:
        own = deploy.serverless
        kept = own.provisioned_concurrency or 0
        return (Machines("", kept, own.max_concurrency, own.memory * _GB),)
    most = max(deploy.instance_count, deploy.autoscaling.max if deploy.autoscaling else 0)
    own_type = deploy.instance_type or ""
    others = [
        Machines(each.instance_type or own_type, each.instance_count, each.instance_count)
        for each in deploy.variants
    ]
    return (Machines(own_type, deploy.instance_count, most), *others)


def _summary(options: Options, deploy: Deploy, machines: tuple[Machines, ...]) -> str:
    first = machines[0]
    parts = [f"{each.instances} x {each.instance_type}" for each in machines if each.instance_type]
    if deploy.serverless is not None:
        parts = [f"{first.memory // _GB} GB, up to {first.most} concurrent requests"]
    if first.most > first.instances and first.instance_type:
        parts[0] += f" (up to {first.most})"
    account, role = options.role.split(":")[4], options.role.rpartition("/")[2]
    sent_with = str(options.credentials)
    return (
        f"sagemaker: {deploy.mode}, {' + '.join(parts)}, role {role} in account {account}, "
        f"{region_of(options)}" + (f", sent with {sent_with}" if sent_with else "")
    )


def check_deployment(options: Options, package: Package | None = None) -> Iterator[Problem]:
    """Yield every problem that can be found offline; `package` None checks the section alone."""
    deploy = options.deploy
    if deploy is None:
        hint = "for example {instance_type: ml.g5.xlarge}, or {serverless: {memory: 4}}"
        yield Problem(_SECTION, "is required", hint)
        return
    reported = [
        *_check_place(options),
        *_check_mode(options, deploy),
        *_check_machines(deploy),
        *_check_end(deploy),
        *check_image(deploy, package),
        *_check_variants(deploy),
        *_check_more(options, deploy),
    ]
    yield from reported
    errors = {each.path for each in reported if each.severity == "error"}
    yield from (
        each for each in _check_requests(options, deploy, package) if each.path not in errors
    )


def _at(key: str, message: str, hint: str | None = None) -> Problem:
    return Problem(f"{_SECTION}.{key}", message, hint)


def _check_place(options: Options) -> Iterator[Problem]:
    where, deploy = region_of(options), options.deploy or Deploy()
    if not where:
        yield Problem("sagemaker.region", "is required", "region: us-east-1, or set AWS_REGION")
    elif catalog.account(where) is None and deploy.image_uri is None:
        message = f"the AWS account that hosts the images in {where} is unknown"
        yield _at("image_uri", message, "image_uri: ACCOUNT.dkr.ecr.REGION.amazonaws.com/NAME:TAG")
    if bool(options.subnets) != bool(options.security_group_ids):
        lacking = "security_group_ids" if options.subnets else "subnets"
        yield Problem(f"sagemaker.{lacking}", "subnets and security_group_ids must be set together")


def _check_end(deploy: Deploy) -> Iterator[Problem]:
    if deploy.delete_after is not None and deploy.scheduler_role is None:
        message = "is required with delete_after"
        hint = "the ARN of a role for EventBridge Scheduler; `deploykit infra` creates one"
        yield _at("scheduler_role", message, hint)


def _check_mode(options: Options, deploy: Deploy) -> Iterator[Problem]:
    """Report settings of one mode that another has not.

    https://docs.aws.amazon.com/sagemaker/latest/dg/serverless-endpoints.html and
    https://docs.aws.amazon.com/sagemaker/latest/dg/async-inference.html
    """
    chosen = [key for key, part in _modes(deploy).items() if part is not None]
    for other in chosen[1:]:
        yield _at(
            other,
            f"cannot be combined with `{chosen[0]}`: an endpoint has one mode",
            "remove one of them",
        )
    mode = chosen[0] if chosen else "real-time"
    refused = {
        "serverless": {
            "autoscaling": "remove it: serverless endpoints scale automatically",
            "capture": "remove it, or use instances",
            "variants": "remove them, or use instances",
            "shadow": "remove it, or use instances",
            "volume_size": "remove it",
            "volume_kms_key": "remove it",
            "startup_timeout": "remove it, or use instances",
        },
        "async": {"shadow": "remove it, or make the endpoint real-time"},
        "batch": {
            "autoscaling": "instance_count: 4",
            "capture": "remove it",
            "variants": "remove them",
            "shadow": "remove it",
            "startup_timeout": "remove it",
            "volume_size": "remove it",
            "delete_after": "remove it: a batch job ends when its input is processed",
        },
    }.get(mode, {})
    for key, hint in refused.items():
        if getattr(deploy, key) not in (None, False, ()):
            yield _at(key, f"is not supported with `{mode}`", hint)
    if mode == "serverless":
        used = {"subnets": options.subnets, "network_isolation": options.network_isolation}
        for key in (key for key, value in used.items() if value):
            message = "is not supported with `serverless`"
            yield Problem(f"sagemaker.{key}", message, "remove it, or use instances")
    for name, value in deploy.env.items():
        if checks.is_secret(value):
            message = (
                "secrets are resolved only for training: the container would receive the reference"
            )
            hint = "read the secret in inference.py, with the role's permissions"
            yield _at(f"env.{name}", message, hint)


def _modes(deploy: Deploy) -> dict[str, Any]:
    return {"serverless": deploy.serverless, "async": deploy.async_, "batch": deploy.batch}


def _check_machines(deploy: Deploy) -> Iterator[Problem]:
    kind, scaling, serverless = deploy.instance_type, deploy.autoscaling, deploy.serverless
    if serverless is None and kind is None:
        yield _at("instance_type", "is required", "instance_type: ml.g5.xlarge, or serverless: {}")
    if serverless is not None:
        if kind is not None:
            gpus = " or GPUs" if catalog.has_gpu(kind) else ""
            message = f"a serverless endpoint has no instances{gpus}"
            yield _at("instance_type", message, "remove it, or remove `serverless`")
        if (serverless.provisioned_concurrency or 0) > serverless.max_concurrency:
            message = f"must be at most max_concurrency, which is {serverless.max_concurrency}"
            yield _at("serverless.provisioned_concurrency", message)
    if deploy.volume_kms_key is not None and kind and hardware.of(kind).nvme:
        message = f"is not supported on {kind}, whose NVMe disks are always encrypted"
        yield _at("volume_kms_key", message, "remove it")
    if scaling is None:
        return
    if scaling.min > scaling.max:
        yield _at(
            "autoscaling.min", f"must be at most max, which is {scaling.max}", f"min: {scaling.max}"
        )
    elif not scaling.min <= deploy.instance_count <= scaling.max:
        message = f"must be within the limits of autoscaling, {scaling.min} to {scaling.max}"
        yield _at("instance_count", message, f"instance_count: {max(1, scaling.min)}")
    if scaling.min == 0 and deploy.async_ is None:
        yield _at("autoscaling.min", "0 requires `async`, which queues requests", "min: 1")


def check_image(deploy: Deploy, package: Package | None) -> Iterator[Problem]:
    """Yield the problems of the container image, for a package."""
    kind, newest = deploy.instance_type or "", next(reversed(catalog.INFERENCE))
    if deploy.image_uri is not None:
        if deploy.framework_version is not None:
            yield _at(
                "framework_version", "cannot be combined with `image_uri`", "remove one of them"
            )
        if "-gpu-" in deploy.image_uri and kind and not catalog.has_gpu(kind):
            message = f"is a GPU image, but {kind} has no GPU"
            yield _at("image_uri", message, "choose a CPU image")
        if "-gpu-" in deploy.image_uri and deploy.serverless is not None:
            message = "is a GPU image, but serverless endpoints have no GPU"
            yield _at("image_uri", message, "choose a CPU image, or use instances")
        return
    chosen, own = deploy.framework_version, package.torch.partition("+")[0] if package else ""
    version = framework_version(deploy, package or _STAND_IN) if package or chosen else newest
    hint = f"framework_version: {newest}, or your own image as image_uri"
    if chosen is not None and version is None:
        message = f"AWS has no inference image with PyTorch {chosen}"
        yield _at("framework_version", message, hint)
    elif version is None:
        message = "the package does not record its PyTorch version"
        if own:
            message = f"AWS has no inference image with the package's PyTorch version, {own}"
        yield _at("framework_version", message, hint)
    elif own and catalog.minor(version) != catalog.minor(own):
        message = f"the package was built with PyTorch {own}, but the image has {version}"
        yield _at("framework_version", message)._replace(severity="warning")
    if version is not None and kind and not catalog.can_start(version, kind):
        message = f"AWS's image with PyTorch {version} does not support {kind}"
        yield _at(
            "instance_type", message, "choose another type, or set image_uri to your own image"
        )


def _check_variants(deploy: Deploy) -> Iterator[Problem]:
    names = [deploy.variant, *(each.name for each in deploy.variants)]
    for number, each in enumerate(deploy.variants):
        if each.name in names[: number + 1]:
            message = f"duplicate variant name {each.name}"
            yield _at(f"variants[{number}].name", message, "choose a unique name")
    shadows = [deploy.shadow, *(each.shadow for each in deploy.variants)]
    if any(shadows) and (len(shadows), sum(shadows)) != (2, 1):
        message = "a shadow variant needs exactly one other variant, which serves the requests"
        hint = "variants: [{name: stable, model: NAME}]"
        yield _at("shadow" if deploy.shadow else "variants", message, hint)
    weights = [deploy.weight, *(each.weight for each in deploy.variants)]
    if not any(weights):
        yield _at("weight", "at least one variant must have a weight above 0", "weight: 1")


def _check_more(options: Options, deploy: Deploy) -> Iterator[Problem]:
    """Report fields of `request` that deploykit sets."""
    planned = _any_requests(options, replace(deploy, request={}), _STAND_IN)
    own: dict[str, set[str]] = {}
    for each in planned:
        own.setdefault(each.operation, set()).update(name for name, _ in leaves(each.parameters))
    for operation, more in deploy.request.items():
        path = f"request.{operation}"
        if operation not in _OPERATIONS:
            hint = did_you_mean(operation, _OPERATIONS) or ", ".join(_OPERATIONS)
            yield _at(path, "unknown operation", hint)
        elif not isinstance(more, Mapping):
            yield _at(
                path, "expected a mapping of fields to values", f"{operation}: {{FIELD: VALUE}}"
            )
        else:
            for name, value in leaves(more):
                yield from _check_owned(f"{path}.{name}", name, value, own.get(operation, set()))


def _check_owned(path: str, name: str, value: Any, own: AbstractSet[str]) -> Iterator[Problem]:
    """Report a field of `request` that is one of deploykit's `own`, or holds one."""
    if name in own or any(each.startswith(f"{name}.") for each in own):
        key = next((key for field, key in _KEYS.items() if name.startswith(field)), None)
        yield _at(
            path, f"is set by deploykit{f'; use {_SECTION}.{key}' if key else ''}", "remove it"
        )
    elif any(name.startswith(f"{each}.") for each in own):
        yield _at(path, f"{name.rpartition('.')[0]} is set by deploykit", "remove it")
    elif isinstance(value, Mapping):
        yield _at(path, "is empty", "remove it")


def _any_requests(options: Options, deploy: Deploy, package: Package) -> list[Request]:
    """Each request that a deployment may send; the model's own variant is one of them."""
    known = replace(options, deploy=deploy, region=region_of(options) or "us-east-1")
    name = deploy.name or _STAND_IN.run
    plan = plan_deployment(known, package, name=name)
    requests = list(plan.requests)
    if deploy.batch is None:
        earlier = recorded(plan, 0.0)
        requests += _endpoint(
            known, deploy, name, plan.config, earlier, exists=True, run=package.run
        )
        own = Variant(deploy.variant, plan.model, deploy.weight, None, deploy.instance_count)
        requests.append(Request("", _VARIANT, _own_variant(deploy, own)))
    return requests


def _check_requests(options: Options, deploy: Deploy, package: Package | None) -> Iterator[Problem]:
    """Report what the services' own descriptions refuse."""
    problems: list[Problem] = []
    for each in _any_requests(options, deploy, package or _STAND_IN):
        if not each.service:
            continue
        known = service_model.shapes(each.service)
        shape = next(
            f"{each.operation}{end}"
            for end in ("Input", "Request")
            if f"{each.operation}{end}" in known
        )
        lines = (
            service_model.type_errors(shape, each.parameters, each.service)
            if deploy.request
            else ()
        )
        wrong = [_at("request", f"{each.operation}: {line}") for line in lines]
        violations = service_model.violations(shape, each.parameters, each.service)
        problems += wrong or [_refused(each.operation, *one) for one in violations]
    yield from dict.fromkeys(problems)


def _refused(operation: str, path: str, message: str, hint: str) -> Problem:
    """The problem of a violation, by the key that it comes from."""
    for field, key in _KEYS.items():
        if path == field or path.startswith((f"{field}.", f"{field}[")):
            inner = path[len(field) :].lstrip(".")
            return _at(key, f"SageMaker: {inner}{' ' * bool(inner)}{message}", hint or None)
    return Problem(_SECTION, f"SageMaker: {operation}: {path} {message}", hint or None)
