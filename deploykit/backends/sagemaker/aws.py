"""AWS as botocore knows it: clients, and its errors as deploykit's.

The only file that imports boto3.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

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
AT_ONCE = 20
"""Requests for files at the same time; many small files need more than s3transfer's default, 10."""
_PROBE_TIMEOUT = 5.0
"""Seconds for a question whose only purpose is to learn whether AWS answers."""
_CREDENTIALS = "run `aws configure` or `aws sso login`, or set AWS_PROFILE"
_LOGIN = "log in again (`aws sso login`) or renew the keys; check: aws sts get-caller-identity"
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
_ACTION = re.compile(r"not authorized to perform:? ([\w-]+:\w+)(?: on resource:? (\S+))?")
"""The action, and its resource, in IAM's message."""
_ACTIONS = {
    "DeleteObjects": "s3:DeleteObject",
    "GetObject": "s3:GetObject",
    "HeadObject": "s3:GetObject",
    "ListObjectsV2": "s3:ListBucket",
    "PutObject": "s3:PutObject",
}
"""Operations of S3, and the action of IAM that each needs."""
_DAMAGED = frozenset({"BadDigest", "IncompleteBody", "RequestTimeout", "XAmzContentSHA256Mismatch"})
"""S3's error codes for an upload that arrived incomplete or changed."""
_OF_HEAD = frozenset({"301", "400", "403", "404", "405", "412"})
"""Statuses with which S3 refuses a HEAD request."""
_REDIRECTS = "too many redirects"
_OTHER_REGION = frozenset({"301", "PermanentRedirect", "IllegalLocationConstraintException"})
_REQUIRED: dict[str, dict[str, type]] = {
    "CreateTrainingJobResponse": {"TrainingJobArn": str},
    "DescribeEndpointOutput": {"EndpointStatus": str},
    "DescribeTransformJobResponse": {"TransformJobStatus": str},
    "InvokeEndpointAsyncOutput": {"OutputLocation": str},
    "DescribeTrainingJobResponse": {"TrainingJobArn": str, "TrainingJobStatus": str},
    "DescribeLogStreamsResponse": {"logStreams": list},
    "GetLogEventsResponse": {"events": list},
    "SearchTrainingPlanOfferingsResponse": {"TrainingPlanOfferings": list},
    "GetRoleResponse": {"Role": dict},
    "HeadObjectOutput": {"ETag": str},
    "PutObjectOutput": {"ETag": str},
}
"""Output of an operation -> the fields that each answer of AWS has, among those that are used."""
_MAX_QUOTED = 60
"""Characters of an invalid answer that a message quotes."""
_FIRST_ERROR = 300
"""The lowest status of an answer that is an error or a redirect."""


class Credentials(NamedTuple):
    """Whose credentials requests are sent with: by default those of the environment."""

    profile: str | None = None
    """One of ~/.aws/config."""
    role: str | None = None
    """ARN of a role that they assume."""

    def __str__(self) -> str:
        parts = [f"profile {self.profile}"] if self.profile else []
        return ", ".join([*parts, *([f"assumed role {self.role}"] if self.role else [])])


ENVIRONMENT = Credentials()
_SESSION_NAME = "deploykit"
"""The name of a session with an assumed role, as CloudTrail shows it."""
_ASSUMED: dict[Any, dict[str, Any]] = {}
"""Credentials -> the temporary ones that botocore got for them, so that not every client asks."""


class NoAnswerError(Exception):
    """The response is not from AWS; a proxy or a wrong endpoint may have sent it."""


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
            raise NotPermitted("no AWS credentials found", hint=_CREDENTIALS)
        credentials.get_frozen_credentials()  # renews those that expire
    if region:
        account(region)


def account(region: str, credentials: Credentials = ENVIRONMENT) -> str:
    sts = client("sts", region, credentials, attempts=1, timeout=_PROBE_TIMEOUT)
    with errors(region):
        identity = sts.get_caller_identity()
    return str(identity.get("Account", ""))


