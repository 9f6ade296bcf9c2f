"""Atomic checkpoints: a folder ``step-00000120`` is either complete or absent.

torch.distributed.checkpoint (DCP) writes the tensors, each rank its shards, under names that do not
depend on the strategy. ``whole.json`` lists the size and CRC-32 of every file and the run's
progress. Everything is written to ``step-00000120.RUN.saving``, which is renamed at the end.

Checkpoints are untrusted when they are read: `integrity` verifies that one is complete, `dcp_files`
that its table of tensors is consistent. Nothing in a checkpoint can run.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, distributed

from trainer.checkpoint import integrity
from trainer.checkpoint.integrity import Progress, VerifiedCheckpoint
from trainer.errors import ConfigError, UnusableCheckpoints
from trainer.measure import timing
from trainer.optim import weight_average
from trainer.parallel.process_group import DistributedContext

State = dict[str, Tensor]
"""Tensors of model and optimizer by name."""
Check = Callable[[VerifiedCheckpoint], str]
"""Says why a valid checkpoint cannot be used by this run, or ''."""


def _accept(_checkpoint: VerifiedCheckpoint) -> str:
    return ""


class CheckpointManager:
    """Saves checkpoints to a folder that all nodes share, and loads them. Methods are collective.

    The `keep` latest checkpoints are kept, and the best one; of checkpoints that this process has
    neither written nor verified, those that are older than all of these are removed. With
    `background`, tensors are copied to CPU memory, which is pinned and used again by the next save,
    and written while training continues; a save waits for the previous one.
    """

    def __init__(
        self, folder: Path, context: DistributedContext, *, keep: int, background: bool
    ) -> None:
        self._folder = folder
        self._context = context
        self._keep = keep
        # its own group: collectives of a background save must not mix with those of a step
        self._group = distributed.new_group(backend="gloo")
        self._pool = ThreadPoolExecutor(1) if background else None
        self._copy: Callable[[State], State] | None = None
        self._pending: Future[None] | None = None
        self._intact: set[str] = set()
        """Names of the checkpoints that this process has written or verified."""

    def save(self, step: int, state: State, progress: Progress) -> Path:
        """Save `state` and return the checkpoint's path.

        `progress` must be JSON data with ``step`` and ``best_step``. A background save is still in
        progress when this returns.
        """
        self.wait()
        path = self._folder / _folder_name(step)
        if self._pool is None:
            self._write(path, state, progress)
        else:
            self._copy = self._copy or _stager(self._context.device)
            copy = self._copy({name: value.detach() for name, value in state.items()})
            self._pending = self._pool.submit(self._write, path, copy, progress)
        return path

    def wait(self) -> None:
        """Wait for a background save to finish; raises the error with which it failed."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def latest(self, check: Check = _accept) -> VerifiedCheckpoint | None:
        """The latest checkpoint that is valid on every rank, or None where there is none at all.

        Skips and logs checkpoints that are damaged or that `check` gives a reason against. Raises
        UnusableCheckpoints if there are only such, since training would start again at step 0, and
        ConfigError if the nodes do not see the same folder.
        """
        names = self._common([path.name for path in _latest_first(self._folder)])
        checkpoint = self._first([self._folder / name for name in names], check)
        if checkpoint is not None:
            self._intact.add(checkpoint.path.name)
        return checkpoint

    def at(self, step: int, check: Check = _accept) -> VerifiedCheckpoint:
        """The checkpoint of a step. Raises UnusableCheckpoints if it is not valid on every rank."""
        checkpoint = self._first([self._folder / _folder_name(step)], check)
        assert checkpoint is not None  # noqa: S101 - there is a path
        return checkpoint

    def _first(self, paths: Sequence[Path], check: Check) -> VerifiedCheckpoint | None:
        share = (self._context.rank, self._context.world_size)
        return first_valid(paths, check, share, self._all_gather, self._context.log)

    def load(self, path: Path, state: State) -> None:
        """Fill `state` in place from the checkpoint at `path`, saved with any strategy.

        Raises FileNotFoundError or InvalidFile if the checkpoint is not valid.
        """
        from trainer.checkpoint import dcp_files

        dcp_files.load(state, path, integrity.read_metadata(path), self._group)

    @timing.excluded()
    def _write(self, path: Path, state: State, progress: Progress) -> None:
        saving = path.with_name(path.name + _suffix())
        if self._context.is_local_rank_zero:  # once per node, in case nodes do not share the folder
            shutil.rmtree(saving, ignore_errors=True)
        distributed.barrier(group=self._group)
        saving.mkdir(parents=True, exist_ok=True)
        from trainer.checkpoint import dcp_files

        dcp_files.save(state, saving, self._group)
        self._finish(saving, path, progress)

    def _finish(self, saving: Path, path: Path, progress: Progress) -> None:
        """Write the manifest and rename the folder, on every node that has one."""
        parts = self._all_gather(integrity.checksums(saving, f"__{self._context.rank}_*"))
        if self._context.is_rank_zero:
            files = {name: sums for part in parts for name, sums in part.items()}
            files |= integrity.checksums(saving, integrity.METADATA_FILE)
            integrity.write_manifest(saving, progress, files)
        distributed.barrier(group=self._group)
        if self._context.is_rank_zero:
            _rename(saving, path)
        distributed.barrier(group=self._group)
        if self._context.is_local_rank_zero:
            _rename(saving, path)  # if this node has a folder of its own
            self._intact = {name for name in self._intact if name < path.name} | {path.name}
            self._remove_old(progress["best_step"])

    def _remove_old(self, best_step: int) -> None:
        """Remove what is older than the checkpoints to keep.

        Names alone do not count: damaged checkpoints must not displace intact ones.
        """
        names = [path.name for path in _latest_first(self._folder)]
        self._intact.intersection_update(names)
        if len(self._intact) >= self._keep:
            oldest = sorted(self._intact, reverse=True)[self._keep - 1]
            for name in {name for name in names if name < oldest} - {_folder_name(best_step)}:
                # without its manifest, a partly removed checkpoint is not valid
                (self._folder / name / integrity.MANIFEST).unlink(missing_ok=True)
                shutil.rmtree(self._folder / name, ignore_errors=True)
        for path in self._folder.glob("step-*.saving"):
            if path.name == path.stem.partition(".")[0] + _suffix():  # not that of another run
                shutil.rmtree(path, ignore_errors=True)

    def _common(self, names: list[str]) -> list[str]:
        """The names that every rank sees, in the given order."""
        by_rank = self._all_gather(names)
        common = set(by_rank[0]).intersection(*by_rank)
        if any(by_rank) and not common:
            raise ConfigError(
                f"the checkpoint folder {self._folder} differs between nodes: rank 0 sees "
                f"{by_rank[0] or 'nothing'}. Use a folder shared by all nodes, or an empty one"
            )
        return [name for name in names if name in common]

    def _all_gather(self, value: Any) -> list[Any]:
        """The value of each rank."""
        values: list[Any] = [None] * self._context.world_size
        distributed.all_gather_object(values, value, group=self._group)
        return values


