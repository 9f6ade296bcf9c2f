"""Random numbers under tensor parallelism: different ones where ranks hold different parts.

Ranks that share a layer draw the same numbers, so that what they all hold stays equal. Between a
layer that is sharded by outputs and the next one that is sharded by inputs, each has activations of
its own, such as other heads of attention. There dropout must draw a mask of its own on each rank:
otherwise the heads that ranks have at the same place would lose the same weights. With sequence
parallelism ranks also have different positions of what lies between such layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
)

from trainer.seeds import SEED_STEP, seed_torch


def apply(part: nn.Module, styles: Mapping[str, ParallelStyle], rank: int) -> None:
    """Let each rank draw its own random numbers between sharded layers.

    `styles` are those of the modules of `part` by name, `rank` is that among those of a layer.
    """
    stream = _Stream(rank)
    if any(isinstance(style, SequenceParallel) for style in styles.values()):
        part.register_forward_pre_hook(stream.begin)
    else:
        _between_sharded_layers(part, styles, stream)
    part.register_forward_hook(stream.end)


def _between_sharded_layers(
    part: nn.Module, styles: Mapping[str, ParallelStyle], stream: _Stream
) -> None:
    """Begin after a layer that is sharded by outputs, end before the next one by inputs."""
    opened = False
    for name, module in part.named_modules():
        style = styles.get(name)
        if isinstance(style, ColwiseParallel) and _sharded(style):
            module.register_forward_hook(stream.begin)
            opened = True
        elif isinstance(style, RowwiseParallel) and opened:
            module.register_forward_pre_hook(stream.end)
            opened = False


def _sharded(style: ColwiseParallel) -> bool:
    """Whether the outputs of a layer stay divided over the ranks."""
    return any(isinstance(each, Shard) for each in style.output_layouts)


class _Stream:
    """A stream of random numbers for one rank, beside that of all ranks of a layer."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._common: list[Tensor] = []
        """The states of the generators that all ranks share, while this rank uses its own."""
        self.begin: Any = torch.compiler.disable(self._begin)
        """Any forward hook. Compiled code would not see that the state changes, so it is left."""
        self.end: Any = torch.compiler.disable(self._end)

    def _begin(self, module: nn.Module, *_: Any) -> None:
        """Use this rank's own numbers, which follow from the common ones.

        So they are the same where a layer is computed again, with the state that it had before.
        """
        if self._common or not module.training:
            return
        seed = int(torch.randint(2**31, ())) * SEED_STEP + self._rank
        self._common = _states()
        seed_torch(seed)

    def _end(self, *_: Any) -> None:
        """Use the common numbers again."""
        if not self._common:
            return
        torch.set_rng_state(self._common[0])
        if len(self._common) > 1:
            torch.cuda.set_rng_state(self._common[1])
        self._common = []


def _states() -> list[Tensor]:
    """The states of the generators of the CPU and of the current GPU, if one is used."""
    gpu = [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *gpu]
