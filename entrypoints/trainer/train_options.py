"""The trainer's options, with their types; `arguments` reads them from the command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """What a task needs to build its model and its data. A checkpoint stores them."""

    task: str
    task_options: Mapping[str, str] = field(default_factory=dict)
    text: str | None = None
    sequence: int
    layers: int
    width: int
    heads: int

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> ModelOptions:
        """Those among the settings of a checkpoint. Raises TypeError if one is missing."""
        names = {each.name for each in fields(ModelOptions)} & settings.keys()
        return ModelOptions(**{name: settings[name] for name in names})


@dataclass(frozen=True, kw_only=True)
class TrainOptions(ModelOptions):
    """All options of ``train.py``."""

    init_from: str | None
    epochs: int
    steps: int | None
    batch_size: int
    optimizer: str
    optimizer_implementation: str | None
    lr: float
    lr_schedule: str
    warmup: int
    weight_decay: float
    clip: float | None
    ema: float | None
    seed: int
    patience: int | None
    deterministic: bool

    strategy: str
    micro_batches: int
    precision: str
    checkpoint_activations: str | None
    reduce_each: bool
    sync_batchnorm: bool
    compile: bool
    compress: str | None
    static_graph: bool
    find_unused_parameters: bool
    bucket_mb: int
    shard_ranks: int | None
    offload: bool
    tensor_parallel: int | None
    sequence_parallel: bool
    loss_parallel: bool
    context_parallel: int | None
    pipeline_parallel: int | None
    schedule: str | None
    stages_per_rank: int | None
    balance: str | None

    checkpoint_every: int
    checkpoint_steps: int | None
    keep: int
    background_save: bool
    log_every: int
    profile: str | None
    tensorboard: bool
    workers: int
