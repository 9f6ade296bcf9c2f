"""Export a trained model for other programs.

    python export.py checkpoints --output model
    python export.py checkpoints --weights        # only the weights, also of a task of yours

`model.safetensors` has the weights, `model.pt2` a torch.export program that runs without this
code, and `model.json` describes the input and the model. `serve.py` serves the folder. It reads the
weights only: loading a `model.pt2` runs what its author wrote. More than 5 GiB of weights are
written to several files with an index, which transformers reads too.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch.export import Dim

from trainer.checkpoint import restore, safetensors_io
from trainer.checkpoint.restore import MODEL_SETTINGS, RestoredModel

MAX_BATCH = 4096
"""Samples that the exported program takes at once."""
MAX_FILE = 5 * 2**30
"""Bytes of weights in a file."""


def main() -> None:
    """Run the command line; exits with code 1 if there is no usable checkpoint."""
    parser = restore.command_line("Export a trained model for other programs.", "model")
    parser.add_argument("--weights", action="store_true", help="only the weights, of any task")
    arguments = parser.parse_args()
    if arguments.weights:
        output, weights = restore.read(arguments, restore.weights)
        files = safetensors_io.write_sharded(weights, output, MAX_FILE)
        print(f"{output}: {', '.join(path.name for path in files)} with {len(weights)} tensors")
    else:
        print(export_model(*restore.read(arguments, restore.restore)))


def export_model(output: Path, restored: RestoredModel) -> str:
    """Write weights, program and description to the folder `output`; returns what it did."""
    test, model, progress = restored
    example = test.tensors[0][:2]
    any_batch = ({0: Dim("samples", min=1, max=MAX_BATCH)},)
    program = torch.export.export(model, (example,), dynamic_shapes=any_batch)
    torch.export.save(program, output / "model.pt2")
    safetensors_io.write(model.state_dict(), output / safetensors_io.SINGLE)
    settings = progress["settings"]
    description = {
        "task": settings["task"],
        "step": progress["step"],
        "input": list(example.shape[1:]),
        "model": {name: settings[name] for name in MODEL_SETTINGS},
    }
    (output / "model.json").write_text(json.dumps(description, indent=1) + "\n")
    size = (output / "model.pt2").stat().st_size / 1024
    return f"{output}: {settings['task']}, step {progress['step']}, model.pt2 of {size:.0f} KiB"


if __name__ == "__main__":
    main()
