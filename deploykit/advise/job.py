"""The job file for a layout, with the reference trainer's options."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator

from deploykit.advise.plan import Cluster, Layout, Training
from deploykit.advise.shape import Model, gpt
from deploykit.errors import UsageError
from deploykit.model import Problem

_PRECISIONS = {"fp32", "bf16", "fp16"}
"""Those of the trainer."""
_OPTIMIZERS = {"adamw": "adamw", "sgd-momentum": "sgd"}
"""Our names to those of the trainer, whose SGD has momentum."""
_VOCABULARY = 256
_WIDTH = 96


def text(model: Model, training: Training, cluster: Cluster, layout: Layout) -> str:
    """A job.yaml, to stand beside the folder ``entrypoints``.

    Raises UsageError for what the trainer has no option for.
    """
    problems = list(_check(training))
    if problems:
        raise UsageError("the reference trainer cannot do this", problems=problems)
    nodes = 1 if layout.world < cluster.world else cluster.nodes
    processes = _processes(cluster, layout)
    return f"""\
# Written by `deploykit advise` for {nodes} x {cluster.gpus_per_node} {cluster.gpu.label}.
name: advised-{layout.strategy}
source: entrypoints         # the folder with train.py

entrypoint:
  script: train.py
  args:
{_flow(options(model, training, layout))}

resources:
  nodes: {nodes}
  processes_per_node: {processes}
  gpus_per_node: {0 if cluster.gpu.is_cpu else min(layout.world, cluster.gpus_per_node)}
  time_limit: 1h            # yours to set: the job is stopped after it
"""


def _check(training: Training) -> Iterator[Problem]:
    if training.precision not in _PRECISIONS:
        hint = "bf16 keeps weights in fp32 and computes in 16 bits"
        yield Problem("--precision", f"it has no {training.precision}", hint)
    if training.optimizer not in _OPTIMIZERS:
        yield Problem("--optimizer", "its SGD has momentum", "choose sgd-momentum")


def difference(model: Model, training: Training) -> str | None:
    """What sets the trainer's model apart from this one, in a sentence; None where nothing does."""
    theirs = gpt(
        layers=model.layers,
        width=model.width,
        heads=model.heads,
        vocabulary=_VOCABULARY,
        positions=training.sequence,
    )
    if theirs.parameters == model.parameters:
        return None
    return (
        f"The trainer's GPT reads bytes (a vocabulary of {_VOCABULARY}) and has an MLP of four "
        f"times its width: {theirs.parameters / 10**9:.2f}B parameters."
    )


def _flow(words: Iterable[str]) -> str:
    """A YAML list over as many lines as it needs."""
    indent = " " * 4
    return textwrap.fill(
        f"[{', '.join(words)}]",
        _WIDTH,
        initial_indent=indent,
        subsequent_indent=f"{indent} ",
        break_on_hyphens=False,
        break_long_words=False,
    )


def _processes(cluster: Cluster, layout: Layout) -> int:
    """Of each node: one a GPU; nn.DataParallel has one for all of them."""
    return 1 if layout.strategy == "dp" else min(layout.world, cluster.gpus_per_node)


def options(model: Model, training: Training, layout: Layout) -> Iterator[str]:
    """Arguments of the reference trainer for this layout."""
    yield from ("--task", "text", "--strategy", layout.strategy)
    for name, value, usual in (
        ("tensor-parallel", layout.tensor, 1),
        ("pipeline-parallel", layout.pipeline, 1),
        ("shard-ranks", layout.shards if layout.strategy == "hsdp" else 1, 1),
        ("micro-batches", layout.micro_batches, 1),
    ):
        if value != usual:
            yield from (f"--{name}", str(value))
    if layout.pipeline > 1:
        yield from ("--schedule", "1f1b")
    if layout.tensor > 1:
        yield "--sequence-parallel"
    yield from ("--precision", training.precision)
    if layout.checkpointing:
        yield "--checkpoint-activations"
    if layout.offload:
        yield "--offload"
    sizes = {
        "batch-size": training.batch,
        "sequence": training.sequence,
        "layers": model.layers,
        "width": model.width,
        "heads": model.heads,
    }
    for name, size in sizes.items():
        yield from (f"--{name}", str(size))
    yield from ("--optimizer", _OPTIMIZERS[training.optimizer])
