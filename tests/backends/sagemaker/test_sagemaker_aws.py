"""Requests that violate the service's own description."""

from __future__ import annotations

import copy
import json

import pytest
from botocore.exceptions import ClientError

from deploykit.backends.sagemaker.aws import message
from deploykit.backends.sagemaker.rules import violations


@pytest.fixture
def request_of(planned):
    return json.loads(planned(tags={"team": "vision ü"}, env={"A": "b"}).text)


def test_a_valid_request_has_no_violations(request_of):
    assert list(violations("CreateTrainingJob", request_of)) == []


def _set(path, value):
    def change(request):
        *folders, name = path.split(".")
        for folder in folders:
            request = request[folder]
        request[name] = value

    return change


def _drop(path):
    def change(request):
        *folders, name = path.split(".")
        for folder in folders:
            request = request[folder]
        del request[name]

    return change


BROKEN = {
    "missing": (_drop("RoleArn"), "RoleArn", "is required"),
    "missing inside": (
        _drop("AlgorithmSpecification.TrainingInputMode"),
        "AlgorithmSpecification.TrainingInputMode",
        "is required",
    ),
    "unknown": (_set("Enviroment", {}), "Enviroment", "is unknown"),
    "unknown inside": (
        _set("ResourceConfig.InstanceTyp", "x"),
        "ResourceConfig.InstanceTyp",
        "is unknown",
    ),
    "type": (_set("TrainingJobName", 5), "TrainingJobName", "must be of type string, not int"),
    "true is not a number": (
        _set("ResourceConfig.InstanceCount", True),
        "ResourceConfig.InstanceCount",
        "must be of type integer, not bool",
    ),
    "enum": (
        _set("ResourceConfig.InstanceType", "ml.g5.13xlarge"),
        "ResourceConfig.InstanceType",
        "not one of the accepted values",
    ),
    "pattern": (_set("TrainingJobName", "a_b"), "TrainingJobName", "does not match"),
    "too long": (
        _set("TrainingJobName", "a" * 64),
        "TrainingJobName",
        "has 64 characters; the maximum is 63",
    ),
    "too short": (
        _set("RoleArn", "arn:aws:iam"),
        "RoleArn",
        "has 11 characters; the minimum is 20",
    ),
    "too large": (
        _set("RetryStrategy", {"MaximumRetryAttempts": 31}),
        "RetryStrategy.MaximumRetryAttempts",
        "is 31; the maximum is 30",
    ),
    "too small": (
        _set("StoppingCondition.MaxRuntimeInSeconds", 0),
        "StoppingCondition.MaxRuntimeInSeconds",
        "is 0; the minimum is 1",
    ),
    "too many": (
        _set("HyperParameters", {f"h{n}": "" for n in range(101)}),
        "HyperParameters",
        "has 101 entries; the maximum is 100",
    ),
    "value of a map": (
        _set("HyperParameters.x", "y" * 2501),
        "HyperParameters.x",
        "has 2501 characters; the maximum is 2500",
    ),
    "line break in a value": (
        _set("HyperParameters.x", "a\nb"),
        "HyperParameters.x",
        "does not match",
    ),
    "key of a map": (_set("Environment", {"a-b": "c"}), "Environment.a-b", "does not match"),
    "item of a list": (
        _set("Tags", [{"Key": "a", "Value": "b"}, {"Key": "!"}]),
        "Tags[1].Value",
        "is required",
    ),
    "character class of Java": (
        _set("Tags", [{"Key": "a!", "Value": "b"}]),
        "Tags[0].Key",
        "does not match",
    ),
}


@pytest.mark.parametrize(("change", "path", "message"), BROKEN.values(), ids=BROKEN)
def test_a_violation_is_reported_with_its_path(request_of, change, path, message):
    broken = copy.deepcopy(request_of)
    change(broken)
    assert any(
        violation.path == path and message in violation.message
        for violation in violations("CreateTrainingJob", broken)
    )


def test_all_violations_are_reported_at_once(request_of):
    for change, _, _ in (BROKEN["missing"], BROKEN["unknown"], BROKEN["enum"]):
        change(request_of)
    assert {violation.path for violation in violations("CreateTrainingJob", request_of)} == {
        "RoleArn",
        "Enviroment",
        "ResourceConfig.InstanceType",
    }


def test_a_web_page_in_place_of_an_answer_is_its_status():
    page = {"Error": {"Message": "<!doctype html>\n<title>500</title>"}}
    error = ClientError({**page, "ResponseMetadata": {"HTTPStatusCode": 502}}, "ListThings")
    assert message(error) == "HTTP 502"
