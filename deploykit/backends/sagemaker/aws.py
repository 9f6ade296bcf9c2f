"""AWS as botocore knows it: clients, its errors as deploykit's, and its description of SageMaker.

The only file that imports boto3. A request is checked against the description before it is sent:
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
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from deploykit.job.model import Problem
from deploykit.job.spelling import did_you_mean
from deploykit.lib.errors import (
    BackendUnavailable,
    DeploykitError,
    NotPermitted,
    SubmitRefused,
    TryAgain,
)

_ATTEMPTS = 5
_TIMEOUT = 60.0
"""Seconds for a connection and for an answer: botocore's defaults."""
_PATIENCE = 5.0
"""Seconds for a question whose only purpose is to learn whether AWS answers."""
_CREDENTIALS = "aws configure, aws sso login, AWS_PROFILE"
_LOGIN = "log in again (aws sso login, or new keys) and check with: aws sts get-caller-identity"
_BUSY = frozenset(
    {
        *("InternalError", "InternalFailure", "InternalServerError", "InternalServiceError"),
        *("RequestLimitExceeded", "ServiceUnavailable", "SlowDown", "Throttling"),
        *("ThrottlingException", "TooManyRequestsException", "503", "500"),
    }
)
_LOGGED_OUT = frozenset(
    {
        *("ExpiredToken", "ExpiredTokenException", "InvalidAccessKeyId", "InvalidClientTokenId"),
        *("SignatureDoesNotMatch", "UnrecognizedClientException"),
    }
)
DENIED = frozenset({"AccessDenied", "AccessDeniedException", "UnauthorizedOperation", "403"})
_DAMAGED = frozenset({"BadDigest", "IncompleteBody", "RequestTimeout", "XAmzContentSHA256Mismatch"})
"""S3's error codes for an upload that arrived incomplete or changed."""
_OF_HEAD = frozenset({"301", "400", "403", "404", "405", "412"})
"""Statuses with which S3 refuses a HEAD request."""
_REDIRECTS = "redirects without end, which botocore follows"
_OTHER_REGION = frozenset({"301", "PermanentRedirect", "IllegalLocationConstraintException"})

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


def identify(region: str | None) -> None:
    """Find credentials and, with a region, let AWS say whose they are; none are printed.

    GetCallerIdentity needs no permission:
    https://docs.aws.amazon.com/STS/latest/APIReference/API_GetCallerIdentity.html

    Raises NotPermitted without valid credentials, and what `errors` raises.
    """
    import botocore.session

    where = region or "any region"
    with errors(where):
        credentials = botocore.session.Session().get_credentials()
        if credentials is None:
            raise NotPermitted("no AWS credentials", hint=_CREDENTIALS)
        credentials.get_frozen_credentials()  # renews those that expire
    if region:
        sts = client("sts", region, attempts=1, timeout=_PATIENCE)
        with errors(where):
            sts.get_caller_identity()


def client(
    service: str, region: str, *, attempts: int = _ATTEMPTS, timeout: float = _TIMEOUT
) -> Any:
    """A client for `service` (boto3's name) that retries as botocore does; `timeout` in seconds.

    Raises BackendUnavailable if boto3 is not installed, and what `errors` raises.
    """
    try:
        import boto3
        import botocore.session
        from botocore.config import Config

        from deploykit.backends.sagemaker import answers
    except ImportError as error:
        raise BackendUnavailable("boto3 is not installed", hint="pip install boto3") from error
    with errors(region):
        retries = {"mode": "standard", "max_attempts": attempts}
        config = Config(retries=retries, connect_timeout=timeout, read_timeout=timeout)
        core = botocore.session.Session()
        core.register_component("data_loader", _descriptions())
        core.register_component("response_parser_factory", answers.Parsers())
        session: Any = boto3.Session(botocore_session=core, region_name=region)
        return session.client(service, config=config)


@cache
def _descriptions() -> Any:
    """Botocore's service descriptions, read once for all sessions: EC2's alone takes 0.2 s."""
    import botocore.loaders

    return botocore.loaders.create_loader()


def code(error: BaseException) -> str:
    """The service's error code, such as ``ValidationException``; empty if there is none."""
    return str(_response(error).get("Error", {}).get("Code", ""))


def message(error: BaseException) -> str:
    """The service's error message, or the text of an exception that is not the service's."""
    response = _response(error)
    text = str(response.get("Error", {}).get("Message", error))
    if text.lstrip().startswith("<"):  # a page of a proxy or a load balancer
        return f"HTTP {response.get('ResponseMetadata', {}).get('HTTPStatusCode', 'error')}"
    return text


