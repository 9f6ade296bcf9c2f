"""TOML as data, in bounded time and memory."""

from __future__ import annotations

import re
import tomllib
from typing import Any

from deploykit.job.decode import Malformed, whole

_LARGEST = 2**18
"""tomllib needs 500 times the memory of a text made of headers."""
_STRING = re.compile(
    r"""(?s:\"{3}.*?(?:\"{3}|\Z))|(?s:'{3}.*?(?:'{3}|\Z))|"(?:[^"\\\n]|\\.)*"?|'[^'\n]*'?|\#[^\n]*"""
)
"""A string or a comment of TOML, closed or not."""
_KEYS = re.compile(r"[\w. \t-]+")
_PARTS = re.compile(r"\.[ \t]*[\w-]")
_MOST_PARTS = 20
"""Of a dotted key of TOML: tomllib needs memory by their square (gigabytes for 30,000)."""


def parse(text: str) -> dict[str, Any]:
    """TOML as data. Raises Malformed."""
    if len(text) > _LARGEST:
        raise Malformed(f"is larger than {_LARGEST >> 10} KiB")
    keys = _STRING.sub("q", text)
    if any(len(_PARTS.findall(run)) > _MOST_PARTS for run in _KEYS.findall(keys)):
        raise Malformed(f"is not valid TOML here: a key of more than {_MOST_PARTS} parts")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise Malformed("is nested too deeply") from None
    except ValueError as error:  # no TOML, or a number of thousands of digits
        what, at, where = str(error).partition(" (at ")  # "line 3, column 5" or "end of document"
        last = len(text.rstrip().splitlines()) if at else None
        line = whole(where.removeprefix("line ").partition(",")[0]) or last
        raise Malformed(f"is not valid TOML: {what}", line) from None
