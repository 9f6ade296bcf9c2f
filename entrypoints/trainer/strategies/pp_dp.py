"""Several pipelines, each with its data shard; ranks of the same stage average their gradients.

Ranks of the same stage are neighbors in rank order: they exchange more data than consecutive
stages do, so they should be on one machine.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from trainer import comm_timing
from trainer.strategies.pp import PP, StageModule


class PPxDDP(PP):
    """Each stage is replicated with DDP."""

    @staticmethod
    def default_pipeline_size(world_size: int) -> int:
        """Pipelines of two ranks."""
        return min(2, world_size)

    def world_size_problems(self) -> Iterator[str]:
        """Problems with the number of ranks."""
        size, world_size = self.pipeline_size, self.context.world_size
        if world_size % size or not 1 < size < world_size:
            sizes = [str(each) for each in range(2, world_size) if world_size % each == 0]
            advice = f"use {' or '.join(sizes)}" if sizes else "start 4 ranks or more"
            yield (
                f"--strategy {self.options.strategy} cannot divide {world_size} rank(s) into "
                f"several pipelines of --pipeline-parallel {size}: {advice}"
            )

    def replicate(self, stage: StageModule) -> nn.Module:
        """Wrap a stage in DistributedDataParallel."""
        replica = DistributedDataParallel(
            stage,
            process_group=self.data_mesh.get_group(),
            bucket_cap_mb=self.options.bucket_mb,
            gradient_as_bucket_view=True,
        )
        comm_timing.instrument_ddp(replica, self.timer)
        return replica


class PPxFSDP(PPxDDP):
    """Each stage is sharded with fully_shard; layers are gathered only while they compute."""

    def replicate(self, stage: StageModule) -> nn.Module:
        """Shard each layer of a stage, and the stage."""
        for layer in stage:
            if next(layer.parameters(), None) is not None:
                fully_shard(layer, mesh=self.data_mesh)
        fully_shard(stage, mesh=self.data_mesh)
        return stage
