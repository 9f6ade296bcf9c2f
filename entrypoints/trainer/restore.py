"""A trained model out of a checkpoint, whatever strategy saved it: one process, no group.

The settings come from the checkpoint, which may come from anybody: a model is made only if its
tensors are those that the checkpoint has on the disk, so that no number in a file decides how much
memory is taken.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer import checkpoint, tasks
from trainer.plain_pickle import Refused
from trainer.seal import Checkpoint
from trainer.tasks import Task

SIZES = ("layers", "width", "heads", "sequence")
LARGEST = 2**20
"""Of each of these numbers."""


def restore(folder: Path) -> tuple[Task, nn.Module, dict[str, object]]:
    """The task, the model in evaluation mode, and the run's progress, of the newest whole
    checkpoint in `folder`.

    Raises FileNotFoundError where there is none, ValueError where none can be used.
    """
    found = checkpoint.newest_alone(folder, _unfit)
    options = argparse.Namespace(**found.progress["settings"])
    state = checkpoint.read(found.path)
    model = outline(vars(options), most=len(state))
    filled(model, {name: state[f"model.{name}"] for name in model.state_dict()})
    return tasks.find(options), model, found.progress


def outline(settings: Mapping[str, Any], most: int) -> nn.Module:
    """The model that `settings` describe, of at most so many layers, and as yet without memory.

    Raises Refused where they describe none.
    """
    if settings.get("task") not in ("digits", "text"):
        raise Refused("its task is not known")
    if not all(type(n) is int and 0 < n <= LARGEST for n in map(settings.get, SIZES)):
        raise Refused("the sizes of its model are no numbers, or too large")
    options = argparse.Namespace(**settings)
    if options.layers > most or options.width % options.heads:
        raise Refused("the sizes of its model do not go together")
    with torch.device("meta"):
        return tasks.model(options)


def filled(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> nn.Module:
    """An outline with these weights in it, ready for use."""
    model.to_empty(device="cpu").load_state_dict(weights)
    return model.eval()


def _unfit(found: Checkpoint) -> str:
    """Why no model can be made from a checkpoint, or ''."""
    settings = found.progress.get("settings")
    if type(settings) is not dict or type(settings.get("text")) not in (str, type(None)):
        return "its settings are not those of a run"
    try:
        model = outline(settings, most=len(found.contents.tensors))
    except Refused as error:
        return str(error)
    return found.contents.unfit({f"model.{k}": v for k, v in model.state_dict().items()})


def command(description: str, output: str) -> tuple[Path, Task, nn.Module, dict[str, object]]:
    """What a program that turns a checkpoint into files in a folder begins with.

    Reads the command line and restores the model; the folder, `output` unless another one is
    named, is there when it returns. Ends the process where there is no checkpoint.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("checkpoints", type=Path, help="folder that train.py saved to")
    parser.add_argument("--output", type=Path, default=Path(output), help="default: %(default)s")
    options = parser.parse_args()
    try:
        found = restore(options.checkpoints)
    except (OSError, ValueError) as error:
        sys.exit(f"{parser.prog}: error: {error}")
    options.output.mkdir(parents=True, exist_ok=True)
    return options.output, *found
