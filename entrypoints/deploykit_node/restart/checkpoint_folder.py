"""The checkpoints in a folder, as any script may name them: which are complete, which are old.

A folder is one checkpoint. Files with the same numbers in their names are one, as ``model_5.pt``
and ``optim_5.pt`` are, and so are all files without a number, which a script writes again and again
(``last.pt``). A number is a step or an epoch unless it counts ranks, shards or the like. A file
that is not named like a checkpoint stands for itself.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from deploykit_node import outputs
from deploykit_node.outputs import KEPT, File
from deploykit_node.restart.checkpoints import ENDINGS, METADATA, UNFINISHED

_MANIFESTS = (METADATA, "whole.json")
"""Files that are written last: by ``torch.distributed.checkpoint``, and by our trainer."""
SHARD = ".distcp"
"""Ending of files that `torch.distributed.checkpoint` names by rank."""
_NUMBER = re.compile(
    r"(?P<part>(?<![a-z])(?:rank|shard|part|node|worker|proc|gpu|device|of|[dtpcem]p"
    r"|v|version|run|seed|fold|trial)[-_=]?)?(?P<number>\d+)(?P<of>(?=[-_]of[-_]\d))?",
    re.IGNORECASE,
)
_NEVER_OLD = re.compile(r"(?<![a-z])(best|last|latest|final)(?![a-z])", re.IGNORECASE)
"""Such a checkpoint is written again, or is the one to keep."""


class Checkpoint(NamedTuple):
    """What belongs together in the folder."""

    name: str
    files: Mapping[str, File]
    """By their paths below the folder."""

    @property
    def saved(self) -> int:
        """When it was last written, in nanoseconds since the epoch."""
        return max((file.modified for file in self.files.values()), default=0)

    @property
    def is_marked(self) -> bool:
        """Whether it has a file that is written last."""
        return any(map(is_manifest, self.files))

    @property
    def is_sharded(self) -> bool:
        """Whether `torch.distributed.checkpoint` wrote it."""
        return any(path.endswith(SHARD) for path in self.files)

    @property
    def title(self) -> str:
        """What a person calls it."""
        first, *others = sorted(self.files) or [self.name]
        if "/" in first:
            return self.name
        return first if not others else f"{first} and {len(others)} more"

    @property
    def series(self) -> str:
        """Equal for checkpoints of one run that differ in their step; empty for any other."""
        return series(self.name, self.files)


def is_manifest(path: str) -> bool:
    """Whether a file is one that is written last, so that its folder is complete with it."""
    return path.rpartition("/")[2] in _MANIFESTS


def series(name: str, files: Iterable[str]) -> str:
    """The series of a checkpoint; empty if it is none, or has no step in its name."""
    if not steps(name) or not any(map(_is_tensors, files)):
        return ""
    return _NUMBER.sub(lambda match: "#" if _is_step(match) else match[0], name)


def steps(name: str) -> list[str]:
    """The numbers in a name that are a step or an epoch."""
    if _NEVER_OLD.search(name):
        return []
    return [match["number"] for match in _NUMBER.finditer(name) if _is_step(match)]


def _is_step(match: re.Match[str]) -> bool:
    return match["part"] is None and match["of"] is None


def listed(folder: Path, *, parts: bool = False) -> dict[str, Checkpoint]:
    """The checkpoints in `folder` and the other files there, by name, unless seen to be unfinished.

    With `parts` the folder is that of one node of several, which has some of the files only.
    """
    groups: dict[str, dict[str, File]] = {}
    for file in outputs.files(folder):
        top = file.path.partition("/")[0]
        if file.path == METADATA or not UNFINISHED.search(top):
            groups.setdefault(_name(file.path), {})[file.path] = file
    every = (Checkpoint(name, files) for name, files in sorted(groups.items()))
    return {one.name: one for one in every if parts or not _is_unfinished(one)}


def is_cut_off(folder: Path, checkpoint: Checkpoint) -> bool:
    """Whether a file was left half written by a killed `torch.save`."""
    return any(outputs.is_cut_off(folder / path) for path in checkpoint.files if _is_tensors(path))


def old(checkpoints: Iterable[Checkpoint], keep: int) -> Iterator[Checkpoint]:
    """Those that are not among the newest `keep` of their series."""
    by_series: dict[str, list[Checkpoint]] = {}
    for one in checkpoints:
        if one.series:
            by_series.setdefault(one.series, []).append(one)
    for some in by_series.values():
        yield from sorted(some, key=lambda one: one.saved, reverse=True)[keep:]


def remove(folder: Path, checkpoint: Checkpoint) -> None:
    """Delete a checkpoint; what is written last goes first, so that half of it is none."""
    for path in sorted(checkpoint.files, key=lambda path: not is_manifest(path)):
        (folder / path).unlink(missing_ok=True)
    shutil.rmtree(folder / checkpoint.name, ignore_errors=True)


def _name(path: str) -> str:
    """The name of what a file belongs to."""
    top, below, _ = path.partition("/")
    if below or not _is_tensors(path):
        return top
    if path == METADATA or path.endswith(SHARD):
        return "files"
    return "-".join(["files", *steps(top)])


def _is_tensors(path: str) -> bool:
    return path.endswith(ENDINGS) or os.path.basename(path) == METADATA  # noqa: PTH119 - text


def _is_unfinished(checkpoint: Checkpoint) -> bool:
    """Whether a folder of ``torch.distributed.checkpoint`` in it has no ``.metadata`` yet."""
    if checkpoint.name == KEPT:
        return False
    sharded = {path.rpartition("/")[0] for path in checkpoint.files if path.endswith(SHARD)}
    return any(f"{folder}/{METADATA}".lstrip("/") not in checkpoint.files for folder in sharded)
