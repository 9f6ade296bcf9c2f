"""Tasks by name: classify handwritten digits, predict the next byte of a text, or your own."""

from __future__ import annotations

import importlib
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset, random_split

from trainer import models
from trainer.errors import ConfigError
from trainer.task import Task
from trainer.train_options import ModelOptions

PIXEL_MEAN, PIXEL_STD = 4.9, 6.0
"""Of the digits' pixels, which range from 0 to 16. Raw pixels train to the same accuracy, but on a
trajectory so unstable that rounding, which depends on the number of ranks, shows in the loss after
50 steps."""

MIN_WINDOWS = 50
"""Minimum number of text windows for a split into three parts."""

TEXT_SUFFIXES = (".txt", ".md", ".rst")


def build_model(options: ModelOptions) -> nn.Sequential:
    """The task's model with fresh weights; needs no data."""
    if options.task == "digits":
        return models.cnn()
    return models.gpt(options.layers, options.width, options.heads, options.sequence)


def load(options: ModelOptions) -> Task:
    """The task that `options.task` names.

    Raises ConfigError if it cannot be found. What your own function raises, it raises.
    """
    if options.task == "digits":
        return load_digits(options)
    return load_text(options) if options.task == "text" else _call(options)


def _call(options: ModelOptions) -> Task:
    """Call the function that ``--task package.module:function`` names."""
    module, _, name = options.task.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        function = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):
            raise  # a module that the task's own module imports
        raise ConfigError(
            f"--task {options.task}: module {error.name} not found in {Path.cwd()} or among the "
            "installed packages"
        ) from error
    if not callable(function):
        raise ConfigError(f"--task {options.task}: the module {module} has no function {name}")
    task = function(options)
    if not isinstance(task, Task):
        raise ConfigError(
            f"--task {options.task} returned {type(task).__name__}, not a trainer.task.Task"
        )
    _check_lengths(task, options.task)
    return task


def _check_lengths(task: Task, name: str) -> None:
    """Raise ConfigError unless the task has a length for each sample, or none at all."""
    if task.lengths is None:
        return
    if task.streams:
        raise ConfigError(
            f"--task {name}: `lengths` requires indexed training data, but this is a stream: put "
            "samples of similar length next to each other in the stream"
        )
    samples = len(task.training)  # type: ignore[arg-type]  # it is no stream
    if len(task.lengths) != samples:
        raise ConfigError(
            f"--task {name}: `lengths` has {len(task.lengths)} numbers for {samples} samples"
        )


def problem(options: ModelOptions) -> str:
    """Why there can be no such task, or ''; without importing it."""
    module, colon, function = options.task.partition(":")
    if options.task == "text":
        return text_problem(options)
    if options.task == "digits" or (module and function.isidentifier()):
        return ""
    return (
        f"--task {options.task} must be digits, text, or your own function as "
        f"package.module:function{'' if colon else ', with a colon'}"
    )


def load_digits(options: ModelOptions) -> Task:
    """scikit-learn's handwritten digits: 1797 images (1, 8, 8), shipped with the package."""
    from sklearn import datasets

    digits = datasets.load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1)
    inputs, targets = normalize(images), torch.tensor(digits.target)
    order = random_split(TensorDataset(inputs), [1077, 360, 360], torch.Generator().manual_seed(0))
    parts = [TensorDataset(inputs[part.indices], targets[part.indices]) for part in order]
    return Task(partial(build_model, options), parts[0], parts[1], parts[2], unit="images")


def normalize(pixels: Tensor) -> Tensor:
    """Scale pixels from 0..16 to about zero mean and unit variance; any shape."""
    return (pixels - PIXEL_MEAN) / PIXEL_STD


def load_text(options: ModelOptions) -> Task:
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
    return Task(partial(build_model, options), parts[0], parts[1], parts[2], unit="bytes")


def text_problem(options: ModelOptions) -> str:
    """Why the text cannot be split into three parts, or ''."""
    size = len(_text(options))
    if size > MIN_WINDOWS * options.sequence:
        return ""
    content = f"contains {size} bytes of text" if size else "contains no text"
    return (
        f"--text {options.text} {content} in files {', '.join(TEXT_SUFFIXES)}; "
        f"at least {MIN_WINDOWS} times --sequence {options.sequence} is required"
    )


def _text(options: ModelOptions) -> bytes:
    if not options.text:
        return "\n".join(topics[name] for name in sorted(topics)).encode()
    paths = sorted(Path(options.text).rglob("*"))
    texts = [path for path in paths if path.suffix in TEXT_SUFFIXES and path.is_file()]
    return b"\n".join(path.read_bytes() for path in texts)