def client(
    service: str,
    region: str,
    credentials: Credentials = ENVIRONMENT,
    *,
    attempts: int = _ATTEMPTS,
    timeout: float = _TIMEOUT,
) -> Any:
    """A client for `service` (boto3's name) that retries as botocore does; `timeout` in seconds.

    One for S3 does not sign the content of files, only the header with their checksum: botocore
    would hash each file once more.

    Raises BackendUnavailable if boto3 is not installed, and what `errors` raises.
    """
    made = session(region, credentials)
    from botocore.config import Config

    retries = {"mode": "standard", "max_attempts": attempts}
    config = Config(retries=retries, connect_timeout=timeout, read_timeout=timeout)
    if service == "s3":
        unsigned = {"payload_signing_enabled": False}
        config = config.merge(Config(max_pool_connections=AT_ONCE, s3=unsigned))
    with errors(region):
        return made.client(service, config=config)


def session(region: str, credentials: Credentials) -> Any:
    """boto3's session with these credentials.

    Raises BackendUnavailable if boto3 is not installed, and NotPermitted for an unknown profile.
    """
    try:
        import boto3
        import botocore.session
    except ImportError as error:
        raise BackendUnavailable("boto3 is not installed", hint="pip install boto3") from error
    core: Any = botocore.session.Session(profile=credentials.profile)
    for name, component in _components().items():
        core.register_component(name, component)
    with errors(region):
        core.get_scoped_config()
    if credentials.role:
        source: Any = botocore.session.Session(profile=credentials.profile)
        _assume(core, source, region, credentials)
    return boto3.Session(botocore_session=core, region_name=region)


def _assume(core: Any, source: Any, region: str, credentials: Credentials) -> None:
    """Let a session use the role, which the credentials of `source` assume when they are needed."""
    from botocore import credentials as providers

    class Assumed(providers.CredentialProvider):  # type: ignore[misc] # botocore has no types
        METHOD = CANONICAL_NAME = _SESSION_NAME

        def load(self) -> Any:
            own = source.get_credentials()
            if own is None:
                return None
            fetcher = providers.AssumeRoleCredentialFetcher(
                client_creator=partial(source.create_client, region_name=region),
                source_credentials=own,
                role_arn=credentials.role,
                extra_args={"RoleSessionName": _SESSION_NAME},
                cache=_ASSUMED.setdefault((credentials, own.access_key), {}),
            )
            return providers.DeferredRefreshableCredentials(
                fetcher.fetch_credentials, method=self.METHOD
            )

    core.register_component("credential_provider", providers.CredentialResolver([Assumed()]))


@cache
def _components() -> dict[str, Any]:
    """Cached for all sessions: botocore's service models and response parsers.

    EC2's description alone takes 0.2 s. The parsers raise NoAnswerError for an unreadable answer:
    botocore's own read an HTML page with status 200 as an empty answer, and raise arbitrary
    exceptions for JSON that is not an object, too deep, or not UTF-8.
    """
    from botocore.loaders import create_loader
    from botocore.parsers import ResponseParserFactory

    class Parsers(ResponseParserFactory):  # type: ignore[misc] # botocore has no types
        def create_parser(self, protocol_name: str) -> Any:
            parser = super().create_parser(protocol_name)
            parser.parse = partial(_parse, parser.parse, protocol_name)
            return parser

    return {"data_loader": create_loader(), "response_parser_factory": Parsers()}


def _parse(original: Any, protocol: str, response: dict[str, Any], shape: Any) -> Any:
    is_error = response["status_code"] >= _FIRST_ERROR
    try:
        parsed = original(response, shape)
    except Exception as error:  # botocore's parsers raise anything
        if not is_error:
            raise NoAnswerError(_described(response)) from error
        status, headers = response["status_code"], dict(response["headers"])
        parsed = {
            "Error": {"Code": str(status), "Message": ""},
            "ResponseMetadata": {"HTTPStatusCode": status, "HTTPHeaders": headers},
        }
    required = _REQUIRED.get(shape.name, {}) if shape and not is_error else {}
    if not isinstance(response["body"], bytes):  # the stream of an object's content
        return parsed
    text = response["body"].strip()
    is_object = not text or (text.startswith(b"{") and text.endswith(b"}"))
    if not is_error and protocol == "json" and not is_object:
        raise NoAnswerError(_described(response))
    if not all(isinstance(parsed.get(name), kind) for name, kind in required.items()):
        raise NoAnswerError(_described(response))
    return parsed


def _described(response: Mapping[str, Any]) -> str:
    """Quote the beginning: ``HTTP 200, text/html: <html> ...``."""
    kind = response["headers"].get("content-type", "no content type")
    text = " ".join(response["body"].decode(errors="replace").split())
    quoted = f"{text[:_MAX_QUOTED]}..." if len(text) > _MAX_QUOTED else text or "empty"
    return f"HTTP {response['status_code']}, {kind}: {quoted}"


