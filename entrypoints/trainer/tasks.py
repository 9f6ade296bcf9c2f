"""The tasks: classify handwritten digits, or predict the next byte of a text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset, random_split

from trainer import models
from trainer.data import IGNORE_INDEX
from trainer.train_options import TrainOptions

PIXEL_MEAN, PIXEL_STD = 4.9, 6.0
"""Of the digits' pixels, which range from 0 to 16. Raw pixels train to the same accuracy, but on a
trajectory so unstable that rounding, which depends on the number of ranks, shows in the loss after
50 steps."""

MIN_WINDOWS = 50
"""Minimum number of text windows for a split into three parts."""

TEXT_SUFFIXES = (".txt", ".md", ".rst")


@dataclass(frozen=True)
class Task:
    """Three disjoint, fixed datasets and a function that builds the model."""

    unit: str
    """What one target is: an image has one, a text window has one per byte."""
    training: TensorDataset
    validation: TensorDataset
    test: TensorDataset
    model: Callable[[], nn.Sequential]

    def target_count(self, name: str) -> int:
        """Number of targets in the dataset `name`: training, validation or test."""
        dataset: TensorDataset = getattr(self, name)
        return int((dataset.tensors[1] != IGNORE_INDEX).sum())


def build_model(options: TrainOptions) -> nn.Sequential:
    """The task's model with fresh weights; needs no data."""
    if options.task == "digits":
        return models.cnn()
    return models.gpt(options.layers, options.width, options.heads, options.sequence)


def load(options: TrainOptions) -> Task:
    """The task that `options.task` names, with its data in memory."""
    return {"digits": load_digits, "text": load_text}[options.task](options)


def load_digits(options: TrainOptions) -> Task:
    """scikit-learn's handwritten digits: 1797 images (1, 8, 8), shipped with the package."""
    from sklearn import datasets

    digits = datasets.load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1)
    inputs, targets = normalize(images), torch.tensor(digits.target)
    order = random_split(TensorDataset(inputs), [1077, 360, 360], torch.Generator().manual_seed(0))
    parts = [TensorDataset(inputs[part.indices], targets[part.indices]) for part in order]
    return Task("images", parts[0], parts[1], parts[2], partial(build_model, options))


def normalize(pixels: Tensor) -> Tensor:
    """Scale pixels from 0..16 to about zero mean and unit variance; any shape."""
    return (pixels - PIXEL_MEAN) / PIXEL_STD


def load_text(options: TrainOptions) -> Task:
    """Byte windows (windows, sequence) of all text files in a folder; each byte predicts the next.

    The default is Python's own help topics, half a million bytes of English.
    """
    data = torch.frombuffer(bytearray(_text(options)), dtype=torch.uint8).long()
    used = data[: (len(data) - 1) // options.sequence * options.sequence + 1]
    inputs = used[:-1].view(-1, options.sequence)
    targets = used[1:].view(-1, options.sequence)
    held_out = max(1, len(inputs) // 20)
    bounds = [0, len(inputs) - 2 * held_out, len(inputs) - held_out, len(inputs)]
    parts = [TensorDataset(inputs[a:b], targets[a:b]) for a, b in pairwise(bounds)]
    return Task("bytes", parts[0], parts[1], parts[2], partial(build_model, options))


def text_problem(options: TrainOptions) -> str:
    """Why the text cannot be split into three parts, or ''."""
    size = len(_text(options))
    if size > MIN_WINDOWS * options.sequence:
        return ""
    content = f"holds {size} bytes of text" if size else "holds no text"
    return (
        f"--text {options.text} {content} in files {', '.join(TEXT_SUFFIXES)}; "
        f"at least {MIN_WINDOWS} times --sequence {options.sequence} are required"
    )


def _text(options: TrainOptions) -> bytes:
    return _text_of_folder(Path(options.text)) if options.text else _help_topics()


def _help_topics() -> bytes:
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics)).encode()


def _text_of_folder(folder: Path) -> bytes:
    paths = sorted(
        path for path in folder.rglob("*") if path.suffix in TEXT_SUFFIXES and path.is_file()
    )
    return b"\n".join(path.read_bytes() for path in paths)
