"""Data with errors as it could be once they are mended, so that the rest can be checked at once.

Each wrong value gives way to a valid one, in two ways that differ as far as possible. What is wrong
with both drafts does not depend on the values that were put in, so it can be reported already.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar, get_args, get_origin

from deploykit.job.decode import Bounds, Help, Plain, Quantity, decode, hints, split
from deploykit.job.spelling import meant
from deploykit.lib.problem import Problem

T = TypeVar("T")
_ROUNDS = 4
"""A section that is missing gets its own required keys in the second round, and so on."""


def as_meant(
    tree: Mapping[str, Any], lines: Mapping[str, int], known: Collection[str]
) -> tuple[dict[str, Any], dict[str, int]]:
    """The keys of a file, and the line of each path, with the keys that misspelled ones mean."""
    renamed = meant(tree, known)

    def name(path: str) -> str:
        head, dot, rest = path.partition(".")
        return f"{renamed.get(head, head)}{dot}{rest}"

    both = {name(path): line for path, line in lines.items()} | dict(lines)
    return {name(key): value for key, value in tree.items()}, both


def problems(
    parts: Mapping[str, tuple[type[Any], Any]],
    known: Sequence[Problem],
    check: Callable[[Mapping[str, Any]], Iterable[Problem]],
) -> list[Problem]:
    """What `check` finds wrong beside the problems that are `known`.

    `parts` are the classes of a job file with their data, by the path of each; `check` gets a value
    for each. A problem at, above or below the place of a known one is left out.
    """
    by_variant = []
    for variant in (0, 1):
        values = {path: _draft(cls, data, path, variant) for path, (cls, data) in parts.items()}
        if None in values.values():
            return []
        by_variant.append(list(check(values)))
    first, second = by_variant
    both = [problem for problem in dict.fromkeys(first) if problem in second]
    return [one for one in both if not any(_related(one.path, other.path) for other in known)]


def _related(path: str, other: str) -> bool:
    """Whether two paths are the same, or one is inside the other."""
    inside = (f"{path}.", f"{path}["), (f"{other}.", f"{other}[")
    return path == other or other.startswith(inside[0]) or path.startswith(inside[1])


def _draft(cls: type[T], data: object, path: str, variant: int) -> T | None:
    for _ in range(_ROUNDS):
        value, problems = decode(cls, data, path)
        if value is not None:
            return value
        for problem in problems:
            keys = problem.path.removeprefix(path).removeprefix(".")
            data = _mended(cls, data, keys.split(".") if keys else [], variant)
    return None


def _mended(cls: Any, data: object, keys: Sequence[str], variant: int) -> dict[str, Any]:
    """The data of a dataclass with another value at the path `keys`."""
    if not isinstance(data, Mapping) or not keys:
        return {}
    tree, name = dict(data), keys[0].partition("[")[0]
    known = {field.name: field for field in dataclasses.fields(cls)}
    right = meant(tree, known).get(name, name)
    value = tree.pop(name, None)
    if right not in known:
        return tree
    kind, metadata, _ = split(hints(cls)[right])
    if right != name:
        tree[right] = value
    elif dataclasses.is_dataclass(kind):
        tree[right] = _mended(kind, value, keys[1:], variant)
    else:
        chosen = _stand_in(kind, metadata, known[right], value, variant)
        tree |= {} if chosen is None else {right: chosen}
    return tree


def _stand_in(
    kind: Any, metadata: Sequence[Any], field: dataclasses.Field[Any], value: object, variant: int
) -> Any:
    """A valid value for a field; None for its default."""
    if get_origin(kind) is tuple:
        return [Plain(word) for word in _words(value)] if isinstance(value, str) else None
    if get_origin(kind) in {dict, Mapping}:
        return None
    if kind is bool:
        return bool(variant)
    required = field.default is field.default_factory is dataclasses.MISSING
    return None if variant and not required else next(_choices(kind, metadata), None)


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:  # a quote that is not closed
        return [text]


def _choices(kind: Any, metadata: Sequence[Any]) -> Iterator[Any]:
    if get_origin(kind) is Literal:
        yield from reversed(get_args(kind))
    quantity = any(isinstance(note, Quantity) for note in metadata)
    for note in metadata:
        if isinstance(note, Bounds) and not quantity:
            yield (note.low or 0) + 1  # examples of counts are often their defaults
    for note in metadata:
        if isinstance(note, Help) and note.example is not None:
            yield Plain(note.example.strip("\"'"))
    if kind is str:
        yield Plain("x")
