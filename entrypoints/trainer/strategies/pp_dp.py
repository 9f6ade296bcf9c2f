"""Several pipelines side by side, each with its share of a batch; alike stages average gradients.

Ranks of the same stage have neighbouring numbers: what they exchange is more than what stages send
each other, so they should be on one machine.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from trainer import waiting
from trainer.strategies.pp import PP


class PPxDDP(PP):
    """Each stage is replicated by DDP."""

    @staticmethod
    def usual(world: int) -> int:
        return min(2, world)

    def misfits(self) -> Iterator[str]:
        world = self.place.world
        if world % self.ranks or not 1 < self.ranks < world:
            fits = [str(ranks) for ranks in range(2, world) if world % ranks == 0]
            advice = f"use {' or '.join(fits)}" if fits else "start 4 ranks or more"
            yield (
                f"--strategy {self.options.strategy} spreads {world} rank(s) over several "
                f"pipelines of --pipeline-parallel {self.ranks}, which does not come out: {advice}"
            )

    def spread(self, stage: nn.Module) -> nn.Module:
        replica = DistributedDataParallel(
            stage,
            process_group=self.data_mesh.get_group(),
            bucket_cap_mb=self.options.bucket_mb,
            gradient_as_bucket_view=True,
        )
        waiting.watch(replica, self.clock)
        return replica


class PPxFSDP(PPxDDP):
    """Each stage is sharded by fully_shard: layers are put together to compute, and no longer."""

    def spread(self, stage: nn.Module) -> nn.Module:
        for layer in stage:
            if next(layer.parameters(), None) is not None:
                fully_shard(layer, mesh=self.data_mesh)
        return fully_shard(stage, mesh=self.data_mesh)
