"""Find private keys and access tokens in files, and plain secrets in a job file.

The patterns are those that the issuers document and that scanners such as gitleaks and
detect-secrets use. Text that only looks random is not reported: it occurs in any source. Only the
kind of a secret and its line are kept, never the secret.
"""

from __future__ import annotations

import dataclasses
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import IO, Any, NamedTuple

from deploykit.job import checks
from deploykit.job.model import JobSpec, Problem

KEY = "a private key"


_REACH = 8192
"""Bytes that a pattern may examine from its start on."""
_MAX_TOKENS_IN_FILE = 100
_MAX_WARNINGS = 20
"""Files with tokens that are listed one by one."""
_MAX_LINES_IN_WARNING = 5

_PUT = rb"""[\w.-]{0,20}["'\])]{0,3}\s{0,3}(?:=>|:=|[=:,(\s])\s{0,3}["'(]{0,3}"""
"""From a name to its value, in code, settings or a command: ``KEY = "value"``."""
_HEX_KEY = rb"(?<![0-9A-Za-z])[0-9a-f]{40}"
_SEPARATOR = rb"[\s\"'`,;#*()<>\\]"
"""Between words of a key, also in code that joins quoted lines."""
_PATTERNS = (
    # A header with a line of base64 below it, or with base64 within the next 16 words, such as the
    # fields of RFC 1421 and OpenPGP. Code that only mentions a header has neither.
    (
        KEY,
        rb"BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)? ?-{4,5}(?:"
        rb"[ \t]*(?:\\+[rn]|\r|\n)+[ \t]*[A-Za-z0-9+/]{3,}={0,2}[ \t]*(?:[\\\r\n\"']|-----END|\Z)"
        rb"|(?:%b++(?!-{4,5} ?END)[^\s\"'`,;#*()<>\\]++){0,16}?%b++[A-Za-z0-9+/]{48})"
        % (_SEPARATOR, _SEPARATOR),
        b"PRIVATE KEY",
    ),
    (KEY, rb"PuTTY-User-Key-File-\d[\s\S]{1,4000}?\nPrivate-Lines:", b"PuTTY-User"),
    (KEY, rb"AGE-SECRET-KEY-1[A-Z0-9]{58}", b"AGE-SECRET"),
    ("an AWS access key", rb"A[KS]IA[A-Z0-9]{16}(?![A-Za-z0-9])", b"AKIA", b"ASIA"),
    (
        "an AWS secret key",
        rb"(?:aws_secret_access_key|AWS_SECRET_ACCESS_KEY|[sS]ecretAccessKey)%b"
        rb"[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+=])" % _PUT,
        *(b"aws_secret_access_key", b"AWS_SECRET_ACCESS_KEY", b"ecretAccessKey"),
    ),
    ("a GitHub token", rb"gh[pousr]_[A-Za-z0-9]{36,}", b"ghp_", b"gho_", b"ghu_", b"ghs_", b"ghr_"),
    ("a GitHub token", rb"github_pat_\w{36,}", b"github_pat_"),
    ("a GitLab token", rb"gl(?:pat|dt|rt)-[\w-]{20,}", b"glpat-", b"gldt-", b"glrt-"),
    ("a Hugging Face token", rb"hf_[A-Za-z0-9]{34,}(?!\w)", b"hf_"),
    (
        "a Slack token",
        rb"x(?:ox[abeoprs]|app)-(?=[A-Za-z-]*\d)[A-Za-z0-9-]{10,}",
        *(b"xox", b"xapp-"),
    ),
    (
        "a Slack webhook",
        rb"hooks\.slack\.com/services/T[A-Z0-9]{8,}/B[A-Z0-9]{8,}/[A-Za-z0-9]{20,}",
        b"hooks.slack.com/services/",
    ),
    ("a Discord webhook", rb"api/webhooks/\d{17,20}/[\w-]{60,}", b"api/webhooks/"),
    ("an Anthropic API key", rb"sk-ant-[a-z]+\d\d-[\w-]{32,}", b"sk-ant-"),
    ("an OpenRouter API key", rb"sk-or-v1-[0-9a-f]{64}", b"sk-or-v1-"),
    (
        "an OpenAI API key",
        rb"sk-(?:(?:proj|svcacct|admin)-[\w-]{40,}|(?:[A-Za-z0-9]{48}|[0-9a-f]{32})(?!\w))",
        b"sk-",
    ),
    ("a Groq API key", rb"gsk_[A-Za-z0-9]{48,}", b"gsk_"),
    ("a Replicate token", rb"r8_[A-Za-z0-9]{37}(?!\w)", b"r8_"),
    ("a Perplexity API key", rb"pplx-[A-Za-z0-9]{48}", b"pplx-"),
    ("an xAI API key", rb"xai-[A-Za-z0-9]{70,}", b"xai-"),
    ("a LangSmith API key", rb"lsv2_(?:pt|sk)_[0-9a-f]{32}_[0-9a-f]{10}", b"lsv2_"),
    ("an NVIDIA API key", rb"nvapi-[\w-]{40,}", b"nvapi-"),
    ("a Weights & Biases API key", rb"wandb_v1_\w{40,}", b"wandb_v1_"),
    (
        "a Weights & Biases API key",
        rb"[wW][aA][nN][dD][bB][^\n]{0,40}?(?i:key|login|token)[^\n]{0,20}?%b(?!\w)" % _HEX_KEY,
        *(b"wandb", b"WANDB", b"Wandb", b"WandB"),
    ),
    ("a Kaggle API key", rb"KGAT_[0-9a-f]{32}(?!\w)", b"KGAT_"),
    ("a Kaggle API key", rb"KAGGLE_KEY%b[0-9a-f]{32}(?!\w)" % _PUT, b"KAGGLE_KEY"),
    (
        "a Neptune API token",
        rb"eyJhcGlfYWRkcmVzcyI6[A-Za-z0-9+/=_-]{40,}",
        b"eyJhcGlfYWRkcmVzcyI6",
    ),
    ("a JSON web token", rb"eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{20,}", b"eyJ"),
    ("a Google API key", rb"AIza[\w-]{35}(?![\w-])", b"AIza"),
    ("a Google client secret", rb"GOCSPX-[\w-]{28}", b"GOCSPX-"),
    ("a Google access token", rb"ya29\.[\w-]{40,}", b"ya29."),
    ("an Azure storage key", rb"AccountKey=[A-Za-z0-9+/]{86}==", b"AccountKey="),
    ("an Azure signature", rb"sig=[A-Za-z0-9%/+]{43,70}(?:%3[Dd]|=)", b"sig="),
    (
        "an Azure client secret",
        rb"[\w~.][\w~.][\w~.][78]Q~[\w~.-]{31,34}(?![\w~.-])",
        *(b"7Q~", b"8Q~"),
    ),
    ("a Stripe key", rb"[sr]k_live_[A-Za-z0-9]{16,}", b"k_live_"),
    ("a PyPI token", rb"pypi-AgE[\w-]{50,}", b"pypi-AgE"),
    ("an npm token", rb"npm_[A-Za-z0-9]{36}(?!\w)", b"npm_"),
    ("an npm token", rb"_authToken\s?=\s?\"?[A-Za-z0-9+/=_-]{20,}", b"_authToken"),
    ("a RubyGems token", rb"rubygems_[0-9a-f]{48}", b"rubygems_"),
    ("a Databricks token", rb"dapi[0-9a-f]{32}(?!\w)", b"dapi"),
    ("a DigitalOcean token", rb"dop_v1_[0-9a-f]{64}", b"dop_v1_"),
    ("a Docker token", rb"dckr_[op]at_[\w-]{27,}", b"dckr_"),
    ("a SendGrid API key", rb"SG\.[\w-]{20,24}\.[\w-]{39,50}(?![\w-])", b"SG."),
    ("a Telegram token", rb"\d\d{7,9}:AA[\w-]{33}(?![\w-])", b":AA"),
    ("a Vault token", rb"hvs\.[\w-]{80,}", b"hvs."),
    ("a Terraform token", rb"[A-Za-z0-9]{14}\.atlasv1\.[\w-]{60,}", b".atlasv1."),
    ("a Sentry token", rb"sntry[su]_[A-Za-z0-9+/=_]{60,}", b"sntry"),
    ("a Grafana token", rb"glsa_[A-Za-z0-9]{32}_[0-9a-f]{8}", b"glsa_"),
    ("a Notion token", rb"ntn_[A-Za-z0-9]{46}(?!\w)", b"ntn_"),
    ("a Linear API key", rb"lin_api_[A-Za-z0-9]{40}(?!\w)", b"lin_api_"),
    ("an Alibaba Cloud access key", rb"LTAI[A-Za-z0-9]{20}(?!\w)", b"LTAI"),
    ("a Tencent Cloud secret ID", rb"AKID[A-Za-z0-9]{32}(?!\w)", b"AKID"),
)
"""The kind of a secret; its regular expression, from a word boundary on; and texts of which each
match contains at least one, since a search for those is many times faster."""
_LITERALS: list[tuple[Any, int]] = [
    (literal, number) for number, (_, _, *literals) in enumerate(_PATTERNS) for literal in literals
]
_PLACEHOLDERS = (
    *(b"example", b"placeholder", b"changeme", b"dummy", b"your", b"fake", b"redacted"),
    *(b"xxxx", b"....", b"****", b"00000000", b"1234567890", b"0123456789", b"abcdefgh"),
    b"eyjzdwiioiixmjm0nty3odkw",  # the sample of jwt.io
)
"""Parts of the tokens in manuals, in lower case."""
_CERTAIN_VARIABLE = (
    r"(?i)(?:^|_)(?:SECRET|PASSPHRASE|API_?KEY|(?:ACCESS|SECRET|PRIVATE)_KEY)$|(?:PASSWORD|PASSWD)$"
)
"""Variables whose value is always a secret."""
_LIKELY_VARIABLE = r"(?i)(?:^|_)(?:TOKEN|CREDENTIALS?)$"
"""Variables whose value is a secret unless it is a path or a tokenizer's word, such as <pad>."""
_POSSIBLE_VARIABLE = r"(?i)TOKEN|SECRET|PASS|KEY|CREDENTIAL|AUTH"
"""Variables whose value is a secret if it looks random."""
_HARMLESS_VALUE = r"(?i)|true|false|yes|no|on|off|none|null|\d|[$~./].*|[a-z]+://.*"
_SINGLE_WORD = r"[\w.+/=~-]{8,}"
_RANDOM_WORD = r"(?=.*\d)(?=.*[A-Za-z])[\w+=~-]{16,}"
_LOGIN_IN_URL = r"(?i)[a-z][a-z0-9+.-]*://[^/\s:@]*:(?!\$|<|\*)[^/\s@]+@"


