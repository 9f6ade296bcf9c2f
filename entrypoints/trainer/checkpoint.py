"""Checkpoints that are whole or not there: a folder ``step-00000120`` for each.

torch.distributed.checkpoint writes the tensors, each rank its own, under names that do not depend
on the strategy. Beside them ``whole.json`` holds the size and CRC-32 of every file and the run's
progress. All of it is written in ``step-00000120.saving``, which gets its name at the end.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import warnings
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata

from trainer import waiting
from trainer.group import Place

State = dict[str, Tensor]
Progress = dict[str, Any]

WHOLE = "whole.json"
PIECE = 2**22
"""Bytes checked at once."""


class Keeper:
    """Saves to and loads from one folder, which all nodes share; every rank calls together.

    `keep` of the newest checkpoints stay, and the best one. With `background`, tensors are copied
    and written while training goes on; a save first waits for the one before.
    """

    def __init__(self, folder: Path, place: Place, *, keep: int, background: bool) -> None:
        self._folder = folder
        self._place = place
        self._keep = keep
        # of its own: collectives of a save in the background must not meet those of a step
        self._group = distributed.new_group(backend="gloo")
        self._pool = ThreadPoolExecutor(1) if background else None
        self._running: Future[None] | None = None

    def save(self, step: int, state: State, progress: Progress) -> Path:
        """Write `state`; where in the background, return before it is there."""
        self.wait()
        path = self._folder / _name(step)
        if self._pool is None:
            self._write(path, state, progress)
        else:
            copy = {name: value.detach().to("cpu", copy=True) for name, value in state.items()}
            self._running = self._pool.submit(self._write, path, copy, progress)
        return path

    def wait(self) -> None:
        """Return when nothing is being written; raise what went wrong there."""
        if self._running is not None:
            self._running.result()
            self._running = None

    def newest(self) -> tuple[Path, Progress] | None:
        """The newest checkpoint that is whole for every rank, and its progress, or None.

        A broken one is named and passed over.
        """
        names = self._agreed([path.name for path in _newest_first(self._folder)])
        for name in names:
            path = self._folder / name
            faults = self._all(_fault(path, self._place.rank, self._place.world))
            if not any(faults):
                return path, _unseal(path / WHOLE)["progress"]
            first = next(filter(None, faults))
            self._place.say(f"{path} is not whole, trying the one before: {first}")
        return None

    def load(self, path: Path, state: State) -> None:
        """Fill `state` in place from the checkpoint at `path`, whatever layout it was saved in."""
        dcp.load(
            state,
            storage_reader=_SafeReader(path),
            planner=DefaultLoadPlanner(),
            process_group=self._group,
        )

    @waiting.aside()
    def _write(self, path: Path, state: State, progress: Progress) -> None:
        saving = path.with_name(f"{path.name}.saving")
        if self._place.first_of_node:  # the nodes may share the folder, or not
            shutil.rmtree(saving, ignore_errors=True)
        distributed.barrier(group=self._group)
        saving.mkdir(parents=True, exist_ok=True)
        dcp.save(
            state,
            storage_writer=FileSystemWriter(saving),
            planner=DefaultSavePlanner(dedup_save_to_lowest_rank=True),
            process_group=self._group,
        )
        self._finish(saving, path, progress)

    def _finish(self, saving: Path, path: Path, progress: Progress) -> None:
        """Write the list of files, and give the folder its name, on every node that has one."""
        sums = self._all(_sums(saving, f"__{self._place.rank}_*"))
        if self._place.first:
            files = {name: value for part in sums for name, value in part.items()}
            files |= _sums(saving, ".metadata")
            _seal(saving / WHOLE, {"progress": progress, "files": files})
        distributed.barrier(group=self._group)
        if self._place.first:
            _rename(saving, path)
        distributed.barrier(group=self._group)
        if self._place.first_of_node:
            _rename(saving, path)  # where the node has a folder of its own
            self._remove_old(progress["best_step"])

    def _remove_old(self, best: int) -> None:
        names = [path.name for path in _newest_first(self._folder)]
        for name in set(names[self._keep :]) - {_name(best)}:
            (self._folder / name / WHOLE).unlink(missing_ok=True)  # half a removal looks like none
            shutil.rmtree(self._folder / name, ignore_errors=True)
        for path in self._folder.glob("step-*.saving"):
            shutil.rmtree(path, ignore_errors=True)

    def _agreed(self, names: list[str]) -> list[str]:
        """The names that every rank sees, in the order given."""
        seen = self._all(names)
        common = set(seen[0]).intersection(*seen)
        if any(seen) and not common:
            raise ValueError(
                f"the checkpoint folder {self._folder} is not the same on every node: rank 0 sees "
                f"{seen[0] or 'nothing'}. Name a folder that all nodes share, or an empty one"
            )
        return [name for name in names if name in common]

    def _all(self, value: Any) -> list[Any]:
        """What each rank passed."""
        box: list[Any] = [None] * self._place.world
        distributed.all_gather_object(box, value, group=self._group)
        return box


def newest_alone(folder: Path) -> tuple[Path, Progress]:
    """The newest whole checkpoint, for one process without a group, and its progress.

    Raises FileNotFoundError where there is none.
    """
    for path in _newest_first(folder):
        fault = _fault(path, rank=0, world=1)
        if not fault:
            return path, _unseal(path / WHOLE)["progress"]
        print(f"{path} is not whole, trying the one before: {fault}", flush=True)
    raise FileNotFoundError(f"{folder} holds no checkpoint; train.py writes one there")


def read(path: Path) -> State:
    """Every tensor of a checkpoint, whole, for one process that needs no group."""
    reader = _SafeReader(path)
    tensors = reader.read_metadata().state_dict_metadata.items()
    state = {name: torch.empty(kind.size, dtype=kind.properties.dtype) for name, kind in tensors}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(state, storage_reader=reader, planner=DefaultLoadPlanner(), no_dist=True)
    return state


class _SafeReader(FileSystemReader):
    """Reads the table of contents, a pickle, without running any code that it names."""

    def read_metadata(self, *_args: Any, **_options: Any) -> Metadata:
        with Path(self.path, ".metadata").open("rb") as file:
            metadata: Metadata = _Unpickler(file).load()
        return metadata


class _Unpickler(pickle.Unpickler):
    """Knows what torch's table of contents is made of: its own classes, and few names beside."""

    def find_class(self, module: str, name: str) -> Any:
        harmless = {("pathlib", "PosixPath"), ("torch.serialization", "_get_layout")}
        torchs = module == "torch" or module.startswith("torch.distributed.checkpoint.")
        if torchs or (module, name) in harmless:
            found = super().find_class(module, name)
            if not torchs or isinstance(found, (type, torch.dtype)):
                return found
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint")


