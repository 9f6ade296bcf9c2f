"""Secrets: references such as ``secret:env:HF_TOKEN`` turned into values, on the node.

Values go into the trainer's environment and nowhere else: no message here shows one.
The two kinds of AWS need boto3, the one package beyond the standard library that the node
plane may import: request signing is not something to write again. SageMaker's images have it.
"""

from __future__ import annotations

import json
import shlex
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cluster import BadEnvironment

VARIABLE = "DEPLOYKIT_SECRETS"

_PREFIX = "secret"


class Unresolved(Exception):
    """One reference that cannot be resolved, and what to do."""


def resolve(env: Mapping[str, str]) -> dict[str, str]:
    """Values for the variables of ``DEPLOYKIT_SECRETS``. Every failure is reported at once."""
    values, failures = {}, []
    for variable, reference in json.loads(env.get(VARIABLE) or "{}").items():
        try:
            values[variable] = _value(reference, env)
        except Unresolved as error:
            failures.append(f"{variable} ({reference}): {error}")
    if failures:
        raise BadEnvironment("Secrets could not be resolved on this node. " + " ".join(failures))
    return values


def _value(reference: str, env: Mapping[str, str]) -> str:
    prefix, kind, name = (*reference.split(":", 2), "", "")[:3]
    readers = {"env": _variable, "file": _file, "ssm": _ssm, "secretsmanager": _secretsmanager}
    if prefix != _PREFIX or kind not in readers or not name:
        raise Unresolved(f"write it secret:KIND:NAME, with KIND one of {', '.join(readers)}.")
    value = readers[kind](name, env)
    if "\0" in value:
        raise Unresolved("the value holds a NUL byte, which no environment variable can.")
    return value


def _variable(name: str, env: Mapping[str, str]) -> str:
    if name not in env:
        raise Unresolved(f"the variable {name} is not set on this node; export it there.")
    return env[name]


def _file(name: str, _: Mapping[str, str]) -> str:
    """The file's text, without the newline that editors put at its end."""
    path = Path(name).expanduser()
    try:
        if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise Unresolved(f"others may read {path}; run: chmod 600 -- {shlex.quote(str(path))}")
        return path.read_text(encoding="utf-8").removesuffix("\n")
    except OSError as error:
        raise Unresolved(f"{path} cannot be read ({error.strerror}).") from None
    except UnicodeDecodeError:
        raise Unresolved(f"{path} is not UTF-8 text.") from None


def _ssm(name: str, env: Mapping[str, str]) -> str:
    def ask(client: Any) -> str:
        return client.get_parameter(Name=name, WithDecryption=True)["Parameter"]["Value"]

    return _aws("ssm", "ssm:GetParameter", ask, env)


def _secretsmanager(name: str, env: Mapping[str, str]) -> str:
    def ask(client: Any) -> str:
        answer = client.get_secret_value(SecretId=name)
        if "SecretString" not in answer:
            raise Unresolved("the secret is binary; store it as text.")
        return answer["SecretString"]

    return _aws("secretsmanager", "secretsmanager:GetSecretValue", ask, env)


def _aws(service: str, action: str, ask: Callable[[Any], str], env: Mapping[str, str]) -> str:
    try:
        import boto3
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError:
        raise Unresolved("boto3 is not installed on this node; run: pip install boto3") from None
    region = env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION")
    try:
        return ask(boto3.client(service, region_name=region))
    except ClientError as error:
        code = error.response["Error"]["Code"]
        raise Unresolved(f"AWS said {code}; the node's role needs {action} on it.") from None
    except BotoCoreError as error:
        raise Unresolved(f"AWS could not be asked: {error}") from None
