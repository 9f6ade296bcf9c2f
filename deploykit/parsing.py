"""Untrusted YAML and TOML as plain data, in bounded time and memory.

Any text gives data or Malformed: nesting, sizes and the expansion of aliases are limited before
they can crash the interpreter (libyaml composes nodes by recursion in C).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deploykit.decode import Malformed, Plain, read_file
from deploykit.model import Problem

_LARGEST = 2**20
"""Bytes of a file written by a person."""
_LARGEST_TOML = _LARGEST // 4
"""tomllib needs 500 times the memory of a text made of headers."""
_DEEPEST = 50
_HEAVIEST = 4 * _LARGEST
"""Characters of all values, where each alias counts as much as its value."""
_LONGEST_PATH = 1_000
_NULLS = ("", "~", "null", "Null", "NULL")
_STRING = re.compile(
    r"""(?s:\"{3}.*?(?:\"{3}|\Z))|(?s:'{3}.*?(?:'{3}|\Z))|"(?:[^"\\\n]|\\.)*"?|'[^'\n]*'?|\#[^\n]*"""
)
"""A string or a comment of TOML, closed or not."""
_KEYS = re.compile(r"[\w. \t-]+")
_PARTS = re.compile(r"\.[ \t]*[\w-]")
_MOST_PARTS = 20
"""Of a dotted key of TOML: tomllib needs memory by their square (gigabytes for 30,000)."""


def is_null(text: str) -> bool:
    """Whether an unquoted scalar of YAML is null."""
    return text in _NULLS


def text_of(path: Path) -> str:
    """The text of a file of at most 1 MiB, in UTF-8. Raises OSError or Malformed."""
    try:
        return read_file(path, _LARGEST).decode()
    except UnicodeDecodeError:
        raise Malformed("is not UTF-8 text") from None


def toml(text: str) -> dict[str, Any]:
    """TOML as data. Raises Malformed."""
    import tomllib

    if len(text) > _LARGEST_TOML:
        raise Malformed(f"is larger than {_LARGEST_TOML >> 10} KiB")
    keys = _STRING.sub("q", text)
    if any(len(_PARTS.findall(run)) > _MOST_PARTS for run in _KEYS.findall(keys)):
        raise Malformed(f"is not valid TOML here: a key of more than {_MOST_PARTS} parts")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise Malformed("is nested too deeply") from None
    except ValueError as error:  # no TOML, or a number of thousands of digits
        raise Malformed(f"is not valid TOML: {error}") from None


def yaml(text: str) -> tuple[Any, dict[str, int], list[Problem]]:
    """YAML as data, the line of each key by its path, and the duplicate keys.

    Unquoted scalars become `Plain`; an empty text is an empty mapping. Raises Malformed.
    """
    import yaml as pyyaml

    loader = getattr(pyyaml, "CSafeLoader", pyyaml.SafeLoader)
    try:
        reader = _Yaml(pyyaml, pyyaml.parse(text, Loader=loader))
        return reader.document(), reader.lines, reader.problems
    except pyyaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        what = getattr(error, "problem", None) or str(error).splitlines()[0]
        line = mark.line + 1 if mark else None
        raise Malformed(f"is not valid YAML: {what}", line) from None
    except UnicodeError:
        raise Malformed("is not valid YAML: invalid characters") from None


class _Yaml:
    """Builds the values from the parser's events, and checks the limits before each."""

    def __init__(self, events: Any, source: Iterator[Any]) -> None:
        self.lines: dict[str, int] = {}
        self.problems: list[Problem] = []
        self._events, self._source = events, source
        self._anchors: dict[str, tuple[Any, int] | None] = {}
        self._weight = 0

    def document(self) -> Any:
        """The value of the one document."""
        next(self._source)  # the start of the stream
        if isinstance(next(self._source), self._events.StreamEndEvent):
            return {}
        value = self._value(next(self._source), "", 0)
        next(self._source)  # the end of the document
        after = next(self._source)
        if not isinstance(after, self._events.StreamEndEvent):
            raise _malformed("expected a single document", after)
        return value

    def _value(self, event: Any, path: str, depth: int) -> Any:
        self.lines.setdefault(path, event.start_mark.line + 1)
        if isinstance(event, self._events.AliasEvent):
            return self._of_alias(event)
        if depth > _DEEPEST:
            raise _malformed(f"nested more than {_DEEPEST} deep", event)
        if len(path) > _LONGEST_PATH:
            raise _malformed(f"keys of more than {_LONGEST_PATH} characters", event)
        if event.anchor is None:
            return self._new_value(event, path, depth)
        before = self._weight
        self._anchors[event.anchor] = None  # until it is complete
        value = self._new_value(event, path, depth)
        self._anchors[event.anchor] = (value, self._weight - before)
        return value

    def _of_alias(self, event: Any) -> Any:
        anchored = self._anchors.get(event.anchor)
        if anchored is None:
            inside = event.anchor in self._anchors
            what = "contains itself" if inside else "is undefined"
            raise _malformed(f"the alias {event.anchor!r} {what}", event)
        value, weight = anchored
        self._add(weight, event)
        return value

    def _add(self, weight: int, event: Any) -> None:
        self._weight += weight
        if self._weight > _HEAVIEST:
            raise _malformed("too many values, perhaps through aliases", event)

    def _new_value(self, event: Any, path: str, depth: int) -> Any:
        if isinstance(event, self._events.MappingStartEvent):
            self._add(1, event)
            return self._mapping(path, depth)
        if isinstance(event, self._events.SequenceStartEvent):
            self._add(1, event)
            return self._sequence(path, depth)
        self._add(1 + len(event.value), event)
        if not event.style:  # unquoted
            return None if is_null(event.value) else Plain(event.value)
        return event.value

    def _sequence(self, path: str, depth: int) -> list[Any]:
        values: list[Any] = []
        for event in self._source:
            if isinstance(event, self._events.SequenceEndEvent):
                break
            values.append(self._value(event, f"{path}[{len(values)}]", depth + 1))
        return values

    def _mapping(self, path: str, depth: int) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for event in self._source:
            if isinstance(event, self._events.MappingEndEvent):
                break
            if not isinstance(event, self._events.ScalarEvent):
                raise _malformed("expected a plain name as a key", event)
            key = event.value
            if event.anchor is not None:
                self._anchors[event.anchor] = (key, len(key))
            below = f"{path}.{key}" if path else key
            line = event.start_mark.line + 1
            if key in values:
                self.problems.append(Problem(below, "duplicate key", line=line))
            self.lines[below] = line
            values[key] = self._value(next(self._source), below, depth + 1)
        return values


def _malformed(what: str, event: Any) -> Malformed:
    return Malformed(f"is not valid YAML: {what}", event.start_mark.line + 1)
