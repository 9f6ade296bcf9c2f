"""Loads a trained model from a checkpoint of any strategy, in one process without a group.

The model's settings come from the checkpoint, which is untrusted. A model is built only if its
tensors are exactly those that the checkpoint stores, so that no number in a file decides how much
memory is allocated.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from trainer import tasks
from trainer.checkpoint import checkpointer as checkpoint
from trainer.checkpoint.integrity import Progress, VerifiedCheckpoint
from trainer.checkpoint.safe_pickle import InvalidFile
from trainer.optim import weight_average
from trainer.train_options import ModelOptions

Loaded = TypeVar("Loaded")
MODEL_SETTINGS = ("layers", "width", "heads", "sequence")
MAX_SETTING = 2**20
"""Maximum value of each model setting."""


class RestoredModel(NamedTuple):
    """Test data of a run, its model in evaluation mode and its progress."""

    test: TensorDataset
    model: nn.Module
    progress: Progress


def restore(folder: Path) -> RestoredModel:
    """Load the model of the latest valid checkpoint in `folder`.

    Raises FileNotFoundError if there is none, ValueError if none can be used.
    """
    latest = checkpoint.find_latest(folder, _problem)
    options = ModelOptions.of(latest.progress["settings"])
    trained = _trained(checkpoint.read(latest.path))
    model = build_on_meta(latest.progress["settings"], max_layers=len(trained))
    materialize(model, {name: trained[name] for name in model.state_dict()})
    test = cast("TensorDataset", tasks.load(options).test)  # that of digits and text is in memory
    return RestoredModel(test, model, latest.progress)


def build_on_meta(settings: Mapping[str, Any], max_layers: int) -> nn.Module:
    """Build the model that `settings` describe on the meta device, which allocates no memory.

    Raises InvalidFile if the settings are not valid or have more than `max_layers` layers.
    """
    if settings.get("task") not in ("digits", "text"):
        raise InvalidFile("it is of a task of your own: only digits and text can be loaded here")
    sizes = [settings.get(name) for name in MODEL_SETTINGS]
    if not all(type(size) is int and 0 < size <= MAX_SETTING for size in sizes):
        raise InvalidFile("the model sizes of its settings are not valid")
    options = ModelOptions.of(settings)
    if options.layers > max_layers or options.width % options.heads:
        raise InvalidFile("the model sizes of its settings contradict each other")
    with torch.device("meta"):
        return tasks.build_model(options)


def materialize(model: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
    """Move a model from the meta device to the CPU, with these weights, in evaluation mode."""
    model.to_empty(device="cpu").load_state_dict(weights)
    return model.eval()


def _problem(candidate: VerifiedCheckpoint) -> str:
    """Why no model can be built from a checkpoint, or ''."""
    settings = candidate.progress.get("settings")
    if type(settings) is not dict or type(settings.get("text")) not in (str, type(None)):
        return "its settings are not those of a run"
    try:
        model = build_on_meta(settings, max_layers=len(candidate.metadata.tensors))
    except InvalidFile as error:
        return str(error)
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    return candidate.metadata.mismatch(state)


def weights(folder: Path) -> dict[str, Tensor]:
    """The weights of the latest valid checkpoint in `folder`, of any task, by name.

    Raises FileNotFoundError or ValueError if there is none.
    """
    return _trained(checkpoint.read(checkpoint.find_latest(folder).path))


def _trained(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a checkpoint by name: their averages, where it has them."""
    return {
        name.removeprefix(prefix): value
        for prefix in ("model.", weight_average.PREFIX)
        for name, value in state.items()
        if name.startswith(prefix)
    }


def command_line(description: str, output: str) -> argparse.ArgumentParser:
    """The options of a program that reads a checkpoint; `output` is its default folder."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("checkpoints", type=Path, help="checkpoint folder of train.py")
    parser.add_argument("--output", type=Path, default=Path(output), help="default: %(default)s")
    return parser


def read(arguments: argparse.Namespace, load: Callable[[Path], Loaded]) -> tuple[Path, Loaded]:
    """Load from the checkpoints of a command line, and make its output folder.

    Exits with code 1 if there is no usable checkpoint.
    """
    try:
        loaded = load(arguments.checkpoints)
    except (OSError, ValueError) as error:
        sys.exit(f"{Path(sys.argv[0]).name}: error: {error}")
    arguments.output.mkdir(parents=True, exist_ok=True)
    return arguments.output, loaded
