"""One process, nothing spread. Every other strategy is this one with what it does differently."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from trainer import gradients, waiting
from trainer.data import Batch, Share
from trainer.group import Place
from trainer.timing import Clock

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Single:
    """The contract between a strategy and the training loop.

    `share` says which samples of a global batch this rank works on, `averaged` over how many ranks
    gradients are averaged (the loss is scaled up by it, since ours is a mean over the global
    batch), `counts` whether this rank's sums of loss and hits enter the totals over all ranks:
    ranks that work on the same samples would count them twice. `sample` is one of this rank's
    batches, there before `prepare`, to measure with. `clock` times a step's parts.
    """

    averaged = 1
    counts = True
    sample: Batch
    model: nn.Module
    optimizer: Optimizer

    def __init__(self, options: argparse.Namespace, place: Place) -> None:
        self.options = options
        self.place = place
        self.share = Share(0, 1)
        self.clock = Clock(place.device)
        waiting.count(self.clock)
        self.check()

    def check(self) -> None:
        """Refuse, with a ValueError, what this strategy cannot do."""
        if self.place.world > 1:
            raise ValueError(
                f"--strategy single is one process, and there are {self.place.world} ranks: "
                "choose another strategy (ddp is the usual one) or start one process"
            )

    def prepare(self, model: nn.Sequential, make_optimizer: MakeOptimizer) -> None:
        """Take the model, the same on every rank, and lay it out."""
        self.model = self.layered(model.to(self.place.device))
        self.optimizer = make_optimizer(self.model.parameters())

    def layered(self, model: nn.Sequential) -> nn.Sequential:
        """Activation checkpointing and compiling, layer by layer, before anything is wrapped."""
        for name, layer in list(model.named_children()):
            if self.options.checkpoint_activations:
                setattr(model, name, checkpoint_wrapper(layer))
        if self.options.compile:
            for layer in model:
                layer.compile()
        return model

    def forward(self, inputs: Tensor) -> Tensor | None:
        """The model's outputs for `inputs`, in training and evaluation; None where another rank
        has them.
        """
        with self.autocast():
            return self.model(inputs)

    def backward(self, batch: Batch, scale: float = 1.0) -> Tensor:
        """Gradients of the mean loss over the global batch, times `scale`.

        Returns this rank's part of that mean loss, unscaled, a tensor without dimensions.
        """
        parts = []
        pieces = self.pieces(batch)
        for number, piece in enumerate(pieces):
            self.synchronize(last=number + 1 == len(pieces))
            with self.clock("forward"):
                part = self.loss(self.forward(piece.inputs), piece)
            with self.clock("backward"):
                (part * (self.averaged * scale)).backward()
            parts.append(part.detach())
        return torch.stack(parts).sum() if len(parts) > 1 else parts[0]

    def pieces(self, batch: Batch) -> list[Batch]:
        """The micro-batches whose gradients add up to those of `batch`."""
        cut = self.options.micro_batches
        if cut == 1:
            return [batch]
        inputs, targets = batch.inputs.chunk(cut), batch.targets.chunk(cut)
        return [Batch(*pair, batch.count) for pair in zip(inputs, targets, strict=True)]

    def synchronize(self, *, last: bool) -> None:
        """Told before each micro-batch: gradients are needed whole only after the last one."""

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """The sum over this batch's samples by the global count: parts add up to the exact mean,
        however unequal they are. Summed in double precision: in single, the sum's own last digit
        would be half of all that two layouts differ by.
        """
        with self.autocast():
            scores = outputs.flatten(0, -2).float()
            losses = cross_entropy(scores, batch.targets.flatten(), reduction="none")
            return losses.sum(dtype=torch.float64) / batch.count

    def autocast(self) -> AbstractContextManager[object]:
        if self.options.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.place.device.type, HALVES[self.options.precision])

    def norm(self) -> Tensor:
        """The 2-norm of the whole model's gradient, the same on every rank."""
        return gradients.norm(self.model.parameters(), self.apart)

    @property
    def apart(self) -> Sequence[ProcessGroup]:
        """Groups whose ranks hold different parameters, in ways that the tensors do not tell."""
        return ()

    def step(self) -> None:
        """One step of the optimizer; the gradients are spent."""
        with self.clock("optimizer"):
            self.optimizer.step()
            self.optimizer.zero_grad()

    def state(self) -> dict[str, Tensor]:
        """The tensors of model and optimizer under names that every strategy shares.

        Sharded ones say so themselves (DTensor), so that another layout can load them.
        """
        model, optimizer = get_state_dict(*self.stateful(), options=FLAT)
        found = {f"model.{name}": value for name, value in model.items()}
        found |= {f"optimizer.{name}": value for name, value in optimizer.items()}
        return {name: value for name, value in found.items() if isinstance(value, Tensor)}

    def load(self, state: dict[str, Tensor]) -> None:
        """Take over what `state` returned and a checkpoint has filled in."""
        model, optimizer = get_state_dict(*self.stateful(), options=FLAT)
        model |= _below(state, "model.")
        optimizer |= _below(state, "optimizer.")
        set_state_dict(
            *self.stateful(),
            model_state_dict=model,
            optim_state_dict=optimizer,
            options=FLAT,
        )

    def measures(self) -> dict[str, float]:
        """More numbers for the metrics of a logged step; every rank calls together."""
        return {}

    def summary(self) -> str:
        """What is worth telling at the end of a run, or ''; every rank calls together."""
        return ""

    def stateful(self) -> tuple[nn.Module, Optimizer]:
        """The module and the torch optimizer whose state is this rank's."""
        return self.model, self.optimizer


def _below(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)
    }
