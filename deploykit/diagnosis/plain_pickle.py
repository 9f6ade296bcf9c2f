"""A pickle from elsewhere as plain data: no name of a module, and no more than its bytes are worth.

Twelve bytes can make Python's own reader take 64 GiB (a place in its memo far beyond the last),
and a few thousand can hold a list of lists of lists, each a million times the same one.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Iterable
from typing import Any

_MOST = 10_000_000
"""Values of a pickle, each counted as often as it stands somewhere."""
_TOO_MANY = f"it holds more than {_MOST} values"
_PUTS = {"PUT", "BINPUT", "LONG_BINPUT"}


class NotPlain(ValueError):
    """What is wrong with a pickle."""


def load(data: bytes) -> Any:
    """Texts, numbers, lists, tuples and dicts. Raises NotPlain."""
    try:
        _check_memo(data)
        tree = _Plain(io.BytesIO(data)).load()
    except NotPlain:
        raise
    except Exception as error:  # noqa: BLE001 - broken bytes make it raise whatever there is
        raise NotPlain(f"it is broken ({error})") from None
    if _count(tree) > _MOST:
        raise NotPlain(_TOO_MANY)
    return tree


class _Plain(pickle.Unpickler):
    """Takes no name of a module: so nothing is imported, and nothing called."""

    def find_class(self, module: str, name: str) -> Any:
        raise NotPlain(f"it asks for {module}.{name}")


def _check_memo(data: bytes) -> None:
    """Each value is kept right behind the last one, or before, and there are not too many."""
    for count, (operation, place, _) in enumerate(pickletools.genops(data)):
        if operation.name in _PUTS and int(place or 0) > count:
            raise NotPlain("it keeps a value where no writer of pickles would")
        if count > _MOST:
            raise NotPlain(_TOO_MANY)


def _count(tree: Any) -> int:
    """How many values there are. Raises NotPlain for one that is part of itself."""
    counted: dict[int, int] = {}
    begun: set[int] = set()
    stack = [tree]
    while stack:
        parts = list(_parts(stack[-1]))
        within = [part for part in parts if _holds(part) and id(part) not in counted]
        if not within:
            node = stack.pop()
            counted[id(node)] = 1 + sum(counted.get(id(part), 1) for part in parts)
        elif id(stack[-1]) in begun:
            raise NotPlain("it holds a value that is part of itself")
        else:
            begun.add(id(stack[-1]))
            stack += within
    return counted[id(tree)]


def _holds(value: Any) -> bool:
    return isinstance(value, (dict, list, tuple, set, frozenset))


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return (part for pair in value.items() for part in pair)
    return value if _holds(value) else ()
