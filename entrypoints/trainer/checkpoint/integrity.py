"""Integrity of checkpoints: ``whole.json`` lists each file with its size and CRC-32.

The checksums detect damage. They are no signature: anyone who can write to the folder can update
them.
"""

from __future__ import annotations

import json
import os
import re
import stat
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from trainer.checkpoint.stored_state import Stored
from trainer.errors import InvalidFile

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

Progress = dict[str, Any]
"""The run's progress, as JSON: at least ``step`` and ``best_step``."""

MANIFEST = "whole.json"
METADATA_FILE = ".metadata"
BLOCK_BYTES = 2**22
"""Bytes read at once for a checksum."""
FOLDER_NAME = re.compile(r"step-([0-9]{8})")
_FILE_NAME = re.compile(r"\.metadata|__[0-9]+_[0-9]+\.distcp")


class VerifiedCheckpoint(NamedTuple):
    """A checkpoint whose manifest, metadata and this rank's share of the files are valid."""

    path: Path
    progress: Progress
    metadata: Metadata

    @property
    def tensors(self) -> Stored:
        """The tensors that it has."""
        kinds: Mapping[str, Any] = self.metadata.state_dict_metadata
        return {name: (kind.properties.dtype, kind.size) for name, kind in kinds.items()}

    def mismatch(self, state: Mapping[str, Tensor]) -> str:
        """Why it cannot fill the tensors of `state`, or ''."""
        stored = self.tensors
        for name, tensor in state.items():
            if name not in stored:
                return f"it does not contain the tensor {name}"
            if stored[name][1] != tensor.size():
                shape, expected = tuple(stored[name][1]), tuple(tensor.size())
                return f"the shape of {name} is {shape}, expected {expected}"
        return ""


def verify(path: Path, rank: int, world_size: int) -> VerifiedCheckpoint | str:
    """Verify a checkpoint, or say what is wrong with it.

    Each rank reads its share of the files; the checkpoint is valid if all ranks say so.
    """
    try:
        progress, files = _read_manifest(path)
        share = sorted(files)[rank::world_size]
        for name in share:
            _verify_file(path / name, *files[name])
        metadata = _read_metadata(path, files, share)
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except InvalidFile as error:
        return str(error)
    except OSError as error:
        return f"cannot read {Path(error.filename or path).name} ({error.strerror})"
    return VerifiedCheckpoint(path, progress, metadata)


def read_metadata(path: Path) -> Metadata:
    """The metadata of a checkpoint, without reading its tensors.

    Raises FileNotFoundError if a file is missing, InvalidFile if one is invalid.
    """
    return _read_metadata(path, _read_manifest(path)[1])


def checksums(folder: Path, pattern: str) -> dict[str, list[int]]:
    """Size and CRC-32 of each matching file, after flushing it to the disk."""
    sums = {}
    for path in folder.glob(pattern):
        fsync(path)
        sums[path.name] = [path.stat().st_size, _crc(path)]
    return sums


def write_manifest(path: Path, progress: Progress, files: dict[str, list[int]]) -> None:
    """Write ``whole.json``, with a CRC-32 of its own, into the folder `path`."""
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
    _regular_size(path / MANIFEST)
    try:
        content = json.loads((path / MANIFEST).read_bytes())
        unchanged = content.pop("crc") == zlib.crc32(json.dumps(content).encode())
        progress, files = content["progress"], content["files"].items()
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidFile(f"{MANIFEST} is not valid ({type(error).__name__})") from None
    if not unchanged:
        raise InvalidFile(f"the checksum of {MANIFEST} does not match")
    if type(progress) is not dict or not all(
        type(progress.get(name)) is int for name in ("step", "best_step")
    ):
        raise InvalidFile(f"{MANIFEST} has no step")
    folder = FOLDER_NAME.fullmatch(path.name)
    if folder and int(folder[1]) != progress["step"]:
        raise InvalidFile(f"the step in {MANIFEST} differs from the folder's name")
    return progress, {name: _file_entry(name, sums) for name, sums in files}


def _file_entry(name: str, sums: Any) -> tuple[int, int]:
    """Check the manifest's entry of a file: its name must be one that torch uses."""
    if not _FILE_NAME.fullmatch(name):
        raise InvalidFile(f"{MANIFEST} lists {ascii(name)[:100]}, which is not a checkpoint file")
    if type(sums) is list and [type(each) for each in sums] == [int, int] and 0 <= sums[0] < 2**63:
        return sums[0], sums[1]
    raise InvalidFile(f"{MANIFEST} lacks a valid size or checksum for {name}")


def _read_metadata(
    path: Path, files: dict[str, tuple[int, int]], share: Sequence[str] = ()
) -> Metadata:
    """The table of the tensors, after a look at those in a `share` of the files."""
    from trainer.checkpoint import dcp_files

    if METADATA_FILE not in files:
        raise InvalidFile(f"{MANIFEST} does not list {METADATA_FILE}")
    _verify_file(path / METADATA_FILE, *files[METADATA_FILE])
    data = (path / METADATA_FILE).read_bytes()
    metadata = dcp_files.parse(data, {name: size for name, (size, _) in files.items()})
    dcp_files.check(path, metadata, share)
    return metadata


def _verify_file(path: Path, size: int, crc: int) -> None:
    actual = _regular_size(path)
    if actual != size:
        raise InvalidFile(f"the size of {path.name} is {actual} bytes, expected {size}")
    if _crc(path) != crc:
        raise InvalidFile(f"the checksum of {path.name} does not match")


def _regular_size(path: Path) -> int:
    """The size of a file in bytes. Raises InvalidFile for a link, a pipe or a device."""
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise InvalidFile(f"{path.name} is not a regular file")
    return status.st_size


def _crc(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            crc = zlib.crc32(block, crc)
    return crc
