"""Requests that violate the service's own description, and errors in another form than AWS's."""

from __future__ import annotations

import json

import boto3
import pytest
from botocore.exceptions import ClientError

from deploykit.backends.sagemaker import aws
from deploykit.backends.sagemaker.rules import request_problems
from deploykit.lib.errors import SubmitRefused


@pytest.fixture
def request_of(planned):
    return json.loads(planned(tags={"team": "vision ü"}, env={"A": "b"}).text)


def change(request, path, value):
    *folders, name = path.split(".")
    for folder in folders:
        request = request[folder]
    request[name] = value


BROKEN = {
    "unknown": (
        "Enviroment",
        {},
        "sagemaker",
        "Enviroment is not supported by the installed botocore",
    ),
    "unknown inside": (
        "ResourceConfig.InstanceTyp",
        "x",
        "sagemaker",
        "InstanceTyp is not supported",
    ),
    "enum": (
        *("ResourceConfig.InstanceType", "ml.g5.13xlarge", "sagemaker.instance_type"),
        "'ml.g5.13xlarge' is not one of the accepted values",
    ),
    "pattern": ("TrainingJobName", "a_b", "--run", "'a_b' does not match"),
    "too long": ("TrainingJobName", "a" * 64, "--run", "has 64 characters; the maximum is 63"),
    "too short": (
        *("RoleArn", "arn:aws:iam", "sagemaker.role"),
        "has 11 characters; the minimum is 20",
    ),
    "too large": (
        *("RetryStrategy", {"MaximumRetryAttempts": 31}, "retries"),
        "is 31; the maximum is 30",
    ),
    "too small": (
        *("StoppingCondition.MaxRuntimeInSeconds", 0, "resources.time_limit"),
        "is 0; the minimum is 1",
    ),
    "too many": (
        *("HyperParameters", {f"h{n}": "" for n in range(101)}, "entrypoint.args"),
        "has 101 entries; the maximum is 100",
    ),
    "value of a map": (
        *("HyperParameters.x", "y" * 2501, "entrypoint.args"),
        ".x has 2501 characters; the maximum is 2500",
    ),
    "line break in a value": ("HyperParameters.x", "a\nb", "entrypoint.args", "does not match"),
    "key of a map": ("Environment", {"a-b": "c"}, "env.a-b", "does not match"),
    "item of a list": (
        *("Tags", [{"Key": "a", "Value": "b"}, {"Key": "c", "Value": "d" * 257}]),
        *("sagemaker.tags", "[1].Value has 257 characters; the maximum is 256"),
    ),
    "character class of Java": (
        *("Tags", [{"Key": "a!", "Value": "b"}], "sagemaker.tags"),
        "[0].Key 'a!' does not match",
    ),
}


@pytest.mark.parametrize(("field", "value", "path", "message"), BROKEN.values(), ids=BROKEN)
def test_a_violation_is_reported_by_its_key(request_of, field, value, path, message):
    assert request_problems(request_of) == []
    change(request_of, field, value)
    assert any(
        problem.path == path and message in problem.message
        for problem in request_problems(request_of)
    )


def test_all_violations_are_reported_at_once(request_of):
    for name in ("unknown", "enum", "too short"):
        change(request_of, *BROKEN[name][:2])
    paths = {problem.path for problem in request_problems(request_of)}
    assert paths == {"sagemaker", "sagemaker.instance_type", "sagemaker.role"}


@pytest.mark.parametrize(
    ("field", "value"), [("RoleArn", None), ("TrainingJobName", 5), ("Enviroment", {})]
)
def test_what_botocore_checks_before_it_sends_is_refused(request_of, field, value):
    """Missing fields, types and names that an old botocore does not know; nothing is sent."""
    request_of[field] = value
    client = boto3.client(
        "sagemaker", "us-east-1", aws_access_key_id="x", aws_secret_access_key="x"
    )
    refused = pytest.raises(SubmitRefused, match=f"boto3 rejected the request.*\n.*{field}")
    with refused, aws.errors("us-east-1"):
        client.create_training_job(**request_of)


def test_a_web_page_in_place_of_an_answer_is_its_status():
    page = {"Error": {"Message": "<!doctype html>\n<title>500</title>"}}
    error = ClientError({**page, "ResponseMetadata": {"HTTPStatusCode": 502}}, "ListThings")
    assert aws.message(error) == "HTTP 502"
