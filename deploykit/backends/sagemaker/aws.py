"""Clients of AWS, and botocore's errors as deploykit's. The only file that imports boto3."""

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
"""S3's error codes for an upload that arrived incomplete or changed."""
_OTHER_REGION = frozenset({"301", "PermanentRedirect", "IllegalLocationConstraintException"})


def client(service: str, region: str) -> Any:
    """A client for `service` (boto3's name) that retries as botocore does.

    Raises BackendUnavailable if boto3 is not installed, and what `errors` raises.
    """
    try:
        import boto3
        import botocore.session
        from botocore.config import Config
    except ImportError as error:
        raise BackendUnavailable("boto3 is not installed", hint="pip install boto3") from error
    with errors(region):
        config = Config(retries={"mode": "standard", "max_attempts": _ATTEMPTS})
        core = botocore.session.Session()
        core.register_component("data_loader", _descriptions())
        session: Any = boto3.Session(botocore_session=core, region_name=region)
        return session.client(service, config=config)


@cache
def _descriptions() -> Any:
    """Botocore's service descriptions, read once for all sessions: EC2's alone takes 0.2 s."""
    import botocore.loaders

    return botocore.loaders.create_loader()


def code(error: BaseException) -> str:
    """The service's error code, such as ``ValidationException``; empty if there is none."""
    response = getattr(error, "response", {})
    return str(response.get("Error", {}).get("Code", ""))


def message(error: BaseException) -> str:
    """The service's error message, or the text of an exception that is not the service's."""
    response = getattr(error, "response", {})
    return str(response.get("Error", {}).get("Message", error))


@contextmanager
def errors(region: str) -> Iterator[None]:
    """Turn botocore's exceptions in the block into deploykit's.

    NotPermitted for credentials and permissions, TryAgain for transient faults, SubmitRefused for
    other answers of the service, BackendUnavailable if the service cannot be reached.
    """
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
            f"no valid AWS credentials: {error}", hint="aws configure, aws sso login, AWS_PROFILE"
        ) from error
    except botocore.BotoCoreError as error:
        raise BackendUnavailable(
            f"cannot reach AWS in {region}: {error}",
            hint="check the network, the proxy, the region and AWS_ENDPOINT_URL",
        ) from error


def may_have_succeeded(error: BaseException) -> bool:
    """Whether a failed request may have taken effect.

    A refused connection counts too: an earlier attempt of botocore may have succeeded.
    """
    from botocore import exceptions as botocore

    if isinstance(error, botocore.ClientError):
        return code(error) in _BUSY and "hrottl" not in code(error)
    return isinstance(error, botocore.HTTPClientError | botocore.ConnectionError)


def _from_service(error: Any, region: str) -> DeploykitError:
    name = code(error)
    text = f"AWS ({error.operation_name}, {region}): {message(error)}"
    if name in _BUSY:
        return TryAgain(text, hint="AWS is busy; try again in a minute")
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
