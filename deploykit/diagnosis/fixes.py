"""What to do, with this run's own values: `{port|PORT}` becomes the port, or PORT."""

from __future__ import annotations

import re
from collections.abc import Mapping

_PLACE = re.compile(r"\{(\w+)\|([^{}]*)\}")
_SAFE = re.compile(r"[\w/][\w.:/@+=,%-]*")
"""Values come from logs and go into commands that a person pastes: no quotes, blanks or `$`."""

OF_RUN = ("backend", "job", "name", "target", "run")
"""Values that a run has."""
OF_LINE = ("file", "host", "rank")
"""Values that a line of a log may have."""


def names(text: str) -> set[str]:
    """The values that a text asks for."""
    return {match[1] for match in _PLACE.finditer(text)}


def render(text: str, values: Mapping[str, str]) -> str:
    """The text with the values put in, and with its own word where one is missing or unsafe."""

    def put(match: re.Match[str]) -> str:
        value = values.get(match[1], "")
        return value if _SAFE.fullmatch(value) else match[2]

    return _PLACE.sub(put, text).strip()
