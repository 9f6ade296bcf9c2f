"""Answer requests with a model of the trainer: SageMaker's four functions.

`deploykit export` puts this file beside the code that built the model, into ``code/`` of a package.
SageMaker's PyTorch containers and `deploykit deploy` call these functions. `deploykit deploy` also
calls `predict_batch_fn` for batches of requests. To change the format of requests or responses,
copy the file to your source folder and edit it there.

A request is JSON, ``{"inputs": [...]}``, or a numpy array (``application/x-npy``); the first size
is the number of samples. Several named inputs are a mapping of lists. The response is
``{"outputs": [...]}``, or an array if the client accepts one.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils import _pytree as pytree

DESCRIPTION = "model.json"
"""In the package: the settings of the run, and the inputs of a sample where they are known."""
JSON, NUMPY = "application/json", "application/x-npy"
_expected: dict[str, Any] = {}
"""Type and shape of each input, by name; '' for the only one. Empty where they are unknown."""


def model_fn(model_dir: str) -> nn.Module:
    """Build the model and load its weights. Raises RuntimeError if they do not belong together."""
    folder = Path(model_dir)
    description = json.loads((folder / DESCRIPTION).read_text())
    _expected.update(description["inputs"] or {})
    model = build(description["settings"], folder / "code" / description["path"])
    weights: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        weights |= load_file(path)
    model.load_state_dict(weights)
    return model.to(device()).eval()


def build(settings: dict[str, Any], code: Path) -> nn.Module:
    """Build the model of a run with fresh weights, by the modules in `code`.

    If the module of a task of your own has a function `build_model`, the task is not called, and
    no data is needed.
    """
    if str(code) not in sys.path:
        sys.path.insert(0, str(code))
    from trainer import tasks
    from trainer.train_options import ModelOptions

    options = ModelOptions.of(settings)
    module, own, _ = options.task.partition(":")
    if not own:
        return tasks.build_model(options)
    builder = getattr(importlib.import_module(module), "build_model", None)
    model: nn.Module = builder(options) if builder else tasks.load(options).model()
    return model


def device() -> torch.device:
    """The device of `deploykit deploy --device`, else a GPU if there is one."""
    default = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(os.environ.get("DEPLOYKIT_DEVICE") or default)


def input_fn(request_body: bytes | str, content_type: str) -> Any:
    """Read the inputs of a request: a tensor, or several by name. Raises ValueError."""
    if content_type == NUMPY and isinstance(request_body, bytes):
        import numpy as np

        array = np.load(io.BytesIO(request_body), allow_pickle=False)
        return _tensor("", torch.from_numpy(array))
    if content_type != JSON:
        raise ValueError(f"content type {content_type!r} is not supported; use {JSON} or {NUMPY}")
    data = json.loads(request_body)
    if isinstance(data, dict) and "inputs" not in data:
        raise ValueError('the request has no "inputs"; expected {"inputs": [...]}')
    inputs = data["inputs"] if isinstance(data, dict) else data
    if isinstance(inputs, dict) and "" in _expected:
        raise ValueError("inputs: expected a list of samples, without names")
    if isinstance(inputs, dict):
        return {name: _tensor(name, value) for name, value in inputs.items()}
    return _tensor("", inputs)


def _tensor(name: str, values: Any) -> Tensor:
    """One input, with the type and the shape that the model was trained with."""
    label = f"input {name!r}" if name else "inputs"
    expected = _expected.get(name)
    dtype = getattr(torch, expected["dtype"]) if expected else None
    try:
        tensor = torch.as_tensor(values, dtype=dtype)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{label}: expected lists of numbers of equal length: {error}") from None
    if tensor.is_floating_point() and isinstance(values, list) and not tensor.isfinite().all():
        raise ValueError(f"{label}: expected finite numbers, because JSON supports no others")
    if expected and dtype is not None and not dtype.is_floating_point:
        given = torch.as_tensor(values)
        if not tensor.to(given.dtype).equal(given):  # torch would round them, or wrap around
            raise ValueError(f"{label}: expected only values of type {expected['dtype']}")
    shape = list(tensor.shape)
    if not shape or (expected and len(shape) != len(expected["shape"]) + 1):
        sizes = ["samples", *expected["shape"]] if expected else ["samples", "..."]
        wanted = ", ".join(map(str, sizes))
        raise ValueError(f"{label}: expected shape [{wanted}], got {shape}")
    return tensor


@torch.inference_mode()
def predict_fn(inputs: Any, model: nn.Module) -> Any:
    """Compute the outputs of the model, on the CPU."""
    from trainer.task import call

    target = next(model.parameters()).device
    outputs = call(model, pytree.tree_map(lambda tensor: tensor.to(target), inputs))
    outputs = getattr(outputs, "logits", outputs)
    return pytree.tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf, outputs)


@torch.inference_mode()
def predict_batch_fn(inputs: list[Any], model: nn.Module) -> list[Any]:
    """Compute the outputs of several requests together: their samples are one batch.

    Raises an error if they do not have the same shapes and names.
    """
    leaves, structures = zip(*map(pytree.tree_flatten, inputs), strict=True)
    if len(set(map(str, structures))) > 1:
        raise ValueError("the requests have different inputs")
    sizes = [len(of_request[0]) for of_request in leaves]
    joined = [torch.cat(parts) for parts in zip(*leaves, strict=True)]
    outputs = predict_fn(pytree.tree_unflatten(joined, structures[0]), model)
    outputs, structure = pytree.tree_flatten(outputs)
    parts = zip(*(leaf.split(sizes) for leaf in outputs), strict=True)
    return [pytree.tree_unflatten(list(each), structure) for each in parts]


def output_fn(prediction: Any, accept: str) -> tuple[bytes, str]:
    """Write the outputs as JSON, or as an array if `accept` is that of numpy."""
    if accept == NUMPY and isinstance(prediction, Tensor):
        import numpy as np

        file = io.BytesIO()
        np.save(file, prediction.float().numpy())
        return file.getvalue(), NUMPY
    plain = pytree.tree_map(
        lambda leaf: leaf.tolist() if isinstance(leaf, Tensor) else leaf, prediction
    )
    try:
        return json.dumps({"outputs": plain}, allow_nan=False).encode(), JSON
    except ValueError:
        raise ValueError(
            f"JSON cannot represent outputs that are not finite; accept {NUMPY} instead"
        ) from None
