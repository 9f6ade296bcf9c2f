"""What `advise` says and writes: a sentence with the recommendation, and a job file."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from deploykit.advise import gpus
from deploykit.advise.chooser import Advice, Candidate
from deploykit.advise.models import Model, gpt
from deploykit.advise.speed import peak
from deploykit.advise.strategies import STRATEGIES, Cluster, ParallelConfig, Training
from deploykit.job.model import Problem
from deploykit.lib.errors import UsageError
from deploykit.lib.units import memory, plural

_SCALES = ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K"))
_NAMES = {
    "adamw": "AdamW",
    "sgd": "SGD",
    "sgd-momentum": "SGD with momentum",
    "nvlink": "NVLink",
    "pcie": "PCIe",
    "tcp": "TCP",
    "efa": "EFA",
    "infiniband": "InfiniBand",
}
_TRAINER_OPTIMIZERS = {"adamw": "adamw", "sgd-momentum": "sgd"}
"""Names of optimizers here and in the trainer, whose SGD has momentum."""
_TRAINER_VOCABULARY = 256
EXAMPLES = {"sharded tables": "recommender.py", "LoRA": "fine_tuning.py"}
"""Tasks in `examples/models` for what the trainer has no option for."""


def number(count: float) -> str:
    """Format a count with three digits: 7B, 350M, 12."""
    for scale, letter in _SCALES:
        if count >= scale:
            return f"{count / scale:.3g}{letter}"
    return f"{count:.0f}"


def time(seconds: float) -> str:
    """Format a duration: 1,234 s, 1.5 s, 20 ms."""
    if seconds >= 100:  # noqa: PLR2004 - three digits
        return f"{seconds:,.0f} s"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def subject(advice: Advice) -> Iterator[str]:
    """Describe the model, the training and the cluster, in two lines."""
    model, training, cluster = advice.model, advice.training, advice.cluster
    shape = f"{model.layers} layers of width {model.width}, {model.heads} heads"
    yield (
        f"{'' if model.exact else 'about '}{number(model.parameters)} parameters ({shape}); "
        f"{training.batch} x {training.sequence} tokens a step, {training.precision}, "
        f"{_NAMES[training.optimizer]}"
    )
    node = f"{cluster.gpus_per_node} x {cluster.gpu.label} with {memory(cluster.gpu.memory)}"
    node += f" linked by {_NAMES[cluster.link]}" if cluster.gpus_per_node > 1 else ""
    if cluster.nodes == 1:
        yield f"one node with {node}"
    else:
        yield f"{cluster.nodes} nodes, each with {node}; {_network(cluster)} between nodes"


def _network(cluster: Cluster) -> str:
    return f"{_NAMES[cluster.fabric]} at {cluster.bandwidth * 8 / 10**9:.0f} Gb/s"


def recommendation(advice: Advice) -> str:
    """What to use and why, in one sentence."""
    best, second, capacity = advice.best, advice.second, memory(advice.cluster.gpu.memory)
    if best is None:
        return _nothing_fits(advice)
    copy = next(each for each in advice.candidates[::-1] if each.strategy in {"single", "ddp"})
    copy_size = memory(copy.memory.total)
    cases = {
        "each": "a full copy of the model fits on each GPU",
        "sharded": f"a full copy of the model does not fit on a GPU ({copy.strategy} needs "
        f"{copy_size})",
        "layer": "not even one layer fits on a GPU",
    }
    case = cases[advice.case]
    if copy.config.lora:
        case = "training all weights does not fit without --offload auto or more GPUs"
    config = degrees(best.config)
    unit = "tokens" if advice.training.sequence > 1 else "samples"
    speed = number(advice.training.tokens / best.step.seconds)
    text = (
        f"Use {best.strategy}{f' with {config}' if config else ''}: {case}; {best.strategy} needs "
        f"{memory(best.memory.total)} of {capacity} per GPU and about {time(best.step.seconds)} "
        f"per step ({speed} {unit}/s, MFU {mfu(advice, best):.0%})"
    )
    if second is not None:
        text += f"; the next best is {second.strategy}: {advice.verdict(second)}"
    return f"{text}."


def _nothing_fits(advice: Advice) -> str:
    """What to change if nothing fits."""
    training, capacity = advice.training, memory(advice.cluster.gpu.memory)
    least = min(advice.candidates, key=lambda each: each.memory.total)
    changes = {
        "--checkpoint-activations on": training.checkpointing is False,
        "--precision bf16": training.precision == "fp32",
        "--offload auto": training.offload is False,
        "an optimizer with fewer states": training.optimizer == "adamw",
        "a shorter sequence": True,
    }
    fits = f"use {plural(advice.enough, 'node')}, or " if advice.enough is not None else ""
    return (
        f"No strategy fits: {least.strategy} comes closest with {memory(least.memory.total)} of "
        f"{capacity}; {fits}try {', '.join(name for name, helps in changes.items() if helps)}."
    )


def degrees(config: ParallelConfig) -> str:
    """Degrees and switches of a configuration, or ''."""
    parts = {
        f"{config.tensor} tensor-parallel ranks": config.tensor > 1,
        f"{config.pipeline} stages": config.pipeline > 1,
        f"{config.shards} shards": config.shards > 1,
        f"{config.micro_batches} micro-batches": config.micro_batches > 1,
        "checkpointing": config.checkpointing,
        "selective checkpointing": config.selective,
        f"gradients in {config.compress}": bool(config.compress),
        "LoRA": config.lora,
        "CPU offload": config.offload,
    }
    return ", ".join(part for part, applies in parts.items() if applies)


def mfu(advice: Advice, each: Candidate) -> float:
    """Model FLOPs utilization: the model's own operations, without repetitions, as a share of what
    the GPUs could do at their peak (https://arxiv.org/abs/2204.02311, appendix B).
    """
    training = advice.training
    work = advice.model.flops(training.tokens, training.sequence)
    if advice.model.sample is not None:
        work = advice.model.sample.flops * training.batch
    work *= 2 / 3 if each.config.lora else 1  # no gradients of the frozen weights
    return work / (each.step.seconds * each.config.world * peak(training, advice.cluster.gpu))


def not_in_trainer(missing: list[str], runs: Advice) -> str:
    """What the reference trainer has no option for, and what `--write` writes instead."""
    instead = "no strategy of the trainer fits"
    if runs.best is not None:
        config = degrees(runs.best.config)
        best = runs.best.strategy + (f" ({config})" if config else "")
        seconds = time(runs.best.step.seconds)
        instead = f"--write uses the trainer's best strategy: {best}, {seconds} per step"
    files = " and ".join(f"examples/models/{EXAMPLES[name]}" for name in missing)
    what = " and ".join(missing)
    return f"The reference trainer supports {what} only in a task, as in {files}; {instead}."


def notes(advice: Advice) -> Iterator[str]:
    """Yield assumptions and caveats."""
    cluster, training, model = advice.cluster, advice.training, advice.model
    if advice.best is not None:
        yield f"{advice.best.strategy}: {STRATEGIES[advice.best.strategy]}."
    if not model.exact:
        yield (
            "The shape was derived from the size; for your model's own shape, set --layers, "
            "--width and --heads."
        )
    if cluster.world > 1 and advice.of("ddp") is None:
        yield (
            f"A batch of {training.batch} cannot be split evenly over {cluster.world} GPUs, so "
            "strategies that split it are omitted."
        )
    if model.sample is None and not (model.width and model.layers):
        yield (
            "The model is not a known transformer, so the estimate excludes its activations. To "
            "include them, give the shape of a sample, as in --input 3x224x224."
        )
    if cluster.gpu.name not in gpus.known():
        yield f"{cluster.gpu.label} is an unknown GPU; the speed of an A100 is assumed."
    if training.precision in {"bf16", "pure-bf16"} and not cluster.gpu.flops["bf16"]:
        yield f"{cluster.gpu.label} has no bf16 hardware; --precision fp16 is much faster."
    if cluster.nodes > 1:
        yield f"Network assumed per node: {_network(cluster)} (set it with --bandwidth)."
    gpu = cluster.gpu
    yield (
        f"Times assume matrix products at {gpu.matmul:.0%} and attention at {gpu.attention:.0%} of "
        "the GPU's peak, and all other operations at memory speed. Memory includes a reserve for "
        "the CUDA context and fragmentation."
    )


def lacking(config: ParallelConfig) -> list[str]:
    """What no option of the reference trainer does: it is a part of a task, `EXAMPLES` has one."""
    wanted = {"sharded tables": config.strategy == "sharded-table", "LoRA": config.lora}
    return [name for name in EXAMPLES if wanted[name]]


def job_file(model: Model, training: Training, cluster: Cluster, config: ParallelConfig) -> str:
    """The text of a job.yaml, for the folder that holds ``entrypoints``.

    Raises UsageError if the trainer does not support the precision or the optimizer.
    """
    problems = []
    if training.precision == "pure-bf16":
        hint = "bf16 keeps weights in fp32 and computes in 16 bits"
        problems.append(Problem("--precision", "pure-bf16 is not supported", hint))
    if training.optimizer not in _TRAINER_OPTIMIZERS:
        message = "SGD without momentum is not supported"
        problems.append(Problem("--optimizer", message, "use sgd-momentum"))
    if problems:
        raise UsageError("not supported by the reference trainer", problems=problems)
    arguments = textwrap.fill(
        f"[{', '.join(_arguments(model, training, config))}]",
        width=96,
        initial_indent=" " * 4,
        subsequent_indent=" " * 5,
        break_on_hyphens=False,
        break_long_words=False,
    )
    gpus_used = min(config.world, cluster.gpus_per_node)
    module = f" and {model.task.partition(':')[0]}" if model.task else ""
    nodes = 1 if config.world < cluster.world else cluster.nodes
    return f"""\
# Written by `deploykit advise` for {nodes} x {cluster.gpus_per_node} {cluster.gpu.label}.
name: advised-{config.strategy}
source: entrypoints         # the folder with train.py{module}

entrypoint:
  script: train.py
  args:
{arguments}

resources:
  nodes: {nodes}
  processes_per_node: {1 if config.strategy == "dp" else gpus_used}
  gpus_per_node: {0 if cluster.gpu.is_cpu else gpus_used}
  time_limit: 1h            # the job is stopped after this time
"""


def _arguments(model: Model, training: Training, config: ParallelConfig) -> Iterator[str]:
    """Arguments of the reference trainer for this configuration."""
    own = not model.task  # a task has its own shape, and its own plan of how to split it
    recompute = "selective" if config.selective else config.checkpointing
    values: dict[str, str | int | bool] = {
        "task": model.task or "text",
        "strategy": config.strategy,
        "tensor-parallel": config.tensor > 1 and config.tensor,
        "pipeline-parallel": config.pipeline > 1 and config.pipeline,
        "shard-ranks": config.strategy == "hsdp" and config.shards,
        "micro-batches": config.micro_batches > 1 and config.micro_batches,
        "schedule": config.pipeline > 1 and "1f1b",
        "sequence-parallel": own and config.tensor > 1,
        "loss-parallel": own and config.tensor > 1,
        "precision": training.precision,
        "checkpoint-activations": recompute,
        "offload": config.offload,
        "compress": config.compress,
        "compile": training.compiled,
        "batch-size": training.batch,
        "sequence": own and training.sequence,
        "layers": own and model.layers,
        "width": own and model.width,
        "heads": own and model.heads,
        "optimizer": _TRAINER_OPTIMIZERS[training.optimizer],
    }
    for name, value in values.items():
        if value is True:
            yield f"--{name}"
        elif value:
            yield from (f"--{name}", str(value))


def difference(model: Model, training: Training) -> str | None:
    """How the trainer's model differs from `model`, in one sentence; None if it does not."""
    if model.task:
        return None
    trainers = gpt(
        layers=model.layers,
        width=model.width,
        heads=model.heads,
        vocabulary=_TRAINER_VOCABULARY,
        positions=training.sequence,
    )
    if trainers.parameters == model.parameters:
        return None
    return (
        f"The trainer's GPT has {trainers.parameters / 10**9:.2f}B parameters: it reads bytes (a "
        f"vocabulary of {_TRAINER_VOCABULARY}), and its MLP is four times as wide as the model."
    )
