"""The loss of a batch, in the precision of the run."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from trainer.data import Batch
from trainer.shards import local
from trainer.task import Task, call
from trainer.train_options import TrainOptions

_HALF_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Objective:
    """What a model is trained for: the loss of the task."""

    def __init__(self, options: TrainOptions, task: Task, device: torch.device) -> None:
        self.task = task
        self._device = device.type
        self._dtype = _HALF_DTYPES.get(options.precision)
        self._parallel = options.loss_parallel

    def autocast(self) -> AbstractContextManager[object]:
        """The context of the forward pass: autocast to 16 bits, or nothing for fp32."""
        return torch.autocast(self._device, self._dtype) if self._dtype else nullcontext()

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
        with self.autocast():
            return call(model, inputs)

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """The sum of the losses in this batch, divided by the number of targets of all ranks.

        The result is a scalar. The parts of all ranks add up to the exact mean, however unequal
        they are. Summed in double precision: in single precision, rounding of the sum would be half
        of the difference between two strategies.
        """
        with self.autocast():
            loss = local(self.task.loss(outputs, batch.targets))
            count = batch.count
            whole = loss.sum(dtype=torch.float64) if loss.dim() else loss.double() * count
            if isinstance(count, int) and count:
                return whole / batch.total
            counts = torch.as_tensor(count, device=loss.device) > 0
            return torch.where(counts, whole, 0.0) / batch.total  # a mean over nothing is NaN
