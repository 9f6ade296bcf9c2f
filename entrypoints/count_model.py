"""Count a model's parameters without allocating them: ``count_model.py MODEL [SAMPLE]``.

MODEL is ``module:function``, which is called with PyTorch's meta device as the default, on which
tensors have shapes but no data (https://docs.pytorch.org/docs/stable/meta.html), or the name or
folder of a language model for Hugging Face's transformers, of which only the configuration is read.
Prints one line of JSON: name and shape of the parameters of the embeddings, of one of the repeated
blocks and of the rest, the number of blocks, and whether a layer shares the embedding's weights.
With a SAMPLE, ``3x224x224`` or ``tokens:1024``, the model of a function also takes a step on it,
and the line has what one more sample costs. With ``task:{"sequence": 64}`` the function is one for
the trainer's ``--task``: it gets these options, and the sample is the first of the task's training
data. `deploykit advise --model` or ``--task`` runs this file, because deploykit itself does not use
PyTorch. It imports nothing of the trainer: the user's folder may have a copy of that, with changes.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import default_collate
from torch.utils.flop_counter import FlopCounterMode

_NOT_RUN = (AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError, ValueError)
"""What a model raises for a sample that is not of its kind."""
NamedShapes = list[tuple[str, list[int]]]


def main() -> None:
    """Run the command line; exits with code 1 if the function does not return a model."""
    name, description = (*sys.argv[1:], "")[:2]
    module, _, function = name.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    kind, _, given = description.partition(":")
    if not function:
        counts = of_configuration(name)
    else:
        build = getattr(importlib.import_module(module), function)
        if kind == "task":
            counts = of_task(name, build(Given(**json.loads(given))))
        else:
            counts = of_function(name, build, description)
    print(json.dumps(counts))


def of_function(name: str, build: Callable[[], Any], description: str) -> dict[str, Any]:
    """The counts of the model that a function builds, and with a description those of a sample."""
    with torch.device("meta"):
        model = build()
    counts = count(_checked(name, model))
    if description:
        counts["sample"] = _try_sample(model, partial(_inputs, description), description)
    return counts


def of_configuration(name: str) -> dict[str, Any]:
    """The counts of a language model of Hugging Face, whose weights are not downloaded."""
    transformers: Any = importlib.import_module("transformers")
    try:
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError) as error:  # unknown name, no network, not a language model
        sys.exit(str(error))
    text = config.get_text_config()
    heads = text.num_attention_heads
    return {
        **count(model),
        "heads": heads,
        "kv_heads": getattr(text, "num_key_value_heads", None) or heads,
        "length": getattr(text, "max_position_embeddings", None) or 0,
    }


def _checked(name: str, model: object) -> nn.Module:
    if not isinstance(model, nn.Module):
        sys.exit(f"{name} returned {type(model).__name__}, not a torch.nn.Module")
    return model


class Given(SimpleNamespace):
    """The options for a task: those that `deploykit advise` was given; any other is None.

    `task_options` are those of the trainer's ``--task-option KEY=VALUE``, which has no defaults.
    """

    task_options: Mapping[str, str] = MappingProxyType({})

    def __getattr__(self, name: str) -> None:
        """An option that was not given."""
        if name.startswith("__"):
            raise AttributeError(name)


def of_task(name: str, task: Any) -> dict[str, Any]:
    """The counts of a task of the trainer: its model, and a step on a sample of its data."""
    if isinstance(task, nn.Module) or not callable(getattr(task, "model", None)):
        sys.exit(f"{name} returned {type(task).__name__}, not a task with a model and data")
    with torch.device("meta"):
        model = _checked(f"the model of {name}", task.model())
    sample = next(iter(task.training))
    collate = getattr(task, "collate", None) or default_collate

    def inputs(size: int) -> Any:
        taken, _ = task.split(collate([sample] * size))
        return tree_map(_on_meta, taken)

    length = _length(inputs(1))
    counts = {**count(model), "sample": _try_sample(model, inputs, "its data")}
    return {**counts, "length": length}


def _on_meta(value: Any) -> Any:
    return value.to("meta") if torch.is_tensor(value) else value


def _length(inputs: Any) -> int:
    """The tokens of a sample: the length of its first tensor of integers, or 1."""
    for leaf in tree_leaves(inputs):
        if torch.is_tensor(leaf) and leaf.dim() > 1 and not leaf.is_floating_point():
            return int(leaf.shape[1])
    return 1


def count(model: nn.Module) -> dict[str, Any]:
    """The model's parameters by part; shared parameters count once, where they come first."""
    blocks = _blocks(model)
    in_blocks = {id(parameter) for block in blocks for parameter in block.parameters()}
    tables = [layer for layer in model.modules() if isinstance(layer, nn.Embedding)]
    embedded = {id(parameter) for table in tables for parameter in table.parameters()} - in_blocks
    rest = [pair for pair in model.named_parameters() if id(pair[1]) not in in_blocks]
    return {
        "layers": len(blocks),
        "block": _shapes(blocks[0].named_parameters()) if blocks else [],
        "embedding": _shapes(pair for pair in rest if id(pair[1]) in embedded),
        "head": _shapes(pair for pair in rest if id(pair[1]) not in embedded),
        "tied": _is_tied(model, tables),
    }


