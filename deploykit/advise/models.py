"""Models: their parameter tensors, in layers.

Known by their architecture are the reference trainer's GPT (an embedding of tokens and positions,
equal blocks of LayerNorm, attention with four projections, LayerNorm and a two-layer MLP, and a
head of LayerNorm and a Linear layer without bias, not tied to the embedding) and Llama. Any other
is counted by a child process, which imports torch.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from deploykit.job.decode import from_json
from deploykit.lib import paths, shell
from deploykit.lib.errors import UsageError

Split = Literal["column", "row", "none"]
"""How tensor parallelism splits a tensor: along dimension 0, along dimension 1, or not at all
(https://arxiv.org/abs/1909.08053, section 3)."""
_ASPECT = 128
"""Width per layer of a model given only by its size: 7B gives 32 layers of width 4096."""
_LARGE_WIDTH = 1024
_MANY_LAYERS = 10
_COUNT_TIMEOUT = 300
_MAX_ERROR_LINES = 3


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
    """The unit in which weights are gathered and freed."""

    name: str
    tensors: tuple[Tensor, ...]

    def size(self, tensor: int = 1, shards: int = 1) -> int:
        """Elements on one rank, of `tensor` x `shards`."""
        return sum(each.local(tensor, shards) for each in self.tensors)

    def matrices(self, tensor: int = 1) -> int:
        """Elements of all tensors with two dimensions or more, on one of `tensor` ranks."""
        return sum(each.local(tensor) for each in self.tensors if len(each.shape) > 1)

    def edges(self, tensor: int = 1) -> float:
        """Inputs and outputs of all matrices, of which each of `tensor` ranks has its split."""
        return sum(each.edges(tensor) for each in self.tensors if len(each.shape) > 1)


@dataclass(frozen=True)
class Sample:
    """One sample's forward and backward pass, counted where no formula fits the model.

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
    embedding's. `flash`: attention keeps no scores in memory. `task`: the trainer's name for a task
    of the user's, whose samples have `length` tokens. `exact`: the tensors are the model's own,
    not derived from its size.
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

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return self.embedding.size() + self.layers * self.block.size() + self.head.size()

    def tensors(self) -> Iterator[Tensor]:
        """Yield every parameter, in the order of the forward pass."""
        for layer in (self.embedding, *[self.block] * self.layers, self.head):
            yield from layer.tensors

    def flops(self, tokens: int, sequence: int) -> float:
        """Floating point operations of one training step over `tokens`, without recomputation.

        Six per token for each weight of a matrix, and 12 x layers x width x sequence per token for
        attention scores (https://arxiv.org/abs/2104.04473, appendix).
        """
        return tokens * self.flops_per_token(self.layers, sequence, head=True)

    def flops_per_token(self, blocks: int, sequence: int, *, head: bool) -> float:
        """As `flops`, per token, for a number of blocks with or without the head."""
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
    feedforward = feedforward or 4 * width
    block = (
        *_norm("norm1", width),
        *(tensor for name in ("query", "key", "value") for tensor in _linear(name, width, width)),
        *_linear("out", width, width, split="row"),
        *_norm("norm2", width),
        *_linear("up", feedforward, width),
        *_linear("down", width, feedforward, split="row"),
    )
    token = Tensor("token.weight", (vocabulary, width), "column")
    return Model(
        Layer("embedding", (token, Tensor("position.weight", (positions, width)))),
        Layer("block", block),
        layers,
        Layer("head", (*_norm("norm", width), Tensor("out.weight", (vocabulary, width), "column"))),
        width=width,
        heads=heads,
        vocabulary=vocabulary,
        feedforward=feedforward,
    )


def _norm(name: str, width: int) -> tuple[Tensor, ...]:
    return Tensor(f"{name}.weight", (width,)), Tensor(f"{name}.bias", (width,))


def _linear(name: str, outputs: int, inputs: int, split: Split = "column") -> tuple[Tensor, ...]:
    bias = Tensor(f"{name}.bias", (outputs,), "column" if split == "column" else "none")
    return Tensor(f"{name}.weight", (outputs, inputs), split), bias


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
    MLP's width is adjusted to match the count. Widths are rounded to multiples of 64, 256 or 1024,
    ten or more layers to multiples of 4, and 1024 or more rows of the MLP to multiples of 64.
    """
    if width is None:
        depth = layers or (parameters / (12 * _ASPECT**2)) ** (1 / 3)
        exact_width = math.sqrt(parameters / (12 * depth))
        steps = ((4 * _LARGE_WIDTH, 1024), (_LARGE_WIDTH, 256), (0, 64))
        unit = next(unit for least, unit in steps if exact_width >= least)
        width = max(1, round(exact_width / unit)) * unit
    outside_blocks = width * (2 * vocabulary + positions)
    remaining = max(parameters - outside_blocks, parameters // 2)
    if layers is None:
        exact_layers = remaining / (12 * width**2)
        many = exact_layers >= _MANY_LAYERS
        layers = 4 * round(exact_layers / 4) if many else max(1, round(exact_layers))
    rows = max(1, round((remaining / layers - 4 * width**2) / (2 * width)))
    model = gpt(
        layers=layers,
        width=width,
        heads=heads or max(1, width // (128 if width >= _LARGE_WIDTH else 64)),
        vocabulary=vocabulary,
        positions=positions,
        feedforward=64 * round(rows / 64) if rows >= _LARGE_WIDTH else rows,
    )
    return dataclasses.replace(model, exact=False)


def counted(name: str, sample: str, *, heads: int | None) -> Model:
    """Count the model `name`: a ``module:function`` of the working folder, or one of Hugging Face.

    It then takes a step on a `sample`, as entrypoints/count_model.py describes. Raises UsageError
    if that fails, with the last lines of the child's stderr.
    """
    option = "--task" if sample.startswith("task:") else "--model"
    if ":" not in name and find_spec("transformers") is None:
        raise UsageError(
            f"--model {name}: a model name requires transformers in {sys.executable}",
            hint="pip install transformers, or describe the model, for example --parameters 7B",
        )
    script = paths.shipped("entrypoints") / "count_model.py"
    done = shell.run([sys.executable, str(script), name, sample], timeout=_COUNT_TIMEOUT)
    if done.code:
        stderr = "\n".join(done.err.strip().splitlines()[-_MAX_ERROR_LINES:])
        raise UsageError(
            f"{option} {name}: building the model in {Path.cwd()} failed",
            hint=f"{stderr}\n{sys.executable} imports the model, and must have torch installed",
        )
    try:
        model = from_counts(from_json(done.out.strip().splitlines()[-1]), heads=heads)
    except (LookupError, TypeError, ValueError):
        raise UsageError(
            f"{option} {name} printed text when Python exited",
            hint="remove the output, for example that of an atexit function",
        ) from None
    return dataclasses.replace(model, task=name) if option == "--task" else model


def from_counts(counts: Mapping[str, Any], *, heads: int | None = None) -> Model:
    """Convert the output of entrypoints/count_model.py to a model.

    The width is that of the largest embedding; its rows are a vocabulary if the head or a tied
    layer has as many outputs. The MLP's width is the largest size in a block. What the model does
    with a sample is taken from the count if the formulas do not apply: without an embedding or
    without blocks.
    """
    rows, width = max((shape for _, shape in counts["embedding"]), default=[0, 0])
    outputs = {shape[0] for _, shape in counts["head"] if len(shape) > 1}
    tied = bool(counts.get("tied"))
    feedforward = max((size for _, shape in counts["block"] for size in shape), default=0)
    inner = [shape for _, shape in counts["block"] if len(shape) > 1 and feedforward in shape]
    known = width and counts["layers"]
    sample = counts.get("sample")
    return Model(
        _layer("embedding", counts["embedding"]),
        _layer("block", counts["block"]),
        counts["layers"],
        _layer("head", counts["head"]),
        width=width,
        heads=heads or counts.get("heads") or max(1, width // 64),
        vocabulary=rows if tied or rows in outputs else 0,
        feedforward=feedforward,
        kv_heads=counts.get("kv_heads", 0),
        gated=len(inner) > 2,  # noqa: PLR2004 - an MLP has two matrices, a gated one three
        tied=tied,
        length=counts.get("length", 0),
        sample=Sample(**sample) if sample and not known else None,
    )


def _layer(name: str, tensors: Sequence[tuple[str, Sequence[int]]]) -> Layer:
    """A layer; tensor parallelism is assumed to split every matrix by columns."""
    return Layer(
        name,
        tuple(
            Tensor(tensor, tuple(shape), "column" if len(shape) > 1 else "none")
            for tensor, shape in tensors
        ),
    )
