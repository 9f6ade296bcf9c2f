"""Plain data into typed values: JSON, numbers, and dataclasses with every problem at once.

A dataclass whose `SHORT` names a field may be written as that field's value alone.

The fields of a dataclass carry notes (`Help`, `Bounds`, `Pattern`, `Quantity`) as arguments of
``typing.Annotated``. They serve four readers: `decode`, the JSON Schema, the commented file that
``deploykit init`` writes, and the reference in ``docs/``.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import json
import re
import shlex
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

from deploykit.job import spelling
from deploykit.lib import paths, quoting
from deploykit.lib.problem import Problem

T = TypeVar("T")
_MAX_QUOTED = 60
"""Characters of a wrong value in a message."""
_MAX_SECONDS = 10**9
"""About 30 years; more would overflow dates."""
_REQUIRED = "is required"
_MAX_JSON_BYTES = 64 * 2**20
_BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_CLOCK = re.compile(r"(?:(\d+)-)?(\d{1,2}):(\d{2}):(\d{2})")
_SPAN = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")
_CREDENTIALS = re.compile(r"://[^\s/]+@")
"""In an address; messages must not contain them."""
_SIZE = re.compile(r"(\d+)\s*([KMGT]?)(i?)B", re.IGNORECASE)


class Help(typing.NamedTuple):
    """The description of a field; `example` is a value as written in the job file."""

    text: str
    example: str | None = None


class Bounds(typing.NamedTuple):
    """The minimum and maximum, their unit, and a pattern of text that is allowed instead."""

    low: int | None = None
    high: int | None = None
    unit: str = ""
    text: str = ""


class Pattern(typing.NamedTuple):
    """Text must fully match `regex`; `meaning` describes it in words."""

    regex: str
    meaning: str


NOT_EMPTY = Pattern(r"[\s\S]+", "a value (omit the key for the default)")


class Usual(typing.NamedTuple):
    """Of a choice: the advice if nothing is similar, and values to accept but not to suggest."""

    hint: str | None = None
    old: tuple[str, ...] = ()


class Quantity(typing.NamedTuple):
    """An integer written with a unit: ``30m``, ``4GiB``.

    `parse` turns the written text into the integer and raises ValueError; `regex` is for editors.
    """

    meaning: str
    regex: str
    parse: Callable[[str], int]
    unit: str = ""
    """Of the integer, for messages."""


def _seconds(text: str) -> int:
    """``90s``, ``30m``, ``1h30m``, ``2d`` or Slurm's ``1-12:00:00`` in seconds."""
    match = _CLOCK.fullmatch(text) or _SPAN.fullmatch(text)
    if not text or match is None:
        raise ValueError(text)
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if total > _MAX_SECONDS:
        raise ValueError(text)
    return total


