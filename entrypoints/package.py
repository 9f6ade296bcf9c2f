"""Write the weights of a checkpoint for a package, and describe the model.

    python package.py checkpoints/step-00000120 --output model --path .

`deploykit export` runs this file in the environment of a run, with the run's own code, ``code/`` of
the package, on PYTHONPATH. Weights of any strategy are written to `model.safetensors`, or to
several files with an index; a Hugging Face model is written by its own `save_pretrained`. Requires
the package safetensors.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import inference
from trainer import tasks
from trainer.checkpoint import checkpointer
from trainer.pretrained import write_weights
from trainer.train_options import ModelOptions


def main() -> None:
    """Run the command line; exits with code 1 and a sentence if there is nothing to package."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--path", default=".", help="folder of the modules, relative to code/")
    arguments = parser.parse_args()
    try:
        latest = checkpointer.find_latest(arguments.checkpoint)
    except (OSError, ValueError) as error:
        sys.exit(str(error))
    write(latest.path, latest.progress, arguments.output, arguments.path)


def write(checkpoint: Path, progress: Mapping[str, Any], output: Path, path: str) -> None:
    """Write the weights and `model.json` of a checkpoint to the folder `output`."""
    settings = progress["settings"]
    weights = checkpointer.trained_weights(checkpoint)
    model: Any = skeleton(settings, Path.cwd() / path)
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(output, state_dict=dict(weights))  # which it empties
    else:
        write_weights(weights, output)
    description = {
        "step": progress["step"],
        "settings": {each.name: settings.get(each.name) for each in fields(ModelOptions)},
        "path": path,
        "inputs": inputs(settings),
        "tensors": len(weights),
        "parameters": sum(tensor.numel() for tensor in weights.values()),
        "class": f"{type(model).__module__}.{type(model).__qualname__}",
        "torch": torch.__version__,
    }
    (output / inference.DESCRIPTION).write_text(json.dumps(description, indent=1) + "\n")


def skeleton(settings: dict[str, Any], code: Path) -> nn.Module:
    """The model without memory for its weights, unless its constructor computes with them."""
    try:
        with torch.device("meta"):
            return inference.build(settings, code)
    except (RuntimeError, NotImplementedError):
        return inference.build(settings, code)


def inputs(settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """Type and shape of the inputs of a training sample, by name; None without the data."""
    try:
        task = tasks.load(ModelOptions.of(settings))
        batch = next(iter(torch.utils.data.DataLoader(task.training, 1, collate_fn=task.collate)))
        parts, _ = task.split(batch)
    except Exception as error:  # noqa: BLE001 - the data of a task may be anywhere, or gone
        print(f"cannot describe the inputs: {type(error).__name__}: {error}")
        return None
    named = parts if isinstance(parts, Mapping) else {"": parts}
    if not all(isinstance(tensor, Tensor) for tensor in named.values()):
        return None
    return {
        name: {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape[1:])}
        for name, tensor in named.items()
    }


if __name__ == "__main__":
    main()
