"""Register a package in SageMaker's model registry, as a version of a model package group.

A version keeps what it comes from in its own fields, so no other service is asked: commit and
training job in `MetadataProperties`, the rest in `CustomerMetadataProperties`.
https://docs.aws.amazon.com/sagemaker/latest/dg/model-registry-version.html
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from deploykit.backends.deployment import Package, RegistrationPlan, Request
from deploykit.backends.sagemaker import aws, deployment, jobs, uploads
from deploykit.backends.sagemaker.options import Deploy, Options
from deploykit.backends.sagemaker.options import region as region_of
from deploykit.job.model import Handle
from deploykit.lib.errors import JobFileError
from deploykit.observe.trackers.contract import ModelVersion, Registration

_APPROVALS = {
    "pending": "PendingManualApproval",
    "approved": "Approved",
    "rejected": "Rejected",
}
_MAX_PROPERTIES, _MAX_KEY, _MAX_VALUE = 50, 128, 256
_NOT_ALLOWED = re.compile(r"[^\w .:/=+@-]")
"""In a property."""
_GROUPS = {
    "multiclass_classification_metrics": ("accuracy", "precision", "recall", "f1"),
    "regression_metrics": ("mae", "mse", "rmse", "r2"),
}
"""Groups of metrics in SageMaker's format, by words in the metrics' names:
https://docs.aws.amazon.com/sagemaker/latest/dg/model-monitor-model-quality-metrics.html"""


def plan_registration(options: Options, package: Package, model: Registration) -> RegistrationPlan:
    """Render the requests. Pure. Raises JobFileError without an image for the package."""
    archive = deployment.archive_location(options, package)
    requests = [
        Request(
            "sagemaker",
            "CreateModelPackageGroup",
            {
                "ModelPackageGroupName": model.name,
                "ModelPackageGroupDescription": "Versions of a model, registered by deploykit",
                **_tags(options),
            },
        )
    ]
    create = {
        "ModelPackageGroupName": model.name,
        "ModelPackageDescription": model.description,
        "ModelApprovalStatus": _APPROVALS[model.approval or "pending"],
        "InferenceSpecification": _specification(options, package),
        "MetadataProperties": {
            "GeneratedBy": _source(options, model),
            **({"CommitId": model.facts["commit"]} if "commit" in model.facts else {}),
        },
        "CustomerMetadataProperties": dict(_properties(model)),
    }
    if model.metrics:
        statistics = json.dumps(_statistics(model.metrics), indent=1) + "\n"
        digest = hashlib.sha256(statistics.encode()).hexdigest()[:12]
        location = f"{archive.rpartition('/')[0]}/metrics-{digest}.json"
        bucket, _, key = location.removeprefix("s3://").partition("/")
        owned = {"ExpectedBucketOwner": options.owner, "ContentType": "application/json"}
        put = {"Bucket": bucket, "Key": key, "Body": statistics, **owned}
        requests.insert(0, Request("s3", "PutObject", put))
        source = {"ContentType": "application/json", "S3Uri": location}
        create["ModelMetrics"] = {"ModelQuality": {"Statistics": source}}
    requests.append(Request("sagemaker", "CreateModelPackage", create))
    return RegistrationPlan(
        backend="sagemaker",
        target=region_of(options) or "",
        package=package,
        archive=archive,
        requests=tuple(requests),
        options=options,
        model=model,
    )


def _tags(options: Options) -> dict[str, Any]:
    tags = [{"Key": key, "Value": value} for key, value in options.tags.items()]
    return {"Tags": tags} if tags else {}


def _specification(options: Options, package: Package) -> dict[str, Any]:
    """How the version can be deployed: as `deploy` would."""
    deploy = options.deploy or Deploy()
    problems = [
        each for each in deployment.check_image(deploy, package) if each.severity == "error"
    ]
    if problems:
        raise JobFileError("the model package", problems)
    archive = deployment.archive_location(options, package)
    container = deployment.model_request(options, deploy, package, archive)["PrimaryContainer"]
    version = deployment.framework_version(deploy, package) or package.torch.partition("+")[0]
    framework = {"Framework": "PYTORCH", **({"FrameworkVersion": version} if version else {})}
    specification: dict[str, Any] = {
        "Containers": [{**container, **framework}],
        "SupportedContentTypes": ["application/json"],
        "SupportedResponseMIMETypes": ["application/json"],
    }
    if deploy.instance_type is not None:
        kind = "Transform" if deploy.batch else "RealtimeInference"
        specification[f"Supported{kind}InstanceTypes"] = [deploy.instance_type]
    return specification


