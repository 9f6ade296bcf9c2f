"""Loading an untrusted pickle as plain data: no imports, and bounded memory.

Twelve bytes can make Python's unpickler allocate 64 GiB (a memo index far beyond the last one),
and a few thousand bytes can hold nested lists, each a million references to the same one.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Iterable
from typing import Any

_MAX_VALUES = 10_000_000
"""Values of a pickle; each counts as often as it is referenced."""
_TOO_MANY = f"it contains more than {_MAX_VALUES} values"
_PUTS = {"PUT", "BINPUT", "LONG_BINPUT"}


class NotPlain(ValueError):
    """The pickle is malformed or holds more than plain data."""


def load(data: bytes) -> Any:
    """Load strings, numbers, lists, tuples and dicts. Raises NotPlain for anything else."""
    try:
        _check_memo(data)
        tree = _Plain(io.BytesIO(data)).load()
    except NotPlain:
        raise
    except Exception as error:  # noqa: BLE001 - malformed bytes raise any exception
        raise NotPlain(f"it is malformed ({error})") from None
    if _count(tree) > _MAX_VALUES:
        raise NotPlain(_TOO_MANY)
    return tree


class _Plain(pickle.Unpickler):
    """Refuses all globals, so that nothing is imported or called."""

    def find_class(self, module: str, name: str) -> Any:
        raise NotPlain(f"it refers to {module}.{name}")


def _check_memo(data: bytes) -> None:
    """Check that memo indices are contiguous, and the number of operations."""
    for count, (operation, argument, _) in enumerate(pickletools.genops(data)):
        if operation.name in _PUTS and int(argument or 0) > count:
            raise NotPlain("its memo has an invalid index")
        if count > _MAX_VALUES:
            raise NotPlain(_TOO_MANY)


def _count(tree: Any) -> int:
    """Count all values. Raises NotPlain for one that contains itself."""
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
            raise NotPlain("it contains a reference cycle")
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
