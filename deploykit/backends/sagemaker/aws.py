"""Clients of AWS, and botocore's errors in words for people. The only file that imports boto3."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from deploykit.errors import (
    BackendUnavailable,
    DeploykitError,
    NotPermitted,
    SubmitRefused,
    TryAgain,
)

_ATTEMPTS = 5
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
"""S3's words for an upload of which something else arrived than was sent."""
_ELSEWHERE = frozenset({"301", "PermanentRedirect", "IllegalLocationConstraintException"})


def client(service: str, region: str) -> Any:
    """A client with botocore's own retries. Raises BackendUnavailable without boto3."""
    try:
        import boto3
        import botocore.session
        from botocore.config import Config
    except ImportError as error:
        raise BackendUnavailable("boto3 is missing", hint="pip install boto3") from error
    with errors(region):
        config = Config(retries={"mode": "standard", "max_attempts": _ATTEMPTS})
        core = botocore.session.Session()
        core.register_component("data_loader", _descriptions())
        session: Any = boto3.Session(botocore_session=core, region_name=region)
        return session.client(service, config=config)


@cache
def _descriptions() -> Any:
    """What botocore knows of each service, read once for all sessions: 0.2 s for EC2 alone."""
    import botocore.loaders

    return botocore.loaders.create_loader()


def code(error: BaseException) -> str:
    """The service's word for an error, such as ``ValidationException``; empty if it has none."""
    response = getattr(error, "response", {})
    return str(response.get("Error", {}).get("Code", ""))


def message(error: BaseException) -> str:
    response = getattr(error, "response", {})
    return str(response.get("Error", {}).get("Message", error))


@contextmanager
def errors(region: str) -> Iterator[None]:
    """Errors of botocore leave the block as deploykit's."""
    from botocore import exceptions as botocore

    try:
        yield
    except botocore.ClientError as error:
        raise _from_service(error, region) from error
    except (
        botocore.NoCredentialsError,
        botocore.PartialCredentialsError,
        botocore.CredentialRetrievalError,
        botocore.TokenRetrievalError,
        botocore.SSOError,
        botocore.ProfileNotFound,
    ) as error:
        raise NotPermitted(
            f"no usable AWS credentials: {error}", hint="aws configure, aws sso login, AWS_PROFILE"
        ) from error
    except botocore.BotoCoreError as error:
        raise BackendUnavailable(
            f"AWS cannot be reached in {region}: {error}",
            hint="check the network, the proxy, the region and AWS_ENDPOINT_URL",
        ) from error


def uncertain(error: BaseException) -> bool:
    """Whether a request may have taken effect although it failed.

    A connection that was refused counts too: an attempt before it may have gone through.
    """
    from botocore import exceptions as botocore

    if isinstance(error, botocore.ClientError):
        return code(error) in _BUSY and "hrottl" not in code(error)
    return isinstance(error, botocore.HTTPClientError | botocore.ConnectionError)


def _from_service(error: Any, region: str) -> DeploykitError:
    word, text = code(error), message(error)
    doing = f"AWS ({error.operation_name}, {region}): {text}"
    if word in _BUSY:
        return TryAgain(doing, hint="AWS is busy; try again in a minute")
    if word in _DAMAGED:
        return TryAgain(doing, hint="the upload was damaged on its way; submit again")
    if word in _LOGGED_OUT:
        return NotPermitted(doing, hint=_LOGIN)
    if word in DENIED:
        return NotPermitted(doing, hint=f"allow your user or role {error.operation_name} in IAM")
    return _refused(word, doing)


def _refused(word: str, doing: str) -> SubmitRefused:
    hints = {
        "ResourceLimitExceeded": "ask for a higher quota of this instance type (Service Quotas, "
        "SageMaker, `... for training job usage`), or use fewer or other machines",
        "NoSuchBucket": "make the bucket, or correct sagemaker.bucket",
        "ValidationException": "correct what it names in the sagemaker section",
    }
    hint = hints.get(word)
    if word in _ELSEWHERE:
        hint = "the bucket lies in another region; use one in the region of the job"
    elif "assume role" in doing:
        hint = "the role must trust sagemaker.amazonaws.com, and you must be allowed iam:PassRole"
    return SubmitRefused(doing, hint=hint)
