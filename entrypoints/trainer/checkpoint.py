"""Checkpoints that are whole or not there: a folder ``step-00000120`` for each.

torch.distributed.checkpoint writes the tensors, each rank its own, under names that do not depend
on the strategy. Beside them ``whole.json`` holds the size and CRC-32 of every file and the run's
progress. All of it is written in ``step-00000120.saving``, which gets its name at the end.

A checkpoint may come from anybody. `seal` checks that it is whole, `contents` that it says nothing
impossible, and `chunks` reads it; none of them unpickles, so nothing in it can run.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, distributed
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from trainer import chunks, seal, waiting
from trainer.group import Place
from trainer.seal import Checkpoint, Progress

State = dict[str, Tensor]
Unfit = Callable[[Checkpoint], str]
"""Why a whole checkpoint cannot be used, or ''."""


def _fits(_found: Checkpoint) -> str:
    return ""


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

    def newest(self, unfit: Unfit = _fits) -> tuple[Path, Progress] | None:
        """The newest checkpoint that is whole for every rank, and its progress, or None.

        A broken one is named and passed over, and so is one for which `unfit` gives a reason.
        Raises ValueError where there are whole ones, and none that fits.
        """
        names = self._agreed([path.name for path in _newest_first(self._folder)])
        search = _Search(self._place.rank, self._place.world, self._all, self._place.say)
        found = search.first((self._folder / name for name in names), unfit)
        return None if found is None else (found.path, found.progress)

    def load(self, path: Path, state: State) -> None:
        """Fill `state` in place from the checkpoint at `path`, whatever layout it was saved in."""
        dcp.load(
            state,
            storage_reader=chunks.Reader(path, seal.contents_of(path)),
            planner=chunks.Planner(),
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
        sums = self._all(seal.sums(saving, f"__{self._place.rank}_*"))
        if self._place.first:
            files = {name: value for part in sums for name, value in part.items()}
            files |= seal.sums(saving, seal.CONTENTS)
            seal.write(saving, progress, files)
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
            (self._folder / name / seal.WHOLE).unlink(
                missing_ok=True
            )  # half a removal looks like none
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


def newest_alone(folder: Path, unfit: Unfit = _fits) -> Checkpoint:
    """The newest whole checkpoint that is not `unfit`, for one process without a group.

    Raises FileNotFoundError where there is none.
    """
    search = _Search(0, 1, gather=lambda value: [value], say=partial(print, flush=True))
    found = search.first(_newest_first(folder), unfit)
    if found is None:
        raise FileNotFoundError(f"{folder} holds no checkpoint; train.py writes one there")
    return found


def read(path: Path) -> State:
    """Every tensor of a checkpoint, whole, for one process that needs no group.

    Raises Refused where it holds what a checkpoint should not.
    """
    return chunks.read(path, seal.contents_of(path))


class _Search(NamedTuple):
    """How checkpoints are tried by every rank together, each looking at its share of the files."""

    rank: int
    world: int
    gather: Callable[[Any], list[Any]]
    say: Callable[[str], None]

    def first(self, paths: Iterable[Path], unfit: Unfit) -> Checkpoint | None:
        """The first that is whole for every rank and not `unfit`; others are named, with why.

        Raises ValueError where there are whole ones, and none that fits.
        """
        other = ""
        for path in paths:
            found = seal.checked(path, self.rank, self.world)
            fault = self._any(found if isinstance(found, str) else "")
            if not fault and not isinstance(found, str):
                fault = other = self._any(unfit(found))
                if not fault:
                    return found
            self.say(f"{path} is not whole, trying the one before: {fault}")
        if other:
            raise ValueError(f"no checkpoint fits this model: {other}. Name another folder")
        return None

    def _any(self, fault: str) -> str:
        """The first fault that a rank has found."""
        return next(filter(None, self.gather(fault)), "")


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
    seal.sync(path.parent)


def _newest_first(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-" + 8 * "[0-9]"), reverse=True)


def _name(step: int) -> str:
    return f"step-{step:08d}"
