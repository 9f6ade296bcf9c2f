"""The messages of the preflight test: signed lines of JSON with a known shape.

Everyone who reaches the test's ports may send something. A line counts only if it is signed with
the key that the job's nodes share, and a reply only for the request that it answers.
"""

from __future__ import annotations

import hmac
import json
import math
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from deploykit_node.preflight.bisection import TRIALS, part

Record = dict[str, Any]
"""A JSON object."""
Check = Callable[[Any], bool]
"""Whether a value has an expected shape."""

MARK = "preflight "
"""Start of a line that a rank of the process group prints for its parent."""
REQUEST = "request"
"""The purpose of a request, as `Seal` signs it."""
LONGEST = 1 << 20
"""Bytes of a line: enough for a node's links to ten thousand others."""
BROKEN_STATES = {"dropped", "refused", "unreachable", "closed", "unknown", "other"}
"""States of a link on which no message could be exchanged."""

_SIGNATURE = 64
_NODE = re.compile(r"[0-9]{1,9}")


class Foreign(ValueError):
    """A line that no node of this job has sent, or whose shape no node would send."""


@dataclass(frozen=True, repr=False)
class Seal:
    """Signs lines and verifies them: HMAC-SHA-256 (RFC 2104) over a purpose and the text."""

    key: bytes

    def write(self, record: Record, purpose: str) -> bytes:
        """The signed line for a record, with its newline."""
        text = json.dumps(record).encode()
        return self._sign(text, purpose) + b" " + text + b"\n"

    def read(self, line: bytes, purpose: str) -> Record:
        """The record of a line. Raises Foreign without parsing a line that is not signed."""
        text = line[_SIGNATURE + 1 :].rstrip(b"\n")
        if not hmac.compare_digest(line[:_SIGNATURE], self._sign(text, purpose)):
            raise Foreign("not signed by a node of this job")
        record = json.loads(text)
        if not isinstance(record, dict):
            raise Foreign("not a JSON object")
        return record

    def _sign(self, text: bytes, purpose: str) -> bytes:
        return hmac.digest(self.key, purpose.encode() + b"\n" + text, "sha256").hex().encode()


def nonce() -> str:
    """A random value that makes a request unique, so that no earlier reply fits it."""
    return secrets.token_hex(16)


def reply_to(request: Record) -> str:
    """The purpose of the reply to a request."""
    return f"reply {request['nonce']}"


def check_request(request: Record, count: int) -> None:
    """Raise Foreign unless this is a request of one of `count` nodes."""
    _need(request, {"run": _text, "kind": _one_of("hello", "report", "send"), "nonce": _text})
    _need(request, {"node": lambda node: _whole(node) and 0 <= node < count})
    if request["kind"] == "report":
        _need(request, {"part": _one_of(*_REPORTS), "report": lambda it: isinstance(it, dict)})
        _REPORTS[request["part"]](request["report"])


def check_verdict(verdict: Record) -> None:
    """Raise Foreign unless this is a verdict of node 0."""
    _need(verdict, {"findings": _list_of(_finding), "port": _maybe(_port), "host": _maybe(_text)})
    _need(verdict, {"trial": _maybe(lambda it: _whole(it) and 0 <= it < len(TRIALS))})


def check_greeting(greeting: Record) -> None:
    """Raise Foreign unless this is the reply to a greeting."""
    _need(greeting, {"node": _whole, "time": _number, "bulk": _port})


def check_count(count: Record) -> None:
    """Raise Foreign unless this says how many bytes came in how many seconds.

    ``waited`` is how many of them the receiver had no processor.
    """
    _need(count, {"bytes": lambda value: _whole(value) and value >= 0})
    _need(count, {"seconds": _number, "waited": _number})


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


def _amount(value: Any) -> bool:
    return _number(value) and value >= 0


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


def _values_of(check: Check) -> Check:
    """An object whose values all pass `check`."""
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


def _space(value: Any) -> bool:
    return _list_of(_whole)(value) and len(value) == 2  # noqa: PLR2004 - free and total


def _finding(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and _text(value[0]) and _flag(value[1])  # noqa: PLR2004 - text, fatal


def _link(value: Any) -> bool:
    """The state of the link to a node, with the facts that `findings` reports about it."""
    if not isinstance(value, dict):
        return False
    numbers = ("rate", "clock", "seconds", "port", "bulk")
    if not all(_number(value[name]) for name in numbers if name in value):
        return False
    state = value.get("state")
    if state == "ports":
        return "bulk" in value and _text(value.get("how"))
    return state in {"ok", "stalled", "files"} | BROKEN_STATES or (
        state == "slow" and "rate" in value
    )


def _links(value: Any) -> bool:
    return _values_of(_link)(value) and all(name.isdecimal() and name.isascii() for name in value)


def _pairs(report: Record) -> None:
    _need(report, {"links": _links, "hostname": _text, "versions": _values_of(_maybe(_text))})
    _need(report, {"address": _maybe(_text), "interface": _maybe(_text), "mtu": _maybe(_whole)})
    _need(report, {"line_rate": _maybe(_amount)})
    _need(report, {"shm": _maybe(_space), "disks": _values_of(_space), "own": _maybe(_number)})
    _need(report, {"health": lambda it: isinstance(it, dict)})
    faults, text = _list_of(_finding), _list_of(_text)
    _need(report["health"], {"faults": faults, "skipped": text, "speeds": _values_of(_number)})
    _need(report["health"], {"counts": _values_of(_whole)})
    _need(report["versions"], {name: _maybe(_text) for name in ("driver", "torch", "NCCL")})


def _versions(report: Record) -> None:
    if "torch" not in report:
        _failure(report)
        return
    _need(report, {"torch": _text, "NCCL": _maybe(_text), "backend": _text, "port": _maybe(_port)})
    _need(report, {"speeds": _values_of(_number), "correct": _flag})


def _group(report: Record) -> None:
    if "correct" not in report:
        _failure(report)
        return
    _need(report, {"backend": _text, "correct": _flag, "seconds": _number})


def _bandwidth(report: Record) -> None:
    if "large" not in report:
        _failure(report)
        return
    _need(report, dict.fromkeys(("small", "large", "size", "busy"), _amount))
    _need(report, {"pairs": _values_of(_amount)})
    _need(report, {"pairs": lambda it: all(map(_NODE.fullmatch, it))})


def _failure(report: Record) -> None:
    """The report of a node one of whose ranks has exited or is late."""
    _need(report, {"rank": _whole, "ended": _flag, "seconds": _number, "output": _list_of(_text)})


_REPORTS: dict[str, Callable[[Record], None]] = {
    "pairs": _pairs,
    "versions": _versions,
    "group": _group,
    "bandwidth": _bandwidth,
    **{part(number): _group for number in range(len(TRIALS))},
}
