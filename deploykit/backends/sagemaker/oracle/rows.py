"""The rows of the rules as jobs: for the reference, and for the test of each."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from deploykit.backends.sagemaker.options import Options
from deploykit.backends.sagemaker.oracle.rule import PLAIN, Row
from deploykit.decode import decode
from deploykit.model import JobSpec, Problem

_DISTRIBUTION = "sagemaker.distribution"
_LONGEST = 90
"""Characters of a value that are shown."""


def job(*changes: Mapping[str, Any]) -> tuple[JobSpec | None, Options | None, list[Problem]]:
    """The plain job with changes on top, as the job file's decoder reads it."""
    merged = {key: value for change in (PLAIN, *changes) for key, value in change.items()}
    tree = _nested({key: value for key, value in merged.items() if value is not None})
    section = tree.pop("sagemaker")
    found, problems = decode(JobSpec, tree)
    options, more = decode(Options, section, "sagemaker")
    return found, options, [*problems, *more]


def shown(row: Row) -> Iterator[str]:
    """A row's changes as lines of a job file; or what the SDK is given, where that says more."""
    for key, value in row.given.items():
        name = key.removeprefix("sagemaker.")
        if value is not None and value != ():
            yield f"{name}: {_value(value)}"
        elif value is None and "sagemaker.framework_version" not in row.given:
            yield f"no {name}"
    if "distribution" in row.raw and row.raw["distribution"] != row.given.get(_DISTRIBUTION):
        yield f"SDK: distribution={json.dumps(row.raw['distribution'])}"


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *folders, name = key.split(".")
        place = tree
        for folder in folders:
            place = place.setdefault(folder, {})
        place[name] = value
    return tree


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        inside = ", ".join(f"{key}: {_value(item)}" for key, item in value.items())
        return f"{{{inside}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    text = str(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
