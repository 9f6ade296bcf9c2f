"""The strategies by name; the file of a strategy is imported when it is chosen."""

from __future__ import annotations

import importlib

from trainer.errors import ConfigError
from trainer.process_group import DistributedContext
from trainer.strategies.single import Single
from trainer.train_options import TrainOptions

STRATEGIES = {
    "single": ("single", "Single"),
    "dp": ("dp", "DP"),
    "ddp": ("ddp", "DDP"),
    "manual": ("manual", "ManualDDP"),
    "zero1": ("zero1", "Zero1"),
    "zero2": ("fsdp", "Zero2"),
    "zero3": ("fsdp", "Zero3"),
    "fsdp": ("fsdp", "Zero3"),
    "hsdp": ("fsdp", "HSDP"),
    "tp": ("tp", "TP"),
    "tp-dp": ("tp_dp", "TPxDP"),
    "fsdp-tp": ("fsdp_tp", "FSDPxTP"),
    "pp": ("pp", "PP"),
    "pp-dp": ("pp_dp", "PPxDDP"),
    "pp-fsdp": ("pp_dp", "PPxFSDP"),
}
"""Value of --strategy to module and class."""


def create(options: TrainOptions, context: DistributedContext) -> Single:
    """Create the strategy that `options.strategy` names, on this rank. Collective.

    Raises ConfigError if the options do not fit the strategy or the number of ranks.
    """
    module, name = STRATEGIES[options.strategy]
    cls = getattr(importlib.import_module(f"trainer.strategies.{module}"), name)
    strategy: Single = cls(options, context)
    shards, micro_batches = strategy.data_shard.num_shards, options.micro_batches
    if options.batch_size % (shards * micro_batches):
        raise ConfigError(
            f"--batch-size {options.batch_size} must be a multiple of {shards * micro_batches}: "
            f"{shards} data shard(s) times {micro_batches} micro-batch(es)"
        )
    return strategy
