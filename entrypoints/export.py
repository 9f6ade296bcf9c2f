"""A trained model as files that other programs load.

    python export.py checkpoints --output model

`model.safetensors` holds the weights, `model.pt2` a torch.export program that runs without this
code, and `model.json` what goes in and comes out. `serve.py` serves the folder.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch.export import Dim

from trainer.restore import command


def main() -> None:
    output, task, model, progress = command("Write a trained model for other programs.", "model")
    example = task.test.tensors[0][:2]
    any_number = ({0: Dim("samples", min=1, max=4096)},)
    program = torch.export.export(model, (example,), dynamic_shapes=any_number)
    torch.export.save(program, output / "model.pt2")
    save_weights(model.state_dict(), output / "model.safetensors")
    about = {"task": progress["settings"]["task"], "step": progress["step"]}
    about["input"] = list(example.shape[1:])
    (output / "model.json").write_text(json.dumps(about, indent=1) + "\n")
    size = (output / "model.pt2").stat().st_size / 1024
    print(f"{output}: {about['task']}, step {about['step']}, model.pt2 of {size:.0f} KiB")


def save_weights(weights: dict[str, torch.Tensor], path: Path) -> None:
    """As safetensors, where that is installed: a format that cannot carry code."""
    try:
        from safetensors.torch import save_file
    except ImportError:
        print("safetensors is not installed: no model.safetensors; model.pt2 has the weights too")
        return
    save_file({name: weight.contiguous() for name, weight in weights.items()}, path)


if __name__ == "__main__":
    main()
