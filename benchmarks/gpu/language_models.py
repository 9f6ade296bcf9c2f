"""Two language models with vocabularies of their own, for `make gpu`: tasks for the trainer.

    train.py --task language_models:gpt2 --layers 12 --width 768 --heads 12 --sequence 1024

With these sizes `gpt2` has the 124 million parameters of GPT-2
(https://github.com/openai/gpt-2, model 124M). With 16 layers of width 2048 and 32 heads `llama` has
the 1.24 billion of Llama 3.2 1B (https://huggingface.co/meta-llama/Llama-3.2-1B, config.json). The
tokens are random: only their number matters for speed and memory. A smaller vocabulary, with
``--task-option vocabulary=512``, is for a trial.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "entrypoints"))

from trainer.models import Block
from trainer.task import Task, reset_parameters
from trainer.train_options import ModelOptions

GPT2_VOCABULARY = 50_257
LLAMA_VOCABULARY = 128_256
WINDOWS = 128
"""Samples in an epoch."""
QUERIES = 4
"""Query heads of Llama that share a head of keys and values."""
ROPE_BASE = 500_000.0


def gpt2(options: ModelOptions) -> Task:
    """GPT-2 with the sizes of the options."""
    return _task(Gpt2, options, GPT2_VOCABULARY)


def llama(options: ModelOptions) -> Task:
    """A Llama with the sizes of the options."""
    return _task(Llama, options, LLAMA_VOCABULARY)


def _task(
    model: Callable[[ModelOptions, int], nn.Module], options: ModelOptions, usual: int
) -> Task:
    vocabulary = int(options.task_options.get("vocabulary", usual))
    windows = _windows(options, vocabulary)
    return Task(partial(model, options, vocabulary), windows, unit="tokens", init=_first_values)


def _first_values(module: nn.Module) -> None:
    """Those of one module, made on the GPU; without this, one CPU core would make all of them."""
    reset_parameters(module)
    if isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)


def _windows(options: ModelOptions, vocabulary: int) -> TensorDataset:
    """Inputs and targets, both (WINDOWS, sequence)."""
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocabulary, (WINDOWS, options.sequence + 1), generator=random)
    return TensorDataset(tokens[:, :-1], tokens[:, 1:])


def _embedding(size: int, width: int) -> nn.Embedding:
    table = nn.Embedding(size, width)
    nn.init.normal_(table.weight, std=0.02)
    return table


def _tied(table: nn.Embedding) -> nn.Linear:
    """The projection to scores, with the weights of the embedding."""
    head = nn.Linear(table.embedding_dim, table.num_embeddings, bias=False, device="meta")
    head.weight = table.weight
    return head


class Gpt2(nn.Module):
    """Tokens (batch, sequence) to scores (batch, sequence, vocabulary)."""

    def __init__(self, options: ModelOptions, vocabulary: int) -> None:
        super().__init__()
        self.token = _embedding(vocabulary, options.width)
        self.position = _embedding(options.sequence, options.width)
        blocks = [Block(options.width, options.heads) for _ in range(options.layers)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(options.width)
        self.head = _tied(self.token)

    def forward(self, tokens: Tensor) -> Tensor:
        """The scores; the embedding of tokens is their projection too."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.token(tokens) + self.position(positions)
        for block in self.blocks:
            hidden = block(hidden)
        scores: Tensor = self.head(self.norm(hidden))
        return scores


class Llama(nn.Module):
    """Tokens (batch, sequence) to scores (batch, sequence, vocabulary)."""

    def __init__(self, options: ModelOptions, vocabulary: int) -> None:
        super().__init__()
        self.token = _embedding(vocabulary, options.width)
        blocks = [LlamaBlock(options.width, options.heads) for _ in range(options.layers)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.RMSNorm(options.width)
        self.head = _tied(self.token)

    def forward(self, tokens: Tensor) -> Tensor:
        """The scores; the embedding of tokens is their projection too."""
        hidden = self.token(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        scores: Tensor = self.head(self.norm(hidden))
        return scores


class LlamaBlock(nn.Module):
    """Attention with rotary positions and shared keys and values, and a gated MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.size = width // heads
        shared = width // QUERIES
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, shared, bias=False)
        self.value = nn.Linear(width, shared, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, 4 * width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, width) to the same shape."""
        x = x + self._attention(self.norm1(x))
        normed = self.norm2(x)
        output: Tensor = x + self.down(silu(self.gate(normed)) * self.up(normed))
        return output

    def _attention(self, x: Tensor) -> Tensor:
        query, key, value = (
            part(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        key, value = (part.repeat_interleave(QUERIES, dim=1) for part in (_rotated(key), value))
        mixed = scaled_dot_product_attention(_rotated(query), key, value, is_causal=True)
        output: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return output


def _rotated(x: Tensor) -> Tensor:
    """Vectors (batch, heads, sequence, size) turned by their positions.

    https://arxiv.org/abs/2104.09864, section 3.4.2, with the halves of a vector as pairs.
    """
    half = x.shape[-1] // 2
    powers = torch.arange(half, device=x.device) / half
    angles = torch.outer(torch.arange(x.shape[-2], device=x.device), ROPE_BASE**-powers)
    cosine, sine = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.split(half, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
