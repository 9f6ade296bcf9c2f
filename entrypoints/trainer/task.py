"""A task: the model to train, its data and its loss.

    def task(options):
        return Task(Net, training=dataset, loss=nn.functional.mse_loss)

``train.py --task package.module:task`` trains it with any strategy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset, IterableDataset

IGNORE_INDEX = -100
"""A target that does not count; the default `ignore_index` of `cross_entropy`."""

Init = Callable[[nn.Module], object]
Settings = Callable[[str], Mapping[str, Any]]

CreateOptimizer = Callable[[Any], Optimizer]
"""Makes an optimizer of parameters, or of groups of them."""
CreateSchedule = Callable[[Optimizer, int], LRScheduler]

Function = Callable[[Any, Any], Tensor]
"""Of the model's outputs and the targets of a batch."""


def cross_entropy(outputs: Any, targets: Tensor) -> Tensor:
    """The cross-entropy of each target.

    The outputs are scores (batch, ..., classes), or have them as `logits`, as models of Hugging
    Face do. The targets are integers (batch, ...); for `IGNORE_INDEX` the loss is 0.
    """
    flat = scores(outputs).flatten(0, -2).float()
    return functional.cross_entropy(flat, targets.flatten(), reduction="none")


def hits(outputs: Any, targets: Tensor) -> Tensor:
    """How many targets have the highest score; see `cross_entropy`."""
    return (scores(outputs).argmax(dim=-1) == targets).sum()


def scores(outputs: Any) -> Tensor:
    """The outputs, or their `logits`."""
    tensor: Tensor = outputs if isinstance(outputs, Tensor) else outputs.logits
    return tensor


def inputs_and_targets(batch: Any) -> tuple[Any, Any]:
    """The halves of a pair, or a mapping without its `labels`, and these."""
    if isinstance(batch, Mapping):
        return {name: value for name, value in batch.items() if name != "labels"}, batch["labels"]
    inputs, targets = batch
    return inputs, targets


def reset_parameters(module: nn.Module) -> None:
    """Set the tensors of one module of PyTorch's to its usual first values; see `Task.init`."""
    reset = getattr(module, "reset_parameters", None)
    if reset is not None:
        reset()


@dataclass(frozen=True)
class Task:
    """What to train, and on what. A model and training data are enough.

    Samples are pairs of inputs and targets, or mappings with `labels`; `split` says otherwise. A
    tensor of inputs is passed to the model as its argument, a tuple as several, a mapping by name.
    """

    model: Callable[[], nn.Module]
    """Builds the model with fresh weights, which follow from torch's random numbers alone."""
    training: Dataset[Any]
    """With a length and an index, or iterable."""
    validation: Dataset[Any] | None = None
    test: Dataset[Any] | None = None
    loss: Function = cross_entropy
    """The loss of each target, 0 for those that do not count, or their mean as a scalar. Several
    numbers for a target, such as those of several outputs, are averaged."""
    metrics: Mapping[str, Function] | None = None
    """Sums over the targets of a batch, by name. None: the accuracy, if `loss` is the default."""
    count: Callable[[Any], int | Tensor] | None = None
    """The number of targets of a batch that count, or the sum of their weights, by which loss and
    metrics are divided. None: integers other than `IGNORE_INDEX`, or one for each sample."""
    collate: Callable[[list[Any]], Any] | None = None
    """Makes a batch of a list of samples. None: torch's `default_collate`."""
    lengths: Sequence[int] | None = None
    """The length of each sample of `training`: batches are made of samples of similar lengths, so
    that `collate` pads less. None: of any samples."""
    split: Callable[[Any], tuple[Any, Any]] = inputs_and_targets
    """The inputs and the targets of a batch."""
    slice_sequence: Callable[[Any, slice], Any] | None = None
    """Some positions of the inputs and targets of a batch, a pair; for ``--context-parallel``.
    None: tensors (batch, sequence, ...) are sliced, those of one dimension are kept. The number of
    positions is the second size of the targets, and targets are shifted already: position n has
    the target of its own output."""
    unit: str = "samples"
    """What one target is: an image has one, a text window has one per byte."""
    layers: Callable[[nn.Module], Sequence[nn.Module]] | None = None
    """The layers to shard, to recompute and to compile one by one. None: found in the model."""
    tensor_parallel: Callable[[nn.Module], Mapping[str, Any]] | None = None
    """The plan for `torch.distributed.tensor.parallel.parallelize_module`."""
    optimizer: CreateOptimizer | None = None
    """An optimizer that steps without a closure. None: that of the command line."""
    lr_schedule: CreateSchedule | None = None
    """Makes a learning-rate scheduler of the optimizer and the number of steps. What it does must
    follow from the step alone. None: that of the command line."""
    optimizer_settings: Settings | None = None
    """Settings of the optimizer for a parameter, by its name: `{"weight_decay": 0.0}`, or a rate of
    its own, `{"lr": 1e-4}`. None: those of the command line, for all."""
    init: Init | None = None
    """Sets the parameters and buffers of one module, without those of its children. With it the
    whole model is never in the memory of one rank: it is built on the meta device, and this is
    called for each module that has tensors, in full. `reset_parameters` does it for PyTorch's own.
    None: `model` makes the weights."""

    pretrained_name: Callable[[str], str | None] | None = None
    """The name that a tensor of the model has among the weights of ``--init-from``, by its name in
    the model; None for a tensor that keeps its first value. Without it, names are the same."""

    @property
    def metric_functions(self) -> Mapping[str, Function]:
        """The metrics by name, the default ones included."""
        if self.metrics is not None:
            return self.metrics
        return {"accuracy": hits} if self.loss is cross_entropy else {}

    def targets_in(self, targets: Any) -> int | Tensor:
        """The number of targets of a batch that count; see `count`."""
        if self.count is not None:
            return self.count(targets)
        return (targets != IGNORE_INDEX).sum() if is_integer(targets) else samples_in(targets)

    @property
    def streams(self) -> bool:
        """Whether the training data has no length."""
        return isinstance(self.training, IterableDataset)


def call(model: nn.Module, inputs: Any) -> Any:
    """The outputs of a model: a mapping gives named arguments, a tuple or list several."""
    if isinstance(inputs, Tensor):
        return model(inputs)
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs)


def is_integer(targets: Any) -> bool:
    """Whether the targets are one tensor of integers, such as classes or tokens."""
    return isinstance(targets, Tensor) and not targets.is_floating_point()


def samples_in(batch: Any) -> int:
    """The number of samples: the first size of the first tensor."""
    return next(len(leaf) for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor))
