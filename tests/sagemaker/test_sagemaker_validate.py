"""Requests that are wrong by the service's own description."""

from __future__ import annotations

import copy
import json

import pytest

from deploykit.backends.sagemaker.validate import faults


@pytest.fixture
def request_of(planned):
    return json.loads(planned(tags={"team": "vision ü"}, env={"A": "b"}).text)


def test_good_request(request_of):
    assert list(faults("CreateTrainingJob", request_of)) == []


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
    "missing": (_drop("RoleArn"), "RoleArn", "is missing"),
    "missing inside": (
        _drop("AlgorithmSpecification.TrainingInputMode"),
        "AlgorithmSpecification.TrainingInputMode",
        "is missing",
    ),
    "unknown": (_set("Enviroment", {}), "Enviroment", "is unknown"),
    "unknown inside": (
        _set("ResourceConfig.InstanceTyp", "x"),
        "ResourceConfig.InstanceTyp",
        "is unknown",
    ),
    "type": (_set("TrainingJobName", 5), "TrainingJobName", "must be of type string, is int"),
    "true is no number": (
        _set("ResourceConfig.InstanceCount", True),
        "ResourceConfig.InstanceCount",
        "must be of type integer, is bool",
    ),
    "choice": (
        _set("ResourceConfig.InstanceType", "ml.g5.13xlarge"),
        "ResourceConfig.InstanceType",
        "none of the choices",
    ),
    "pattern": (_set("TrainingJobName", "a_b"), "TrainingJobName", "does not match"),
    "too long": (
        _set("TrainingJobName", "a" * 64),
        "TrainingJobName",
        "is 64 long; the most is 63",
    ),
    "too short": (_set("RoleArn", "arn:aws:iam"), "RoleArn", "is 11 long; the least is 20"),
    "too much": (
        _set("RetryStrategy", {"MaximumRetryAttempts": 31}),
        "RetryStrategy.MaximumRetryAttempts",
        "is 31; the most is 30",
    ),
    "too little": (
        _set("StoppingCondition.MaxRuntimeInSeconds", 0),
        "StoppingCondition.MaxRuntimeInSeconds",
        "is 0; the least is 1",
    ),
    "too many": (
        _set("HyperParameters", {f"h{n}": "" for n in range(101)}),
        "HyperParameters",
        "is 101 entries; the most is 100",
    ),
    "value of a map": (
        _set("HyperParameters.x", "y" * 2501),
        "HyperParameters.x",
        "is 2501 long; the most is 2500",
    ),
    "line end in a value": (
        _set("HyperParameters.x", "a\nb"),
        "HyperParameters.x",
        "does not match",
    ),
    "key of a map": (_set("Environment", {"a-b": "c"}), "Environment.a-b", "does not match"),
    "item of a list": (
        _set("Tags", [{"Key": "a", "Value": "b"}, {"Key": "!"}]),
        "Tags[1].Value",
        "is missing",
    ),
    "class of Java": (_set("Tags", [{"Key": "a!", "Value": "b"}]), "Tags[0].Key", "does not match"),
}


@pytest.mark.parametrize(("change", "path", "words"), BROKEN.values(), ids=BROKEN)
def test_broken_request(request_of, change, path, words):
    broken = copy.deepcopy(request_of)
    change(broken)
    assert any(
        fault.path == path and words in fault.message
        for fault in faults("CreateTrainingJob", broken)
    )


def test_every_fault_is_found_at_once(request_of):
    for change, _, _ in (BROKEN["missing"], BROKEN["unknown"], BROKEN["choice"]):
        change(request_of)
    assert {fault.path for fault in faults("CreateTrainingJob", request_of)} == {
        "RoleArn",
        "Enviroment",
        "ResourceConfig.InstanceType",
    }
