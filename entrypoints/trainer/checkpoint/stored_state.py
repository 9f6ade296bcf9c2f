"""State as the tensors of a checkpoint: also numbers, and whatever else `torch.load` reads safely.

A checkpoint has tensors only. A number is a tensor without dimensions, named ``number.NAME``; any
other value, such as what `torch.nn.Module.get_extra_state` returns, is written by `torch.save` into
a tensor of bytes, named ``object.NAME``, and read with ``weights_only=True``, which runs no code.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainer.errors import ConfigError, InvalidFile
from trainer.parallel.process_group import refuse_together

NUMBER, OBJECT = "number.", "object."
Stored = Mapping[str, tuple[torch.dtype, torch.Size]]
"""The tensors of a checkpoint: dtype and shape by name."""


def encode(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors that stand for `state` in a checkpoint.

    Raises ConfigError for a value that could not be read again.
    """
    return dict(_encoded(name, value) for name, value in state.items())


def targets(state: Mapping[str, Any], stored: Stored) -> dict[str, Tensor]:
    """The tensors into which a checkpoint with the tensors `stored` is read, to replace `state`."""
    tensors: dict[str, Tensor] = {}
    for name, value in state.items():
        key = next((each for each in (NUMBER + name, OBJECT + name) if each in stored), None)
        if key is not None:
            dtype, shape = stored[key]
            tensors[key] = torch.zeros(shape, dtype=dtype)
        else:
            tensors |= encode({name: value})
    return tensors


def decode(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The state that `encode` was given. Raises InvalidFile for bytes that it has not written."""
    state: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if name.startswith(NUMBER):
            if tensor.dim():
                raise InvalidFile(f"{name} is not a number")
            state[name.removeprefix(NUMBER)] = tensor.item()
        elif name.startswith(OBJECT):
            state[name.removeprefix(OBJECT)] = _load(name, tensor)
        else:
            state[name] = tensor
    return state


def check_extra_state(model: nn.Module) -> None:
    """Raise ConfigError if a module's `get_extra_state` returns what cannot be read again.

    Collective: ranks may have other stages of a pipeline.
    """
    problem = ""
    for name, module in with_extra_state(model):
        try:
            _encoded(f"{name}.get_extra_state()".lstrip("."), module.get_extra_state())
        except ConfigError as error:
            problem = str(error)
    refuse_together(problem)


def with_extra_state(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules, by name, that have state which is neither a parameter nor a buffer."""
    none = nn.Module.get_extra_state
    return [each for each in model.named_modules() if type(each[1]).get_extra_state is not none]


def _encoded(name: str, value: Any) -> tuple[str, Tensor]:
    if isinstance(value, Tensor):
        return name, value
    if type(value) in (bool, int, float):
        dtype = {bool: torch.bool, int: torch.int64, float: torch.float64}[type(value)]
        try:
            return NUMBER + name, torch.tensor(value, dtype=dtype)
        except (ValueError, OverflowError, RuntimeError):  # an integer of more than 64 bits
            pass
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        tensor = torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8).clone()
        _load(name, tensor)
    except (InvalidFile, pickle.PicklingError, TypeError, AttributeError, RuntimeError) as error:
        raise ConfigError(
            f"{name} is a {type(value).__name__}, which cannot be saved in a checkpoint ({error}). "
            "Use tensors, numbers, text, or lists, tuples and dictionaries of them"
        ) from error
    return OBJECT + name, tensor


def _load(name: str, tensor: Tensor) -> Any:
    if tensor.dtype != torch.uint8 or tensor.dim() != 1:
        raise InvalidFile(f"{name} is not a byte tensor")
    return unpack(name, tensor.numpy().tobytes())


def unpack(name: str, data: bytes) -> Any:
    """What `torch.save` has written, as far as it needs no code. Raises InvalidFile."""
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:
        raise InvalidFile(f"{name} cannot be read ({type(error).__name__})") from error
