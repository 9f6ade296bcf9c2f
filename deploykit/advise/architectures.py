"""Models known by their architecture.

The reference trainer's GPT is known exactly: an embedding of tokens and positions, equal blocks
(LayerNorm, attention with four projections, LayerNorm, a two-layer MLP), and a head (LayerNorm and
a Linear layer without bias, whose weights are not tied to the embedding).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from deploykit.advise.model_shape import Layer, Model, Split, Tensor

_ASPECT = 128
"""Width per layer of a model given only by its size: 7B gives 32 layers of width 4096."""
_HEAD_WIDTH = 128
_LARGE_WIDTH = 1024
_MANY_LAYERS = 10
_MLP_RATIO = 4


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


def llama(  # noqa: PLR0913 - the options that size a Llama
    *, layers: int, width: int, heads: int, kv_heads: int, feedforward: int, vocabulary: int
) -> Model:
    """A Llama 2 or 3: RMSNorm, keys and values for fewer heads, a gated MLP, no biases
    (https://arxiv.org/abs/2407.21783, section 3.2).
    """
    narrow = width * kv_heads // heads
    block = (
        Tensor("norm1.weight", (width,)),
        Tensor("query.weight", (width, width), "column"),
        Tensor("key.weight", (narrow, width), "column"),
        Tensor("value.weight", (narrow, width), "column"),
        Tensor("out.weight", (width, width), "row"),
        Tensor("norm2.weight", (width,)),
        Tensor("gate.weight", (feedforward, width), "column"),
        Tensor("up.weight", (feedforward, width), "column"),
        Tensor("down.weight", (width, feedforward), "row"),
    )
    head = (Tensor("norm.weight", (width,)), Tensor("out.weight", (vocabulary, width), "column"))
    return Model(
        Layer("embedding", (Tensor("token.weight", (vocabulary, width), "column"),)),
        Layer("block", block),
        layers,
        Layer("head", head),
        width=width,
        heads=heads,
        vocabulary=vocabulary,
        feedforward=feedforward,
        kv_heads=kv_heads,
        gated=True,
    )
