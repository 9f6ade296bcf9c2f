"""The shape of a model: its parameter tensors, in layers.

The reference trainer's GPT is known exactly: an embedding of tokens and positions, equal blocks
(LayerNorm, attention with four projections, LayerNorm, a two-layer MLP), and a head (LayerNorm and
a Linear layer without bias, whose weights are not tied to the embedding).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Split = Literal["column", "row", "none"]
"""How tensor parallelism splits a tensor: along dimension 0, along dimension 1, or not at all
(https://arxiv.org/abs/1909.08053, section 3)."""

_ASPECT = 128
"""Width per layer of a model given only by its size: 7B gives 32 layers of width 4096."""
_HEAD_WIDTH = 128
_LARGE_WIDTH = 1024
_MANY_LAYERS = 10
_MLP_RATIO = 4


@dataclass(frozen=True)
class Tensor:
    """One parameter: its name, its shape, and how tensor parallelism splits it."""

    name: str
    shape: tuple[int, ...]
    split: Split = "none"

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def local(self, tensor: int = 1, shards: int = 1) -> int:
        """Elements on the first of `shards` ranks, each with 1/`tensor` of the tensor.

        FSDP2 splits dimension 0 into equal chunks, rounded up
        (https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html).
        """
        rows, *rest = self.shape or (1,)
        columns = math.prod(rest)
        if self.split == "column":
            rows = math.ceil(rows / tensor)
        elif self.split == "row":
            columns = math.ceil(columns / tensor)
        return math.ceil(rows / shards) * columns


@dataclass(frozen=True)
class Layer:
    """A layer: the unit in which weights are gathered and freed."""

    name: str
    tensors: tuple[Tensor, ...]

    def size(self, tensor: int = 1, shards: int = 1) -> int:
        """Elements on one rank, of `tensor` x `shards`."""
        return sum(each.local(tensor, shards) for each in self.tensors)


@dataclass(frozen=True)
class Model:
    """An embedding, `layers` equal blocks and a head."""

    embedding: Layer
    block: Layer
    layers: int
    head: Layer
    width: int
    heads: int
    vocabulary: int
    feedforward: int
    exact: bool = True
    """Whether the tensors are the model's own; False if they were derived from its size."""

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return self.embedding.size() + self.layers * self.block.size() + self.head.size()

    def all_layers(self) -> Iterator[Layer]:
        """Yield every layer in the order of the forward pass."""
        yield self.embedding
        for _ in range(self.layers):
            yield self.block
        yield self.head

    def tensors(self) -> Iterator[Tensor]:
        """Yield every parameter of every layer."""
        for layer in self.all_layers():
            yield from layer.tensors

    def flops(self, tokens: int, sequence: int) -> float:
        """Floating point operations of one training step over `tokens`, without recomputation.

        Six per token for each weight of a matrix, and 12 x layers x width x sequence per token for
        attention scores (https://arxiv.org/abs/2104.04473, appendix).
        """
        return tokens * self.flops_per_token(self.layers, sequence, head=True)

    def flops_per_token(self, blocks: int, sequence: int, *, head: bool) -> float:
        """The same per token, for a number of blocks with or without the head."""
        matrices = blocks * _matrices(self.block) + head * _matrices(self.head)
        return 6.0 * matrices + 12.0 * blocks * self.width * sequence


def _matrices(layer: Layer) -> int:
    return sum(tensor.size for tensor in layer.tensors if len(tensor.shape) > 1)


def gpt(  # noqa: PLR0913 - the options that size a GPT
    *,
    layers: int,
    width: int,
    heads: int,
    vocabulary: int,
    positions: int,
    feedforward: int | None = None,
) -> Model:
    """The GPT of the reference trainer with these options."""
    feedforward = feedforward or _MLP_RATIO * width
    return Model(
        Layer("embedding", (*_embedding(vocabulary, positions, width),)),
        Layer("block", (*_block(width, feedforward),)),
        layers,
        Layer("head", (*_norm("norm", width), Tensor("out.weight", (vocabulary, width), "column"))),
        width=width,
        heads=heads,
        vocabulary=vocabulary,
        feedforward=feedforward,
    )


def _embedding(vocabulary: int, positions: int, width: int) -> Iterator[Tensor]:
    yield Tensor("token.weight", (vocabulary, width), "column")
    yield Tensor("position.weight", (positions, width))


def _block(width: int, feedforward: int) -> Iterator[Tensor]:
    yield from _norm("norm1", width)
    for name in ("query", "key", "value"):
        yield from _linear(name, width, width, "column")
    yield from _linear("out", width, width, "row")
    yield from _norm("norm2", width)
    yield from _linear("up", feedforward, width, "column")
    yield from _linear("down", width, feedforward, "row")


def _norm(name: str, width: int) -> Iterator[Tensor]:
    yield Tensor(f"{name}.weight", (width,))
    yield Tensor(f"{name}.bias", (width,))


def _linear(name: str, outputs: int, inputs: int, split: Split) -> Iterator[Tensor]:
    yield Tensor(f"{name}.weight", (outputs, inputs), split)
    yield Tensor(f"{name}.bias", (outputs,), "column" if split == "column" else "none")


def gpt_of_size(  # noqa: PLR0913 - as gpt()
    parameters: int,
    *,
    layers: int | None = None,
    width: int | None = None,
    heads: int | None = None,
    vocabulary: int,
    positions: int,
) -> Model:
    """A GPT with about `parameters` parameters; options that are None are derived.

    A block has 12 x width x width weights (https://arxiv.org/abs/2104.04473, section 2.3); the
    MLP's width is adjusted to match the count. Widths and layers are rounded to numbers with many
    divisors.
    """
    if width is None:
        depth = layers or (parameters / (12 * _ASPECT**2)) ** (1 / 3)
        width = _rounded_width(math.sqrt(parameters / (12 * depth)))
    outside_blocks = width * (2 * vocabulary + positions)
    remaining = max(parameters - outside_blocks, parameters // 2)
    layers = layers or _rounded_layers(remaining / (12 * width**2))
    feedforward = _rounded_rows(remaining / layers - 4 * width**2, 2 * width)
    model = gpt(
        layers=layers,
        width=width,
        heads=heads
        or max(1, width // (_HEAD_WIDTH if width >= _LARGE_WIDTH else _HEAD_WIDTH // 2)),
        vocabulary=vocabulary,
        positions=positions,
        feedforward=feedforward,
    )
    return dataclasses.replace(model, exact=False)


def _rounded_width(width: float) -> int:
    """The nearest multiple of 64, 256 or 1024, depending on the width."""
    unit = 1024 if width >= 4 * _LARGE_WIDTH else 256 if width >= _LARGE_WIDTH else 64
    return max(1, round(width / unit)) * unit


def _rounded_layers(layers: float) -> int:
    """The nearest number of layers; a multiple of 4 from 10 layers on."""
    return 4 * round(layers / 4) if layers >= _MANY_LAYERS else max(1, round(layers))


def _rounded_rows(elements: float, columns: int) -> int:
    """Rows of a matrix with this many elements; a multiple of 64 from 1024 rows on."""
    rows = max(1, round(elements / columns))
    return 64 * round(rows / 64) if rows >= _LARGE_WIDTH else rows
