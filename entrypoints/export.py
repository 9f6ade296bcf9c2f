"""Export a trained model for other programs.

    python export.py checkpoints --output model
    python export.py checkpoints --weights        # only the weights, for any task

`model.safetensors` contains the weights, `model.pt2` is a torch.export program that runs without
this code, and `model.json` describes the input and the model. Loading an untrusted `model.pt2` can
run any code. More than 5 GiB of weights are split into several files with an index, as Hugging Face
does. Requires the package safetensors.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch.export import Dim

from evaluate import Trained, command_line, load, trained_model
from trainer.checkpoint import checkpointer
from trainer.pretrained import write_weights

MAX_BATCH = 4096
"""Samples that the exported program takes at once."""


def main() -> None:
    """Run the command line; exits with code 1 if there is no usable checkpoint."""
    parser = command_line("Export a trained model for other programs.", "model")
    parser.add_argument(
        "--weights", action="store_true", help="export only the weights, for any task"
    )
    arguments = parser.parse_args()
    if arguments.weights:
        output, weights = load(arguments, checkpointer.latest_weights)
        files = write_weights(weights, output)
        print(f"{output}: {', '.join(path.name for path in files)} with {len(weights)} tensors")
    else:
        print(export_model(*load(arguments, trained_model)))


def export_model(output: Path, trained: Trained) -> str:
    """Write weights, program and description to the folder `output`; returns what it did."""
    test, model, progress = trained
    example = test.tensors[0][:2]
    any_batch = ({0: Dim("samples", min=1, max=MAX_BATCH)},)
    program = torch.export.export(model, (example,), dynamic_shapes=any_batch)
    torch.export.save(program, output / "model.pt2")
    write_weights(model.state_dict(), output)
    settings = progress["settings"]
    description = {
        "task": settings["task"],
        "step": progress["step"],
        "input": list(example.shape[1:]),
        "model": {name: settings[name] for name in ("layers", "width", "heads", "sequence")},
    }
    (output / "model.json").write_text(json.dumps(description, indent=1) + "\n")
    size = (output / "model.pt2").stat().st_size / 1024
    return f"{output}: {settings['task']}, step {progress['step']}, model.pt2 of {size:.0f} KiB"


if __name__ == "__main__":
    main()
