"""Serve a Hugging Face model through SageMaker's four functions.

A request is JSON. If the package has a tokenizer, send `{"inputs": "text"}` or a list of texts, and
optionally `parameters` of the pipeline, such as `{"max_new_tokens": 20}`. Otherwise, send
`{"inputs": {"input_ids": [[1, 2]]}}` or lists of tokens; the response contains the scores.
"""

import json
import os
from pathlib import Path
from typing import Any

import torch
import transformers

TASKS = {
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForMaskedLM": "fill-mask",
}
"""Pipelines by the end of a class's name."""


def model_fn(model_dir: str) -> Any:
    """Load a pipeline, or the model alone if the package has no tokenizer."""
    default = "cuda" if torch.cuda.is_available() else "cpu"
    device = os.environ.get("DEPLOYKIT_DEVICE") or default
    config = transformers.AutoConfig.from_pretrained(model_dir)
    name = (config.architectures or [""])[0]
    task = next((task for ending, task in TASKS.items() if name.endswith(ending)), None)
    if task and Path(model_dir, "tokenizer_config.json").is_file():
        return transformers.pipeline(task, model=model_dir, device=device)
    known = getattr(transformers, name, transformers.AutoModel)
    return known.from_pretrained(model_dir).to(device).eval()


def input_fn(request_body: str, content_type: str) -> dict[str, Any]:
    """Read a request."""
    if content_type != "application/json":
        raise ValueError(f"content type {content_type} is not supported; use application/json")
    data = json.loads(request_body)
    if not isinstance(data, dict) or "inputs" not in data:
        raise ValueError('expected {"inputs": ...}')
    return data


@torch.inference_mode()
def predict_fn(request: dict[str, Any], model: Any) -> Any:
    """Run the pipeline, or compute the scores of the model."""
    inputs = request["inputs"]
    if isinstance(model, transformers.Pipeline):
        return model(inputs, **request.get("parameters", {}))
    named = inputs if isinstance(inputs, dict) else {"input_ids": inputs}
    tensors = {name: torch.tensor(value, device=model.device) for name, value in named.items()}
    outputs = model(**tensors)
    scores = outputs.logits if hasattr(outputs, "logits") else outputs.last_hidden_state
    return scores.float().tolist()


def output_fn(prediction: Any, accept: str) -> tuple[str, str]:
    """Write the answer."""
    return json.dumps({"outputs": prediction}), "application/json"
