"""Text out of the text model, one byte after the other."""

from __future__ import annotations

import torch
from torch import nn


@torch.no_grad()
def write(
    model: nn.Module, prompt: str, length: int, generator: torch.Generator, warmth: float = 0.8
) -> str:
    """`prompt` and `length` bytes more, each drawn by its probability.

    `warmth` below 1 favours likely bytes. The model sees as many bytes as it was trained on: the
    last ones, with spaces before a prompt that is shorter.
    """
    sequence = model.get_submodule("embed").position.num_embeddings
    written = list(prompt.encode())
    for _ in range(length):
        seen = ([ord(" ")] * sequence + written)[-sequence:]
        scores = model(torch.tensor([seen]))[0, -1] / warmth
        written.append(int(torch.multinomial(scores.softmax(dim=0), 1, generator=generator)))
    return bytes(written).decode(errors="replace")
