"""Placeholders in fixes: `{port|PORT}` becomes the port of this run, or PORT."""

from __future__ import annotations

import re
from collections.abc import Mapping

_PLACEHOLDER = re.compile(r"\{(\w+)\|([^{}]*)\}")
_SAFE = re.compile(r"[\w/][\w.:/@+=,%-]*")
"""Values come from logs and end up in pasted commands: no quotes, spaces or `$`."""

OF_RUN = ("backend", "job", "name", "target", "run")
"""Names of values that a run provides."""
OF_LINE = ("file", "host", "rank")
"""Names of values that a line of a log may provide."""


def names(text: str) -> set[str]:
    """The names of the placeholders of a text."""
    return {match[1] for match in _PLACEHOLDER.finditer(text)}


def render(text: str, values: Mapping[str, str]) -> str:
    """Fill in the placeholders; a missing or unsafe value leaves the default."""

    def replacement(match: re.Match[str]) -> str:
        value = values.get(match[1], "")
        return value if _SAFE.fullmatch(value) else match[2]

    return _PLACEHOLDER.sub(replacement, text).strip()