def _fault(path: Path, rank: int, world: int) -> str:
    """What is wrong with a checkpoint, as far as a rank's share of its files shows; or ''."""
    try:
        files = _unseal(path / WHOLE)["files"]
        for name, (size, crc) in sorted(files.items())[rank::world]:
            found = (path / name).stat().st_size
            if found != size:
                return f"{name} has {found} bytes instead of {size}"
            if _crc(path / name) != crc:
                return f"the content of {name} has changed since it was written"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (ValueError, KeyError, TypeError, OSError) as error:
        return f"{WHOLE} cannot be read ({error})"
    return ""


def _sums(folder: Path, pattern: str) -> dict[str, list[int]]:
    """Size and CRC-32 of each file, which is on the disk when this returns."""
    found = {}
    for file in folder.glob(pattern):
        _sync(file)
        found[file.name] = [file.stat().st_size, _crc(file)]
    return found


def _crc(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            crc = zlib.crc32(piece, crc)
    return crc


def _seal(path: Path, content: dict[str, Any]) -> None:
    """Write `content` with a CRC-32 of its own."""
    crc = zlib.crc32(json.dumps(content).encode())
    path.write_text(json.dumps({**content, "crc": crc}, indent=1))
    _sync(path)


def _unseal(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_bytes())
    if content.pop("crc") != zlib.crc32(json.dumps(content).encode()):
        raise ValueError("its content has changed since it was written")
    return content


def _rename(saving: Path, path: Path) -> None:
    """Give a finished checkpoint its name, in the place of an old one of that name.

    Once another node has done it, nothing is touched: the answer of the rename tells, and not
    whether `saving` seems to exist, since the cache of a network file system may be old.
    """
    try:
        saving.rename(path)
    except FileNotFoundError:
        return
    except OSError:  # an old one is in the way
        shutil.rmtree(path)
        saving.rename(path)
    _sync(path.parent)


def _newest_first(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-" + 8 * "[0-9]"), reverse=True)


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _sync(path: Path) -> None:
    """Make a file, or the names in a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