def _source(options: Options, model: Registration) -> str:
    """What trained the model: the ARN of the training job, or the address of another job."""
    if model.job is None:
        return f"run {model.facts['run']}"
    return jobs.arn(model.job, options.role) if _is_here(model.job) else str(model.job)


def _is_here(job: Handle) -> bool:
    return job.backend == "sagemaker"


def _properties(model: Registration) -> Iterator[tuple[str, str]]:
    metrics = {f"metric.{name}": f"{value:.6g}" for name, value in model.metrics.items()}
    for name, value in list({**model.facts, **metrics}.items())[:_MAX_PROPERTIES]:
        key, text = _NOT_ALLOWED.sub("_", name), _NOT_ALLOWED.sub("_", value)
        yield key[:_MAX_KEY], text[:_MAX_VALUE]


def _statistics(metrics: Mapping[str, float]) -> dict[str, Any]:
    """The metrics in the format of SageMaker's model quality statistics."""
    words = {word for name in metrics for word in re.split(r"[^a-z0-9]+", name.lower())}
    group = next((name for name, known in _GROUPS.items() if words & {*known}), "metrics")
    values = {
        name: {"value": value, "standard_deviation": "NaN"} for name, value in metrics.items()
    }
    return {"version": 0.0, group: values}


def register(plan: RegistrationPlan, archive: Path) -> ModelVersion:
    """Send the requests for what does not exist; a version that exists only gets the approval.

    The package is uploaded first. Raises what `aws.errors` raises.
    """
    from botocore import xform_name  # not for a dry run

    model, options = plan.model, plan.options
    client = aws.client("sagemaker", plan.target, options.credentials)
    known: Any = None
    with aws.errors(plan.target):
        if _exists(client, model.name):
            known = next(_versions(client, model), None)
    if known is not None:
        approval = _APPROVALS.get(model.approval, known.get("ModelApprovalStatus"))
        if known.get("ModelApprovalStatus") != approval:
            arn = known["ModelPackageArn"]
            with aws.errors(plan.target):
                client.update_model_package(ModelPackageArn=arn, ModelApprovalStatus=approval)
        return _version(model, known["ModelPackageArn"], str(approval), is_new=False)
    uploads.upload_model(options, plan.target, archive, plan.archive)
    created: dict[str, Any] = {}
    for request in plan.requests:
        with aws.errors(plan.target):
            if request.operation == "CreateModelPackageGroup" and _exists(client, model.name):
                continue
            sender = aws.client(request.service, plan.target, options.credentials)
            created = getattr(sender, xform_name(request.operation))(**request.parameters)
    approval = _APPROVALS[model.approval or "pending"]
    return _version(model, created["ModelPackageArn"], approval, is_new=True)


def _exists(client: Any, name: str) -> bool:
    """Whether a group exists."""
    try:
        client.describe_model_package_group(ModelPackageGroupName=name)
    except client.exceptions.ClientError as error:
        if "does not exist" not in aws.message(error):
            raise
        return False
    return True


def _versions(client: Any, model: Registration) -> Iterator[Any]:
    """The versions of a group that have this package."""
    pages = client.get_paginator("list_model_packages").paginate(ModelPackageGroupName=model.name)
    for page in pages:
        for version in page.get("ModelPackageSummaryList", ()):
            if version.get("ModelPackageDescription") == model.description:
                yield version


def _version(model: Registration, arn: str, approval: str, *, is_new: bool) -> ModelVersion:
    names = {native: name for name, native in _APPROVALS.items()}
    number = arn.rpartition("/")[2]
    return ModelVersion("sagemaker", model.name, number, names.get(approval, approval), arn, is_new)
