"""Export a trained model for other programs.

    python export.py checkpoints --output model

`model.safetensors` has the weights, `model.pt2` a torch.export program that runs without this
code, and `model.json` describes the input and the model. `serve.py` serves the folder. It reads the
weights only: loading a `model.pt2` runs what its author wrote.
"""

from __future__ import annotations

import json

import torch
from torch.export import Dim

from trainer import safetensors_io
from trainer.restore import MODEL_SETTINGS, from_command_line

MAX_BATCH = 4096
"""Samples that the exported program takes at once."""


def main() -> None:
    """Run the command line; exits with code 1 if there is no usable checkpoint."""
    output, restored = from_command_line("Export a trained model for other programs.", "model")
    task, model, progress = restored
    example = task.test.tensors[0][:2]
    any_batch = ({0: Dim("samples", min=1, max=MAX_BATCH)},)
    program = torch.export.export(model, (example,), dynamic_shapes=any_batch)
    torch.export.save(program, output / "model.pt2")
    safetensors_io.write(model.state_dict(), output / "model.safetensors")
    settings = progress["settings"]
    description = {
        "task": settings["task"],
        "step": progress["step"],
        "input": list(example.shape[1:]),
        "model": {name: settings[name] for name in MODEL_SETTINGS},
    }
    (output / "model.json").write_text(json.dumps(description, indent=1) + "\n")
    size = (output / "model.pt2").stat().st_size / 1024
    print(f"{output}: {settings['task']}, step {progress['step']}, model.pt2 of {size:.0f} KiB")


if __name__ == "__main__":
    main()
