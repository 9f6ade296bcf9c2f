"""The shape of a model: its parameter tensors, in layers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Split = Literal["column", "row", "none"]
"""How tensor parallelism splits a tensor: along dimension 0, along dimension 1, or not at all
(https://arxiv.org/abs/1909.08053, section 3)."""


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

    def edges(self, tensor: int = 1) -> float:
        """Inputs plus outputs of a matrix on one of `tensor` ranks."""
        rows, *rest = self.shape
        columns = math.prod(rest)
        split_rows = tensor if self.split == "column" else 1
        split_columns = tensor if self.split == "row" else 1
        return rows / split_rows + columns / split_columns


@dataclass(frozen=True)
class Layer:
    """A layer: the unit in which weights are gathered and freed."""

    name: str
    tensors: tuple[Tensor, ...]

    def size(self, tensor: int = 1, shards: int = 1) -> int:
        """Elements on one rank, of `tensor` x `shards`."""
        return sum(each.local(tensor, shards) for each in self.tensors)

    def matrices(self) -> int:
        """Elements of all tensors with two dimensions or more."""
        return sum(tensor.size for tensor in self.tensors if len(tensor.shape) > 1)

    def edges(self, tensor: int = 1) -> float:
        """Inputs and outputs of all matrices, of which each of `tensor` ranks has its split."""
        return sum(each.edges(tensor) for each in self.tensors if len(each.shape) > 1)


@dataclass(frozen=True)
class Sample:
    """One sample's forward and backward pass, counted where no formula knows the model.

    `flops`: floating point operations. `saved`: elements that the forward pass keeps for the
    backward pass. `traffic`: elements that all operations read and write.
    """

    flops: float
    saved: float
    traffic: float


@dataclass(frozen=True)
class Model:
    """An embedding, `layers` equal blocks and a head.

    `vocabulary`: the number of logits per token; 0 if the embedding is no vocabulary (a table of a
    recommender, the input of a classifier). `kv_heads`: heads of keys and values, if fewer than
    `heads`. `gated`: an MLP with two inner matrices, as in Llama. `tied`: the head's matrix is the
    embedding's. `flash`: attention keeps no scores in memory. `task`: the trainer's name for it,
    if it is a task of the user's, whose samples have `length` tokens.
    """

    embedding: Layer
    block: Layer
    layers: int
    head: Layer
    width: int
    heads: int
    vocabulary: int
    feedforward: int
    kv_heads: int = 0
    gated: bool = False
    tied: bool = False
    flash: bool = True
    sample: Sample | None = None
    task: str = ""
    length: int = 0
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
        matrices = blocks * self.block.matrices() + head * self.head_size
        return 6.0 * matrices + 12.0 * blocks * self.width * sequence

    @property
    def head_size(self) -> int:
        """Weights that a token meets in the head, a tied embedding included."""
        return self.vocabulary * self.width if self.tied else self.head.matrices()

    @property
    def kv_share(self) -> float:
        """Width of the keys as a share of the model's."""
        return (self.kv_heads or self.heads) / self.heads
