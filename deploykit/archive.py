"""A tar stream without owners and clocks, known by its hash; gzipped where it is written."""

from __future__ import annotations

import gzip
import hashlib
import tarfile
from collections.abc import Iterable
from typing import IO, TYPE_CHECKING

from deploykit.source_tree import Entry

if TYPE_CHECKING:
    from hashlib import _Hash

    Mark = tuple[_Hash, int]


class Archive:
    """Entries are added in their order; `out` is None where only the hash is wanted."""

    def __init__(self, out: IO[bytes] | None = None) -> None:
        self._digest = hashlib.sha256()
        self._size = 0
        self._out = gzip.GzipFile("", "wb", 6, out, mtime=0) if out is not None else None

    def add(self, entry: Entry, content: Iterable[bytes]) -> None:
        """An entry with its bytes, of which there are as many as it says."""
        self._write(_header(entry))
        for piece in content:
            self._write(piece)
        self._write(b"\0" * (-entry.size % tarfile.BLOCKSIZE))

    def mark(self) -> Mark:
        """Where the stream is now, for `reset`."""
        return self._digest.copy(), self._size

    def reset(self, mark: Mark) -> None:
        """Forget what was added since; only where nothing is written."""
        self._digest, self._size = mark

    def close(self) -> str:
        """Write the end of the archive; the SHA-256 of the stream before compression."""
        end = 2 * tarfile.BLOCKSIZE
        self._write(b"\0" * (end + -(self._size + end) % tarfile.RECORDSIZE))
        if self._out is not None:
            self._out.close()
        return self._digest.hexdigest()

    def _write(self, data: bytes) -> None:
        self._digest.update(data)
        self._size += len(data)
        if self._out is not None:
            self._out.write(data)


def _header(entry: Entry) -> bytes:
    info = tarfile.TarInfo(entry.path)
    info.mode, info.size = entry.mode, entry.size
    if entry.target is not None:
        info.type, info.linkname = tarfile.SYMTYPE, entry.target
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