def _is_tied(model: nn.Module, tables: list[nn.Embedding]) -> bool:
    """Whether the weight of an embedding belongs to another layer too: the head."""
    others = [layer for layer in model.modules() if not isinstance(layer, nn.Embedding)]
    shared = {id(parameter) for layer in others for parameter in layer.parameters(recurse=False)}
    return any(id(table.weight) in shared for table in tables)


def _try_sample(
    model: nn.Module, inputs: Callable[[int], Any], description: str
) -> dict[str, float] | None:
    """The cost of a sample. Tokens are a guess: a model that takes something else has none."""
    try:
        few, more = (step(model, inputs(size)) for size in (2, 4))
    except _NOT_RUN as error:
        if description.startswith("tokens:"):
            return None
        sys.exit(f"a step on a sample of {description} failed: {type(error).__name__}: {error}")
    return {name: (more[name] - few[name]) / 2 for name in few}


def step(model: nn.Module, inputs: Any) -> dict[str, float]:
    """What a forward and backward pass costs: floating point operations, elements kept between the
    passes, elements that operations read and write.
    """
    saved = Saved(model)
    model.zero_grad()
    hooks = torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor)
    with FlopCounterMode(display=False) as flops, Traffic() as traffic:
        with hooks:
            outputs = _call(model, inputs)
        _differentiable(outputs).sum().backward()
    counted = {"flops": flops.get_total_flops(), "traffic": traffic.elements}
    return {**counted, "saved": sum(saved.sizes.values())}


def _call(model: nn.Module, inputs: Any) -> Any:
    """As the trainer does: a mapping gives named arguments, a tuple or list several."""
    if torch.is_tensor(inputs):
        return model(inputs)
    return model(**inputs) if isinstance(inputs, Mapping) else model(*inputs)


def _inputs(description: str, size: int) -> torch.Tensor:
    kind, _, length = description.rpartition(":")
    if kind == "tokens":
        return torch.zeros(size, int(length), dtype=torch.long, device="meta")
    return torch.zeros(size, *map(int, description.split("x")), device="meta")


def _differentiable(outputs: object) -> torch.Tensor:
    """The first tensor of the model's outputs that has a gradient, or its `logits`.

    Raises ValueError if there is none.
    """
    outputs = getattr(outputs, "logits", outputs)
    leaves = tree_leaves(dict(outputs) if isinstance(outputs, dict) else outputs)
    for leaf in leaves:
        if torch.is_tensor(leaf) and leaf.requires_grad:
            return leaf
    raise ValueError("its outputs contain no tensor that requires grad")


class Saved:
    """Elements of the tensors that autograd keeps, without the parameters; each storage once."""

    def __init__(self, model: nn.Module) -> None:
        self.known = {_storage(parameter) for parameter in model.parameters()}
        self.sizes: dict[int, int] = {}
        self.alive: list[torch.Tensor] = []

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Note a tensor; it is held, so that no other gets its address."""
        key = _storage(tensor)
        if key not in self.known and tensor.is_floating_point():
            self.sizes[key] = tensor.untyped_storage().nbytes() // tensor.element_size()
            self.alive.append(tensor)
        return tensor


class Traffic(TorchDispatchMode):
    """Elements of the inputs and outputs of all operations but views."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and add its tensors."""
        outputs = func(*args, **(kwargs or {}))
        returns = [each.alias_info for each in func._schema.returns]  # noqa: SLF001 - no other way to tell a view
        if not any(alias and not alias.is_write for alias in returns):
            tensors = filter(torch.is_tensor, tree_leaves((args, kwargs, outputs)))
            self.elements += sum(tensor.numel() for tensor in tensors)
        return outputs


def _storage(tensor: torch.Tensor) -> int:
    """What tells a storage from others while it lives."""
    key: int = tensor.untyped_storage()._cdata  # noqa: SLF001 - as torch does
    return key


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The largest group of sibling layers with the same parameters, or none."""
    largest: list[nn.Module] = []
    for parent in model.modules():
        groups: dict[str, list[nn.Module]] = {}
        for child in parent.children():
            groups.setdefault(str(_shapes(child.named_parameters())), []).append(child)
        for group in groups.values():
            if len(group) > 1 and _size(group) > _size(largest):
                largest = group
    return largest


def _shapes(parameters: Iterable[tuple[str, nn.Parameter]]) -> NamedShapes:
    return [(name, list(parameter.shape)) for name, parameter in parameters]


def _size(layers: Iterable[nn.Module]) -> int:
    return sum(parameter.numel() for layer in layers for parameter in layer.parameters())


if __name__ == "__main__":
    main()
