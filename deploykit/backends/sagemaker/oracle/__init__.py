"""The oracle: what SageMaker does with a job. It runs as asked, runs as something else, is refused,
or the outcome cannot be known.

The rules are data, in the TOML files of this folder; 01-launchers.toml documents every key. Each
names the setting, the reason, the nearest setting that works and a source. The reference page is
generated from them, with examples that the tests check against the real SDK. Pure: nothing is
queried.

`check` adds what the service's own description says of the request. botocore checks required
fields, names, types and minima, and leaves patterns, enums and maxima to the service. The
description is read as data, which is faster than importing botocore.
"""

from __future__ import annotations

import datetime as dt
import difflib
import enum
import gzip
import importlib.util
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from deploykit.backends import base as backend
from deploykit.backends.sagemaker import request
from deploykit.backends.sagemaker.options import Options, launched, region
from deploykit.backends.sagemaker.oracle.case import Case
from deploykit.job import checks
from deploykit.job.model import JobSpec, Problem
from deploykit.job.spelling import did_you_mean
from deploykit.lib.errors import BackendUnavailable

_SOURCES = {
    "sdk": "https://github.com/aws/sagemaker-python-sdk/blob/v2.257.7/src/sagemaker",
    "api": "https://docs.aws.amazon.com/sagemaker/latest/APIReference",
    "guide": "https://docs.aws.amazon.com/sagemaker/latest/dg",
    "toolkit": "https://github.com/aws/sagemaker-training-toolkit/tree/master/"
    "src/sagemaker_training",
    "launcher": "https://github.com/aws/sagemaker-pytorch-training-toolkit/blob/master/"
    "src/sagemaker_pytorch_container/training.py",
}
"""Beginnings of the sources that rules cite."""
_ANY_RUN, _ANY_BUNDLE = "r" * 63, "0" * 64
"""As long as a run id and a hash can be: a request that is valid with these is valid with any."""
_ANY_IMAGE, _ANY_REGION, _ANY_TYPE = "image", "us-east-1", "ml.g5.12xlarge"
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


class Verdict(enum.Enum):
    """What SageMaker does with a setting."""

    ASKED = "runs as asked"
    OTHER = "runs as something else"
    REFUSED = "refused"
    UNKNOWN = "cannot know"


@dataclass(frozen=True, kw_only=True)
class OracleRule:
    """One fact about SageMaker. Its fields are the keys of ``[[rule]]``."""

    id: str
    path: str
    verdict: Verdict
    when: Sequence[str] | None = None
    """None: the rule never applies, and is there for the reference only."""
    reason: str
    nearest: str | None = None
    source: str
    quiet: bool = False

    @property
    def severity(self) -> Literal["error", "warning"] | None:
        """Severity of the problem that `check` reports; None if it reports none."""
        if self.verdict is Verdict.REFUSED:
            return "error"
        return None if self.quiet else "warning"

    def apply(self, case: Case) -> Iterator[Consequence]:
        """One consequence for each item that the rule applies to."""
        items = [] if self.when is None else case.items(self.when)
        for item in items:
            values = {"case": case, "job": case.job, "options": case.options, "item": item}
            nearest = self.nearest and self.nearest.format(**values)
            path, reason = self.path.format(**values), self.reason.format(**values)
            yield Consequence(self, path, reason, nearest)


@dataclass(frozen=True)
class Consequence:
    """A rule that applies to a job, with its texts filled in."""

    rule: OracleRule
    path: str
    reason: str
    nearest: str | None

    def problem(self) -> Problem | None:
        """The problem that `check` reports; None if the job simply runs as asked."""
        severity = self.rule.severity
        if severity is None:
            return None
        source = self.rule.source
        return Problem(self.path, self.reason, self.nearest, severity=severity, source=source)


