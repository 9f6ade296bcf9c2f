"""Finding the lines of a log that hold one of many literals, and the lines after them.

grep does it where it is installed, since it is many times faster than Python.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import subprocess
import tempfile
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import IO, NamedTuple, cast

from deploykit.diagnose import log_forms
from deploykit.lib.errors import NotFound

CONTEXT = 3
"""Lines after a hit that are included: a frame's code, its marks and the exception."""
_LONGEST = 1 << 20
"""Maximum bytes of a line in memory: a log may hold no line end at all."""
_TOO_LONG = 1 << 23
"""Bytes of a line that grep does not get: it would hold twice as many in memory."""
_FIRST, _STEP = 1 << 12, 1 << 16
"""Bytes that are read at once to find the end of a line."""
_AT_ONCE = 1000
"""Files in one command line."""
_WIDEST = 4000
"""Characters that are matched together; longer lines are matched in pieces."""

_NOT_FIXED = "never in any log[0-9]"
"""With one regular expression among the literals, GNU grep 3.8 uses a DFA: twice as fast."""


class Line(NamedTuple):
    """A line with its number from 1; `hit` is False for a line after a hit."""

    number: int
    text: str
    hit: bool


class RawLine(NamedTuple):
    """A line as it was read, with its end: most lines of a failing loop are never decoded."""

    number: int
    raw: bytes
    hit: bool

    def decoded(self) -> Line:
        """The line as text, without its end."""
        text = self.raw.decode(errors="replace").rstrip("\r\n")
        return Line(self.number, text, self.hit)


_Piece = tuple[bytes, bytes, bool]
"""The file that grep names, a line or a part of one, and whether a line begins there."""


def files(
    paths: Sequence[Path], literals: Sequence[str], unread: list[str]
) -> Iterator[tuple[Path, Iterator[RawLine]]]:
    """Scan files, in their order; those without a hit are left out.

    `unread` gets a sentence for each file that cannot be read. One grep reads many of them. The
    lines of a file must be read before the next file is asked for.
    """
    alone = {path: _is_read_alone(path) for path in paths}
    grep = shutil.which("grep") if _names_files() and literals else None
    for is_alone, group in groupby(paths, lambda path: grep is None or alone[path]):
        some = list(group)
        if is_alone or grep is None:
            yield from ((path, _if_readable(path, literals, unread)) for path in some)
            continue
        for start in range(0, len(some), _AT_ONCE):
            yield from _grep_all(grep, some[start : start + _AT_ONCE], literals)


def _if_readable(path: Path, literals: Sequence[str], unread: list[str]) -> Iterator[RawLine]:
    try:
        yield from file(path, literals, unread)
    except NotFound as error:
        unread.append("\n  ".join(filter(None, [error.message, error.hint])))


def _is_read_alone(path: Path) -> bool:
    """Whether a file is none for a grep of many."""
    if not path.is_file():  # a pipe can be opened once only; of others `file` says what is wrong
        return True
    try:
        with path.open("rb", buffering=0) as source:
            plain = log_forms.is_plain(source.read(log_forms.HEAD))
        return not plain or "\n" in str(path.absolute()) or _has_long_line(path)
    except OSError:
        return True


