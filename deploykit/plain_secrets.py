"""Find secrets that a job file contains as plain text, and that would appear in the plan."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

from deploykit import contract, secret_scan
from deploykit.model import JobSpec, Problem

_NAME = (
    r"(?i)(?:^|_)(?:SECRET|PASSPHRASE|API_?KEY|(?:ACCESS|SECRET|PRIVATE)_KEY)$|(?:PASSWORD|PASSWD)$"
)
"""Variables whose value is always a secret."""
_LIKELY_NAME = r"(?i)(?:^|_)(?:TOKEN|CREDENTIALS?)$"
"""Variables whose value is a secret unless it is a path or a tokenizer's word, such as <pad>."""
_MAYBE = r"(?i)TOKEN|SECRET|PASS|KEY|CREDENTIAL|AUTH"
"""Variables whose value is a secret if it looks random."""
_HARMLESS = r"(?i)|true|false|yes|no|on|off|none|null|\d|[$~./].*|[a-z]+://.*"
_ONE_WORD = r"[\w.+/=~-]{8,}"
_RANDOM = r"(?=.*\d)(?=.*[A-Za-z])[\w+=~-]{16,}"
_URL = r"(?i)[a-z][a-z0-9+.-]*://[^/\s:@]*:(?!\$|<|\*)[^/\s@]+@"


def check(job: JobSpec, sections: Mapping[str, Any]) -> Iterator[Problem]:
    """A warning for each plain secret of the job and of its sections, which never quotes it."""
    for name, value in job.env.items():
        if not contract.is_secret(value) and (what := _in_variable(name, value)):
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
    if re.fullmatch(_HARMLESS, value):
        return None
    tokenlike = re.search(_LIKELY_NAME, name) and re.fullmatch(_ONE_WORD, value)
    random = re.search(_MAYBE, name) and re.fullmatch(_RANDOM, value)
    if re.search(_NAME, name) or tokenlike or random:
        return "is a secret by its name"
    return None


def _in_text(text: str) -> str | None:
    finding = secret_scan.secret(text)
    if finding is not None:
        return f"looks like {finding.name}"
    has_password = "://" in text and re.search(_URL, text)
    return "contains an address with a password" if has_password else None


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
