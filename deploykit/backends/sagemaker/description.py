"""A request checked against botocore's description of SageMaker, before it is sent.

botocore itself checks required fields, names, types and minima; the patterns, enums and maxima of
the description, which it leaves to the service, are checked here too. The description is read as
data, which is faster than importing botocore.
"""

from __future__ import annotations

import difflib
import gzip
import importlib.util
import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from deploykit.job.model import Problem
from deploykit.job.spelling import did_you_mean
from deploykit.lib.errors import BackendUnavailable

_TYPES: dict[str, Any] = {
    "structure": Mapping,
    "map": Mapping,
    "list": list,
    "string": str,
    "boolean": bool,
    "integer": int,
    "long": int,
    "float": (int, float),
}
_CLASSES = {r"\p{Alnum}": "a-zA-Z0-9", r"\p{L}": r"\w", r"\p{N}": r"\d", r"\p{Z}": r"\s"}
"""Character classes of Java that the patterns use, always inside brackets."""
_MANY = 5
"""Choices that a message lists."""
_KEYS = {
    "Environment": "env",
    "RoleArn": "sagemaker.role",
    "AlgorithmSpecification.TrainingImage": "sagemaker.image_uri",
    "AlgorithmSpecification.ContainerArguments": "sagemaker.image_entrypoint",
    "ResourceConfig.InstanceType": "sagemaker.instance_type",
    "ResourceConfig.InstanceGroups": "sagemaker.instance_groups",
    "ResourceConfig.VolumeKmsKeyId": "sagemaker.volume_kms_key",
    "ResourceConfig.TrainingPlanArn": "sagemaker.training_plan",
    "AlgorithmSpecification.MetricDefinitions": "sagemaker.metric_definitions",
    "OutputDataConfig.KmsKeyId": "sagemaker.output_kms_key",
    "TensorBoardOutputConfig.S3OutputPath": "sagemaker.tensorboard_output",
    "HyperParameters.mp_parameters": "sagemaker.model_parallel",
    "ResourceConfig.InstanceCount": "resources.nodes",
    "ResourceConfig.VolumeSizeInGB": "sagemaker.volume_size",
    "ResourceConfig.KeepAlivePeriodInSeconds": "sagemaker.keep_alive",
    "StoppingCondition.MaxRuntimeInSeconds": "resources.time_limit",
    "StoppingCondition.MaxWaitTimeInSeconds": "sagemaker.max_wait",
    "VpcConfig.Subnets": "sagemaker.subnets",
    "VpcConfig.SecurityGroupIds": "sagemaker.security_group_ids",
    "RetryStrategy.MaximumRetryAttempts": "retries",
    "InputDataConfig": "data",
    "OutputDataConfig.S3OutputPath": "output",
    "CheckpointConfig.S3Uri": "checkpoints",
    "HyperParameters": "entrypoint.args",
    "Tags": "sagemaker.tags",
}
"""Path in the request -> key of the job file."""
_COMBINED = {
    "Environment.DEPLOYKIT_SECRETS": "all secret references together, as JSON,",
    "Environment.DEPLOYKIT_ENV": "all NCCL_, FI_, GLOO_ and RDMAV_ variables together, as JSON,",
}
"""Path in the request -> the values of the job file that are combined there."""


class Violation(NamedTuple):
    """A breach of the service's description. `path` is the dotted path in the request."""

    path: str
    message: str
    hint: str | None = None


def request_problems(request: Mapping[str, Any]) -> list[Problem]:
    """Everything in a CreateTrainingJob request that the service would refuse.

    Paths are those of the job file. Raises BackendUnavailable if botocore is not installed.
    """
    return [_problem(violation) for violation in violations("CreateTrainingJob", request)]


def violations(operation: str, request: Mapping[str, Any]) -> Iterator[Violation]:
    """Every violation of the operation's description. Raises as `request_problems` does."""
    model = _model()
    shape = model["operations"][operation]["input"]["shape"]
    yield from _check(model["shapes"], shape, request, "")


