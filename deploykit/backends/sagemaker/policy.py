"""The IAM policy for people who submit a job: for submit, status, logs, cancel and fetch.

Actions and their resources:
https://docs.aws.amazon.com/service-authorization/latest/reference/list_amazonsagemaker.html
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from deploykit.backends.sagemaker import request
from deploykit.backends.sagemaker.jobs import LOG_GROUP
from deploykit.backends.sagemaker.options import Options, local_data, region
from deploykit.job.model import JobSpec


def submitter_policy(job: JobSpec, options: Options) -> Mapping[str, Any]:
    """The least policy for this job; see `base.Capabilities.submitter_policy`. Pure."""
    return {"Version": "2012-10-17", "Statement": list(_statements(job, options))}


def _statements(job: JobSpec, options: Options) -> Iterator[dict[str, Any]]:
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


def _results(job: JobSpec, options: Options) -> Iterator[str]:
    """The locations that `fetch` downloads from."""
    yield request.output(job, options)
    if job.checkpoints is not None:
        yield job.checkpoints


def _allow(name: str, actions: list[str], resources: list[str]) -> dict[str, Any]:
    return {"Sid": name, "Effect": "Allow", "Action": actions, "Resource": resources}
