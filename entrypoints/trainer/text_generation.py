"""Sampling from the text model, one byte at a time."""

from __future__ import annotations

import torch
from torch import nn


@torch.no_grad()
def generate(
    model: nn.Module, prompt: str, length: int, generator: torch.Generator, temperature: float = 0.8
) -> str:
    """Continue `prompt` by `length` bytes, sampled from the softmax of scores / `temperature`.

    The model sees its full context length: the last bytes, left-padded with spaces if there are
    fewer.
    """
    positions = model.get_submodule("embed.position")
    assert isinstance(positions, nn.Embedding)  # noqa: S101 - only the text model can be sampled
    sequence = positions.num_embeddings
    text = list(prompt.encode())
    for _ in range(length):
        window = ([ord(" ")] * sequence + text)[-sequence:]
        scores = model(torch.tensor([window]))[0, -1] / temperature
        text.append(int(torch.multinomial(scores.softmax(dim=0), 1, generator=generator)))
    return bytes(text).decode(errors="replace")