class Secret(NamedTuple):
    """Something that looks like a secret: its kind, and its line from 1."""

    kind: str
    line: int


def find(file: IO[bytes], size: int = 1 << 20) -> list[Secret]:
    """The secrets in a file, which is read in pieces of `size`: far longer than `_REACH`."""
    secrets: list[Secret] = []
    data, searched, line = b"", 0, 1
    piece = file.read(size)
    while piece:
        data += piece
        piece = file.read(size)
        end = max(len(data) - _REACH, searched) if piece else len(data)
        counted = searched
        for start, kind in _found_in(data, searched, end):
            if kind == KEY or len(secrets) < _MAX_TOKENS_IN_FILE:
                line += data.count(b"\n", counted, start)
                counted = start
                secrets.append(Secret(kind, line))
        line += data.count(b"\n", counted, end)
        searched = min(end, 1)  # one byte is kept for word boundaries
        data = data[end - searched :]
    return secrets


def _found_in(data: bytes, begin: int, end: int) -> Iterator[tuple[int, str]]:
    """Where secrets start between `begin` and `end`, and their kinds; no two overlap."""
    numbers = sorted({number for literal, number in _LITERALS if literal in data})
    matches = [
        (match.start(), kind, match.end())
        for kind, regex, *_ in map(_PATTERNS.__getitem__, numbers)
        for match in _compiled(regex).finditer(data, begin)
        if match.start() < end
    ]
    free = begin
    for start, kind, stop in sorted(matches, key=lambda match: match[0]):
        text = data[start:stop].lower()
        if start >= free and (kind == KEY or not any(word in text for word in _PLACEHOLDERS)):
            yield start, kind
            free = stop