def _response(error: BaseException) -> Mapping[str, Any]:
    """The service's answer; empty where the connection failed, whose error has `response` None."""
    from botocore.exceptions import ClientError

    return error.response if isinstance(error, ClientError) else {}


@contextmanager
def errors(region: str) -> Iterator[None]:
    """Turn botocore's exceptions in the block into deploykit's.

    NotPermitted for credentials and permissions, TryAgain for transient faults and for answers that
    are not AWS's, SubmitRefused for other answers of the service, BackendUnavailable if the service
    cannot be reached.
    """
    from botocore import exceptions as botocore

    from deploykit.backends.sagemaker.answers import NoAnswerError

    try:
        yield
    except botocore.ClientError as error:
        raise _from_service(error, region) from error
    except NoAnswerError as error:
        raise _no_answer(region, str(error)) from error
    except RecursionError as error:
        raise _no_answer(region, _REDIRECTS) from error
    except (
        botocore.NoCredentialsError,
        botocore.PartialCredentialsError,
        botocore.CredentialRetrievalError,
        botocore.TokenRetrievalError,
        botocore.SSOError,
        botocore.ProfileNotFound,
    ) as error:
        raise NotPermitted(f"no valid AWS credentials: {error}", hint=_CREDENTIALS) from error
    except botocore.BotoCoreError as error:
        if "recursion depth" in str(error):
            raise _no_answer(region, _REDIRECTS) from error
        raise BackendUnavailable(
            f"cannot reach AWS in {region}: {error}",
            hint="check the network, the proxy, the region and AWS_ENDPOINT_URL",
        ) from error


def was_lost(error: BaseException) -> bool:
    """Whether no answer came at all, so that the service may still be working on the request.

    A refused connection counts too: an earlier attempt of botocore may have succeeded.
    """
    from botocore import exceptions as botocore

    return isinstance(error, botocore.HTTPClientError | botocore.ConnectionError)


def may_have_succeeded(error: BaseException) -> bool:
    """Whether a failed request may have taken effect."""
    from botocore.exceptions import ClientError

    from deploykit.backends.sagemaker.answers import NoAnswerError

    if isinstance(error, ClientError):
        return not _is_of_service(error) or (code(error) in _BUSY and "hrottl" not in code(error))
    return was_lost(error) or isinstance(error, NoAnswerError)


def _is_of_service(error: Any) -> bool:
    """Whether an error is AWS's: each has a name, except one of a HEAD request, without a body."""
    if error.operation_name.startswith("Head"):
        return code(error) in _OF_HEAD
    return not code(error).isdecimal() and code(error) != ""


def _no_answer(region: str, what: str) -> TryAgain:
    return TryAgain(
        f"AWS sent no valid answer in {region}: {what}",
        hint="a proxy, the login page of a network or a wrong AWS_ENDPOINT_URL may answer instead",
    )


def _from_service(error: Any, region: str) -> DeploykitError:
    name = code(error)
    text = f"AWS ({error.operation_name}, {region}): {message(error)}"
    if name in _BUSY:
        return TryAgain(text, hint="AWS is busy; try again in a minute")
    if not _is_of_service(error):
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", "error")
        return _no_answer(region, f"HTTP {status} for {error.operation_name}")
    if name in _DAMAGED:
        return TryAgain(text, hint="the upload was damaged in transit; submit again")
    if name in _LOGGED_OUT:
        return NotPermitted(text, hint=_LOGIN)
    if name in DENIED:
        return NotPermitted(text, hint=f"allow your user or role {error.operation_name} in IAM")
    return _refused(name, text)


def _refused(name: str, text: str) -> SubmitRefused:
    hints = {
        "ResourceLimitExceeded": "request a higher quota for this instance type (Service Quotas, "
        "SageMaker, `... for training job usage`), or use fewer nodes or another type",
        "NoSuchBucket": "create the bucket, or correct sagemaker.bucket",
        "ValidationException": "correct the named value in the sagemaker section",
    }
    hint = hints.get(name)
    if name in _OTHER_REGION:
        hint = "the bucket is in another region; use one in the region of the job"
    elif "assume role" in text:
        hint = "the role must trust sagemaker.amazonaws.com, and you need iam:PassRole"
    return SubmitRefused(text, hint=hint)


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
