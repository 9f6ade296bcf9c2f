"""What can be learned: handwritten digits, or the next byte of a text."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset, random_split

from trainer import models

MEAN, DEVIATION = 4.9, 6.0
"""Of the digits' pixels, which run from 0 to 16. Raw pixels train to the same accuracy, but on a
path so unstable that rounding, which depends on the number of ranks, shows in the loss after 50
steps."""

MINIMUM = 50
"""Windows of text that are worth cutting into three parts."""

TEXT_SUFFIXES = (".txt", ".md", ".rst")


@dataclass(frozen=True)
class Task:
    """Samples in three parts that never overlap or change, and the model that learns from them."""

    unit: str
    """What a target is: one image has one, a piece of text one for each of its bytes."""
    training: TensorDataset
    validation: TensorDataset
    test: TensorDataset
    model: Callable[[], nn.Sequential]


def model(options: argparse.Namespace) -> nn.Sequential:
    """The model of a task, before any training; without its samples."""
    if options.task == "digits":
        return models.cnn()
    return models.gpt(options.layers, options.width, options.heads, options.sequence)


def find(options: argparse.Namespace) -> Task:
    return {"digits": digits, "text": text}[options.task](options)


def digits(options: argparse.Namespace) -> Task:
    """scikit-learn's handwritten digits: 1797 real images of 8 x 8 pixels, in the package."""
    from sklearn.datasets import load_digits

    loaded = load_digits()
    images = torch.tensor(loaded.images, dtype=torch.float32).unsqueeze(1)
    inputs, targets = normal(images), torch.tensor(loaded.target)
    parts = random_split(range(len(inputs)), [1077, 360, 360], torch.Generator().manual_seed(0))
    chosen = [TensorDataset(inputs[part.indices], targets[part.indices]) for part in parts]
    return Task("images", *chosen, partial(model, options))


def normal(pixels: Tensor) -> Tensor:
    """Pixels from 0 to 16 as the model takes them: around 0, about 1 wide."""
    return (pixels - MEAN) / DEVIATION


def text(options: argparse.Namespace) -> Task:
    """Bytes of every text file in a folder, cut into windows; each byte predicts the next.

    By default the reference texts that come with Python, half a million bytes of English.
    """
    data = torch.frombuffer(bytearray(_text(options)), dtype=torch.uint8).long()
    windows = data[: (len(data) - 1) // options.sequence * options.sequence + 1]
    inputs = windows[:-1].view(-1, options.sequence)
    targets = windows[1:].view(-1, options.sequence)
    held = max(1, len(inputs) // 20)
    ends = [0, len(inputs) - 2 * held, len(inputs) - held, len(inputs)]
    parts = [TensorDataset(inputs[a:b], targets[a:b]) for a, b in pairwise(ends)]
    return Task("bytes", *parts, partial(model, options))


def too_short(options: argparse.Namespace) -> str:
    """Why there is not enough text for three parts, or ''."""
    found = len(_text(options))
    if found > MINIMUM * options.sequence:
        return ""
    what = f"holds {found} bytes of text" if found else "holds no text"
    return (
        f"--text {options.text} {what} in files {', '.join(TEXT_SUFFIXES)}; "
        f"at least {MINIMUM} times --sequence {options.sequence} are needed"
    )


def _text(options: argparse.Namespace) -> bytes:
    return _found(Path(options.text)) if options.text else _shipped()


def _shipped() -> bytes:
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics)).encode()


def _found(folder: Path) -> bytes:
    found = sorted(
        path for path in folder.rglob("*") if path.suffix in TEXT_SUFFIXES and path.is_file()
    )
    return b"\n".join(path.read_bytes() for path in found)