def code(error: BaseException) -> str:
    """The service's error code, such as ``ValidationException``; empty if there is none."""
    return str(_response(error).get("Error", {}).get("Code", ""))


def message(error: BaseException) -> str:
    """The service's error message, or the text of an exception that is not the service's."""
    response = _response(error)
    text = str(response.get("Error", {}).get("Message", error))
    if not text or text.lstrip().startswith("<"):  # a page of a proxy or a load balancer
        return f"HTTP {response.get('ResponseMetadata', {}).get('HTTPStatusCode', 'error')}"
    return text


def _response(error: BaseException) -> Mapping[str, Any]:
    """The service's answer; empty where the connection failed, whose error has `response` None."""
    response: Mapping[str, Any] | None = getattr(error, "response", None)
    return response or {}


@contextmanager
def errors(region: str) -> Iterator[None]:
    """Turn botocore's exceptions in the block into deploykit's.

    NotPermitted for credentials and permissions, TryAgain for transient faults and for answers that
    are not AWS's, SubmitRefused for other answers of the service, BackendUnavailable if the service
    cannot be reached.
    """
    from botocore import exceptions as botocore

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
    except botocore.ParamValidationError as error:
        hint = "pip install -U boto3; the installed version may not support a setting of the job"
        raise SubmitRefused(f"boto3 rejected the request: {error}", hint=hint) from error
    except botocore.BotoCoreError as error:
        if "recursion depth" in str(error):
            raise _no_answer(region, _REDIRECTS) from error
        raise BackendUnavailable(
            f"cannot reach AWS in {region}: {error}",
            hint="check the network, proxy, region and AWS_ENDPOINT_URL",
        ) from error


def was_lost(error: BaseException) -> bool:
    """Whether no answer came at all, so that the service may still be working on the request.

    A refused connection counts too: an earlier attempt of botocore may have succeeded.
    """
    from botocore import exceptions as botocore

    return isinstance(error, botocore.HTTPClientError | botocore.ConnectionError)


def may_have_succeeded(error: BaseException) -> bool:
    if _response(error):
        return not _is_of_service(error) or (code(error) in _BUSY and "hrottl" not in code(error))
    return was_lost(error) or isinstance(error, NoAnswerError)


def _is_of_service(error: Any) -> bool:
    """Whether an error is AWS's: each has a name, except one of a HEAD request, without a body."""
    if error.operation_name.startswith("Head"):
        return code(error) in _OF_HEAD
    return not code(error).isdecimal() and code(error) != ""


def _no_answer(region: str, what: str) -> TryAgain:
    return TryAgain(
        f"invalid response from AWS in {region}: {what}",
        hint="a proxy, a captive portal or a wrong AWS_ENDPOINT_URL may have sent the response",
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
        return TryAgain(text, hint="the upload was corrupted in transit; submit again")
    if name in _LOGGED_OUT:
        return NotPermitted(text, hint=_LOGIN)
    if name in DENIED:
        return NotPermitted(text, hint=_permission(error))
    return _refused(name, text)


def denied_action(error: BaseException) -> str:
    """The action that IAM's message names, and its resource; empty if it names none.

    It may be another one than the request's.
    """
    match = _ACTION.search(message(error))
    if match is None:
        return ""
    return f"{match[1]} on {match[2]}" if match[2] else match[1]


def _permission(error: Any) -> str:
    """The hint: which action to allow."""
    text = message(error)
    action = denied_action(error) or _ACTIONS.get(error.operation_name, error.operation_name)
    if "explicit deny" in text:
        return f"a policy explicitly denies {action}, overriding any Allow; ask its administrator"
    return f"grant {action} to your user or role in IAM"


def _refused(name: str, text: str) -> SubmitRefused:
    hints = {
        "ResourceLimitExceeded": "request a higher quota for this instance type (Service Quotas, "
        "SageMaker, `... for training job usage`), use fewer nodes, or choose another type",
        "NoSuchBucket": "create the bucket, or correct sagemaker.bucket",
        "ValidationException": "correct this value in the sagemaker section of the job file",
    }
    hint = hints.get(name)
    if name in _OTHER_REGION:
        hint = "the bucket is in another region; use a bucket in the job's region"
    elif "assume role" in text:
        hint = "the role must trust sagemaker.amazonaws.com, and you need iam:PassRole"
    return SubmitRefused(text, hint=hint)