def _has_long_line(path: Path) -> bool:
    """Whether a file may have a line of `_TOO_LONG` bytes, which grep would hold in memory.

    Every line of twice that length holds a piece that begins at a multiple of it.
    """
    size = path.stat().st_size
    with path.open("rb", buffering=0) as source:
        for at in range(0, size - _TOO_LONG, _TOO_LONG):
            source.seek(at)
            sizes = (_FIRST, *[_STEP] * (_TOO_LONG // _STEP))
            if not any(b"\n" in source.read(each) for each in sizes):
                return True
    return False


@cache
def _names_files() -> bool:
    """Whether this grep separates names from lines by a zero byte, as GNU's and BSD's do."""
    argv = ["grep", "--null", "-H", "-a", "-n", "-E", "root", os.devnull]
    done = subprocess.run(argv, stderr=subprocess.DEVNULL, check=False)
    return done.returncode == 1


def _grep_all(
    program: str, paths: Sequence[Path], literals: Sequence[str]
) -> Iterator[tuple[Path, Iterator[RawLine]]]:
    """What one grep finds in files, by file."""
    words = ["--null", "-H", "--", *(os.path.abspath(path) for path in paths)]  # noqa: PTH100 - no link is followed
    by_name = dict(zip(words[3:], paths, strict=True))
    with _grepping(program, words, None, literals) as matching:
        for name, pieces in groupby(_with_names(matching), itemgetter(0)):
            yield by_name[os.fsdecode(name)], _parsed_lines(pieces)


def _with_names(pieces: Iterable[_Piece]) -> Iterator[_Piece]:
    """The pieces, with the names of their files taken from them."""
    name = b""
    for _, piece, begins in pieces:
        if not begins:
            yield name, piece, False
        elif b"\0" in piece:  # else grep's group separator
            name, _, text = piece.partition(b"\0")
            yield name, text, True


def file(
    path: Path | None, literals: Sequence[str], unread: list[str] | None = None
) -> Iterator[RawLine]:
    """Scan a file in any form, or standard input for None. Raises NotFound.

    `unread` gets what is wrong with a file of which only the beginning can be read.
    """
    noted = [] if unread is None else unread
    with _source(path) as source:
        try:
            text = log_forms.opened(source, lambda why: noted.append(f"{path or '-'}: {why}"))
            yield from _scanned(path, source, text, literals)
        except OSError as error:
            raise NotFound(f"cannot read {path or '-'}: {error.strerror}") from error
        except NotFound as error:  # a form that this Python cannot read
            raise NotFound(f"cannot read {path or '-'}: {error.message}", hint=error.hint) from None


def _source(path: Path | None) -> io.BufferedReader:
    try:
        if path and path.is_dir():
            raise NotFound(f"{path} is a folder", hint="name the log files in it")
        return path.open("rb") if path else os.fdopen(os.dup(0), "rb")
    except OSError as error:
        raise NotFound(f"cannot read {path or '-'}: {error.strerror}") from error


def _scanned(
    path: Path | None, source: io.BufferedReader, text: io.BufferedIOBase, literals: Sequence[str]
) -> Iterator[RawLine]:
    grep = shutil.which("grep")
    if not grep or not literals:
        yield from lines(text, literals)
    elif text is source and path and path.is_file() and not _has_long_line(path):
        os.lseek(source.fileno(), 0, os.SEEK_SET)  # its beginning was read to learn its form
        with _grepping(grep, [], source.fileno(), literals) as matching:
            yield from _parsed_lines(matching)
    else:
        yield from _grep_cut(grep, text, literals)


def _grep_cut(
    program: str, source: io.BufferedIOBase, literals: Sequence[str]
) -> Iterator[RawLine]:
    """What grep finds in lines that are cut into pieces on their way to it."""
    cuts: list[int] = []
    end, begin = os.pipe()
    feeder = threading.Thread(target=_cut, args=(source, begin, cuts), daemon=True)
    feeder.start()
    try:
        with _grepping(program, [], end, literals) as matching:
            os.close(end)  # grep's alone from now on: where grep ends, the feeder ends
            for line in _parsed_lines(matching):
                yield line._replace(number=line.number - bisect_right(cuts, line.number))
    finally:
        feeder.join()


def _cut(source: io.BufferedIOBase, sink: int, cuts: list[int]) -> None:
    """Copy lines, long ones as several; `cuts` gets the numbers of those that continue a line."""
    with contextlib.suppress(BrokenPipeError), os.fdopen(sink, "wb") as copy:
        for number, (_, piece, begins) in enumerate(_pieces(source), 1):
            if not begins:
                cuts.append(number)
            copy.write(piece if piece.endswith(b"\n") else piece + b"\n")


@contextlib.contextmanager
def _grepping(
    program: str, words: Sequence[str], source: int | None, literals: Sequence[str]
) -> Iterator[Iterator[_Piece]]:
    """What grep prints, in pieces."""
    with tempfile.NamedTemporaryFile("w", encoding="utf-8") as texts:
        texts.write("\n".join([*map(_escaped, literals), _NOT_FIXED]))
        texts.flush()
        argv = [program, "-a", "-n", "-E", "-A", str(CONTEXT), "-f", texts.name, *words]
        env = {**os.environ, "LC_ALL": "C"}
        with subprocess.Popen(argv, stdin=source, stdout=subprocess.PIPE, env=env) as process:
            yield _pieces(cast("IO[bytes]", process.stdout))


_MARK = re.compile(rb"(\d+)([:-])", re.DOTALL)


def _parsed_lines(pieces: Iterable[_Piece]) -> Iterator[RawLine]:
    """Lines by the number and mark that grep prints: `:` for a hit, `-` for one after it."""
    mark = None
    for _, piece, begins in pieces:
        if begins:
            mark = _MARK.match(piece)
        if mark:  # grep's group separator has none
            yield RawLine(int(mark[1]), piece[mark.end() if begins else 0 :], mark[2] == b":")


def _escaped(text: str) -> str:
    return re.sub(r"([][\\.*^$+?(){}|])", r"\\\1", text)


def _pieces(stream: IO[bytes] | io.BufferedIOBase) -> Iterator[_Piece]:
    """Lines, long ones in pieces, of a file without a name."""
    begins = True
    for raw in iter(lambda: stream.readline(_LONGEST), b""):
        yield b"", raw, begins
        begins = raw.endswith(b"\n")


def lines(source: Iterable[bytes], literals: Sequence[str]) -> Iterator[RawLine]:
    """Scan any source of lines, in Python."""
    search = _any_of(tuple(literals))
    number = left = 0
    parts = (
        _pieces(source)
        if isinstance(source, io.BufferedIOBase)
        else ((b"", raw, True) for raw in source)
    )
    for _, raw, begins in parts:
        number += begins
        if search(raw):
            left = CONTEXT + 1
        if left:
            yield RawLine(number, raw, hit=left == CONTEXT + 1)
            left -= 1


@cache
def _any_of(literals: tuple[str, ...]) -> Callable[[bytes], re.Match[bytes] | None]:
    return re.compile(b"|".join(re.escape(text.encode()) for text in literals)).search


def start(text: str) -> str:
    """The part of a line that is matched together with the next lines."""
    return text[:_WIDEST]


def pieces(text: str) -> Iterator[str]:
    """Split a line at carriage returns, as progress bars write them, and to a limited width."""
    if len(text) <= _WIDEST and "\r" not in text:
        yield text
        return
    for part in text.split("\r"):
        for start in range(0, max(len(part), 1), _WIDEST):
            yield part[start : start + _WIDEST]
