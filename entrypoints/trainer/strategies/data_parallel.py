"""What all data-parallel strategies share: a data shard per rank and averaged gradients."""

from __future__ import annotations

from trainer.data import DataShard
from trainer.process_group import DistributedContext
from trainer.strategies.single import Single
from trainer.train_options import TrainOptions


class DataParallel(Single):
    """Each rank works on its own shard of the batch; gradients are averaged over all ranks."""

    def __init__(self, options: TrainOptions, context: DistributedContext) -> None:
        super().__init__(options, context)
        self.data_shard = DataShard(context.rank, context.world_size)
        self.averaging_ranks = context.world_size

    def check(self) -> None:
        """Nothing to refuse: any number of ranks works."""
