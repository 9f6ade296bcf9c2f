"""A pickle reader for untrusted files: it imports, creates and calls nothing that a file names.

Python's unpickler calls whatever a pickle names. This reader supports only the opcodes that data
needs, and represents every named object by a `PickledObject`, a plain record of what the pickle
says. Numbers, strings, tuples, lists, dictionaries and such records are all it can build.
"""

from __future__ import annotations

import pickletools
import struct
import warnings
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any

PERSISTENT_ID = "persistent"
"""Name of the record of an object that is stored outside of the pickle."""
_MAX_BITS = 64


class InvalidFile(ValueError):
    """A file is damaged, or not one that this trainer writes; the message says what is wrong."""


@dataclass(eq=False, repr=False)
class PickledObject:
    """What a pickle says about an object: its class, constructor arguments and state.

    Compares by identity: a comparison of the content could recurse as deep as the file's author
    wants.
    """

    name: str
    """Module and class, joined by a dot."""
    arguments: tuple[Any, ...] | None = None
    """Constructor arguments; None for the class itself."""
    state: Any = None


def load(data: bytes, names: Container[tuple[str, str]]) -> Any:
    """Read the value in `data`; `names` are the allowed (module, class) pairs.

    Raises InvalidFile for anything else.
    """
    machine = _PickleMachine(names)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # unknown escape sequences in strings
            return machine.run(data)
    except InvalidFile:
        raise
    except (ValueError, LookupError, struct.error, OverflowError, MemoryError) as error:
        raise InvalidFile(f"invalid pickle ({type(error).__name__})") from None


class _PickleMachine:
    """The pickle machine's stack and memo, with a method per kind of opcode."""

    def __init__(self, names: Container[tuple[str, str]]) -> None:
        self._names = names
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    def run(self, data: bytes) -> Any:
        """Execute the pickle and return the value on the stack at the end."""
        for opcode, argument, _position in pickletools.genops(data):
            if opcode.name == "STOP":
                return self.pop()
            self.step(opcode.name, argument)
        raise InvalidFile("invalid pickle (no STOP opcode)")

    def step(self, opcode: str, argument: Any) -> None:
        action = _ACTIONS.get(opcode)
        if action is None:
            raise InvalidFile(f"pickle opcode {opcode} is not allowed")
        action(self, argument)

    def pop(self, *kinds: type) -> Any:
        value = self._stack.pop()
        if kinds and type(value) not in kinds:
            raise InvalidFile(f"invalid pickle (unexpected {type(value).__name__})")
        return value

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def integer(self, value: int) -> None:
        """Push an integer. Sizes and offsets have 64 bits; longer numbers would flood the log."""
        if value.bit_length() >= _MAX_BITS:
            raise InvalidFile(f"a pickled integer has more than {_MAX_BITS} bits")
        self.push(value)

    def top(self, kind: type) -> Any:
        """Return the value on top without removing it."""
        value = self.pop(kind)
        self.push(value)
        return value

    def mark(self, _: Any) -> None:
        self._marks.append(self._stack)
        self._stack = []

    def since_mark(self) -> list[Any]:
        """Remove and return everything since the last mark."""
        values, self._stack = self._stack, self._marks.pop()
        return values

    def make_tuple(self, size: int) -> None:
        values = [self._stack.pop() for _ in range(size)]
        self.push(tuple(reversed(values)))

    def put(self, number: int | None) -> None:
        self.memo[len(self.memo) if number is None else number] = self._stack[-1]

    def append(self, values: list[Any]) -> None:
        self.top(list).extend(values)

    def set_items(self, values: list[Any]) -> None:
        """Fill a dictionary. Hashing keys of other types could recurse arbitrarily deep."""
        target = self.top(dict)
        for key, value in zip(values[::2], values[1::2], strict=True):
            if type(key) not in (str, PickledObject):
                raise InvalidFile(f"a pickled dictionary has a {type(key).__name__} as a key")
            target[key] = value

    def push_class(self, module: str, name: str) -> None:
        if (module, name) not in self._names:
            raise InvalidFile(
                f"the pickled name {ascii(f'{module}.{name}')[1:-1][:100]} is not allowed"
            )
        self.push(PickledObject(f"{module}.{name}"))

    def stack_global(self, _: Any) -> None:
        name, module = self.pop(str), self.pop(str)
        self.push_class(module, name)

    def construct(self, _: Any) -> None:
        arguments, kind = self.pop(tuple), self.pop(PickledObject)
        if kind.arguments is not None:
            raise InvalidFile("the pickle calls an object that is not a class")
        self.push(PickledObject(kind.name, arguments))

    def build(self, _: Any) -> None:
        state, target = self.pop(), self.top(PickledObject)
        if target.arguments is None or target.state is not None:
            raise InvalidFile("a pickled class is modified")
        target.state = state


_VALUES = ("BININT", "BININT1", "BININT2", "SHORT_BINUNICODE", "BINUNICODE")
_ACTIONS: dict[str, Callable[[_PickleMachine, Any], None]] = {
    **dict.fromkeys(("PROTO", "FRAME"), lambda _machine, _argument: None),
    **dict.fromkeys(_VALUES, _PickleMachine.push),
    "LONG1": _PickleMachine.integer,
    "NONE": lambda machine, _: machine.push(None),
    "NEWTRUE": lambda machine, _: machine.push(True),
    "NEWFALSE": lambda machine, _: machine.push(False),
    "EMPTY_DICT": lambda machine, _: machine.push({}),
    "EMPTY_LIST": lambda machine, _: machine.push([]),
    "EMPTY_TUPLE": lambda machine, _: machine.push(()),
    "MARK": _PickleMachine.mark,
    "TUPLE": lambda machine, _: machine.push(tuple(machine.since_mark())),
    "TUPLE1": lambda machine, _: machine.make_tuple(1),
    "TUPLE2": lambda machine, _: machine.make_tuple(2),
    "TUPLE3": lambda machine, _: machine.make_tuple(3),
    "APPEND": lambda machine, _: machine.append([machine.pop()]),
    "APPENDS": lambda machine, _: machine.append(machine.since_mark()),
    "SETITEM": lambda machine, _: machine.set_items([machine.pop(), machine.pop()][::-1]),
    "SETITEMS": lambda machine, _: machine.set_items(machine.since_mark()),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT", "MEMOIZE"), _PickleMachine.put),
    **dict.fromkeys(
        ("BINGET", "LONG_BINGET"), lambda machine, number: machine.push(machine.memo[number])
    ),
    "GLOBAL": lambda machine, words: machine.push_class(*words.split(" ", 1)),
    "STACK_GLOBAL": _PickleMachine.stack_global,
    "NEWOBJ": _PickleMachine.construct,
    "REDUCE": _PickleMachine.construct,
    "BUILD": _PickleMachine.build,
    "BINPERSID": lambda machine, _: machine.push(PickledObject(PERSISTENT_ID, (machine.pop(),))),
}
"""Every opcode in what torch writes; the arguments are those of `pickletools`."""
