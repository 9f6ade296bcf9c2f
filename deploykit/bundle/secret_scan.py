"""Find private keys and access tokens in files, and plain secrets in a job file.

The patterns are those that the issuers document and that scanners such as gitleaks and
detect-secrets use. Text that only looks random is not reported: it occurs in any source. Only the
kind of a secret and its line are kept, never the secret.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from deploykit.job import checks
from deploykit.job.model import JobSpec, Problem

KEY = "a private key"


class _Pattern(NamedTuple):
    """What a kind of secret looks like, and texts of which each match holds at least one."""

    kind: str
    literals: tuple[bytes, ...]
    """Looked for first, since that is many times faster than a regular expression."""
    regex: bytes
    """Matched from a word boundary on."""


_REACH = 8192
"""Bytes that a pattern may examine from its start on."""
_MAX_TOKENS_IN_FILE = 100
_MAX_WARNINGS = 20
"""Files with tokens that are listed one by one."""
_MAX_LINES_IN_WARNING = 5

_PUT = rb"""[\w.-]{0,20}["'\])]{0,3}\s{0,3}(?:=>|:=|[=:,(\s])\s{0,3}["'(]{0,3}"""
"""From a name to its value, in code, settings or a command: ``KEY = "value"``."""
_AWS_SECRET = rb"[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+=])"
_HEX_KEY = rb"(?<![0-9A-Za-z])[0-9a-f]{40}(?!\w)"
_SEPARATOR = rb"[\s\"'`,;#*()<>\\]"
"""Between words of a key, also in code that joins quoted lines."""
_PATTERNS = (
    # A header with a line of base64 below it, or with base64 within the next 16 words, such as the
    # fields of RFC 1421 and OpenPGP. Code that only mentions a header has neither.
    _Pattern(
        KEY,
        (b"PRIVATE KEY",),
        rb"BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)? ?-{4,5}(?:"
        rb"[ \t]*(?:\\+[rn]|\r|\n)+[ \t]*[A-Za-z0-9+/]{3,}={0,2}[ \t]*(?:[\\\r\n\"']|-----END|\Z)"
        rb"|(?:%b++(?!-{4,5} ?END)[^\s\"'`,;#*()<>\\]++){0,16}?%b++[A-Za-z0-9+/]{48})"
        % (_SEPARATOR, _SEPARATOR),
    ),
    _Pattern(KEY, (b"PuTTY-User",), rb"PuTTY-User-Key-File-\d[\s\S]{1,4000}?\nPrivate-Lines:"),
    _Pattern(KEY, (b"AGE-SECRET",), rb"AGE-SECRET-KEY-1[A-Z0-9]{58}"),
    _Pattern("an AWS access key", (b"AKIA", b"ASIA"), rb"A[KS]IA[A-Z0-9]{16}(?![A-Za-z0-9])"),
    _Pattern(
        "an AWS secret key",
        (b"aws_secret_access_key",),
        rb"aws_secret_access_key" + _PUT + _AWS_SECRET,
    ),
    _Pattern(
        "an AWS secret key",
        (b"AWS_SECRET_ACCESS_KEY",),
        rb"AWS_SECRET_ACCESS_KEY" + _PUT + _AWS_SECRET,
    ),
    _Pattern(
        "an AWS secret key", (b"ecretAccessKey",), rb"[sS]ecretAccessKey" + _PUT + _AWS_SECRET
    ),
    _Pattern(
        "a GitHub token",
        (b"ghp_", b"gho_", b"ghu_", b"ghs_", b"ghr_"),
        rb"gh[pousr]_[A-Za-z0-9]{36,}",
    ),
    _Pattern("a GitHub token", (b"github_pat_",), rb"github_pat_\w{36,}"),
    _Pattern("a GitLab token", (b"glpat-", b"gldt-", b"glrt-"), rb"gl(?:pat|dt|rt)-[\w-]{20,}"),
    _Pattern("a Hugging Face token", (b"hf_",), rb"hf_[A-Za-z0-9]{34,}(?!\w)"),
    _Pattern(
        "a Slack token",
        (b"xox", b"xapp-"),
        rb"x(?:ox[abeoprs]|app)-(?=[A-Za-z-]*\d)[A-Za-z0-9-]{10,}",
    ),
    _Pattern(
        "a Slack webhook",
        (b"hooks.slack.com/services/",),
        rb"hooks\.slack\.com/services/T[A-Z0-9]{8,}/B[A-Z0-9]{8,}/[A-Za-z0-9]{20,}",
    ),
    _Pattern("a Discord webhook", (b"api/webhooks/",), rb"api/webhooks/\d{17,20}/[\w-]{60,}"),
    _Pattern("an Anthropic API key", (b"sk-ant-",), rb"sk-ant-[a-z]+\d\d-[\w-]{32,}"),
    _Pattern("an OpenRouter API key", (b"sk-or-v1-",), rb"sk-or-v1-[0-9a-f]{64}"),
    _Pattern(
        "an OpenAI API key",
        (b"sk-proj-", b"sk-svcacct-", b"sk-admin-"),
        rb"sk-(?:proj|svcacct|admin)-[\w-]{40,}",
    ),
    _Pattern("an OpenAI API key", (b"sk-",), rb"sk-(?:[A-Za-z0-9]{48}|[0-9a-f]{32})(?!\w)"),
    _Pattern("a Groq API key", (b"gsk_",), rb"gsk_[A-Za-z0-9]{48,}"),
    _Pattern("a Replicate token", (b"r8_",), rb"r8_[A-Za-z0-9]{37}(?!\w)"),
    _Pattern("a Perplexity API key", (b"pplx-",), rb"pplx-[A-Za-z0-9]{48}"),
    _Pattern("an xAI API key", (b"xai-",), rb"xai-[A-Za-z0-9]{70,}"),
    _Pattern("a LangSmith API key", (b"lsv2_",), rb"lsv2_(?:pt|sk)_[0-9a-f]{32}_[0-9a-f]{10}"),
    _Pattern("an NVIDIA API key", (b"nvapi-",), rb"nvapi-[\w-]{40,}"),
    _Pattern("a Weights & Biases API key", (b"wandb_v1_",), rb"wandb_v1_\w{40,}"),
    _Pattern(
        "a Weights & Biases API key",
        (b"wandb", b"WANDB", b"Wandb", b"WandB"),
        rb"[wW][aA][nN][dD][bB][^\n]{0,40}?(?i:key|login|token)[^\n]{0,20}?" + _HEX_KEY,
    ),
    _Pattern("a Kaggle API key", (b"KGAT_",), rb"KGAT_[0-9a-f]{32}(?!\w)"),
    _Pattern("a Kaggle API key", (b"KAGGLE_KEY",), rb"KAGGLE_KEY" + _PUT + rb"[0-9a-f]{32}(?!\w)"),
    _Pattern(
        "a Neptune API token",
        (b"eyJhcGlfYWRkcmVzcyI6",),
        rb"eyJhcGlfYWRkcmVzcyI6[A-Za-z0-9+/=_-]{40,}",
    ),
    _Pattern("a JSON web token", (b"eyJ",), rb"eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{20,}"),
    _Pattern("a Google API key", (b"AIza",), rb"AIza[\w-]{35}(?![\w-])"),
    _Pattern("a Google client secret", (b"GOCSPX-",), rb"GOCSPX-[\w-]{28}"),
    _Pattern("a Google access token", (b"ya29.",), rb"ya29\.[\w-]{40,}"),
    _Pattern("an Azure storage key", (b"AccountKey=",), rb"AccountKey=[A-Za-z0-9+/]{86}=="),
    _Pattern("an Azure signature", (b"sig=",), rb"sig=[A-Za-z0-9%/+]{43,70}(?:%3[Dd]|=)"),
    _Pattern(
        "an Azure client secret",
        (b"7Q~", b"8Q~"),
        rb"[\w~.][\w~.][\w~.][78]Q~[\w~.-]{31,34}(?![\w~.-])",
    ),
    _Pattern("a Stripe key", (b"k_live_",), rb"[sr]k_live_[A-Za-z0-9]{16,}"),
    _Pattern("a PyPI token", (b"pypi-AgE",), rb"pypi-AgE[\w-]{50,}"),
    _Pattern("an npm token", (b"npm_",), rb"npm_[A-Za-z0-9]{36}(?!\w)"),
    _Pattern("an npm token", (b"_authToken",), rb"_authToken\s?=\s?\"?[A-Za-z0-9+/=_-]{20,}"),
    _Pattern("a RubyGems token", (b"rubygems_",), rb"rubygems_[0-9a-f]{48}"),
    _Pattern("a Databricks token", (b"dapi",), rb"dapi[0-9a-f]{32}(?!\w)"),
    _Pattern("a DigitalOcean token", (b"dop_v1_",), rb"dop_v1_[0-9a-f]{64}"),
    _Pattern("a Docker token", (b"dckr_",), rb"dckr_[op]at_[\w-]{27,}"),
    _Pattern("a SendGrid API key", (b"SG.",), rb"SG\.[\w-]{20,24}\.[\w-]{39,50}(?![\w-])"),
    _Pattern("a Telegram token", (b":AA",), rb"\d\d{7,9}:AA[\w-]{33}(?![\w-])"),
    _Pattern("a Vault token", (b"hvs.",), rb"hvs\.[\w-]{80,}"),
    _Pattern(
        "a Terraform token", (b".atlasv1.",), rb"[A-Za-z0-9][A-Za-z0-9]{13}\.atlasv1\.[\w-]{60,}"
    ),
    _Pattern("a Sentry token", (b"sntry",), rb"sntry[su]_[A-Za-z0-9+/=_]{60,}"),
    _Pattern("a Grafana token", (b"glsa_",), rb"glsa_[A-Za-z0-9]{32}_[0-9a-f]{8}"),
    _Pattern("a Notion token", (b"ntn_",), rb"ntn_[A-Za-z0-9]{46}(?!\w)"),
    _Pattern("a Linear API key", (b"lin_api_",), rb"lin_api_[A-Za-z0-9]{40}(?!\w)"),
    _Pattern("an Alibaba Cloud access key", (b"LTAI",), rb"LTAI[A-Za-z0-9]{20}(?!\w)"),
    _Pattern("a Tencent Cloud secret ID", (b"AKID",), rb"AKID[A-Za-z0-9]{32}(?!\w)"),
)
_LITERALS = [(text, number) for number, one in enumerate(_PATTERNS) for text in one.literals]
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


class Scanner:
    """Searches one file, which is fed to it in pieces."""

    def __init__(self) -> None:
        self.secrets: list[Secret] = []
        self._data = b""
        """The end of the previous piece."""
        self._done = 0
        """Bytes of it that were searched, and are kept for word boundaries."""
        self._line = 1

    @property
    def has_key(self) -> bool:
        """Whether a private key was found."""
        return any(secret.kind == KEY for secret in self.secrets)

    def feed(self, piece: bytes, *, last: bool = True) -> None:
        """Search the next bytes of the file; pieces should be far longer than `_REACH`."""
        data = self._data + piece
        end = len(data) if last else max(len(data) - _REACH, self._done)
        counted = self._done
        for start, kind in _found_in(data, self._done, end):
            if kind == KEY or len(self.secrets) < _MAX_TOKENS_IN_FILE:
                self._line += data.count(b"\n", counted, start)
                counted = start
                self.secrets.append(Secret(kind, self._line))
        self._line += data.count(b"\n", counted, end)
        self._done = min(end, 1)
        self._data = data[end - self._done :]


def _found_in(data: bytes, begin: int, end: int) -> Iterator[tuple[int, str]]:
    """Where secrets start between `begin` and `end`, and their kinds; no two overlap."""
    numbers = {number for literal, number in _LITERALS if literal in data}
    matches = [
        (match.start(), number, match.end())
        for number in numbers
        for match in _compiled(_PATTERNS[number].regex).finditer(data, begin)
        if match.start() < end
    ]
    free = begin
    for start, number, stop in sorted(matches):
        kind = _PATTERNS[number].kind
        if start >= free and (kind == KEY or not _is_placeholder(data[start:stop])):
            yield start, kind
            free = stop


@cache
def _compiled(regex: bytes) -> re.Pattern[bytes]:
    return re.compile(rb"\b(?:%b)" % regex)


def _is_placeholder(text: bytes) -> bool:
    """Whether a token is one of those in manuals."""
    return any(word in text.lower() for word in _PLACEHOLDERS)


def has_private_key(data: bytes) -> bool:
    """Whether `data` contains a private key."""
    scanner = Scanner()
    scanner.feed(data)
    return scanner.has_key


def check(job: JobSpec, sections: Mapping[str, Any]) -> Iterator[Problem]:
    """A warning for each plain secret of the job and of its sections, which never quotes it.

    The name of a variable counts too, since all of its value would appear in the plan.
    """
    for name, value in job.env.items():
        if not checks.is_secret(value) and (reason := _in_variable(name, value)):
            yield _warning(
                f"env.{name}",
                reason,
                f"write secret:env:{name} and set {name} where you submit, or use a store: "
                "secret:file:PATH, secret:ssm:NAME, secret:secretsmanager:NAME",
            )
    texts = [*_texts(dataclasses.replace(job, env={}), "")]
    for section, options in sections.items():
        texts += _texts(options, section)
    for path, text in texts:
        if reason := _in_text(text):
            hint = "pass it as a variable of `env`, such as TOKEN: secret:env:TOKEN"
            yield _warning(path, reason, hint)


def _warning(path: str, reason: str, hint: str) -> Problem:
    message = f"{reason}; it would appear in the plan as plain text"
    return Problem(path, message, hint, severity="warning")


def _in_variable(name: str, value: str) -> str | None:
    if reason := _in_text(value):
        return reason
    if re.fullmatch(_HARMLESS_VALUE, value):
        return None
    is_likely = re.search(_LIKELY_VARIABLE, name) and re.fullmatch(_SINGLE_WORD, value)
    is_random = re.search(_POSSIBLE_VARIABLE, name) and re.fullmatch(_RANDOM_WORD, value)
    if re.search(_CERTAIN_VARIABLE, name) or is_likely or is_random:
        return "looks like a secret by its name"
    return None


def _in_text(text: str) -> str | None:
    scanner = Scanner()
    scanner.feed(text.encode(errors="replace"))
    if scanner.secrets:
        return f"looks like {scanner.secrets[0].kind}"
    has_password = "://" in text and re.search(_LOGIN_IN_URL, text)
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
            f"left out, because they contain private keys: {', '.join(lines)}",
            "to include one, add it with a leading ! to .deploykitignore",
            severity="warning",
        )
    paths = [path for path in secrets if path not in left_out]
    for path in paths[:_MAX_WARNINGS]:
        for kind in dict.fromkeys(secret.kind for secret in secrets[path]):
            lines_of_kind = sorted({s.line for s in secrets[path] if s.kind == kind})
            yield Problem(
                "source",
                f"{path}, {_lines(lines_of_kind)}: looks like {kind}",
                "remove it and pass it as a `secret:` of `env`; "
                f"if it is not a secret, add !/{path} to .deploykitignore",
                severity="warning",
            )
    if len(paths) > _MAX_WARNINGS:
        more = f"{len(paths) - _MAX_WARNINGS} more files seem to contain tokens"
        yield Problem("source", more, severity="warning")


def _lines(lines: list[int]) -> str:
    if len(lines) == 1:
        return f"line {lines[0]}"
    shown = ", ".join(map(str, lines[:_MAX_LINES_IN_WARNING]))
    return f"lines {shown}{', ...' if len(lines) > _MAX_LINES_IN_WARNING else ''}"
