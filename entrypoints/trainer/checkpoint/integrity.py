"""Integrity of checkpoints: ``whole.json`` lists each file with its size and CRC-32.

The checksums detect damage. They are no signature: anyone who can write to the folder can update
them.
"""

from __future__ import annotations

import json
import math
import os
import re
import zlib
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from trainer.checkpoint import metadata, tensor_reader
from trainer.checkpoint.metadata import CheckpointMetadata
from trainer.checkpoint.safe_pickle import InvalidFile

Progress = dict[str, Any]
"""The run's progress, as JSON: at least ``step`` and ``best_step``."""

MANIFEST = "whole.json"
METADATA_FILE = ".metadata"
BLOCK_BYTES = 2**22
"""Bytes read at once for a checksum."""
MAX_BYTES = 16 * 2**20
"""Maximum size of a manifest; each file takes about 60 bytes."""
_MAX_DIGITS = 20
"""A 64-bit integer has at most 20 digits."""
FOLDER_NAME = re.compile(r"step-([0-9]{8})")
_FILE_NAME = re.compile(r"\.metadata|__[0-9]+_[0-9]+\.distcp")


class VerifiedCheckpoint(NamedTuple):
    """A checkpoint whose manifest, metadata and this rank's share of the files are valid."""

    path: Path
    progress: Progress
    metadata: CheckpointMetadata


def verify(path: Path, rank: int, world_size: int) -> VerifiedCheckpoint | str:
    """Verify a checkpoint, or say what is wrong with it.

    Each rank reads its share of the files; the checkpoint is valid if all ranks say so.
    """
    try:
        progress, files = _read_manifest(path)
        names = sorted(files)[rank::world_size]
        for name in names:
            _verify_file(path / name, *files[name])
        table = _read_metadata(path, files)
        chunks = (chunk for chunk in table.chunks.values() if chunk.file in names)
        tensor_reader.validate(path, chunks)
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except InvalidFile as error:
        return str(error)
    except OSError as error:
        return f"cannot read {Path(error.filename or path).name} ({error.strerror})"
    return VerifiedCheckpoint(path, progress, table)


def read_metadata(path: Path) -> CheckpointMetadata:
    """The metadata of a checkpoint, without reading its tensors.

    Raises FileNotFoundError if a file is missing, InvalidFile if one is invalid.
    """
    _, files = _read_manifest(path)
    return _read_metadata(path, files)


def checksums(folder: Path, pattern: str) -> dict[str, list[int]]:
    """Size and CRC-32 of each matching file, after flushing it to the disk."""
    sums = {}
    for path in folder.glob(pattern):
        fsync(path)
        with path.open("rb") as file:
            sums[path.name] = [path.stat().st_size, _crc(file)]
    return sums


def write_manifest(path: Path, progress: Progress, files: dict[str, list[int]]) -> None:
    """Write ``whole.json``, with a CRC-32 of its own, into the folder `path`.

    Raises ValueError if the checkpoint has more tensors than a reader accepts.
    """
    if files[METADATA_FILE][0] > metadata.MAX_BYTES:
        limit = metadata.MAX_BYTES >> 20
        raise ValueError(f"too many tensors in {path}: {METADATA_FILE} exceeds {limit} MiB")
    content = {"progress": progress, "files": files}
    crc = zlib.crc32(json.dumps(content).encode())
    (path / MANIFEST).write_text(json.dumps({**content, "crc": crc}, indent=1))
    fsync(path / MANIFEST)


def fsync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_manifest(path: Path) -> tuple[Progress, dict[str, tuple[int, int]]]:
    """The progress, and the size and CRC-32 of each file."""
    data = _read_limited(path / MANIFEST, MAX_BYTES)
    try:
        content = json.loads(data, parse_constant=_constant, parse_int=_integer)
        crc = content.pop("crc")
        unchanged = crc == zlib.crc32(json.dumps(content).encode())
        progress, files = content["progress"], content["files"].items()
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidFile(f"{MANIFEST} is not valid ({type(error).__name__})") from None
    if not unchanged:
        raise InvalidFile(f"the checksum of {MANIFEST} does not match")
    return _progress(path, progress), {name: _file_entry(name, sums) for name, sums in files}


def _progress(path: Path, progress: Any) -> Progress:
    """Check the fields that every checkpoint has: its own step and the best one."""
    folder = FOLDER_NAME.fullmatch(path.name)
    if type(progress) is not dict or not all(
        type(progress.get(name)) is int for name in ("step", "best_step")
    ):
        raise InvalidFile(f"{MANIFEST} has no step")
    if folder and int(folder[1]) != progress["step"]:
        raise InvalidFile(f"the step in {MANIFEST} is not that of the folder's name")
    if progress["best_step"] < 0:
        raise InvalidFile(f"the best step in {MANIFEST} is negative")
    return progress


def _file_entry(name: str, sums: Any) -> tuple[int, int]:
    """Check the manifest's entry of a file: its name must be one that torch uses."""
    if not _FILE_NAME.fullmatch(name):
        raise InvalidFile(f"{MANIFEST} lists {ascii(name)[:100]}, which is not a checkpoint file")
    if type(sums) is list and len(sums) == 2:  # noqa: PLR2004 - size and checksum
        size, crc = sums
        if type(size) is int and type(crc) is int and size >= 0:
            return size, crc
    raise InvalidFile(f"{MANIFEST} has no valid size and checksum for {name}")


def _read_metadata(path: Path, files: dict[str, tuple[int, int]]) -> CheckpointMetadata:
    if METADATA_FILE not in files:
        raise InvalidFile(f"{MANIFEST} does not list {METADATA_FILE}")
    data = _read_limited(path / METADATA_FILE, metadata.MAX_BYTES)
    if (len(data), zlib.crc32(data)) != files[METADATA_FILE]:
        raise InvalidFile(f"the checksum of {METADATA_FILE} does not match")
    return metadata.parse(data, {name: size for name, (size, _) in files.items()})


def _read_limited(path: Path, limit: int) -> bytes:
    with tensor_reader.open_regular_file(path) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise InvalidFile(f"{path.name} exceeds {limit >> 20} MiB")
    return data


def _verify_file(path: Path, size: int, crc: int) -> None:
    with tensor_reader.open_regular_file(path) as file:
        actual = os.fstat(file.fileno()).st_size
        if actual != size:
            raise InvalidFile(f"the size of {path.name} is {actual} bytes, expected {size}")
        if _crc(file) != crc:
            raise InvalidFile(f"the checksum of {path.name} does not match")


def _crc(file: BinaryIO) -> int:
    crc = 0
    while block := file.read(BLOCK_BYTES):
        crc = zlib.crc32(block, crc)
    return crc


def _integer(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(digits)
    return int(digits)


def _constant(word: str) -> float:
    """Allow Infinity, the best loss before the first evaluation, but not NaN."""
    if word != "Infinity":
        raise ValueError(word)
    return math.inf
