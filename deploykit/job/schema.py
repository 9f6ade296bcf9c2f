"""Describe the job file: a JSON Schema for editors, and a commented file to start from."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args, get_origin

from deploykit.job.decode import Bounds, Help, Pattern, Quantity, hints, is_required, key_of, split
from deploykit.job.model import JobSpec

_COMMENT_WIDTH = 96
_SET_IN_EXAMPLE = {
    *("entrypoint.script", "entrypoint.args"),
    *("resources.nodes", "resources.processes_per_node", "resources.time_limit"),
    *("sagemaker.instance_type", "sagemaker.region", "sagemaker.image_uri"),
}
"""Optional keys that the commented file sets."""

_SCALARS: dict[Any, dict[str, Any]] = {
    Any: {},
    str: {"type": ["string", "number", "boolean"]},
    int: {"type": ["integer"]},
    bool: {"type": ["boolean", "string"], "pattern": "^([Yy]es|YES|[Nn]o|NO|[Oo]n|ON|[Oo]ff|OFF)$"},
}
"""Schemas by Python type. A number may stand for text, since unquoted scalars keep their text, and
`yes` is text to editors, which follow YAML 1.2."""


def json_schema(sections: Mapping[str, type[Any]]) -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a job file; `sections` are the backends' Options."""
    schema = _object(JobSpec)
    for name, options in sections.items():
        schema["properties"][name] = {**_object(options), "type": ["object", "null"]}
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "deploykit job file",
    }
    return {**head, **schema}


def _of(hint: Any) -> dict[str, Any]:
    kind, metadata, optional = split(hint)
    schema = {**_type(kind, metadata), **_limits(metadata)}
    if optional and "enum" in schema:
        schema["enum"] = [*schema["enum"], None]
    elif optional:
        kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        schema["type"] = [*kinds, *(["null"] if "null" not in kinds else [])]
    return schema


def _type(kind: Any, metadata: tuple[Any, ...]) -> dict[str, Any]:
    quantity = next((note for note in metadata if isinstance(note, Quantity)), None)
    if quantity is not None:
        return {"type": "string", "pattern": quantity.regex}
    if dataclasses.is_dataclass(kind):
        section, short = _object(kind), getattr(kind, "SHORT", None)
        return {"anyOf": [section["properties"][short], section]} if short else section
    if get_origin(kind) is tuple:
        return {"type": "array", "items": _of(get_args(kind)[0])}
    if get_origin(kind) is Literal:
        return {"enum": list(get_args(kind))}
    if get_args(kind):
        key, item = get_args(kind)
        names = _of(key).get("pattern")
        rest = {"propertyNames": {"pattern": names}} if names else {}
        return {"type": ["object", "null"], "additionalProperties": _of(item), **rest}
    return dict(_SCALARS[kind])


def _object(cls: Any) -> dict[str, Any]:
    properties, required = {}, []
    for field in dataclasses.fields(cls):
        key = key_of(field.name)
        properties[key] = _of(hints(cls)[field.name])
        if is_required(field):
            required.append(key)
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**schema, "required": required} if required else schema


def _limits(metadata: tuple[Any, ...]) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    quantity = any(isinstance(note, Quantity) for note in metadata)
    for note in metadata:
        if isinstance(note, Help):
            schema["description"] = note.text
        elif isinstance(note, Pattern):
            schema["pattern"] = f"^({note.regex})$"
        elif isinstance(note, Bounds) and not quantity:
            limits = {"minimum": note.low, "maximum": note.high}
            schema |= {name: limit for name, limit in limits.items() if limit is not None}
            if note.text:
                schema |= {"type": ["integer", "string"], "pattern": f"^({note.text})$"}
    return schema


def commented(sections: Mapping[str, type[Any]]) -> str:
    """A job file with every key explained; optional keys are commented out."""
    lines = [
        "# A deploykit job file. Commented-out keys are optional.",
        "# `deploykit check` lists all problems; `deploykit submit --dry-run` sends nothing.",
        "",
        *_fields(JobSpec, ""),
    ]
    for name, options in sections.items():
        lines += ["", f"# {name}:", *(f"# {line}" for line in _fields(options, f"{name}."))]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def brief(name: str, options: Any) -> list[str]:
    """The lines of a backend's section with the keys that most jobs set; none where none does."""
    shown = [
        f"  {field.name}: {sample(field, split(hints(options)[field.name])[1])}"
        for field in dataclasses.fields(options)
        if is_required(field) or f"{name}.{field.name}" in _SET_IN_EXAMPLE
    ]
    return [f"{name}:", *shown] if shown else []


def _fields(cls: Any, path: str) -> Iterator[str]:
    """The lines of a section, with an empty line between keys of the top level."""
    indent = "  " * path.count(".")
    for number, field in enumerate(dataclasses.fields(cls)):
        kind, metadata, optional = split(hints(cls)[field.name])
        if not path and number:
            yield ""
        text = next(note.text for note in metadata if isinstance(note, Help))
        mark = f"{indent}# "
        yield from textwrap.wrap(
            text,
            _COMMENT_WIDTH,
            initial_indent=mark,
            subsequent_indent=mark,
            break_on_hyphens=False,
        )
        key = key_of(field.name)
        inside = f"{path}{key}"
        if dataclasses.is_dataclass(kind):
            lines = [f"{indent}{key}:", *_fields(kind, f"{inside}.")]
            yield from (f"{indent}# {line[len(indent) :]}" if optional else line for line in lines)
            continue
        shown = is_required(field) or inside in _SET_IN_EXAMPLE
        yield f"{indent}{'' if shown else '# '}{key}: {sample(field, metadata)}"


def sample(field: dataclasses.Field[Any], metadata: tuple[Any, ...]) -> str:
    """A value for a key, as it is written in YAML: its example, else its default."""
    for note in metadata:
        if isinstance(note, Help) and note.example is not None:
            return note.example
    if isinstance(field.default, bool):
        return str(field.default).lower()
    if field.default_factory is not dataclasses.MISSING:
        return "{}"
    return "" if field.default in (None, dataclasses.MISSING, ()) else str(field.default)
