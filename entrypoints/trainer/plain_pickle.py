"""What a pickle holds, read as plain data: nothing that it names is imported, made or called.

Python's own unpickler calls whatever a pickle names. This reader knows the few opcodes of data, and
a name becomes a `Named`, which is only a note of what stood there. It can build numbers, texts,
tuples, lists, dictionaries and such notes, and nothing else.
"""

from __future__ import annotations

import pickletools
import struct
import warnings
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any

PERSISTENT = "persistent"
"""Name of a note of something that is kept outside the pickle."""
_BITS = 64


class Refused(ValueError):
    """Why something in a checkpoint is not what this trainer writes."""


@dataclass(eq=False, repr=False)
class Named:
    """What a pickle says about an object: its class, and what it would be made of.

    Two are equal only if they are one: comparing what is inside could go as deep as a file likes.
    """

    name: str
    arguments: tuple[Any, ...] | None = None
    """What the class was called with; None for the class itself."""
    state: Any = None


def load(data: bytes, names: Container[tuple[str, str]]) -> Any:
    """The one value in `data`, which may hold objects of exactly these modules and names.

    Raises Refused for everything else.
    """
    machine = _Machine(names)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about an unknown escape in a text
            return machine.run(data)
    except Refused:
        raise
    except (ValueError, LookupError, struct.error, OverflowError, MemoryError) as error:
        raise Refused(f"a broken pickle ({type(error).__name__})") from None


class _Machine:
    """The stack and the memo of a pickle, and one method for each kind of opcode."""

    def __init__(self, names: Container[tuple[str, str]]) -> None:
        self._names = names
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    def run(self, data: bytes) -> Any:
        """The value that is left at the end."""
        for opcode, argument, _position in pickletools.genops(data):
            if opcode.name == "STOP":
                return self.pop()
            self.step(opcode.name, argument)
        raise Refused("a pickle without an end")

    def step(self, opcode: str, argument: Any) -> None:
        action = _ACTIONS.get(opcode)
        if action is None:
            raise Refused(f"a pickle with {opcode}, which data does not need")
        action(self, argument)

    def pop(self, *kinds: type) -> Any:
        value = self._stack.pop()
        if kinds and type(value) not in kinds:
            raise Refused(f"a pickle with a {type(value).__name__} in a wrong place")
        return value

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def integer(self, value: int) -> None:
        """Sizes and offsets have 64 bits; a longer number would only fill the log."""
        if value.bit_length() >= _BITS:
            raise Refused(f"a pickle with an integer of more than {_BITS} bits")
        self.push(value)

    def last(self, kind: type) -> Any:
        """The value on top, which stays there."""
        value = self.pop(kind)
        self.push(value)
        return value

    def mark(self, _: Any) -> None:
        self._marks.append(self._stack)
        self._stack = []

    def marked(self) -> list[Any]:
        """Everything since the last mark."""
        values, self._stack = self._stack, self._marks.pop()
        return values

    def tupled(self, size: int) -> None:
        values = [self._stack.pop() for _ in range(size)]
        self.push(tuple(reversed(values)))

    def put(self, number: int | None) -> None:
        self.memo[len(self.memo) if number is None else number] = self._stack[-1]

    def append(self, values: list[Any]) -> None:
        self.last(list).extend(values)

    def fill(self, values: list[Any]) -> None:
        """Keys are texts and notes: to hash anything else could go as deep as a file likes."""
        target = self.last(dict)
        for key, value in zip(values[::2], values[1::2], strict=True):
            if type(key) not in (str, Named):
                raise Refused(f"a pickle with a {type(key).__name__} as a key")
            target[key] = value

    def named(self, module: str, name: str) -> None:
        if (module, name) not in self._names:
            raise Refused(f"{ascii(f'{module}.{name}')[1:-1][:100]} has no place in a checkpoint")
        self.push(Named(f"{module}.{name}"))

    def stack_global(self, _: Any) -> None:
        name, module = self.pop(str), self.pop(str)
        self.named(module, name)

    def make(self, _: Any) -> None:
        arguments, kind = self.pop(tuple), self.pop(Named)
        if kind.arguments is not None:
            raise Refused("a pickle that calls an object")
        self.push(Named(kind.name, arguments))

    def build(self, _: Any) -> None:
        state, made = self.pop(), self.last(Named)
        if made.arguments is None or made.state is not None:
            raise Refused("a pickle that changes what it has named")
        made.state = state


_VALUES = ("BININT", "BININT1", "BININT2", "SHORT_BINUNICODE", "BINUNICODE")
_ACTIONS: dict[str, Callable[[_Machine, Any], None]] = {
    **dict.fromkeys(("PROTO", "FRAME"), lambda _machine, _argument: None),
    **dict.fromkeys(_VALUES, _Machine.push),
    "LONG1": _Machine.integer,
    "NONE": lambda machine, _: machine.push(None),
    "NEWTRUE": lambda machine, _: machine.push(True),
    "NEWFALSE": lambda machine, _: machine.push(False),
    "EMPTY_DICT": lambda machine, _: machine.push({}),
    "EMPTY_LIST": lambda machine, _: machine.push([]),
    "EMPTY_TUPLE": lambda machine, _: machine.push(()),
    "MARK": _Machine.mark,
    "TUPLE": lambda machine, _: machine.push(tuple(machine.marked())),
    "TUPLE1": lambda machine, _: machine.tupled(1),
    "TUPLE2": lambda machine, _: machine.tupled(2),
    "TUPLE3": lambda machine, _: machine.tupled(3),
    "APPEND": lambda machine, _: machine.append([machine.pop()]),
    "APPENDS": lambda machine, _: machine.append(machine.marked()),
    "SETITEM": lambda machine, _: machine.fill([machine.pop(), machine.pop()][::-1]),
    "SETITEMS": lambda machine, _: machine.fill(machine.marked()),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT", "MEMOIZE"), _Machine.put),
    **dict.fromkeys(
        ("BINGET", "LONG_BINGET"), lambda machine, number: machine.push(machine.memo[number])
    ),
    "GLOBAL": lambda machine, words: machine.named(*words.split(" ", 1)),
    "STACK_GLOBAL": _Machine.stack_global,
    "NEWOBJ": _Machine.make,
    "REDUCE": _Machine.make,
    "BUILD": _Machine.build,
    "BINPERSID": lambda machine, _: machine.push(Named(PERSISTENT, (machine.pop(),))),
}
"""Every opcode in what torch writes; the arguments are those of `pickletools`."""
