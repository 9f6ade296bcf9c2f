"""Find secrets that a job file contains as plain text, and that would appear in the plan."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

from deploykit import backend, secret_scan
from deploykit.model import JobSpec, Problem

_NAME = re.compile(
    r"(?:^|_)(?:SECRET|PASSPHRASE|API_?KEY|(?:ACCESS|SECRET|PRIVATE)_KEY)$|(?:PASSWORD|PASSWD)$",
    re.IGNORECASE,
)
"""Variables whose value is always a secret."""
_TOKEN_NAME = re.compile(r"(?:^|_)(?:TOKEN|CREDENTIALS?)$", re.IGNORECASE)
"""Variables whose value is a secret unless it is a path or a tokenizer's word, such as <pad>."""
_MAYBE = re.compile(r"TOKEN|SECRET|PASS|KEY|CREDENTIAL|AUTH", re.IGNORECASE)
"""Variables whose value is a secret if it looks random."""
_NO_SECRET = re.compile(
    r"|true|false|yes|no|on|off|none|null|\d|[$~./].*|[a-z]+://.*", re.IGNORECASE
)
_TOKEN = re.compile(r"[\w.+/=~-]{8,}")
_RANDOM = re.compile(r"(?=.*\d)(?=.*[A-Za-z])[\w+=~-]{16,}")
_URL = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s:@]*:(?!\$|<|\*)[^/\s@]+@", re.IGNORECASE)


def check(job: JobSpec, sections: Mapping[str, Any]) -> Iterator[Problem]:
    """A warning for each plain secret of the job and of its sections, which never quotes it."""
    for name, value in job.env.items():
        if not backend.is_secret(value) and (what := _in_variable(name, value)):
            yield _warning(
                f"env.{name}",
                what,
                f"write secret:env:{name} and set {name} where you submit, or use a store: "
                "secret:file:PATH, secret:ssm:NAME, secret:secretsmanager:NAME",
            )
    texts = [*_texts(dataclasses.replace(job, env={}), "")]
    for section, options in sections.items():
        texts += _texts(options, section)
    for path, text in texts:
        if what := _in_text(text):
            hint = "pass it as a variable of `env`, such as TOKEN: secret:env:TOKEN"
            yield _warning(path, what, hint)


def _warning(path: str, what: str, hint: str) -> Problem:
    message = f"{what}; it would appear in the plan as plain text"
    return Problem(path, message, hint, severity="warning")


def _in_variable(name: str, value: str) -> str | None:
    if what := _in_text(value):
        return what
    if _NO_SECRET.fullmatch(value):
        return None
    tokenlike = _TOKEN_NAME.search(name) and _TOKEN.fullmatch(value)
    if _NAME.search(name) or tokenlike or (_MAYBE.search(name) and _RANDOM.fullmatch(value)):
        return "is a secret by its name"
    return None


def _in_text(text: str) -> str | None:
    finding = secret_scan.secret(text)
    if finding is not None:
        return f"looks like {finding.name}"
    return "contains an address with a password" if _URL.search(text) else None


def _texts(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Every text in a value, with its path in the job file."""
    if isinstance(value, str):
        yield path, value
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            below = f"{path}.{field.name}" if path else field.name
            yield from _texts(getattr(value, field.name), below)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(item, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _texts(item, f"{path}[{number}]")
