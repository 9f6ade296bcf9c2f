"""A submitted job as a list of settings, for people: each key and each argument, as text."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

_NOT_SETTINGS = {"name", "source", "backend", "max_bundle", "log_limit", "notify"}
"""Keys of a job that do not affect its result, or are shown elsewhere."""


def settings(
    job: Mapping[str, Any], without: Collection[str] = _NOT_SETTINGS
) -> Iterator[tuple[str, str]]:
    """Each key of a job and each argument, as text; those that are not set are left out."""
    entry = job.get("entrypoint")
    arguments = entry.get("args") if isinstance(entry, dict) else None
    for key, value in job.items():
        if key not in without:
            yield from (item for item in _flat(key, value) if item[0] != "entrypoint.args")
    named: dict[str, list[str]] = {}
    for name, value in argument_pairs(arguments or ()):
        named.setdefault(name, []).append(value)
    yield from ((name, " ".join(values)) for name, values in named.items())


def argument_pairs(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The arguments of a program by name: ``--lr 0.1`` is ``("--lr", "0.1")``.

    Arguments that follow no option have their place as name: ``argument 1``.
    """
    option, position = "", 0
    for text in arguments:
        if text.startswith("--") and text != "--":
            if option:
                yield option, "yes"
            option, equals, value = text.partition("=")
            if equals:
                yield option, value
                option = ""
        elif option:
            yield option, text
            option = ""
        else:
            position += 1
            yield f"argument {position}", text
    if option:
        yield option, "yes"


def _flat(path: str, value: Any) -> Iterator[tuple[str, str]]:
    """The values of nested data as text, each with its path; empty ones are left out."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(f"{path}.{key}", inner)
    elif isinstance(value, list):
        if value:
            yield path, ", ".join(map(str, value))
    elif isinstance(value, bool):
        yield path, "yes" if value else "no"
    elif value is not None:
        yield path, str(value)
