"""The trainer's options, with their types."""

from __future__ import annotations

import argparse


class TrainOptions(argparse.Namespace):
    """Parsed command-line options of ``train.py``; ``arguments.py`` defines and checks them.

    A checkpoint stores some of them, so `restore` builds this class from a checkpoint too.
    """

    task: str
    task_options: dict[str, str]
    text: str | None
    sequence: int
    layers: int
    width: int
    heads: int

    init_from: str | None
    epochs: int
    steps: int | None
    batch_size: int
    optimizer: str
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
