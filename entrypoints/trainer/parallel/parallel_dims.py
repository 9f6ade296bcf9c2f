"""The number of ranks along each dimension of parallelism, and the mesh that they form."""

from __future__ import annotations

from typing import NamedTuple

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from trainer.parallel.process_group import DistributedContext


class ParallelDims(NamedTuple):
    """One number for each dimension: of all ranks, or of one rank's position.

    The last dimension varies fastest, so that the ranks that communicate most are neighbors:
    those of a tensor-parallel group, then those that share sequences, then those that share shards,
    then replicas, then the stages of a pipeline.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def dp(self) -> int:
        """The number of ranks with different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def ranks(self) -> int:
        """The number of ranks in all."""
        return self.pp * self.dp * self.cp * self.tp

    def position(self, rank: int) -> ParallelDims:
        """The coordinates of a rank, each from 0."""
        coordinates = []
        for size in reversed(self):
            rank, coordinate = divmod(rank, size)
            coordinates.append(coordinate)
        return ParallelDims(*reversed(coordinates))


class RankMesh:
    """The mesh of all ranks, with an axis for each dimension that has more than one rank.

    Its axis `dp_shard` always exists, because `fully_shard` requires one. Ranks that share
    sequences share parameters like those with other samples: where parameters are meant, they are a
    part of `dp_shard`, and else an axis of their own, `cp`. Collective.
    """

    def __init__(self, dims: ParallelDims, context: DistributedContext) -> None:
        self._ranks = _mesh(dims, context)
        self._parameters = self._ranks
        if dims.cp > 1:
            self._parameters = _mesh(dims._replace(dp_shard=dims.dp_shard * dims.cp, cp=1), context)

    def axes(self, *names: str) -> DeviceMesh:
        """Those of these axes that exist, of the mesh over which parameters are distributed."""
        return _axes(self._parameters, names)

    def group(self, *names: str) -> ProcessGroup:
        """The ranks that differ from this one along these axes only."""
        mesh = _axes(self._ranks, names)
        if mesh.ndim == 1:
            return mesh.get_group()
        return mesh._flatten("_".join(names)).get_group()  # noqa: SLF001 - torch has no other name


def _mesh(dims: ParallelDims, context: DistributedContext) -> DeviceMesh:
    sizes = dims._asdict().items()
    return context.mesh(**{name: size for name, size in sizes if size > 1 or name == "dp_shard"})


def _axes(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """The part of `mesh` with those of these axes that it has."""
    return mesh[tuple(name for name in names if name in (mesh.mesh_dim_names or ()))]
