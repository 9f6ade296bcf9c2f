"""The job file for a configuration, with options of the reference trainer."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator

from deploykit.advise.architectures import gpt
from deploykit.advise.model_shape import Model
from deploykit.advise.workload import Cluster, ParallelConfig, Training
from deploykit.job.model import Problem
from deploykit.lib.errors import UsageError

_PRECISIONS = {"fp32", "bf16", "fp16"}
"""Precisions that the trainer supports."""
_OPTIMIZERS = {"adamw": "adamw", "sgd-momentum": "sgd"}
"""Names of optimizers here and in the trainer, whose SGD has momentum."""
EXAMPLES = {"sharded tables": "recommender.py", "LoRA": "fine_tuning.py"}
"""Tasks in `examples/models` that do what no option of the trainer does."""
_VOCABULARY = 256
_LINE_WIDTH = 96


def lacking(config: ParallelConfig) -> list[str]:
    """What no option of the reference trainer does: it is a part of a task, `EXAMPLES` has one."""
    wanted = {"sharded tables": config.strategy == "sharded-table", "LoRA": config.lora}
    return [name for name in EXAMPLES if wanted[name]]


def can_run(config: ParallelConfig) -> bool:
    """Whether the reference trainer's options can do all of this configuration."""
    return not lacking(config)


def text(model: Model, training: Training, cluster: Cluster, config: ParallelConfig) -> str:
    """The text of a job.yaml, for the folder that holds ``entrypoints``.

    Raises UsageError if the trainer does not support the precision or the optimizer.
    """
    problems = list(_problems(training))
    if problems:
        raise UsageError("not supported by the reference trainer", problems=problems)
    nodes = 1 if config.world < cluster.world else cluster.nodes
    processes = _processes(cluster, config)
    module = f" and {model.task.partition(':')[0]}" if model.task else ""
    return f"""\
# Written by `deploykit advise` for {nodes} x {cluster.gpus_per_node} {cluster.gpu.label}.
name: advised-{config.strategy}
source: entrypoints         # the folder with train.py{module}

entrypoint:
  script: train.py
  args:
{_flow(options(model, training, config))}

resources:
  nodes: {nodes}
  processes_per_node: {processes}
  gpus_per_node: {0 if cluster.gpu.is_cpu else min(config.world, cluster.gpus_per_node)}
  time_limit: 1h            # adjust: the job is stopped after this time
"""


def _problems(training: Training) -> Iterator[Problem]:
    if training.precision not in _PRECISIONS:
        hint = "bf16 keeps weights in fp32 and computes in 16 bits"
        yield Problem("--precision", f"{training.precision} is not supported", hint)
    if training.optimizer not in _OPTIMIZERS:
        yield Problem("--optimizer", "SGD without momentum is not supported", "use sgd-momentum")


def difference(model: Model, training: Training) -> str | None:
    """How the trainer's model differs from `model`, in one sentence; None if it does not."""
    if model.task:
        return None
    trainers = gpt(
        layers=model.layers,
        width=model.width,
        heads=model.heads,
        vocabulary=_VOCABULARY,
        positions=training.sequence,
    )
    if trainers.parameters == model.parameters:
        return None
    return (
        f"The trainer's GPT reads bytes (a vocabulary of {_VOCABULARY}) and its MLP is four "
        f"times as wide as the model: {trainers.parameters / 10**9:.2f}B parameters."
    )


def _flow(words: Iterable[str]) -> str:
    """A YAML list, wrapped over several lines."""
    indent = " " * 4
    return textwrap.fill(
        f"[{', '.join(words)}]",
        _LINE_WIDTH,
        initial_indent=indent,
        subsequent_indent=f"{indent} ",
        break_on_hyphens=False,
        break_long_words=False,
    )


def _processes(cluster: Cluster, config: ParallelConfig) -> int:
    """Processes per node: one per GPU, but one for all GPUs with nn.DataParallel."""
    return 1 if config.strategy == "dp" else min(config.world, cluster.gpus_per_node)


def options(model: Model, training: Training, config: ParallelConfig) -> Iterator[str]:
    """Arguments of the reference trainer for this configuration."""
    yield from ("--task", model.task or "text", "--strategy", config.strategy)
    for name, value, default in (
        ("tensor-parallel", config.tensor, 1),
        ("pipeline-parallel", config.pipeline, 1),
        ("shard-ranks", config.shards if config.strategy == "hsdp" else 1, 1),
        ("micro-batches", config.micro_batches, 1),
    ):
        if value != default:
            yield from (f"--{name}", str(value))
    if config.pipeline > 1:
        yield from ("--schedule", "1f1b")
    if config.tensor > 1 and not model.task:  # a task's own plan says how it is split
        yield from ("--sequence-parallel", "--loss-parallel")
    yield from ("--precision", training.precision)
    yield from _switches(training, config)
    yield from ("--batch-size", str(training.batch))
    if not model.task:
        yield from ("--sequence", str(training.sequence), "--layers", str(model.layers))
        yield from ("--width", str(model.width), "--heads", str(model.heads))
    yield from ("--optimizer", _OPTIMIZERS[training.optimizer])


def _switches(training: Training, config: ParallelConfig) -> Iterator[str]:
    """Options that save memory, traffic or time."""
    if config.checkpointing:
        yield "--checkpoint-activations"
    if config.selective:
        yield from ("--checkpoint-activations", "selective")
    if config.offload:
        yield "--offload"
    if config.compress:
        yield from ("--compress", config.compress)
    if training.compiled:
        yield "--compile"