@cache
def _compiled(regex: bytes) -> re.Pattern[bytes]:
    return re.compile(rb"\b(?:%b)" % regex)


def has_key(secrets: Sequence[Secret]) -> bool:
    """Return whether one of the secrets is a private key."""
    return any(secret.kind == KEY for secret in secrets)


def check(job: JobSpec, sections: Mapping[str, Any]) -> Iterator[Problem]:
    """A warning for each plain secret of the job and of its sections, which never quotes it.

    The name of a variable counts too, since all of its value would appear in the plan.
    """
    for name, value in job.env.items():
        if not checks.is_secret(value) and (reason := _in_variable(name, value)):
            yield _warning(
                f"env.{name}",
                reason,
                f"use secret:env:{name} and set {name} where you submit, or use "
                "secret:file:PATH, secret:ssm:NAME or secret:secretsmanager:NAME",
            )
    texts = [*_texts(dataclasses.replace(job, env={}), "")]
    for section, options in sections.items():
        texts += _texts(options, section)
    for path, text in texts:
        if reason := _in_text(text):
            hint = "pass it as a variable in `env`, such as TOKEN: secret:env:TOKEN"
            yield _warning(path, reason, hint)


def _warning(path: str, reason: str, hint: str) -> Problem:
    message = f"{reason}; it would appear in the plan in plain text"
    return Problem(path, message, hint, severity="warning")