def find_latest(folder: Path, check: Check = _accept) -> VerifiedCheckpoint:
    """The latest valid checkpoint that `check` accepts, for one process without a group.

    Of a run that ``--patience`` stopped, it is the best one. `folder` may be a single checkpoint.
    Raises FileNotFoundError if there is no checkpoint, UnusableCheckpoints if there are only such
    that are damaged or not accepted.
    """
    single = is_checkpoint(folder)
    try:
        checkpoint = first_valid([folder] if single else _latest_first(folder), check)
    except UnusableCheckpoints:
        problem = integrity.verify(folder, 0, 1) if single else None
        if not isinstance(problem, str):
            raise
        raise UnusableCheckpoints(
            f"the checkpoint {folder.name} is damaged: {problem}. Restore it from a backup, or "
            "choose another one"
        ) from None
    if checkpoint is None:
        raise FileNotFoundError(f"no checkpoint found in {folder}, where train.py saves them")
    best = folder / _folder_name(checkpoint.progress["best_step"])
    if single or not checkpoint.progress.get("out_of_patience") or best == checkpoint.path:
        return checkpoint
    print(f"--patience stopped this run at {checkpoint.path.name}; the best is {best.name}")
    return cast("VerifiedCheckpoint", first_valid([best], check))


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is one checkpoint, under whatever name it was copied, not several."""
    named = bool(integrity.FOLDER_NAME.fullmatch(folder.name)) and folder.is_dir()
    return named or (folder / integrity.MANIFEST).is_file()


def read(path: Path) -> State:
    """Read all tensors of a checkpoint, unsharded, in one process without a group.

    Raises FileNotFoundError or InvalidFile if the checkpoint is not valid.
    """
    from trainer.checkpoint import dcp_files

    return dcp_files.read(path, integrity.read_metadata(path))


def latest_weights(folder: Path) -> State:
    """The weights of the latest valid checkpoint in `folder`, of any task, by name.

    They are averages, where the checkpoint has them. Raises FileNotFoundError or ValueError if
    there is none.
    """
    return trained_weights(find_latest(folder).path)


def trained_weights(path: Path) -> State:
    """The weights of a checkpoint by name: their averages, where it has them."""
    from trainer.checkpoint import dcp_files

    metadata = integrity.read_metadata(path)
    names = weight_names(metadata.state_dict_metadata)
    state = dcp_files.read(path, metadata, set(names.values()))
    return {name: state[stored] for name, stored in names.items()}


def weight_names(stored: Iterable[str]) -> dict[str, str]:
    """The names under which a checkpoint has the trained weights, by their names in the model."""
    prefixes = ("model.", weight_average.PREFIX)
    return {
        name.removeprefix(prefix): name
        for prefix in prefixes
        for name in stored
        if name.startswith(prefix)
    }


def first_valid(
    paths: Sequence[Path],
    check: Check,
    share: tuple[int, int] = (0, 1),
    all_gather: Callable[[str], list[str]] = lambda value: [value],
    log: Callable[[str], None] = print,
) -> VerifiedCheckpoint | None:
    """The first checkpoint that is valid on every rank and accepted by `check`.

    Each rank verifies its `share` of the files, by rank and world size. Logs why others are
    skipped. None if there are no `paths`; raises UnusableCheckpoints if none of them can be used.
    """
    damaged = rejected = ""
    for path in paths:
        result = integrity.verify(path, *share)
        problem = _any(all_gather(result if isinstance(result, str) else ""))
        if problem:
            damaged = damaged or f"{path.name}: {problem}"
        elif not isinstance(result, str):
            problem = rejected = _any(all_gather(check(result)))
            if not problem:
                return result
        log(f"skipped checkpoint {path}: {problem}")
    if rejected:
        raise UnusableCheckpoints(
            f"no checkpoint matches this model: {rejected}. Use another folder"
        )
    if damaged:
        count = f"none of the {len(paths)} checkpoints" if len(paths) > 1 else "no checkpoint"
        raise UnusableCheckpoints(
            f"{count} in {paths[0].parent} can be read ({damaged}). Restore one from a backup; "
            "to start from scratch instead, remove them or use another folder"
        )
    return None


def _any(problems: Sequence[str]) -> str:
    """The first problem of any rank, or ''."""
    return next(filter(None, problems), "")


def _stager(device: torch.device) -> Callable[[State], State]:
    """Copies tensors to CPU memory. It keeps the memory, pinned if they come from a GPU."""
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    from_gpu = device.type == "cuda"
    options = StagingOptions(
        use_pinned_memory=from_gpu,
        use_shared_memory=False,
        use_async_staging=False,  # the next step changes the tensors
        use_non_blocking_copy=from_gpu,
    )
    return cast("Callable[[State], State]", DefaultStager(options).stage)


def _rename(saving: Path, path: Path) -> None:
    """Rename a complete checkpoint, replacing an older one of the same name.

    Does nothing if another node has renamed it already. The rename itself shows that, whereas
    ``saving.exists()`` may be answered from the stale cache of a network file system.
    """
    try:
        saving.rename(path)
    except FileNotFoundError:
        return
    except OSError:  # the name is taken by an older checkpoint
        shutil.rmtree(path)
        saving.rename(path)
    integrity.fsync(path.parent)


def _latest_first(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-" + 8 * "[0-9]"), reverse=True)


def _suffix() -> str:
    """Ends the name of an unfinished save; two runs with the same folder have their own."""
    run = os.environ.get("DEPLOYKIT_RUN", "")
    return f".{run}.saving" if run else ".saving"


def _folder_name(step: int) -> str:
    return f"step-{step:08d}"
