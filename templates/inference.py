"""Serve the model of your script. SageMaker's containers call these four functions.

deploykit export RUN --to model        # packages the run's checkpoint with its source
deploykit deploy model                 # serves it on this machine
"""

import json
from pathlib import Path

import torch
from torch import nn


def model_fn(model_dir: str) -> nn.Module:
    """Load the model. `model_dir` contains the checkpoint under the name that your script uses."""
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))  # as in train.py
    state = torch.load(Path(model_dir, "last.pt"), map_location="cpu", weights_only=True)
    model.load_state_dict(state["network"])
    return model.eval()


def input_fn(request_body: str, content_type: str) -> torch.Tensor:
    """Read a request, such as {"inputs": [[0.1, -0.2], [0.9, 0.9]]}."""
    if content_type != "application/json":
        raise ValueError(f"content type {content_type} is not supported; use application/json")
    return torch.tensor(json.loads(request_body)["inputs"], dtype=torch.float32)


@torch.inference_mode()
def predict_fn(inputs: torch.Tensor, model: nn.Module) -> torch.Tensor:
    """Compute the answer."""
    return model(inputs).softmax(dim=-1)


def output_fn(prediction: torch.Tensor, accept: str) -> tuple[str, str]:
    """Write the answer."""
    return json.dumps({"outputs": prediction.tolist()}), "application/json"
