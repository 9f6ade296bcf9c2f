"""Find private keys and access tokens: in files, at about the speed of hashing, and in job files.

One pass finds the few occurrences of the literals of `secret_rules`; a pattern is tried only there.
The secret itself is not kept, only its kind, its offset and the beginning that its kind has. In a
job file the name of a variable counts too, since all of it would appear in the plan.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from deploykit.bundle.secret_rules import KEY_LITERALS, PLACEHOLDERS, TOKEN_RULES, TokenRule
from deploykit.job import checks
from deploykit.job.model import JobSpec, Problem

KEY = "a private key"

_REACH = 4096
"""Bytes that a pattern may examine from its literal on."""
_BEFORE = 128
"""Bytes that it may examine before."""
_HEADER = rb"-{4,5} ?BEGIN [A-Z0-9 ]{0,40}\Z"
_HEADER_END = rb"PRIVATE KEY(?: BLOCK)? ?-{4,5}"
_NEXT_LINE = (
    rb"[ \t]*(?:\\+[rn]|\r|\n)+[ \t]*[A-Za-z0-9+/]{3,}={0,2}[ \t]*(?:\\|\r|\n|\"|'|-----END|\Z)"
)
"""A line of base64 right below a header."""
_SEPARATORS = rb"(?:\\+[nrt]|[\s\"'`,;#*()<>\\])+"
_BODY_PART = rb"[A-Za-z0-9+/]{16,}={0,2}"
_LEAST_BODY = 48
"""Characters of base64 in the shortest private key (Ed25519's has 64)."""
_MOST_WORDS = 16
"""Words between a header and the body, such as the fields of RFC 1421 and OpenPGP."""
_MOST_TOKENS = 100
_MOST_WARNINGS = 20
"""Files with tokens that are listed one by one."""
_MOST_LINES = 5
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

_Hits = Iterable[tuple[int, int]]


class Secret(NamedTuple):
    """Something that looks like a secret, at `offset` bytes."""

    name: str
    offset: int
    start: str = ""
    """At most four characters with which every token of its kind begins."""


class Scanner:
    """Searches one file, which is fed to it in pieces."""

    def __init__(self) -> None:
        self.secrets: list[Secret] = []
        self._rest = b""
        self._before = 0
        """Bytes before `_rest`."""
        self._done = 0
        """Bytes of `_rest` that were searched."""
        self._wide: bool | None = None

    @property
    def private(self) -> bool:
        """Whether a private key was found."""
        return any(secret.name == KEY for secret in self.secrets)

    def watch(self, pieces: Iterable[bytes], size: int) -> Iterator[bytes]:
        """The same pieces, `size` bytes in all, searched as they pass."""
        for piece in pieces:
            size -= len(piece)
            self.feed(piece, last=size <= 0)
            yield piece

    def feed(self, piece: bytes, *, last: bool = True) -> None:
        """Search the next bytes of the file; pieces should be far longer than `_REACH`."""
        piece = self._narrow(piece)
        data = self._rest + piece if self._rest else piece
        end = len(data) if last else max(len(data) - _REACH, self._done)
        for index, start in _finder()(data):
            if self._done <= start < end:
                self._look(data, index, start)
        keep = max(end - _BEFORE, 0)
        self._before, self._rest, self._done = self._before + keep, data[keep:], end - keep

    def lines(self, pieces: Iterable[bytes]) -> dict[Secret, int]:
        """The line of each secret, from 1. Reads the file again, up to the last of them."""
        line_by_secret: dict[Secret, int] = {}
        waiting = sorted(self.secrets, key=lambda secret: -secret.offset)
        line, before = 1, 0
        for piece in map(self._narrow, pieces):
            counted = 0
            while waiting and waiting[-1].offset < before + len(piece):
                secret = waiting.pop()
                line += piece.count(b"\n", counted, secret.offset - before)
                counted = secret.offset - before
                line_by_secret[secret] = line
            if not waiting:
                break
            line += piece.count(b"\n", counted)
            before += len(piece)
        return line_by_secret

    def _narrow(self, piece: bytes) -> bytes:
        """Text in UTF-16 or UTF-32 without its zero bytes."""
        if self._wide is None:
            self._wide = _is_wide(piece)
        return piece.replace(b"\0", b"") if self._wide else piece

    def _look(self, data: bytes, index: int, start: int) -> None:
        offset = self._before + start
        if index < len(KEY_LITERALS):
            if not self.private and _is_key(data, start):
                self.secrets.append(Secret(KEY, offset))
            return
        if len(self.secrets) > _MOST_TOKENS:
            return
        rule = next((rule for rule in _rules()[index] if _is_token(rule, data, start)), None)
        if rule is not None:
            shown = "" if _pattern(rule).groups else _literals()[index][:4].decode()
            self.secrets.append(Secret(rule.name, offset, shown))


def private_key(data: bytes) -> bool:
    """Whether `data` contains a private key."""
    scanner = Scanner()
    scanner.feed(data)
    return scanner.private


def secret(text: str) -> Secret | None:
    """The first private key or token in a text; None without one."""
    scanner = Scanner()
    scanner.feed(text.encode(errors="replace"))
    return scanner.secrets[0] if scanner.secrets else None


def check(job: JobSpec, sections: Mapping[str, Any]) -> Iterator[Problem]:
    """A warning for each plain secret of the job and of its sections, which never quotes it."""
    for name, value in job.env.items():
        if not checks.is_secret(value) and (what := _in_variable(name, value)):
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


LinesByFile = Mapping[str, Mapping[Secret, int]]
"""The secrets of files, each with its line."""


def found_in(keys: LinesByFile, tokens: LinesByFile) -> Iterator[Problem]:
    """A warning for the files with private keys, which stay behind, and those with tokens."""
    yield from _key_warnings(keys)
    yield from _token_warnings(tokens)


def _key_warnings(lines_by_file: LinesByFile) -> Iterator[Problem]:
    keys = [
        f"{path} (line {line})"
        for path, lines in lines_by_file.items()
        for secret, line in lines.items()
        if secret.name == KEY
    ]
    if keys:
        yield Problem(
            "source",
            f"left out, because they contain private keys: {', '.join(keys)}",
            "to include one, add it with a leading ! to .deploykitignore",
            severity="warning",
        )


def _token_warnings(lines_by_file: LinesByFile) -> Iterator[Problem]:
    for path, lines in list(lines_by_file.items())[:_MOST_WARNINGS]:
        for name, start in dict.fromkeys((secret.name, secret.start) for secret in lines):
            numbers = sorted({line for secret, line in lines.items() if secret.name == name})
            yield Problem(
                "source",
                f"{path}, {_listed(numbers)}: looks like {name}{f' ({start}...)' if start else ''}",
                "remove it and pass it as a `secret:` of `env`; "
                f"if it is not a secret, add !/{path} to .deploykitignore",
                severity="warning",
            )
    if len(lines_by_file) > _MOST_WARNINGS:
        more = f"{len(lines_by_file) - _MOST_WARNINGS} more files seem to contain tokens"
        yield Problem("source", more, severity="warning")


def _listed(lines: list[int]) -> str:
    if len(lines) == 1:
        return f"line {lines[0]}"
    return f"lines {', '.join(map(str, lines[:_MOST_LINES]))}{', ...' * (len(lines) > _MOST_LINES)}"


def _is_wide(start: bytes) -> bool:
    """Whether this may be UTF-16 or UTF-32: it has a byte order mark, or many zero bytes."""
    first = start[:512]
    return first.startswith((b"\xff\xfe", b"\xfe\xff")) or first.count(0) > len(first) // 3


@functools.cache
def _literals() -> tuple[bytes, ...]:
    """The literals of keys, then those of tokens."""
    return (*KEY_LITERALS, *dict.fromkeys(item for rule in TOKEN_RULES for item in rule.literals))


@functools.cache
def _rules() -> list[list[TokenRule]]:
    """The rules of each literal."""
    return [[rule for rule in TOKEN_RULES if item in rule.literals] for item in _literals()]


@functools.cache
def _finder() -> Callable[[bytes], _Hits]:
    """A function that yields each occurrence of a literal, as its number and its offset."""
    try:
        import ahocorasick_rs
    except ImportError:  # about thirty times slower, but always available
        pattern = re.compile(b"|".join(b"(%b)" % re.escape(item) for item in _literals()))
        return lambda data: (
            ((hit.lastindex or 1) - 1, hit.start()) for hit in pattern.finditer(data)
        )
    kind = ahocorasick_rs.MatchKind.LeftmostFirst
    search = ahocorasick_rs.BytesAhoCorasick(_literals(), matchkind=kind)
    return lambda data: ((index, start) for index, start, _ in search.find_matches_as_indexes(data))


def _is_token(rule: TokenRule, data: bytes, start: int) -> bool:
    if not rule.pattern.startswith(b"(?<=") and not _pattern(rule).groups and _in_word(data, start):
        return False
    hit = _pattern(rule).match(data, start, start + _REACH)
    if hit is None:
        return False
    token = hit[hit.re.groups].lower()
    return not any(word in token for word in PLACEHOLDERS)


def _in_word(data: bytes, start: int) -> bool:
    """Whether this is inside a word."""
    before, here = data[max(start - 1, 0) : start], data[start : start + 1]
    return here.isalnum() and (before.isalnum() or before == b"_")


@functools.cache
def _pattern(rule: TokenRule) -> re.Pattern[bytes]:
    return re.compile(rule.pattern)


def _is_key(data: bytes, start: int) -> bool:
    near = data[start : start + _REACH]
    if near.startswith(b"PuTTY"):
        return b"Private-Lines:" in near
    if near.startswith(b"AGE"):
        return re.match(rb"AGE-SECRET-KEY-1[A-Z0-9]{58}", near) is not None
    if near.startswith(b"LS0t"):
        return _is_wrapped_key(near)
    end = re.match(_HEADER_END, near)
    if end is None or not re.search(_HEADER, data[max(start - _BEFORE, 0) : start]):
        return False
    return _has_body(near[end.end() :])


def _is_wrapped_key(near: bytes) -> bool:
    """Whether base64 contains a key's header and body, as in a kubeconfig."""
    whole = re.match(rb"[A-Za-z0-9+/]+", near)
    text = base64.b64decode(whole[0][: len(whole[0]) // 4 * 4]) if whole else b""
    return b"PRIVATE KEY-----" in text[:64] and private_key(text)


def _has_body(text: bytes) -> bool:
    """Whether base64 follows a header, unlike in code that only mentions the header."""
    if re.match(_NEXT_LINE, text):
        return True
    length = 0
    for number, word in enumerate(_words(text)):
        if re.fullmatch(_BODY_PART, word):
            length += len(word)
        elif number >= _MOST_WORDS:
            return False
        if length >= _LEAST_BODY:
            return True
    return False


def _words(text: bytes) -> Iterator[bytes]:
    body = re.split(rb"-{4,5} ?END", text, maxsplit=1)[0]
    return (word for word in re.split(_SEPARATORS, body) if word)


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
        return "looks like a secret by its name"
    return None


def _in_text(text: str) -> str | None:
    if rule := secret(text):
        return f"looks like {rule.name}"
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
