"""The two models, which know nothing of parallelism.

Each is a sequence of named layers, so that a pipeline can be split between any two of them. Neither
uses batch normalization or dropout: with those, results would depend on how a batch is split.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

VOCABULARY_SIZE = 256
"""Tokens are bytes."""


def cnn() -> nn.Sequential:
    """A CNN with 38 thousand parameters: pixels (batch, 1, 8, 8) to scores (batch, 10)."""
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(1, 16, kernel_size=3, padding=1),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(16, 32, kernel_size=3, padding=1),
            relu2=nn.ReLU(),
            pool=nn.MaxPool2d(2),
            flat=nn.Flatten(),
            hidden=nn.Linear(32 * 4 * 4, 64),
            relu3=nn.ReLU(),
            scores=nn.Linear(64, 10),
        )
    )


def gpt(layers: int, width: int, heads: int, sequence: int) -> nn.Sequential:
    """A GPT over bytes: tokens (batch, sequence) to scores (batch, sequence, 256)."""
    blocks = {f"block{number}": Block(width, heads) for number in range(layers)}
    named = OrderedDict[str, nn.Module](embed=Embedding(width, sequence))
    named.update(blocks)
    named["head"] = Head(width)
    return nn.Sequential(named)


class Embedding(nn.Module):
    """Token and position embeddings, added."""

    def __init__(self, width: int, sequence: int) -> None:
        super().__init__()
        self.byte = nn.Embedding(VOCABULARY_SIZE, width)
        self.position = nn.Embedding(sequence, width)
        for table in (self.byte, self.position):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Tokens (batch, sequence) to hidden states (batch, sequence, width).

        `position_ids` (1, sequence) are 0, 1, 2 and so on, unless the tokens begin elsewhere.
        """
        if position_ids is None:
            position_ids = torch.arange(tokens.shape[1], device=tokens.device)
        hidden: Tensor = self.byte(tokens) + self.position(position_ids)
        return hidden


class Block(nn.Module):
    """A pre-norm transformer block: attention and MLP, each with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.feed = FeedForward(width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, width) to the same shape."""
        x = x + self.attention(self.norm1(x))
        output: Tensor = x + self.feed(self.norm2(x))
        return output


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.size = width // heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, width) to the same shape."""
        query, key, value = (self._heads(part(x)) for part in (self.query, self.key, self.value))
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        output: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return output

    def _heads(self, x: Tensor) -> Tensor:
        """(batch, sequence, width) to (batch, heads, sequence, size), for the heads on this rank.

        Under tensor parallelism `width` is this rank's part, and so is the number of heads.
        """
        heads: Tensor = x.unflatten(-1, (-1, self.size))
        return heads.transpose(1, 2)


class FeedForward(nn.Module):
    """An MLP with one hidden layer of four times the width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, width) to the same shape."""
        output: Tensor = self.down(gelu(self.up(x)))
        return output


class Head(nn.Module):
    """The final normalization and the projection to scores."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.scores = nn.Linear(width, VOCABULARY_SIZE, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, width) to scores (batch, sequence, 256)."""
        scores: Tensor = self.scores(self.norm(x))
        return scores