def _in_variable(name: str, value: str) -> str | None:
    if reason := _in_text(value):
        return reason
    if re.fullmatch(_HARMLESS_VALUE, value):
        return None
    is_likely = re.search(_LIKELY_VARIABLE, name) and re.fullmatch(_SINGLE_WORD, value)
    is_random = re.search(_POSSIBLE_VARIABLE, name) and re.fullmatch(_RANDOM_WORD, value)
    if re.search(_CERTAIN_VARIABLE, name) or is_likely or is_random:
        return "has a name that suggests a secret"
    return None


def _in_text(text: str) -> str | None:
    if secrets := find(io.BytesIO(text.encode(errors="replace"))):
        return f"looks like {secrets[0].kind}"
    has_password = "://" in text and re.search(_LOGIN_IN_URL, text)
    return "contains a URL with a password" if has_password else None


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


def warnings(secrets: Mapping[str, list[Secret]], left_out: Sequence[str]) -> Iterator[Problem]:
    """Warnings about the secrets in files, by path: those with private keys were `left_out`."""
    if left_out:
        lines = [
            f"{path} (line {secret.line})"
            for path in left_out
            for secret in secrets[path]
            if secret.kind == KEY
        ]
        yield Problem(
            "source",
            f"files left out because they contain private keys: {', '.join(lines)}",
            "to include a file, add !PATH to .deploykitignore",
            severity="warning",
        )
    paths = [path for path in secrets if path not in left_out]
    for path in paths[:_MAX_WARNINGS]:
        for kind in dict.fromkeys(secret.kind for secret in secrets[path]):
            lines_of_kind = sorted({s.line for s in secrets[path] if s.kind == kind})
            yield Problem(
                "source",
                f"{path}, {_lines(lines_of_kind)}: looks like {kind}",
                "pass it as a `secret:` in `env` instead; "
                f"if it is not a secret, add !/{path} to .deploykitignore",
                severity="warning",
            )
    if len(paths) > _MAX_WARNINGS:
        more = f"{len(paths) - _MAX_WARNINGS} more files may contain tokens"
        yield Problem("source", more, severity="warning")


def _lines(lines: list[int]) -> str:
    if len(lines) == 1:
        return f"line {lines[0]}"
    shown = ", ".join(map(str, lines[:_MAX_LINES_IN_WARNING]))
    return f"lines {shown}{', ...' if len(lines) > _MAX_LINES_IN_WARNING else ''}"
