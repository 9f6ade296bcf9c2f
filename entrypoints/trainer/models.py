"""The two models. They know nothing of how they will be spread over processes.

Each is a sequence of named layers, so that a pipeline can be cut between any two of them.
Neither has batch normalisation or dropout: both would make the numbers depend on how a batch is
split.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

BYTES = 256


def cnn() -> nn.Sequential:
    """38 thousand parameters: (samples, 1, 8, 8) pixels in, (samples, 10) scores out."""
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
    """A GPT over bytes: (samples, sequence) in, (samples, sequence, 256) scores out."""
    blocks = {f"block{number}": Block(width, heads) for number in range(layers)}
    parts = OrderedDict(embed=Embedding(width, sequence), **blocks, head=Head(width))
    return nn.Sequential(parts)


class Embedding(nn.Module):
    """What a byte is plus where it stands."""

    def __init__(self, width: int, sequence: int) -> None:
        super().__init__()
        self.byte = nn.Embedding(BYTES, width)
        self.position = nn.Embedding(sequence, width)
        for table in (self.byte, self.position):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.byte(tokens) + self.position(
            torch.arange(tokens.shape[1], device=tokens.device)
        )


class Block(nn.Module):
    """Attention, then a feed-forward network, each added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.feed = Feed(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feed(self.norm2(x))


class Attention(nn.Module):
    """Each position looks at itself and those before it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.size = width // heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (self._heads(part(x)) for part in (self.query, self.key, self.value))
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        """(samples, sequence, width) to (samples, heads, sequence, size), of the heads here."""
        return x.unflatten(-1, (-1, self.size)).transpose(1, 2)


class Feed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(gelu(self.up(x)))


class Head(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.scores = nn.Linear(width, BYTES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(self.norm(x))
