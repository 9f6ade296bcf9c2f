"""Logs as lines worth a look: those that hold one of many fixed texts, and the lines behind them.

grep finds them where there is one, since it does so many times faster than Python can.
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

BEHIND = 2
"""Lines behind a hit that come along: messages are broken over several lines."""
_LONGEST = 1 << 20
"""Bytes of a line that are kept at a time: a log may hold no line end at all."""
_WIDEST = 4000
"""Characters that are looked at together; a longer line is looked at in pieces."""

_NOT_FIXED = "never in any log[0-9]"
"""With an expression among many fixed texts, GNU grep 3.8 takes an automaton: twice as fast."""


class Line(NamedTuple):
    number: int
    text: str
    hit: bool


def file(path: Path | None, literals: Sequence[str]) -> Iterator[Line]:
    """Those lines of a file, or of standard input."""
    try:
        source = path.open("rb") if path else os.fdopen(os.dup(0), "rb")
    except OSError as error:
        raise NotFound(f"{path} cannot be read: {error.strerror}") from error
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
        argv = [program, "-a", "-n", "-E", "-A", str(BEHIND), "-f", texts.name]
        env = {**os.environ, "LC_ALL": "C"}
        with subprocess.Popen(argv, stdin=source, stdout=subprocess.PIPE, env=env) as process:
            number, mark = 0, b""
            for piece, begins in _pieces(cast("IO[bytes]", process.stdout)):
                text = piece
                if begins:
                    number, mark, text = _marked(piece)
                if mark:
                    yield Line(number, _decoded(text), hit=mark == b":")


def _escaped(text: str) -> str:
    return re.sub(r"([][\\.*^$+?(){}|])", r"\\\1", text)


_MARK = re.compile(rb"(\d+)([:-])", re.DOTALL)


def _marked(raw: bytes) -> tuple[int, bytes, bytes]:
    """Number, `:` for a hit or `-` for a line behind one, and text; no mark between groups."""
    match = _MARK.match(raw)
    return (int(match[1]), match[2], raw[match.end() :]) if match else (0, b"", b"")


def _pieces(stream: IO[bytes] | io.BufferedIOBase) -> Iterator[tuple[bytes, bool]]:
    """Lines, the longest in pieces, and whether one begins there."""
    begins = True
    for raw in iter(lambda: stream.readline(_LONGEST), b""):
        yield raw, begins
        begins = raw.endswith(b"\n")


def lines(source: Iterable[bytes], literals: Sequence[str]) -> Iterator[Line]:
    """The same in Python, from any source of lines."""
    search = _any_of(tuple(literals))
    number = left = 0
    found = (
        _pieces(source)
        if isinstance(source, io.BufferedIOBase)
        else ((raw, True) for raw in source)
    )
    for raw, begins in found:
        number += begins
        if search(raw):
            left = BEHIND + 1
        if left:
            yield Line(number, _decoded(raw), hit=left == BEHIND + 1)
            left -= 1


@cache
def _any_of(literals: tuple[str, ...]) -> Callable[[bytes], re.Match[bytes] | None]:
    return re.compile(b"|".join(re.escape(text.encode()) for text in literals)).search


def _decoded(raw: bytes) -> str:
    return raw.decode(errors="replace").rstrip("\r\n")


def start(text: str) -> str:
    """What of a line is looked at together with others."""
    return text[:_WIDEST]


def pieces(text: str) -> Iterator[str]:
    """What a line shows one after the other: progress bars write over themselves."""
    for part in text.split("\r"):
        for start in range(0, max(len(part), 1), _WIDEST):
            yield part[start : start + _WIDEST]
