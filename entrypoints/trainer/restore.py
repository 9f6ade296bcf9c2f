"""A trained model out of a checkpoint, whatever strategy saved it: one process, no group."""

from __future__ import annotations

import argparse
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
