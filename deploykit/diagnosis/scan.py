"""Finding the lines of a log that hold one of many literals, and the lines after them.

grep does it where it is installed, since it is many times faster than Python.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import IO, NamedTuple, cast

from deploykit.errors import NotFound

CONTEXT = 2
"""Lines after a hit that are included: messages span several lines."""
_LONGEST = 1 << 20
"""Maximum bytes of a line in memory: a log may hold no line end at all."""
_WIDEST = 4000
"""Characters that are matched together; longer lines are matched in pieces."""

_NOT_FIXED = "never in any log[0-9]"
"""With one regular expression among the literals, GNU grep 3.8 uses a DFA: twice as fast."""


class Line(NamedTuple):
    """A line with its number from 1; `hit` is False for a line after a hit."""

    number: int
    text: str
    hit: bool


def file(path: Path | None, literals: Sequence[str]) -> Iterator[Line]:
    """Scan a file, or standard input for None. Raises NotFound."""
    try:
        source = path.open("rb") if path else os.fdopen(os.dup(0), "rb")
    except OSError as error:
        raise NotFound(f"cannot read {path}: {error.strerror}") from error
    with source:
        if path and path.is_dir():
            raise NotFound(f"{path} is a folder", hint="name the log files in it")
        grep = shutil.which("grep")
        if grep and literals:
            yield from _grep(grep, source.fileno(), literals)
        else:
            yield from lines(source, literals)


def _grep(program: str, source: int, literals: Sequence[str]) -> Iterator[Line]:
    with tempfile.NamedTemporaryFile("w", encoding="utf-8") as texts:
        texts.write("\n".join([*map(_escaped, literals), _NOT_FIXED]))
        texts.flush()
        argv = [program, "-a", "-n", "-E", "-A", str(CONTEXT), "-f", texts.name]
        env = {**os.environ, "LC_ALL": "C"}
        with subprocess.Popen(argv, stdin=source, stdout=subprocess.PIPE, env=env) as process:
            number, mark = 0, b""
            for piece, begins in _pieces(cast("IO[bytes]", process.stdout)):
                text = piece
                if begins:
                    number, mark, text = _parsed(piece)
                if mark:
                    yield Line(number, _decoded(text), hit=mark == b":")


def _escaped(text: str) -> str:
    return re.sub(r"([][\\.*^$+?(){}|])", r"\\\1", text)


_MARK = re.compile(rb"(\d+)([:-])", re.DOTALL)


def _parsed(raw: bytes) -> tuple[int, bytes, bytes]:
    """Number, `:` for a hit or `-` for context, and text; empty for grep's group separator."""
    match = _MARK.match(raw)
    return (int(match[1]), match[2], raw[match.end() :]) if match else (0, b"", b"")


def _pieces(stream: IO[bytes] | io.BufferedIOBase) -> Iterator[tuple[bytes, bool]]:
    """Lines, long ones in pieces, each with whether a line begins there."""
    begins = True
    for raw in iter(lambda: stream.readline(_LONGEST), b""):
        yield raw, begins
        begins = raw.endswith(b"\n")


def lines(source: Iterable[bytes], literals: Sequence[str]) -> Iterator[Line]:
    """Scan any source of lines, in Python."""
    search = _any_of(tuple(literals))
    number = left = 0
    parts = (
        _pieces(source)
        if isinstance(source, io.BufferedIOBase)
        else ((raw, True) for raw in source)
    )
    for raw, begins in parts:
        number += begins
        if search(raw):
            left = CONTEXT + 1
        if left:
            yield Line(number, _decoded(raw), hit=left == CONTEXT + 1)
            left -= 1


@cache
def _any_of(literals: tuple[str, ...]) -> Callable[[bytes], re.Match[bytes] | None]:
    return re.compile(b"|".join(re.escape(text.encode()) for text in literals)).search


def _decoded(raw: bytes) -> str:
    return raw.decode(errors="replace").rstrip("\r\n")


def start(text: str) -> str:
    """The part of a line that is matched together with the next lines."""
    return text[:_WIDEST]


def pieces(text: str) -> Iterator[str]:
    """Split a line at carriage returns, as progress bars write them, and to a limited width."""
    for part in text.split("\r"):
        for start in range(0, max(len(part), 1), _WIDEST):
            yield part[start : start + _WIDEST]
