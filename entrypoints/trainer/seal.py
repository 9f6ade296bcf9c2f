"""What tells a whole checkpoint from half of one: ``whole.json``, with a checksum of every file.

The sums find damage. They are no signature: whoever can write the folder can write new ones.
"""

from __future__ import annotations

import json
import math
import os
import re
import zlib
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from trainer import chunks, contents
from trainer.contents import Contents
from trainer.plain_pickle import Refused

Progress = dict[str, Any]

WHOLE = "whole.json"
CONTENTS = ".metadata"
PIECE = 2**22
"""Bytes checked at once."""
LARGEST = 16 * 2**20
"""Bytes of a ``whole.json``; a file takes some 60."""
_DIGITS = 20
"""No number of 64 bits takes more."""
NAME = re.compile(r"step-([0-9]{8})")
_FILE = re.compile(r"\.metadata|__[0-9]+_[0-9]+\.distcp")


class Checkpoint(NamedTuple):
    """One that is whole, as far as a rank has looked."""

    path: Path
    progress: Progress
    contents: Contents


def checked(path: Path, rank: int, world: int) -> Checkpoint | str:
    """A checkpoint, or what is wrong with it, as far as a rank's share of its files shows."""
    try:
        progress, files = _unseal(path)
        for name, (size, crc) in sorted(files.items())[rank::world]:
            _compare(path / name, size, crc)
        found = _contents(path, files)
        mine = set(sorted(files)[rank::world])
        chunks.check(path, (chunk for chunk in found.chunks.values() if chunk.file in mine))
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except Refused as error:
        return str(error)
    except OSError as error:
        return f"{Path(error.filename or path).name} cannot be read ({error.strerror})"
    return Checkpoint(path, progress, found)


def contents_of(path: Path) -> Contents:
    """What a checkpoint holds; of its files, only this table is read.

    Raises FileNotFoundError where it is not whole, Refused where it holds what it should not.
    """
    _, files = _unseal(path)
    return _contents(path, files)


def sums(folder: Path, pattern: str) -> dict[str, list[int]]:
    """Size and CRC-32 of each file, which is on the disk when this returns."""
    found = {}
    for path in folder.glob(pattern):
        sync(path)
        with path.open("rb") as file:
            found[path.name] = [path.stat().st_size, _crc(file)]
    return found


def write(path: Path, progress: Progress, files: dict[str, list[int]]) -> None:
    """Write ``whole.json`` into the folder `path`, with a CRC-32 of its own.

    Raises ValueError where nobody could read the checkpoint again.
    """
    if files[CONTENTS][0] > contents.LARGEST:
        raise ValueError(f"{path} has too many tensors: {CONTENTS} is larger than may be read")
    content = {"progress": progress, "files": files}
    crc = zlib.crc32(json.dumps(content).encode())
    (path / WHOLE).write_text(json.dumps({**content, "crc": crc}, indent=1))
    sync(path / WHOLE)


def sync(path: Path) -> None:
    """Make a file, or the names in a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unseal(path: Path) -> tuple[Progress, dict[str, tuple[int, int]]]:
    """Progress, and the size and CRC-32 of each file."""
    with chunks.open_plain(path / WHOLE) as file:
        data = file.read(LARGEST + 1)
    if len(data) > LARGEST:
        raise Refused(f"{WHOLE} is larger than {LARGEST >> 20} MiB")
    try:
        content = json.loads(data, parse_constant=_constant, parse_int=_integer)
        crc = content.pop("crc")
        same = crc == zlib.crc32(json.dumps(content).encode())
        progress, files = content["progress"], content["files"].items()
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise Refused(f"{WHOLE} cannot be read ({type(error).__name__})") from None
    if not same:
        raise Refused(f"the content of {WHOLE} has changed since it was written")
    return _progress(path, progress), {name: _file(name, sums) for name, sums in files}


def _progress(path: Path, found: Any) -> Progress:
    """What every trainer keeps: its step, which is in the folder's name too, and the best one."""
    named = NAME.fullmatch(path.name)
    if type(found) is not dict or not all(type(found.get(k)) is int for k in ("step", "best_step")):
        raise Refused(f"{WHOLE} does not tell the step")
    if named and int(named[1]) != found["step"]:
        raise Refused(f"{WHOLE} is of another step than the folder")
    if found["best_step"] < 0:
        raise Refused(f"{WHOLE} names a best step below 0")
    return found


def _file(name: str, sums: Any) -> tuple[int, int]:
    """Size and CRC-32 of a file; its name must be one that torch gives."""
    if not _FILE.fullmatch(name):
        raise Refused(f"{WHOLE} names {ascii(name)[:100]}, which is no file of a checkpoint")
    if type(sums) is list and len(sums) == 2:  # noqa: PLR2004 - size and sum
        size, crc = sums
        if type(size) is int and type(crc) is int and size >= 0:
            return size, crc
    raise Refused(f"{WHOLE} does not tell the size of {name}")


def _contents(path: Path, files: dict[str, tuple[int, int]]) -> Contents:
    if CONTENTS not in files:
        raise Refused(f"{WHOLE} does not list {CONTENTS}")
    with chunks.open_plain(path / CONTENTS) as file:
        data = file.read(contents.LARGEST + 1)
    if len(data) > contents.LARGEST:
        raise Refused(f"{CONTENTS} is larger than {contents.LARGEST >> 20} MiB")
    if (len(data), zlib.crc32(data)) != files[CONTENTS]:
        raise Refused(f"the content of {CONTENTS} has changed since it was written")
    return contents.parse(data, {name: size for name, (size, _) in files.items()})


def _compare(path: Path, size: int, crc: int) -> None:
    with chunks.open_plain(path) as file:
        found = os.fstat(file.fileno()).st_size
        if found != size:
            raise Refused(f"{path.name} has {found} bytes instead of {size}")
        if _crc(file) != crc:
            raise Refused(f"the content of {path.name} has changed since it was written")


def _crc(file: BinaryIO) -> int:
    crc = 0
    while piece := file.read(PIECE):
        crc = zlib.crc32(piece, crc)
    return crc


def _integer(digits: str) -> int:
    if len(digits) > _DIGITS:
        raise ValueError(digits)
    return int(digits)


def _constant(word: str) -> float:
    """A best loss is infinite until there is one; nothing else is."""
    if word != "Infinity":
        raise ValueError(word)
    return math.inf