def _bytes(text: str) -> int:
    """``512MiB``, ``4GiB`` (powers of 1024) or ``4GB`` (powers of 1000) in bytes."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(text)
    number, prefix, binary = match.groups()
    power = " KMGT".index(prefix.upper() or " ")
    return int(number) * int((1024 if binary else 1000) ** power)


DURATION = Quantity(
    "a time such as 90s, 30m, 1h30m, 2d or 1-12:00:00",
    r"^(\d+d)?(\d+h)?(\d+m)?(\d+s)?$|^(\d+-)?\d{1,2}:\d{2}:\d{2}$",
    _seconds,
    "s",
)
SIZE = Quantity("a size such as 512MiB or 4GiB", r"^\d+\s*[KkMmGgTt]?[Ii]?[Bb]$", _bytes, "bytes")

Duration = Annotated[int, DURATION]
"""Seconds."""
Size = Annotated[int, SIZE]
"""Bytes."""


class Plain(str):
    """An unquoted scalar of a YAML file or of ``--set``, read as the type that its key expects."""

    __slots__ = ()


class Malformed(ValueError):
    """A text that is not valid, or too large. `line` counts from 1; None where unknown."""

    def __init__(self, what: str, line: int | None = None) -> None:
        super().__init__(what)
        self.line = line


def decode(cls: type[T], data: object, path: str = "") -> tuple[T | None, list[Problem]]:
    """`data` as an instance of the dataclass `cls`, and the problems; None when there are any."""
    value, problems = decode_as_meant(cls, data, path)
    return (None if problems else value), problems


def decode_as_meant(cls: type[T], data: object, path: str) -> tuple[T | None, list[Problem]]:
    """The same, but unknown keys count as what they probably mean, missing ones as their examples.

    So what else is wrong can be reported at once.
    """
    problems: list[Problem] = []
    return cast("T | None", _read(cls, data, path, problems)), problems


def read_json(path: Path) -> Any:
    """The JSON in a regular file of at most 64 MiB. Raises OSError or Malformed."""
    return from_json(read_record(path, _MAX_JSON_BYTES))


def read_record(path: Path, most: int) -> bytes:
    """The content of a regular file of at most `most` bytes. Raises OSError or Malformed."""
    try:
        return paths.read_regular(path, most)
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise Malformed(f"is larger than {most >> 20} MiB") from error
        raise


def from_json(text: str | bytes) -> Any:
    """JSON as plain data. Raises Malformed."""
    try:
        return json.loads(text)
    except RecursionError:
        raise Malformed("is nested too deeply") from None
    except ValueError as error:  # no JSON, no UTF-8, or a number of thousands of digits
        raise Malformed(f"is not valid JSON: {error}") from None


def whole(text: str) -> int | None:
    """A whole number of up to 18 digits; None for any other text.

    For untrusted text: int() also accepts signs and blanks, and raises for 5,000 digits.
    """
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else None


@functools.cache
def hints(cls: Any) -> dict[str, Any]:
    """The resolved annotations of a dataclass, metadata included."""
    return get_type_hints(cls, include_extras=True)


def split(hint: Any) -> tuple[Any, tuple[Any, ...], bool]:
    """The bare type of a hint, its metadata, and whether None is allowed."""
    metadata: tuple[Any, ...] = ()
    optional = False
    while True:
        if get_origin(hint) is Annotated:
            metadata += hint.__metadata__
            hint = hint.__origin__
        elif get_origin(hint) in {typing.Union, types.UnionType}:
            hint = next(arm for arm in get_args(hint) if arm is not types.NoneType)
            optional = True
        else:
            return hint, metadata, optional


def _read(hint: Any, data: object, path: str, problems: list[Problem]) -> Any:
    kind, metadata, optional = split(hint)
    if data is None and optional:
        return None
    before = len(problems)
    value = _read_kind(kind, metadata, data, path, problems)
    if _has_errors(problems[before:]):
        return None
    unit = next((f" {note.unit}" for note in metadata if isinstance(note, Quantity)), "")
    for note in metadata:
        problem = _violation(note, value, data, unit)
        if problem is not None:
            problems.append(Problem(path, problem))
    return value


def _read_kind(
    kind: Any, metadata: tuple[Any, ...], data: object, path: str, problems: list[Problem]
) -> Any:
    quantity = next((note for note in metadata if isinstance(note, Quantity)), None)
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind, data, path, problems, _example(metadata, path))
    if get_origin(kind) is tuple:
        return _sequence(get_args(kind)[0], data, path, problems)
    if get_origin(kind) in {dict, Mapping}:
        key, item = get_args(kind)
        return _mapping(key, item, data, path, problems)
    if get_origin(kind) is Literal:
        usual = next((note for note in metadata if isinstance(note, Usual)), Usual())
        return _choice(get_args(kind), data, path, problems, usual)
    text = data if isinstance(data, str) else ""
    try:
        return quantity.parse(text) if quantity else _SCALARS[kind](data)
    except (ValueError, TypeError, OverflowError) as error:
        expected = quantity.meaning if quantity else _EXPECTED[kind]
        hint = str(error) if isinstance(error, TypeError) else None
        problems.append(Problem(path, f"expected {expected}, got {_shown(data)}", hint))
        return None


def _example(metadata: tuple[Any, ...], path: str) -> str | None:
    """``for example entrypoint: {script: train.py}``, for a key that has an example."""
    example = next((note.example for note in metadata if isinstance(note, Help)), None)
    return example and f"for example {path.rpartition('.')[2]}: {example}"


def _dataclass(
    cls: Any, data: object, path: str, problems: list[Problem], example: str | None = None
) -> Any:
    before = len(problems)
    short = getattr(cls, "SHORT", None)
    if short is not None and not isinstance(data, Mapping):
        value = _read(hints(cls)[short], data, path, problems)
        return None if _has_errors(problems[before:]) else cls(**{short: value})
    if data is None:
        data = {}
    if not isinstance(data, Mapping):
        problems.append(Problem(path, f"expected a section, got {_shown(data)}", example))
        return None
    known = {key_of(field.name): field for field in dataclasses.fields(cls)}
    values: dict[str, Any] = {}
    misspelled: dict[str, str] = {}
    if not known.keys() >= data.keys():
        misspelled = spelling.meant(data, known)
        problems += spelling.unknown_keys(path, data, known)
    for key, value in data.items():
        if (name := misspelled.get(key, key)) in known:
            own = known[name].name
            values[own] = _read(hints(cls)[own], value, _join(path, str(key)), problems)
    is_whole = True
    for name, field in known.items():
        if is_required(field) and field.name not in values:
            values[field.name], more = _missing(cls, field.name, _join(path, name))
            problems += more
            is_whole = is_whole and values[field.name] is not None
    return cls(**values) if is_whole and not _has_errors(problems[before:]) else None


def _has_errors(problems: Sequence[Problem]) -> bool:
    """Whether there are others than unknown and missing keys, despite which a value can be made."""
    return any(problem.message not in {spelling.UNKNOWN_KEY, _REQUIRED} for problem in problems)


def is_required(field: dataclasses.Field[Any]) -> bool:
    """Whether data must have this key."""
    return field.default is field.default_factory is dataclasses.MISSING


def _missing(cls: Any, name: str, path: str) -> tuple[Any, list[Problem]]:
    """The example of a missing key, if it has one, and its problem: the rest can be checked then.

    For a section, those of its own required keys.
    """
    inside: list[Problem] = []
    kind, metadata, _ = split(hints(cls)[name])
    if dataclasses.is_dataclass(kind):
        value = _dataclass(kind, {}, path, inside)
        if inside:
            return value, inside
    example = next((note.example for note in metadata if getattr(note, "example", None)), None)
    if example is None:
        return None, [Problem(path, _REQUIRED)]
    value = _read(hints(cls)[name], Plain(example), path, [])
    return value, [Problem(path, _REQUIRED, f"for example {name}: {example}")]


def _sequence(item: Any, data: object, path: str, problems: list[Problem]) -> Any:
    if isinstance(data, str) or not isinstance(data, Sequence):
        hint = None
        if isinstance(data, str) and data:
            try:
                words = shlex.split(data)
            except ValueError:  # a quote that is not closed
                words = [data]
            hint = f"write [{', '.join(map(quoting.yaml, words))}]"
        problems.append(Problem(path, f"expected a list, got {_shown(data)}", hint))
        return None
    return tuple(
        _read(item, value, f"{path}[{number}]", problems) for number, value in enumerate(data)
    )


def _mapping(key: Any, item: Any, data: object, path: str, problems: list[Problem]) -> Any:
    if data is None:
        return {}
    if not isinstance(data, Mapping):
        problems.append(Problem(path, f"expected a mapping, got {_shown(data)}"))
        return None
    return {
        _read(key, name, _join(path, str(name)), problems): _read(
            item, value, _join(path, str(name)), problems
        )
        for name, value in data.items()
    }


def _choice(
    choices: tuple[Any, ...], data: object, path: str, problems: list[Problem], usual: Usual
) -> Any:
    if isinstance(data, str) and data in choices:
        return str(data)
    current = [choice for choice in choices if choice not in usual.old]
    hint = spelling.did_you_mean(str(data), current) or usual.hint
    problems.append(
        Problem(path, f"expected one of {', '.join(choices)}; got {_shown(data)}", hint)
    )
    return None


def encodable(text: str) -> bool:
    """Whether UTF-8 can hold `text`: it has no surrogates (PEP 383), as in YAML and JSON."""
    return text.encode(errors="ignore").decode() == text


def _anything(data: object) -> Any:
    """Plain data of any shape: unquoted scalars are numbers and booleans where they look so."""
    if isinstance(data, Mapping):
        return {str(name): _anything(value) for name, value in data.items()}
    if isinstance(data, Sequence) and not isinstance(data, str):
        return [_anything(value) for value in data]
    if isinstance(data, Plain):
        if re.fullmatch(r"[+-]?[0-9]+", data):
            return int(data)
        if re.fullmatch(r"[+-]?[0-9]*\.[0-9]+(e[+-]?[0-9]+)?", data):
            return float(data)
        return _BOOLEANS.get(data.lower(), str(data))
    return data


def _text(data: object) -> str:
    if isinstance(data, str):
        if "\0" in data or not encodable(data):
            raise TypeError("remove NUL characters and unpaired surrogates")
        return str(data)
    if isinstance(data, bool | int | float):
        raise TypeError(f'put it in quotes: "{_shown(data)}"')
    raise ValueError(data)


def _integer(data: object) -> int:
    if isinstance(data, Plain):
        if re.fullmatch(r"[+-]?[0-9]+", data) is None:
            raise ValueError(data)
        return int(data)
    if isinstance(data, str) and data.isascii() and data.isdigit():
        raise TypeError("remove the quotes")
    if isinstance(data, int) and not isinstance(data, bool):
        return data
    raise ValueError(data)


def _boolean(data: object) -> bool:
    if isinstance(data, bool):
        return data
    if isinstance(data, Plain) and data.lower() in _BOOLEANS:
        return _BOOLEANS[data.lower()]
    raise ValueError(data)


_SCALARS: dict[Any, Any] = {str: _text, int: _integer, bool: _boolean, Any: _anything}
_EXPECTED: dict[Any, str] = {str: "text", int: "a whole number", bool: "true or false"}


def _violation(note: object, value: Any, data: object, unit: str) -> str | None:
    """How `value`, in units of `unit`, violates a note on its field; None where it does not."""
    if isinstance(note, Pattern) and re.fullmatch(note.regex, value) is None:
        return f"expected {note.meaning}; got {_shown(data)}"
    if isinstance(note, Bounds):
        low, high, unit = note.low, note.high, f" {note.unit}" if note.unit else unit
        if low is not None and value < low:
            return f"must be at least {low}{unit}, got {_shown(data if unit else value)}"
        if high is not None and value > high:
            return f"must be at most {high}{unit}, got {_shown(data if unit else value)}"
    return None


def _shown(data: object) -> str:
    if data is None:
        return "nothing"
    if isinstance(data, Mapping):
        return "a section"
    if isinstance(data, Sequence) and not isinstance(data, str):
        return "a list"
    text = repr(_CREDENTIALS.sub("://***@", data)) if isinstance(data, str) else repr(data)
    return text if len(text) <= _MAX_QUOTED else f"{text[:_MAX_QUOTED]}..."


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else str(key)


def key_of(name: str) -> str:
    """The key of a field: ``as`` of ``as_``, since a keyword of Python cannot name a field."""
    return name.rstrip("_")


def as_data(value: Any) -> Any:
    """A job or options as in a job file that decodes to the same, whatever the user's defaults."""
    if dataclasses.is_dataclass(value):
        kind: Any = type(value)
        if short := getattr(kind, "SHORT", None):
            data = {name: item for name, item in vars(value).items() if item is not None}
            return data[short] if data.keys() == {short} else data
        data = {name: _with_unit(hint, getattr(value, name)) for name, hint in hints(kind).items()}
        data = {key_of(name): item for name, item in data.items()}
        return {name: item for name, item in data.items() if (name, item) != ("time_limit", "0s")}
    if isinstance(value, Mapping):
        return {key: as_data(item) for key, item in value.items()}
    return [as_data(item) for item in value] if isinstance(value, tuple) else value


def _with_unit(hint: Any, value: Any) -> Any:
    quantity = next((note for note in split(hint)[1] if isinstance(note, Quantity)), None)
    if quantity is None or value is None:
        return as_data(value)
    return f"{value}{'B' if quantity.unit == 'bytes' else quantity.unit}"
