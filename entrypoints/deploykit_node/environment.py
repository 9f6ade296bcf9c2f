"""What a node or a rank puts into its environment before the user's program starts.

Secret references such as ``secret:env:HF_TOKEN`` are resolved here. Values go into the trainer's
environment and nowhere else; no message contains one. The two kinds that AWS stores need boto3, the
only package besides torch that the node plane may import. SageMaker's images have it.
"""

from __future__ import annotations

import json
import os
import shlex
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deploykit_node import records
from deploykit_node.cluster import BadEnvironment

Environ = dict[str, str]

SECRETS = "DEPLOYKIT_SECRETS"
"""JSON object from a variable's name to its reference."""

NOTIFY = "DEPLOYKIT_NOTIFY"
"""JSON: `notify` of the job file, without the receivers that only the control plane reaches."""

_PREFIX = "secret"


def prepare(env: Environ) -> Environ:
    """Apply the plan's settings and secrets, and make its folders.

    Returns the user's own settings. Raises BadEnvironment if a secret cannot be resolved or a
    folder cannot be made.
    """
    # SageMaker's toolkit has overwritten the user's settings
    user_settings: Environ = json.loads(env.pop("DEPLOYKIT_ENV", "{}"))
    env.update(user_settings)
    env.update(secrets(env))
    env.pop(SECRETS, None)
    env.pop(NOTIFY, None)
    for name in ("DEPLOYKIT_OUTPUT_DIR", "DEPLOYKIT_CHECKPOINT_DIR"):
        _make_folder(name, env.get(name, ""))
    return user_settings


def _make_folder(name: str, location: str) -> None:
    if not location or "://" in location:
        return
    try:
        records.make_folder(Path(location))
    except OSError as error:
        raise BadEnvironment(
            f"{name} is {location}, but this folder cannot be created here ({error.strerror}). "
            "In the job file, choose a location that this node can write to."
        ) from None


def version(package: str) -> str | None:
    """The version of a Python package of this node; None where it is not installed, or broken."""
    import importlib.metadata  # takes 1 MB, and few nodes need it

    try:
        return importlib.metadata.version(package)
    except Exception:  # noqa: BLE001 - what is broken there is no reason to end a run
        return None


class Unresolved(Exception):
    """A reference cannot be resolved. The message says why and what to do."""


def secrets(env: Environ) -> dict[str, str]:
    """Values for the variables of ``DEPLOYKIT_SECRETS``.

    Raises BadEnvironment with all references that cannot be resolved.
    """
    values, failures = {}, []
    for variable, reference in json.loads(env.get(SECRETS) or "{}").items():
        try:
            values[variable] = resolve(reference, env)
        except Unresolved as error:
            failures.append(f"{variable} ({reference}): {error}")
    if failures:
        raise BadEnvironment("Secrets could not be resolved on this node. " + " ".join(failures))
    return values


def resolve(reference: str, env: Environ) -> str:
    """The value of a reference, ``secret:KIND:NAME``. Raises Unresolved."""
    prefix, kind, name = (*reference.split(":", 2), "", "")[:3]
    readers = {"env": _variable, "file": _file, "ssm": _ssm, "secretsmanager": _secretsmanager}
    if prefix != _PREFIX or kind not in readers or not name:
        raise Unresolved(f"write secret:KIND:NAME, where KIND is one of {', '.join(readers)}.")
    value = readers[kind](name, env)
    if "\0" in value:
        raise Unresolved("the value contains a NUL byte, which environment variables cannot hold.")
    return value


def _variable(name: str, env: Environ) -> str:
    if name not in env:
        raise Unresolved(f"the variable {name} is not set on this node; export it there.")
    return env[name]


def _file(name: str, _: Environ) -> str:
    """The file's text without the newline that editors append."""
    path = Path(os.path.expanduser(name))  # noqa: PTH111 - pathlib's raises for an unknown user
    try:
        if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise Unresolved(
                f"other users can read {path}; run: chmod 600 -- {shlex.quote(str(path))}"
            )
        return path.read_text(encoding="utf-8").removesuffix("\n")
    except OSError as error:
        raise Unresolved(f"{path} cannot be read ({error.strerror}).") from None
    except UnicodeDecodeError:
        raise Unresolved(f"{path} is not UTF-8 text.") from None


def _ssm(name: str, env: Environ) -> str:
    def fetch(client: Any) -> str:
        return str(client.get_parameter(Name=name, WithDecryption=True)["Parameter"]["Value"])

    return _aws("ssm", "ssm:GetParameter", fetch, env)


def _secretsmanager(name: str, env: Environ) -> str:
    def fetch(client: Any) -> str:
        answer = client.get_secret_value(SecretId=name)
        if "SecretString" not in answer:
            raise Unresolved("the secret is binary; store it as text.")
        return str(answer["SecretString"])

    return _aws("secretsmanager", "secretsmanager:GetSecretValue", fetch, env)


def codeartifact_token(domain: str, owner: str, region: str) -> str:
    """A password for the repositories of a domain of AWS CodeArtifact, from this node's role.

    Raises BadEnvironment. https://docs.aws.amazon.com/codeartifact/latest/ug/tokens-authentication.html
    """

    def fetch(client: Any) -> str:
        answer = client.get_authorization_token(domain=domain, domainOwner=owner)
        return str(answer["authorizationToken"])

    try:
        actions = "codeartifact:GetAuthorizationToken and sts:GetServiceBearerToken"
        return _aws("codeartifact", actions, fetch, {"AWS_REGION": region})
    except Unresolved as error:
        raise BadEnvironment(f"The CodeArtifact domain {domain} cannot be used: {error}") from None


def _aws(service: str, action: str, fetch: Callable[[Any], str], env: Environ) -> str:
    """The value that `fetch` gets from a boto3 client; `action` is the permission it needs."""
    try:
        import boto3
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError:
        raise Unresolved("boto3 is not installed on this node; run: pip install boto3") from None
    region = env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION")
    try:
        return fetch(boto3.client(service, region_name=region))
    except ClientError as error:
        code = error.response["Error"]["Code"]
        raise Unresolved(f"AWS returned {code}; the node's role requires {action}.") from None
    except BotoCoreError as error:
        raise Unresolved(f"the request to AWS failed: {error}") from None
