"""The words of the test before the trainer: lines of JSON, signed, and of a known shape.

Anyone who reaches the ports of the test may send. A line counts only if it is signed with the key
that the job's nodes share, and an answer only for the question that it answers.
"""

from __future__ import annotations

import hmac
import json
import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Record = dict[str, Any]
Check = Callable[[Any], bool]

QUESTION = "question"
LONGEST = 1 << 20
"""Bytes of a line: what a node tells of its links to ten thousand others."""

_STATES = {"dropped", "refused", "unreachable", "closed", "unknown", "other"}
_SIGNATURE = 64


class Foreign(ValueError):
    """A line that no node of this job has sent, or of no shape that one would send."""


@dataclass(frozen=True, repr=False)
class Seal:
    """Signs lines and tells which are signed: HMAC-SHA-256 (RFC 2104) over purpose and text."""

    key: bytes

    def write(self, record: Record, purpose: str) -> bytes:
        """The line for a record, its end included."""
        text = json.dumps(record).encode()
        return self._sign(text, purpose) + b" " + text + b"\n"

    def read(self, line: bytes, purpose: str) -> Record:
        """The record of a line. Raises Foreign; what is not signed is not even parsed."""
        text = line[_SIGNATURE + 1 :].rstrip(b"\n")
        if not hmac.compare_digest(line[:_SIGNATURE], self._sign(text, purpose)):
            raise Foreign("not signed by a node of this job")
        record = json.loads(text)
        if not isinstance(record, dict):
            raise Foreign("no record")
        return record

    def _sign(self, text: bytes, purpose: str) -> bytes:
        return hmac.digest(self.key, purpose.encode() + b"\n" + text, "sha256").hex().encode()


def nonce() -> str:
    """What makes a question one of its kind, so that no earlier answer fits it."""
    return secrets.token_hex(16)


def answers(question: Record) -> str:
    """The purpose of the answer to a question."""
    return f"answer {question['nonce']}"


def check_question(question: Record, count: int) -> None:
    """Raise Foreign unless this is a question of one of `count` nodes."""
    _need(question, {"run": _text, "ask": _one_of("hello", "tell", "send"), "nonce": _text})
    _need(question, {"node": lambda node: _whole(node) and 0 <= node < count})
    if question["ask"] == "tell":
        _need(question, {"part": _one_of(*_TOLD), "told": lambda told: isinstance(told, dict)})
        _TOLD[question["part"]](question["told"])


def check_verdict(verdict: Record) -> None:
    """Raise Foreign unless this is what node 0 answers."""
    _need(verdict, {"findings": _list_of(_finding), "port": _maybe(_port), "host": _maybe(_text)})


def check_greeting(greeting: Record) -> None:
    """Raise Foreign unless this is the answer to a greeting."""
    _need(greeting, {"node": _whole, "time": _number, "bulk": _port})


def check_count(count: Record) -> None:
    """Raise Foreign unless this says how many bytes came in how many seconds."""
    _need(count, {"bytes": lambda value: _whole(value) and value >= 0, "seconds": _number})


def _need(record: Mapping[str, Any], shape: Mapping[str, Check]) -> None:
    for name, fits in shape.items():
        if not fits(record.get(name)):
            raise Foreign(f"{name} is {str(record.get(name))[:40]!r}")


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def _number(value: Any) -> bool:
    return _whole(value) or (isinstance(value, float) and math.isfinite(value))


def _port(value: Any) -> bool:
    return _whole(value) and 0 <= value < 2**16


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _one_of(*values: str) -> Check:
    return lambda value: isinstance(value, str) and value in values


def _maybe(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _list_of(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _named(check: Check) -> Check:
    """A record whose values all fit."""
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


def _space(value: Any) -> bool:
    return _list_of(_whole)(value) and len(value) == 2  # noqa: PLR2004 - free and total


def _finding(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and _text(value[0]) and _flag(value[1])  # noqa: PLR2004 - text, fatal


def _link(value: Any) -> bool:
    """The state of the way to a node, with what `preflight_words` says of it."""
    if not isinstance(value, dict):
        return False
    numbers = ("rate", "clock", "seconds", "port", "bulk")
    if not all(_number(value[name]) for name in numbers if name in value):
        return False
    state = value.get("state")
    if state == "ports":
        return "bulk" in value and _text(value.get("how"))
    return state in {"ok", "stalled"} | _STATES or (state == "slow" and "rate" in value)


def _links(value: Any) -> bool:
    return _named(_link)(value) and all(name.isdecimal() and name.isascii() for name in value)


def _pairs(told: Record) -> None:
    _need(told, {"links": _links, "hostname": _text, "versions": _named(_maybe(_text))})
    _need(told, {"address": _maybe(_text), "interface": _maybe(_text), "mtu": _maybe(_whole)})
    _need(told, {"shm": _maybe(_space), "disks": _named(_space)})
    _need(told["versions"], {name: _maybe(_text) for name in ("driver", "torch", "NCCL")})


def _versions(told: Record) -> None:
    if "torch" not in told:
        _failed(told)
        return
    _need(told, {"torch": _text, "NCCL": _maybe(_text), "backend": _text, "port": _maybe(_port)})


def _group(told: Record) -> None:
    if "right" not in told:
        _failed(told)
        return
    _need(told, {"backend": _text, "right": _flag, "seconds": _number})


def _failed(told: Record) -> None:
    """What a node tells of a rank that ended, or was late."""
    _need(told, {"rank": _whole, "ended": _flag, "seconds": _number, "said": _list_of(_text)})


_TOLD: dict[str, Callable[[Record], None]] = {
    "pairs": _pairs,
    "versions": _versions,
    "group": _group,
}
