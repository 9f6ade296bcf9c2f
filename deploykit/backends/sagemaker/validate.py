"""A request against botocore's own description of the service, read as data.

botocore itself checks required fields, names, types and minima; the patterns, choices and maxima
stand in the same file and are left to the service. Here they count too. Importing botocore would
cost more than reading the file.
"""

from __future__ import annotations

import difflib
import functools
import gzip
import importlib.util
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploykit.decode import did_you_mean
from deploykit.errors import BackendUnavailable

_TYPES: dict[str, Any] = {
    "structure": Mapping,
    "map": Mapping,
    "list": list,
    "string": str,
    "boolean": bool,
    "integer": int,
    "long": int,
    "float": (int, float),
}
_CLASSES = {r"\p{Alnum}": "a-zA-Z0-9", r"\p{L}": r"\w", r"\p{N}": r"\d", r"\p{Z}": r"\s"}
"""Java's classes that these patterns use; each stands inside brackets."""
_MANY = 5


@dataclass(frozen=True)
class Fault:
    """What breaks the service's rules. `path` is the place in the request, dotted."""

    path: str
    message: str
    hint: str | None = None


def faults(operation: str, request: Mapping[str, Any]) -> Iterator[Fault]:
    """Everything in `request` that the service would refuse by its own description."""
    model = _model()
    shape = model["operations"][operation]["input"]["shape"]
    yield from _check(model["shapes"], shape, request, "")


@functools.cache
def _model() -> Any:
    """SageMaker's newest description in the installed botocore."""
    found = importlib.util.find_spec("botocore")
    if found is None or found.origin is None:
        raise BackendUnavailable("the Python package botocore is missing", hint="pip install boto3")
    versions = (Path(found.origin).parent / "data" / "sagemaker").glob("*/service-2.json*")
    newest = max(versions, key=lambda path: path.parent.name)
    data = newest.read_bytes()
    return json.loads(gzip.decompress(data) if newest.suffix == ".gz" else data)


def _check(shapes: Any, name: str, value: Any, path: str) -> Iterator[Fault]:
    shape = shapes[name]
    kind = shape["type"]
    expected: Any = _TYPES[kind]
    if not isinstance(value, expected) or (isinstance(value, bool) and kind != "boolean"):
        yield Fault(path, f"must be of type {kind}, is {type(value).__name__}")
        return
    yield from _size(shape, kind, value, path)
    if kind == "string":
        yield from _text(shape, value, path)
    elif kind == "structure":
        yield from _structure(shapes, shape, value, path)
    elif kind == "list":
        for number, item in enumerate(value):
            yield from _check(shapes, shape["member"]["shape"], item, f"{path}[{number}]")
    elif kind == "map":
        for key, item in value.items():
            yield from _check(shapes, shape["key"]["shape"], key, f"{path}.{key}")
            yield from _check(shapes, shape["value"]["shape"], item, f"{path}.{key}")


def _structure(shapes: Any, shape: Any, value: Any, path: str) -> Iterator[Fault]:
    for name in shape.get("required", ()):
        if name not in value:
            yield Fault(_join(path, name), "is missing")
    for name, item in value.items():
        if name in shape["members"]:
            yield from _check(shapes, shape["members"][name]["shape"], item, _join(path, name))
        else:
            near = difflib.get_close_matches(name, shape["members"], n=1)
            hint = f"did you mean {near[0]!r}?" if near else None
            yield Fault(_join(path, name), "is unknown", hint)


def _size(shape: Any, kind: str, value: Any, path: str) -> Iterator[Fault]:
    if kind in {"structure", "boolean"}:
        return
    size, unit = (value, "") if kind in {"integer", "long", "float"} else (len(value), " long")
    if unit and kind != "string":
        unit = " entries"
    low, high = shape.get("min"), shape.get("max")
    if low is not None and size < low:
        yield Fault(path, f"is {size}{unit}; the least is {low}")
    if high is not None and size > high:
        yield Fault(path, f"is {size}{unit}; the most is {high}")


def _text(shape: Any, value: str, path: str) -> Iterator[Fault]:
    choices = shape.get("enum")
    if choices and value not in choices:
        known = ", ".join(choices) if len(choices) <= _MANY else f"{len(choices)} are known"
        yield Fault(
            path, f"{value!r} is none of the choices", did_you_mean(value, choices) or known
        )
    pattern = shape.get("pattern")
    longest = shape.get("max") or len(value)
    if pattern and len(value) <= longest and _compiled(pattern).fullmatch(value) is None:
        yield Fault(path, f"{value!r} does not match {pattern}")


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    ours = pattern
    for java, python in _CLASSES.items():
        ours = ours.replace(java, python)
    return re.compile(ours, 0 if ours != pattern else re.ASCII)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
