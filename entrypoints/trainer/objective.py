"""The loss of a batch, in the precision of the run."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from trainer.data import Batch
from trainer.parallel.shards import local
from trainer.task import Task, call, is_integer, samples_in
from trainer.train_options import TrainOptions

if TYPE_CHECKING:
    from trainer.parallel.context_parallel import ContextParallel

_TRIED, _ROUNDING = 16, 1e-2
"""Samples whose losses are compared with that of all of them; how far off they may be, relatively,
in 16 bits."""
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16, "float8": torch.bfloat16}


class Objective:
    """What a model is trained for: the loss of the task."""

    def __init__(
        self,
        options: TrainOptions,
        task: Task,
        device: torch.device,
        context: ContextParallel | None = None,
    ) -> None:
        self.task = task
        self._context = context
        self._device = device.type
        self._dtype = _AUTOCAST.get(options.precision)
        self._parallel = options.loss_parallel
        self._tried = False
        self.adds_up = True
        """Whether a scalar loss was that of its parts in the first batch; see `loss_adds_up`."""

    def autocast(self) -> AbstractContextManager[object]:
        """The context of the forward pass: autocast to 16 bits, or nothing for fp32."""
        return torch.autocast(self._device, self._dtype) if self._dtype else nullcontext()

    def _attention(self) -> AbstractContextManager[object]:
        """The context of the forward pass: attention over the parts of all ranks."""
        return self._context.attention() if self._context else nullcontext()

    def sharded_scores(self) -> AbstractContextManager[object]:
        """The context of a step: the cross-entropy of scores of which each rank has some classes.

        https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html
        """
        if not self._parallel:
            return nullcontext()
        from torch.distributed.tensor.parallel import loss_parallel

        parallel: AbstractContextManager[object] = loss_parallel()
        return parallel

    def outputs(self, model: nn.Module, inputs: Any) -> Any:
        """The outputs of `model`."""
        with self._attention(), self.autocast():
            return call(model, inputs)

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """The sum of the losses in this batch, divided by the number of targets of all ranks.

        The result is a scalar. The parts of all ranks add up to the exact mean, however unequal
        they are. Summed in double precision: in single precision, rounding of the sum would be half
        of the difference between two strategies.
        """
        with self.autocast():
            return _mean(self.losses(outputs, batch), batch)

    def losses(self, outputs: Any, batch: Batch) -> Tensor:
        """The loss of each target on this rank, or their mean if the task computes that.

        Several numbers for a target, such as those of several outputs, are averaged.
        """
        with self.autocast():
            losses = losses_of(self.task, outputs, batch.targets)
            if losses.dim() == 0 and not self._tried:
                self._tried = True
                self.adds_up = loss_adds_up(self.task, outputs, batch.targets, losses.detach())
        return losses

    def backward(self, losses: Tensor, batch: Batch, factor: float) -> Callable[[], Tensor]:
        """Add the gradients of `loss` times `factor`; the result computes `loss`, detached.

        Each of the losses has the same derivative, so autograd need not record how they are added,
        and most steps need not add them.
        """
        count, total = batch.count, batch.total
        if losses.dim() and isinstance(count, int) and isinstance(total, int) and count:
            torch.autograd.backward(losses, torch.full_like(losses, factor / total))
            return partial(_mean, losses.detach(), batch)
        loss = _mean(losses, batch)
        torch.autograd.backward(loss * factor)
        return loss.detach


def losses_of(task: Task, outputs: Any, targets: Any) -> Tensor:
    """The loss of each target, or their mean if the task computes that; see `Objective.losses`."""
    losses = local(task.loss(outputs, targets))
    if losses.dim() > 1 and task.count is None:
        kept = targets.dim() if is_integer(targets) else 1
        losses = losses.flatten(kept).mean(-1) if losses.dim() > kept else losses
    return losses


@torch.no_grad()
def loss_adds_up(task: Task, outputs: Any, targets: Any, loss: Tensor) -> bool:
    """Whether a scalar loss of samples is the mean of those of each sample, by their targets.

    Otherwise it depends on how a batch is divided, as a mean by the weights of classes does. True
    where that cannot be tried: of one sample, or if the loss is random or fails on single samples.
    """
    size = samples_in(targets)
    some = min(size, _TRIED)
    rows = [slice(0, some), *(slice(row, row + 1) for row in range(some))]
    try:
        with torch.random.fork_rng([]):
            again = local(task.loss(outputs, targets))
            parts = [(rows_of(outputs, each, size), rows_of(targets, each, size)) for each in rows]
            _, *counts = [float(task.targets_in(part)) for _, part in parts]
            together, *losses = [float(local(task.loss(*part))) for part in parts]
    except Exception:  # noqa: BLE001 - losses do anything
        return True
    if not torch.equal(again, loss) or not sum(counts):
        return True
    mean = sum(each * count for each, count in zip(losses, counts, strict=True) if count)
    return math.isclose(mean / sum(counts), together, rel_tol=_ROUNDING)


def rows_of(tree: Any, rows: slice, size: int) -> Any:
    """These samples of a structure of tensors, or of the tensors that an object has."""

    def part(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf[rows] if leaf.dim() and len(leaf) == size else leaf
        if hasattr(leaf, "__dict__"):
            leaf = copy.copy(leaf)
            vars(leaf).update({name: part(value) for name, value in vars(leaf).items()})
        return leaf

    return pytree.tree_map(part, tree)


def _mean(losses: Tensor, batch: Batch) -> Tensor:
    count = batch.count
    whole = losses.sum(dtype=torch.float64) if losses.dim() else losses.double() * count
    if isinstance(count, int) and count:
        return whole / batch.total
    counts = torch.as_tensor(count, device=losses.device) > 0
    return torch.where(counts, whole, 0.0) / batch.total  # a mean over nothing is NaN
