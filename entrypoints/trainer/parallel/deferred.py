"""First weights that are made in place: no rank ever holds more than its shards and one module.

The model is built on the meta device, which has shapes but no data, and parallelized there. Then
each module is initialized alone and in full, and each rank keeps its part. The random numbers of a
module follow from the seed and its name, so the weights do not depend on the layout, to the last
bit.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn

from trainer.errors import ConfigError
from trainer.parallel import layers, shards
from trainer.pretrained import Pretrained
from trainer.seeds import seed_all
from trainer.task import Init, Task
from trainer.train_options import TrainOptions


class FirstWeights:
    """Builds the model of a task, and gives it its first weights once it is parallelized."""

    def __init__(self, task: Task, options: TrainOptions) -> None:
        self._init = task.init
        self._build = task.model
        self._seed = options.seed
        self._pretrained = (
            Pretrained(Path(options.init_from), task.pretrained_name) if options.init_from else None
        )
        self.evaluates = False
        """Whether the model that was built is in evaluation mode."""
        self._twins: dict[str, nn.Module] = {}
        """Each module alone, whole and on the meta device, by its name in the model."""

    def build(self) -> nn.Module:
        """The model; with weights only if the task does not say how to make them.

        Raises ConfigError if those of ``--init-from`` are not weights of this model.
        """
        seed_all(self._seed)
        with torch.device("meta") if self._init else nullcontext():
            model = self._build()
        self.evaluates = not model.training
        _refuse_sparse_gradients(model)
        if self._init:
            self._twins = {name: layers.twin(module) for name, module in model.named_modules()}
        if self._pretrained:
            self._pretrained.check(model)
        return model

    def load(self, part: nn.Module) -> None:
        """Replace the weights of `part` of the model by those of ``--init-from``, if it is set."""
        if self._pretrained:
            self._pretrained.load(part)

    def pending_in(self, part: nn.Module) -> bool:
        """Whether `part` of the model has no data yet."""
        tensors = (*part.parameters(), *part.buffers())
        return bool(self._twins) and any(tensor.is_meta for tensor in tensors)

    def fill(self, part: nn.Module, device: torch.device) -> None:
        """Allocate the tensors of `part` of the model and initialize them, unless that is done.

        Raises ConfigError with the names of the tensors that the task leaves without a value.
        """
        if self._init is None or not self.pending_in(part):
            return
        tied = shards.tied(part)
        part.to_empty(device=device)
        for names in tied:
            shards.tie(part, names)
        done: set[Tensor] = set()
        empty: list[str] = []
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            for name, module in part.named_modules():
                empty += self._fill_module(name, module, self._init, done)
        if empty:
            raise ConfigError(
                f"Task.init leaves {', '.join(empty[:5])}{' and others' * (len(empty) > 5)} "  # noqa: PLR2004
                "without a value: it is called for each module and must set that module's tensors"
            )

    def _fill_module(
        self, name: str, module: nn.Module, init: Init, done: set[Tensor]
    ) -> Iterator[str]:
        """Set the tensors of one module that are not `done`; yields those that have no value."""
        kept = {n: t for n, t in shards.own_tensors(module) if t not in done}
        if not kept:
            return
        done.update(kept.values())
        whole = _with_data(self._twins[name], next(iter(kept.values())).device)
        torch.manual_seed(self._seed ^ zlib.crc32(name.encode()))
        with torch.no_grad():
            init(whole)
            values = dict(shards.own_tensors(whole))
            for own, tensor in kept.items():
                shards.copy_part(tensor, values[own])
                if values[own].isnan().any():
                    yield f"{name}.{own}".lstrip(".")


def _refuse_sparse_gradients(model: nn.Module) -> None:
    """Raise ConfigError if a part of the model has them."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ConfigError(
                f"{name or type(module).__name__} has sparse gradients, which have no norm and are "
                "rejected by most optimizers and strategies: remove sparse=True"
            )


def _with_data(module: nn.Module, device: torch.device) -> nn.Module:
    """The module with tensors that have memory, and no value yet: not a number."""
    whole = layers.twin(module)
    for name, parameter in module.named_parameters(recurse=False):
        data = _unset(parameter, device)
        setattr(whole, name, nn.Parameter(data, requires_grad=parameter.requires_grad))
    for name, buffer in module.named_buffers(recurse=False):
        setattr(whole, name, _unset(buffer, device))
    return whole


def _unset(tensor: Tensor, device: torch.device) -> Tensor:
    value = float("nan") if tensor.is_floating_point() else 0
    return torch.full(tensor.shape, value, dtype=tensor.dtype, device=device)