def _problem(violation: Violation) -> Problem:
    path, message, hint = violation
    if path in _COMBINED:
        return Problem("env", f"SageMaker: {_COMBINED[path]} {message}", "shorten or remove some")
    for field, key in _KEYS.items():
        if path == field or path.startswith((f"{field}.", f"{field}[")):
            inner = path[len(field) :]
            if key == "env":
                return Problem(key + inner, f"SageMaker: {message}", hint)
            return Problem(key, f"SageMaker: {inner}{' ' * bool(inner)}{message}", hint)
    return Problem("sagemaker", f"SageMaker: {path} {message}", hint)


@cache
def _model() -> Any:
    """The newest description of SageMaker in the installed botocore."""
    spec = importlib.util.find_spec("botocore")
    if spec is None or spec.origin is None:
        raise BackendUnavailable(
            "the Python package botocore is not installed", hint="pip install boto3"
        )
    versions = (Path(spec.origin).parent / "data" / "sagemaker").glob("*/service-2.json*")
    newest = max(versions, key=lambda path: path.parent.name)
    data = newest.read_bytes()
    return json.loads(gzip.decompress(data) if newest.suffix == ".gz" else data)


def _check(shapes: Any, name: str, value: Any, path: str) -> Iterator[Violation]:
    shape = shapes[name]
    kind = shape["type"]
    expected: Any = _TYPES[kind]
    if not isinstance(value, expected) or (isinstance(value, bool) and kind != "boolean"):
        yield Violation(path, f"must be of type {kind}, not {type(value).__name__}")
        return
    yield from _check_size(shape, kind, value, path)
    if kind == "string":
        yield from _check_text(shape, value, path)
    elif kind == "structure":
        yield from _check_structure(shapes, shape, value, path)
    elif kind == "list":
        for number, item in enumerate(value):
            yield from _check(shapes, shape["member"]["shape"], item, f"{path}[{number}]")
    elif kind == "map":
        for key, item in value.items():
            yield from _check(shapes, shape["key"]["shape"], key, f"{path}.{key}")
            yield from _check(shapes, shape["value"]["shape"], item, f"{path}.{key}")


def _check_structure(shapes: Any, shape: Any, value: Any, path: str) -> Iterator[Violation]:
    for name in shape.get("required", ()):
        if name not in value:
            yield Violation(_join(path, name), "is required")
    for name, item in value.items():
        if name in shape["members"]:
            yield from _check(shapes, shape["members"][name]["shape"], item, _join(path, name))
        else:
            near = difflib.get_close_matches(name, shape["members"], n=1)
            hint = f"did you mean {near[0]!r}?" if near else None
            yield Violation(_join(path, name), "is unknown", hint)


def _check_size(shape: Any, kind: str, value: Any, path: str) -> Iterator[Violation]:
    if kind in {"structure", "boolean"}:
        return
    if kind in {"integer", "long", "float"}:
        size, unit = value, ""
    else:
        size, unit = len(value), " characters" if kind == "string" else " entries"
    has = f"has {size}{unit}" if unit else f"is {size}"
    low, high = shape.get("min"), shape.get("max")
    if low is not None and size < low:
        yield Violation(path, f"{has}; the minimum is {low}")
    if high is not None and size > high:
        yield Violation(path, f"{has}; the maximum is {high}")


def _check_text(shape: Any, value: str, path: str) -> Iterator[Violation]:
    choices = shape.get("enum")
    if choices and value not in choices:
        known = ", ".join(choices) if len(choices) <= _MANY else f"{len(choices)} are known"
        hint = did_you_mean(value, choices) or known
        yield Violation(path, f"{value!r} is not one of the accepted values", hint)
    pattern = shape.get("pattern")
    longest = shape.get("max") or len(value)
    if pattern and len(value) <= longest and _compiled(pattern).fullmatch(value) is None:
        yield Violation(path, f"{value!r} does not match {pattern}")


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    translated = pattern
    for java, python in _CLASSES.items():
        translated = translated.replace(java, python)
    return re.compile(translated, 0 if translated != pattern else re.ASCII)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
