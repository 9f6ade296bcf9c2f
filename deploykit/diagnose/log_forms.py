"""The forms in which logs come: compressed, in UTF-16, or as JSON records, as lines of text.

A form is recognized by the first bytes. Forms may be nested: records in a compressed file.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from typing import Any

from deploykit.lib.errors import NotFound

HEAD = 1 << 12
"""Bytes at the beginning by which a form is recognized."""
_CHUNK = 1 << 16
_NESTED = 3
_GZIP, _ZSTD = b"\x1f\x8b\x08", b"\x28\xb5\x2f\xfd"
_TEXTS = ("log", "message", "MESSAGE", "msg", "textPayload", "jsonPayload")
"""Keys of the text: Docker and fluentd; CloudWatch; journald; loggers; Google Cloud."""
_TIMES = ("time", "timestamp", "@timestamp", "ts", "asctime", "__REALTIME_TIMESTAMP")
_LEVELS = ("level", "levelname", "severity")
_CALM = frozenset({"TRACE", "DEBUG", "INFO", "WARN", "WARNING"})
_RECORD = re.compile(rb'\s*[\[{][^\0]{0,4000}?"(?:' + "|".join(_TEXTS).encode() + rb')"\s*:')
_PRETTY = re.compile(r'\s*"(' + "|".join(_TEXTS) + r')"\s*:\s*("(?:[^"\\]|\\.)*")\s*,?\s*')
_CONTAINER = re.compile(r"(?:^|/)(algo-\d+)\b")
_UNITS = ((1e17, 1e9), (1e14, 1e6), (1e11, 1e3), (1e8, 1.0))
"""Numbers of seconds since 1970 are at least this large in that unit."""


def is_plain(head: bytes) -> bool:
    """Whether a file that begins so is text, one line after the other."""
    return _form(head) is None


def opened(source: io.BufferedIOBase, cut: Callable[[str], None]) -> io.BufferedIOBase:
    """Lines of text in UTF-8 of a log in any form; `source` itself where it is that already.

    `cut` is called with what is wrong where a compressed log ends too early. Raises NotFound for
    a form that this Python cannot read.
    """
    text = source
    for _ in range(_NESTED):
        form = _form(_head(text))
        if form is None:
            break
        text = io.BufferedReader(_Chunks(form(text, cut)), _CHUNK)
    return text


_Form = Callable[[io.BufferedIOBase, Callable[[str], None]], Iterator[bytes]]


def _head(source: io.BufferedIOBase) -> bytes:
    peek = getattr(source, "peek", None)
    return peek(HEAD)[:HEAD] if peek else b""


def _form(head: bytes) -> _Form | None:
    if head.startswith(_GZIP):
        return _gunzipped
    if head.startswith(_ZSTD):
        return _unzstd
    if encoding := _utf16(head):
        return lambda source, _: _recoded(source, encoding)
    return (lambda source, _: _records(source)) if _RECORD.match(head) else None


def _utf16(head: bytes) -> str | None:
    """The encoding of text whose ASCII characters have a zero byte before or after them."""
    for mark, name in ((codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be")):
        if head.startswith(mark):
            return name
    for start, name in ((1, "utf-16-le"), (0, "utf-16-be")):
        if len(head) > 1 and head[start::2].count(0) > 0.9 * (len(head) // 2) > head.count(0) / 2:
            return name
    return None


def _gunzipped(source: io.BufferedIOBase, cut: Callable[[str], None]) -> Iterator[bytes]:
    with gzip.GzipFile(fileobj=source) as text:
        yield from _whole(text, cut)


def _unzstd(source: io.BufferedIOBase, cut: Callable[[str], None]) -> Iterator[bytes]:
    try:
        from compression import zstd  # type: ignore[import-not-found,unused-ignore]  # 3.14
    except ImportError:
        hint = "decompress it first: zstd -d FILE   (or use Python 3.14 or later)"
        raise NotFound("it is compressed with zstd", hint=hint) from None
    with zstd.ZstdFile(source) as text:
        yield from _whole(text, cut)


def _whole(text: Any, cut: Callable[[str], None]) -> Iterator[bytes]:
    """All that can be decompressed."""
    try:
        while chunk := text.read1(_CHUNK):
            yield chunk
    except (OSError, EOFError, zlib.error, ValueError) as error:
        cut(f"only the beginning can be decompressed: {error}")


def _recoded(source: io.BufferedIOBase, encoding: str) -> Iterator[bytes]:
    decoder = codecs.getincrementaldecoder(encoding)(errors="replace")
    while chunk := source.read(_CHUNK):
        yield decoder.decode(chunk).removeprefix("\ufeff").encode()


def _records(source: io.BufferedIOBase) -> Iterator[bytes]:
    """The messages of JSON records: one in each line, all in one, or one in many lines."""
    for raw in iter(lambda: source.readline(1 << 20), b""):
        text = raw.decode(errors="replace")
        if pretty := _PRETTY.fullmatch(text):
            yield from _lines("", _loaded(pretty[2]))
            continue
        record = _loaded(text.strip().rstrip(","))
        if record is not None:
            yield from _of_record(record)
        elif '"' not in text or not text.lstrip().startswith(('"', "{", "[")):
            yield raw if raw.strip(b"{}[], \r\n") else b""
        else:  # a part of a long line
            for match in _PRETTY.finditer(text):
                yield from _lines("", _loaded(match[2]))


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _of_record(record: Any) -> Iterator[bytes]:
    """The text of a record, or of a list of them; nothing where it has none."""
    if isinstance(record, list):
        for one in record:
            yield from _of_record(one)
    elif isinstance(record, dict):
        if isinstance(events := record.get("events"), list):
            yield from _of_record(events)
            return
        text = next((record[key] for key in _TEXTS if key in record), None)
        yield from _of_record(text) if isinstance(text, dict) else _lines(_marks(record), text)


def _lines(marks: str, text: Any) -> Iterator[bytes]:
    if isinstance(text, list):  # bytes, as journald writes what is no plain text
        numbers = [one for one in text if isinstance(one, int) and 0 <= one < 256]  # noqa: PLR2004
        text = bytes(numbers).decode(errors="replace")
    if isinstance(text, str):
        for line in text.rstrip("\n").split("\n"):
            yield f"{marks}{line}\n".encode(errors="replace")


def _marks(record: dict[str, Any]) -> str:
    """Time, container, rank and level of a record, as lines of text have them."""
    stream = record.get("logStreamName")
    container = _CONTAINER.search(stream) if isinstance(stream, str) else None
    level = str(next((record[key] for key in _LEVELS if key in record), "")).upper()
    rank = record.get("rank")
    return (
        _time(next((record[key] for key in _TIMES if key in record), None))
        + (f"{container[1]} | " if container else "")
        + (f"[rank{rank}]: " if isinstance(rank, int) and not isinstance(rank, bool) else "")
        + (f"[{level}] " if level in _CALM else "")
    )


def _time(value: Any) -> str:
    """A time in ISO format and a blank; empty where the record has none."""
    if isinstance(value, str) and re.match(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d", value):
        return value.replace(" ", "T") + " "
    if isinstance(value, str) and re.fullmatch(r"\d{9,19}", value):
        value = int(value)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return ""
    for least, unit in _UNITS:
        if least <= value < least * 1e4:
            moment = datetime.fromtimestamp(value / unit, UTC)
            return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z ")
    return ""


class _Chunks(io.RawIOBase):
    """A stream of the bytes that an iterator yields."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        super().__init__()
        self._chunks, self._left = iter(chunks), b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._left:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._left = chunk
        part = self._left[: len(buffer)]
        buffer[: len(part)] = part
        self._left = self._left[len(part) :]
        return len(part)
