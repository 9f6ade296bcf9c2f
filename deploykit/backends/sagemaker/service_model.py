"""What the installed botocore says of AWS's requests: types, enums, patterns and ranges.

The descriptions are read as data: importing botocore would add a third to the time of a dry run.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from deploykit.job.spelling import did_you_mean
from deploykit.lib.errors import BackendUnavailable

_COUNTED = {"string": "characters", "list": "entries", "map": "entries"}
"""Type of a value -> what its range counts; the range of a number is that of its value."""
_MARKS = r"!-/:-@\[-`{-~\u00a1-\u00bf\u2000-\u2bff\u3000-\u303f"
"""Punctuation and symbols, about."""
_CLASSES = {
    r"\p{Alnum}": "a-zA-Z0-9",
    r"\p{L}": r"\w",
    r"\p{M}": r"\u0300-\u036f",
    r"\p{N}": r"\d",
    r"\p{P}": _MARKS,
    r"\p{S}": _MARKS,
    r"\p{Z}": r"\s",
    r"\p{Print}": "[ -~]",
    r"\uD800\uDC00-\uDBFF\uDFFF": r"\U00010000-\U0010ffff",
}
"""Java's character classes in the patterns; all but `Print` are inside brackets."""
_MAX_LISTED = 5
"""Choices that a message lists."""


@cache
def shapes(service: str = "sagemaker") -> Any:
    """The newest description of a service in the installed botocore.

    Raises BackendUnavailable without botocore.
    """
    spec = importlib.util.find_spec("botocore")
    if spec is None or spec.origin is None:
        raise BackendUnavailable(
            "the Python package botocore is not installed", hint="pip install boto3"
        )
    versions = (Path(spec.origin).parent / "data" / service).glob("*/service-2.json*")
    newest = max(versions, key=lambda path: path.parent.name)
    data = newest.read_bytes()
    return json.loads(gzip.decompress(data) if newest.suffix == ".gz" else data)["shapes"]


def violations(
    shape_name: str, value: Any, service: str = "sagemaker"
) -> Iterator[tuple[str, str, str]]:
    """Yield the dotted path, message and hint of what botocore leaves to the service.

    Names that it does not know, values outside of an enum, a pattern or a range. Types and required
    fields are those of `request.render`, and botocore checks them before it sends.
    """
    known = shapes(service)
    yield from _inside(known, known[shape_name], value, "")


def _inside(shapes: Any, shape: Any, value: Any, path: str) -> Iterator[tuple[str, str, str]]:
    if value is None:  # reported by a rule
        return
    yield from _limits(shape, value, path)
    if shape["type"] == "structure":
        for name, item in value.items():
            inner = f"{path}.{name}".lstrip(".")
            if name in shape["members"]:
                member = shapes[shape["members"][name]["shape"]]
                yield from _inside(shapes, member, item, inner)
            else:
                hint = did_you_mean(name, shape["members"]) or "pip install -U boto3"
                yield inner, "is not supported by the installed botocore", hint
    elif shape["type"] == "list":
        for number, item in enumerate(value):
            member = shapes[shape["member"]["shape"]]
            yield from _inside(shapes, member, item, f"{path}[{number}]")
    elif shape["type"] == "map":
        for key, item in value.items():
            for part, content in (("key", key), ("value", item)):
                member = shapes[shape[part]["shape"]]
                yield from _inside(shapes, member, content, f"{path}.{key}")


def _limits(shape: Any, value: Any, path: str) -> Iterator[tuple[str, str, str]]:
    low, high, units_of = shape.get("min"), shape.get("max"), _COUNTED.get(shape["type"])
    size = len(value) if units_of else value
    amount = f"has {size} {units_of}" if units_of else f"is {size}"
    if low is not None and size < low:
        yield path, f"{amount}; the minimum is {low}", ""
    if high is not None and size > high:
        yield path, f"{amount}; the maximum is {high}", ""
    choices, pattern = shape.get("enum", ()), shape.get("pattern")
    if choices and value not in choices:
        known = (
            ", ".join(choices)
            if len(choices) <= _MAX_LISTED
            else f"{len(choices)} values are accepted"
        )
        hint = did_you_mean(value, choices) or known
        yield path, f"{value!r} is not one of the accepted values", hint
    elif pattern and size <= (high or size) and _compiled(pattern).fullmatch(value) is None:
        yield path, f"{value!r} does not match {pattern}", ""


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    translated = re.sub(r"\$\{\d+,\d+\}$", "", pattern)  # a range, which `max` states too
    for java, python in _CLASSES.items():
        translated = translated.replace(java, python)
    return re.compile(translated, 0 if translated != pattern else re.ASCII)


def type_errors(
    shape_name: str, value: Mapping[str, Any], service: str = "sagemaker"
) -> Iterator[str]:
    """Yield wrong types and missing fields, which botocore refuses before it sends a request."""
    from botocore import model, validate

    shape = model.ShapeResolver(shapes(service)).get_shape_by_name(shape_name)
    report = validate.ParamValidator().validate(value, shape)
    if report.has_errors():
        for line in report.generate_report().splitlines():
            if line.startswith(("Invalid type", "Missing required")):  # `violations` has the rest
                yield line
