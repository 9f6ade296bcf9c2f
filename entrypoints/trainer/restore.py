"""A trained model out of a checkpoint, whatever strategy saved it: one process, no group."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from torch import nn

from trainer import checkpoint, tasks
from trainer.tasks import Task


def restore(folder: Path) -> tuple[Task, nn.Module, dict[str, object]]:
    """The task, the model in evaluation mode, and the run's progress, of the newest whole
    checkpoint in `folder`.

    Raises FileNotFoundError where there is none.
    """
    path, progress = checkpoint.newest_alone(folder)
    task = tasks.find(argparse.Namespace(**progress["settings"]))
    model = task.model()
    state = checkpoint.read(path)
    weights = {name: state[f"model.{name}"] for name in model.state_dict()}
    model.load_state_dict(weights)
    return task, model.eval(), progress


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
    except FileNotFoundError as error:
        sys.exit(f"{parser.prog}: error: {error}")
    options.output.mkdir(parents=True, exist_ok=True)
    return options.output, *found
