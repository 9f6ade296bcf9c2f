"""A trained model as files that other programs load.

    python export.py checkpoints --output model

`model.safetensors` holds the weights, `model.pt2` a torch.export program that runs without this
code, and `model.json` what goes in and how large the model is. `serve.py` serves the folder; it
reads the weights, and never the program: who loads one of those runs what its author wrote.
"""

from __future__ import annotations

import json

import torch
from torch.export import Dim

from trainer import weights
from trainer.restore import SIZES, command


def main() -> None:
    output, task, model, progress = command("Write a trained model for other programs.", "model")
    example = task.test.tensors[0][:2]
    any_number = ({0: Dim("samples", min=1, max=4096)},)
    program = torch.export.export(model, (example,), dynamic_shapes=any_number)
    torch.export.save(program, output / "model.pt2")
    weights.write(model.state_dict(), output / "model.safetensors")
    settings = progress["settings"]
    about = {"task": settings["task"], "step": progress["step"]}
    about["input"] = list(example.shape[1:])
    about["model"] = {name: settings[name] for name in SIZES}
    (output / "model.json").write_text(json.dumps(about, indent=1) + "\n")
    size = (output / "model.pt2").stat().st_size / 1024
    print(f"{output}: {about['task']}, step {about['step']}, model.pt2 of {size:.0f} KiB")


if __name__ == "__main__":
    main()
