"""YAML, TOML and JSON of others as plain data, in bounded time and memory.

Whatever the text is, the answer is data or a Malformed: nesting, sizes and what aliases multiply
are limited before they can end the interpreter (libyaml's own nodes are made by recursion in C).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deploykit.decode import Plain
from deploykit.model import Problem

_LARGEST = 2**20
"""Bytes of a file that a person writes."""
_LARGEST_TOML = _LARGEST // 4
"""tomllib takes 500 times the memory of the text where that is made of headers."""
_LARGEST_JSON = 64 * 2**20
"""Bytes of one that a program writes."""
_DEEPEST = 50
_HEAVIEST = 4 * _LARGEST
"""Characters of all values, where each alias counts as much as what it stands for."""
_LONGEST_PATH = 1_000
_NULLS = ("", "~", "null", "Null", "NULL")
_STRING = re.compile(
    r"""(?s:\"{3}.*?(?:\"{3}|\Z))|(?s:'{3}.*?(?:'{3}|\Z))|"(?:[^"\\\n]|\\.)*"?|'[^'\n]*'?|\#[^\n]*"""
)
"""A string or a comment of TOML, closed or not."""
_KEYS = re.compile(r"[\w. \t-]+")
_PARTS = re.compile(r"\.[ \t]*[\w-]")
_MOST_PARTS = 20
"""Of a dotted key of TOML: tomllib takes memory by the square of them (gigabytes for 30,000)."""


class Malformed(ValueError):
    """A text that is not what it should be, or too much of it. `line` counts from 1."""

    def __init__(self, what: str, line: int | None = None) -> None:
        super().__init__(what)
        self.line = line


def is_null(text: str) -> bool:
    """Whether an unquoted scalar of YAML is nothing."""
    return text in _NULLS


def text_of(path: Path) -> str:
    """The text of a file that a person wrote. Raises OSError or Malformed."""
    with path.open("rb") as file:
        data = file.read(_LARGEST + 1)
    if len(data) > _LARGEST:
        raise Malformed(f"is larger than {_LARGEST >> 20} MiB")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise Malformed("is not UTF-8 text") from None


def json_of(path: Path) -> Any:
    """The JSON in a file that a program wrote. Raises OSError or Malformed."""
    with path.open("rb") as file:
        data = file.read(_LARGEST_JSON + 1)
    if len(data) > _LARGEST_JSON:
        raise Malformed(f"is larger than {_LARGEST_JSON >> 20} MiB")
    return json(data)


def json(text: str | bytes) -> Any:
    """JSON as data. Raises Malformed."""
    from json import loads

    try:
        return loads(text)
    except RecursionError:
        raise Malformed("is nested too deep") from None
    except ValueError as error:  # no JSON, no UTF-8, or a number of thousands of digits
        raise Malformed(f"is not valid JSON: {error}") from None


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
        raise Malformed("is nested too deep") from None
    except ValueError as error:  # no TOML, or a number of thousands of digits
        raise Malformed(f"is not valid TOML: {error}") from None


def yaml(text: str) -> tuple[Any, dict[str, int], list[Problem]]:
    """YAML as data, the line of each key by its path, and keys that stand twice.

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
        raise Malformed("is not valid YAML: it holds bytes that are no text") from None


class _Yaml:
    """The parser's events, one after the other: nothing is built that was not judged before."""

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
        self._anchors[event.anchor] = None  # until it is whole
        value = self._new_value(event, path, depth)
        self._anchors[event.anchor] = (value, self._weight - before)
        return value

    def _of_alias(self, event: Any) -> Any:
        found = self._anchors.get(event.anchor)
        if found is None:
            inside = event.anchor in self._anchors
            what = "is part of itself" if inside else "stands for nothing"
            raise _malformed(f"the alias {event.anchor!r} {what}", event)
        value, weight = found
        self._add(weight, event)
        return value

    def _add(self, weight: int, event: Any) -> None:
        self._weight += weight
        if self._weight > _HEAVIEST:
            raise _malformed("too many values; do aliases multiply them?", event)

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
        found: list[Any] = []
        for event in self._source:
            if isinstance(event, self._events.SequenceEndEvent):
                break
            found.append(self._value(event, f"{path}[{len(found)}]", depth + 1))
        return found

    def _mapping(self, path: str, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for event in self._source:
            if isinstance(event, self._events.MappingEndEvent):
                break
            if not isinstance(event, self._events.ScalarEvent):
                raise _malformed("expected a plain name as a key", event)
            key = event.value
            if event.anchor is not None:
                self._anchors[event.anchor] = (key, len(key))
            place = f"{path}.{key}" if path else key
            line = event.start_mark.line + 1
            if key in found:
                self.problems.append(Problem(place, "stands twice", line=line))
            self.lines[place] = line
            found[key] = self._value(next(self._source), place, depth + 1)
        return found


def _malformed(what: str, event: Any) -> Malformed:
    return Malformed(f"is not valid YAML: {what}", event.start_mark.line + 1)
