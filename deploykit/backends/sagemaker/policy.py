"""The IAM policy for people who submit a job: for submit, status, logs, cancel and fetch.

With `sagemaker.deploy`, it is also for `deploy`, `endpoint`, `register` and `list --endpoints`.

Actions and their resources:
https://docs.aws.amazon.com/service-authorization/latest/reference/list_amazonsagemaker.html
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from deploykit.backends.sagemaker import request
from deploykit.backends.sagemaker.jobs import LOG_GROUP
from deploykit.backends.sagemaker.options import Deploy, Options, local_data, region
from deploykit.job.model import JobSpec


def submitter_policy(job: JobSpec, options: Options) -> Mapping[str, Any]:
    """The least policy for this job; see `base.Capabilities.submitter_policy`. Pure."""
    return {"Version": "2012-10-17", "Statement": list(_statements(job, options))}


def _statements(job: JobSpec, options: Options) -> Iterator[dict[str, Any]]:
    yield from _training(job, options)
    if options.deploy is not None:
        yield from _deploy(options, options.deploy)


def _training(job: JobSpec, options: Options) -> Iterator[dict[str, Any]]:
    _, partition, *_, account, _ = options.role.split(":")
    here = f"{region(options)}:{account}"
    jobs = ["CreateTrainingJob", "DescribeTrainingJob", "StopTrainingJob"]
    jobs += ["AddTags"] if options.tags else []
    yield _allow(
        "Jobs",
        [f"sagemaker:{action}" for action in jobs],
        [f"arn:{partition}:sagemaker:{here}:training-job/*"],
    )
    yield _allow("Role", ["iam:PassRole"], [options.role]) | {
        "Condition": {"StringEquals": {"iam:PassedToService": "sagemaker.amazonaws.com"}}
    }
    yield _allow(
        "Logs",
        ["logs:DescribeLogStreams", "logs:GetLogEvents"],
        [f"arn:{partition}:logs:{here}:log-group:{LOG_GROUP}:*"],
    )
    bucket = f"arn:{partition}:s3:::"
    yield _allow(
        "Upload",
        ["s3:GetObject", "s3:PutObject"],  # GetObject: whether the same source is there already
        [f"{bucket}{options.bucket}/{options.prefix}/*"],
    )
    if local_data(job, options):
        yield _allow("Data", ["s3:ListBucket"], [f"{bucket}{options.bucket}"]) | {
            "Condition": {"StringLike": {"s3:prefix": f"{options.prefix}/data/*"}}
        }
    for number, location in enumerate(_results(job, options), 1):
        name, _, prefix = location.removeprefix("s3://").partition("/")
        below = f"{prefix.rstrip('/')}/*" if prefix else "*"
        yield _allow(f"List{number}", ["s3:ListBucket"], [f"{bucket}{name}"]) | {
            "Condition": {"StringLike": {"s3:prefix": below}}
        }
        yield _allow(f"Fetch{number}", ["s3:GetObject"], [f"{bucket}{name}/{below}"])


def _deploy(options: Options, deploy: Deploy) -> Iterator[dict[str, Any]]:
    """What the verbs for endpoints send."""
    _, partition, *_, account, _ = options.role.split(":")
    here = f"{region(options)}:{account}"
    mine = f"arn:{partition}:sagemaker:{here}"
    kinds = ["model", "endpoint-config", "transform-job" if deploy.batch else "endpoint"]
    yield _allow(
        "Deploy",
        [f"sagemaker:{action}" for action in _actions(deploy)],
        [f"{mine}:{kind}/*" for kind in kinds],
    )
    yield _allow(
        "Register",
        [
            *("sagemaker:AddTags", "sagemaker:CreateModelPackage"),
            *("sagemaker:CreateModelPackageGroup", "sagemaker:DescribeModelPackageGroup"),
            *("sagemaker:ListModelPackages", "sagemaker:UpdateModelPackage"),
        ],
        [f"{mine}:model-package-group/*", f"{mine}:model-package/*"],
    )
    groups = "TransformJobs:*" if deploy.batch else "Endpoints/*"
    yield _allow(
        "DeployLogs",
        ["logs:DescribeLogStreams", "logs:GetLogEvents"],
        [f"arn:{partition}:logs:{here}:log-group:/aws/sagemaker/{groups}"],
    )
    if deploy.batch:
        return
    yield _allow("List", ["sagemaker:ListEndpoints", "cloudwatch:GetMetricData"], ["*"])
    yield _allow("Tags", ["sagemaker:ListTags"], [f"{mine}:endpoint/*"])
    if deploy.autoscaling:
        actions = ("RegisterScalableTarget", "DeregisterScalableTarget", "PutScalingPolicy")
        yield _allow(
            "Scale",
            [f"application-autoscaling:{action}" for action in actions],
            [f"arn:{partition}:application-autoscaling:{here}:scalable-target/*"],
        )
    if deploy.scheduler_role:
        schedules = ("CreateSchedule", "DeleteSchedule", "GetSchedule", "UpdateSchedule")
        yield _allow(
            "Schedule",
            [f"scheduler:{action}" for action in schedules],
            [f"arn:{partition}:scheduler:{here}:schedule/default/*"],
        )
        yield _allow("SchedulerRole", ["iam:PassRole"], [deploy.scheduler_role]) | {
            "Condition": {"StringEquals": {"iam:PassedToService": "scheduler.amazonaws.com"}}
        }


def _actions(deploy: Deploy) -> Iterator[str]:
    """Actions on models, configurations, endpoints or transform jobs."""
    for verb in ("Create", "Describe", "Delete"):
        yield f"{verb}Model"
        if not deploy.batch:
            yield from (f"{verb}EndpointConfig", f"{verb}Endpoint")
    if deploy.batch:
        yield from ("CreateTransformJob", "DescribeTransformJob", "StopTransformJob")
    else:
        yield from ("UpdateEndpoint", "UpdateEndpointWeightsAndCapacities", "InvokeEndpoint")
        yield from ["InvokeEndpointAsync"] if deploy.async_ else []
    yield "AddTags"


def _results(job: JobSpec, options: Options) -> Iterator[str]:
    """The locations that `fetch` downloads from."""
    yield request.output(job, options)
    if job.checkpoints is not None:
        yield job.checkpoints


def _allow(name: str, actions: list[str], resources: list[str]) -> dict[str, Any]:
    return {"Sid": name, "Effect": "Allow", "Action": actions, "Resource": resources}