def check(job: JobSpec, options: Options) -> Iterator[Problem]:
    """Every problem of a job: the oracle's, then those of the request that would be sent.

    Pure, except that the date decides which images still receive patches. Raises
    BackendUnavailable if botocore is not installed and nothing else is wrong.
    """
    options = launched(job, options)
    yield from backend.check_program(job)
    yield from _check_plain(job, options)
    yield from _check_profile(job, options)
    yield from _check_debugger(job)
    yield from _check_log_limit(job)
    known = [problem for one in consequences(job, options) if (problem := one.problem())]
    yield from known
    errors = {problem.path for problem in known if problem.severity == "error"}
    try:
        problems = _request_problems(job, options if not errors else _completed(options))
    except BackendUnavailable:
        if not errors:
            raise
        return
    yield from (problem for problem in problems if problem.path not in errors)


def _check_plain(job: JobSpec, options: Options) -> Iterator[Problem]:
    """Whether a script that starts its own processes gets a node without another launcher."""
    if job.entrypoint.launcher != "python":
        return
    if options.distribution != "none":
        message = f"{options.distribution} starts the ranks, and `launcher: python` the script"
        yield Problem("sagemaker.distribution", message, "distribution: none")
    if job.preflight and job.resources.nodes > 1:
        message = "the nodes cannot test the network before a plain process of each"
        yield Problem("preflight", message, "remove it, or use launcher: torchrun")


def _check_profile(job: JobSpec, options: Options) -> Iterator[Problem]:
    """Nsight Systems stands above a rank, which only deploykit's own torchrun allows."""
    if (job.profile or "").startswith("nsys") and options.distribution != "none":
        message = "nsys needs ranks that deploykit starts, and here SageMaker's toolkit starts them"
        yield Problem("profile", message, "torch:20:25, which PyTorch's own profiler records")


def _check_debugger(job: JobSpec) -> Iterator[Problem]:
    if checks.DEBUGGER in job.env:
        message = "no editor can connect to a container of SageMaker"
        yield Problem(f"env.{checks.DEBUGGER}", message, "remove --debugger, or run it locally")


def _check_log_limit(job: JobSpec) -> Iterator[Problem]:
    if job.log_limit != backend.LOG_LIMIT:
        message = "is not enforced on SageMaker: CloudWatch takes all output, and bills it"
        yield Problem("log_limit", message, severity="warning")


def _completed(options: Options) -> Options:
    """The options with an image, a type and a region, so that a request can be rendered."""
    return replace(
        options,
        image_uri=options.image_uri or _ANY_IMAGE,
        region=region(options) or _ANY_REGION,
        instance_type=options.instance_type or (None if options.instance_groups else _ANY_TYPE),
    )


def _request_problems(job: JobSpec, options: Options) -> list[Problem]:
    """What the service's own description says of the request."""
    rendered = request.render(job, options, run=_ANY_RUN, bundle=_ANY_BUNDLE)
    return request_problems(rendered)


def consequences(job: JobSpec, options: Options, today: dt.date | None = None) -> list[Consequence]:
    """The consequences of every rule that applies, in the order of `rules`.

    `today` decides which images still receive patches; the default is today's date in UTC.
    """
    case = Case(job, options, today or dt.datetime.now(tz=dt.UTC).date())
    return [one for group in rules().values() for rule in group for one in rule.apply(case)]


@cache
def rules() -> Mapping[str, tuple[OracleRule, ...]]:
    """All rules, under the headings of the reference."""
    files = sorted(Path(__file__).parent.glob("*.toml"))
    return dict(read(path.read_text(encoding="utf-8")) for path in files)


def read(text: str) -> tuple[str, tuple[OracleRule, ...]]:
    """The heading and the rules of a file.

    Raises TypeError for an unknown or missing key, ValueError for an unknown verdict, and KeyError
    for an unknown beginning of a source.
    """
    return _group(**tomllib.loads(text))


def _group(*, heading: str, rule: list[dict[str, Any]]) -> tuple[str, tuple[OracleRule, ...]]:
    return heading, tuple(_rule(**table) for table in rule)


def _rule(*, verdict: str, source: str, **texts: Any) -> OracleRule:
    return OracleRule(verdict=Verdict(verdict), source=source.format(**_SOURCES), **texts)


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
