"""Checkpoint files by torch.distributed.checkpoint (DCP), which takes 0.7 s to import.

Files are untrusted when they are read: their table is that of `metadata`, and nothing is unpickled.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from trainer.checkpoint import integrity, tensor_reader
from trainer.checkpoint.metadata import CheckpointMetadata, Chunk
from trainer.checkpoint.safe_pickle import InvalidFile


def save(state: dict[str, Tensor], folder: Path, group: ProcessGroup) -> None:
    """Write tensors to `folder`, each rank its shards. Collective."""
    dcp.save(
        state,
        storage_writer=FileSystemWriter(folder),
        planner=DefaultSavePlanner(dedup_save_to_lowest_rank=True),
        process_group=group,
    )


def load(state: dict[str, Tensor], folder: Path, group: ProcessGroup) -> None:
    """Fill `state` in place from `folder`, saved with any strategy. Collective.

    Raises FileNotFoundError or InvalidFile if the files are not valid.
    """
    dcp.load(
        state,
        storage_reader=CheckpointReader(folder, integrity.read_metadata(folder)),
        planner=TensorOnlyPlanner(),
        process_group=group,
    )


class CheckpointReader(FileSystemReader):
    """A storage reader for ``dcp.load`` with parsed metadata and without unpickling."""

    def __init__(self, folder: Path, metadata: CheckpointMetadata) -> None:
        super().__init__(folder)
        self._folder, self._metadata = folder, metadata

    def read_metadata(self, *_args: Any, **_options: Any) -> Metadata:
        """The metadata, as parsed by this trainer."""
        return _to_torch(self._metadata)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read each planned slice into its target tensor. Raises InvalidFile for an object."""
        items: dict[Chunk, list[ReadItem]] = {}
        for item in plan.items:
            if item.type != LoadItemType.TENSOR:
                raise InvalidFile("it has an object; only tensors are loaded")
            index = item.storage_index
            chunk = self._metadata.chunks[index.fqn, tuple(index.offset or ())]
            items.setdefault(chunk, []).append(item)

        def fill(file: io.BufferedReader, chunk: Chunk) -> None:
            tensor = tensor_reader.read(file, chunk)
            for item in items[chunk]:
                target = planner.resolve_tensor(item).detach()
                target.copy_(tensor_reader.narrow(tensor, item.storage_offsets, item.lengths))
                planner.commit_tensor(item, target)

        tensor_reader.for_each(self._folder, items, fill)
        done: Future[None] = Future()
        done.set_result(None)
        return done


class TensorOnlyPlanner(DefaultLoadPlanner):
    """torch's load planner, which would unpickle objects; this one refuses them."""

    def load_bytes(self, *_item_and_bytes: Any) -> None:
        """Raise InvalidFile: the checkpoint has an object."""
        raise InvalidFile("it has an object; only tensors are loaded")


def _to_torch(metadata: CheckpointMetadata) -> Metadata:
    """The same as an object of torch's, built from scratch."""
    kinds = {
        name: TensorStorageMetadata(TensorProperties(dtype), torch.Size(shape), [])
        for name, (dtype, shape) in metadata.tensors.items()
    }
    for (name, offsets), chunk in metadata.chunks.items():
        sizes = torch.Size(chunk.sizes)
        kinds[name].chunks.append(ChunkStorageMetadata(torch.Size(offsets), sizes))
    stored = {
        MetadataIndex(name, offsets): chunk for (name, offsets), chunk in metadata.chunks.items()
    }
    return Metadata(dict(kinds), storage_data=stored)
