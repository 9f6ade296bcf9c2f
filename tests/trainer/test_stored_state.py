"""A resumed run has all of its state: also numbers and objects, of optimizers and of modules."""

import io
import os

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import Optimizer

from tests.trainer.own_tasks import Points
from tests.trainer.ranks import losses
from trainer.checkpoint import stored_state
from trainer.errors import ConfigError, InvalidFile
from trainer.task import Task

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("trainer")]


class Adapting(Optimizer):
    """Counts steps with an int, as Adafactor does, and adapts its group, as Prodigy does."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.05, "k": 0, "d": 1.0, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            group["d"] = 1 + 1 / group["k"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state |= {"step": 0, "average": torch.zeros_like(parameter), "scale": 1.0}
                state["step"] += 1
                state["scale"] *= 0.9
                state["average"].mul_(0.9).add_(parameter.grad)
                rate = group["lr"] * group["d"] * (state["scale"] + 1 / state["step"])
                parameter.add_(state["average"], alpha=-rate)


class Counting(nn.Linear):
    """Scales its outputs by how often it was called in training: state that is no tensor."""

    calls = 0

    def get_extra_state(self):
        return {"calls": self.calls, "kind": "counting"}

    def set_extra_state(self, state):
        self.calls = state["calls"]

    def forward(self, values):
        if self.training:
            self.calls += 1
        return super().forward(values) / (1 + self.calls / 50)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 16), Counting(16, 16), nn.Linear(16, 2)

    def forward(self, values, scale):
        hidden = torch.tanh(self.first(values) * scale)
        return self.last(torch.tanh(self.second(hidden)))


class Unpicklable(Net):
    def get_extra_state(self):
        return os.getpid

    def set_extra_state(self, state):
        raise AssertionError


def task(_options):
    return Task(Net, Points(96), loss=functional.mse_loss, optimizer=Adapting)


def unpicklable(_options):
    return Task(Unpicklable, Points(96), loss=functional.mse_loss)


def words(strategy, steps, name="task"):
    own = ("--task", f"tests.trainer.test_stored_state:{name}", "--strategy", strategy)
    given = ("--batch-size", "24", "--log-every", "1", "--no-tensorboard", "--epochs", "9")
    return (*own, *given, "--steps", steps)


LAYOUTS = ("1 single, 1 single", "2 ddp, 2 zero1", "2 fsdp, 2 zero2", "2 zero1, 1 single")


@pytest.mark.slow
@pytest.mark.parametrize("layouts", LAYOUTS)
def test_numbers_and_objects_are_resumed_in_every_layout(layouts, pools, once, tmp_path):
    for layout, steps in zip(layouts.split(", "), ("6", "12"), strict=True):
        world, strategy = layout.split()
        printed = pools[int(world)].train(tmp_path, *words(strategy, steps))
    assert "after 6 steps (restart 0)" in printed[0]
    uninterrupted = losses(once(1, *words("single", "12")))
    assert losses(tmp_path) == pytest.approx(uninterrupted, rel=1e-5)


def test_extra_state_that_no_checkpoint_can_hold_is_refused_before_training(pools, tmp_path):
    (error,) = pools[1].try_to_train(tmp_path, *words("single", "2", "unpicklable"))
    reason = (
        "get_extra_state() is a builtin_function_or_method, which cannot be saved in a checkpoint"
    )
    assert error.startswith("ConfigError: ")
    assert reason in error


VALUES = {
    "int": 3,
    "float": 0.1,
    "bool": True,
    "large": 2**70,
    "none": None,
    "text": "adam",
    "nested": {"list": [1, (2.5, None)], "tensor": torch.arange(3)},
}


def test_every_plain_value_is_the_same_again():
    tensors = stored_state.encode(VALUES)
    assert all(isinstance(tensor, torch.Tensor) for tensor in tensors.values())
    read = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    stored = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    before = dict.fromkeys(VALUES, 0)
    targets = stored_state.targets(before, stored)
    assert targets.keys() == read.keys()
    for name, tensor in targets.items():
        tensor.copy_(tensors[name])
    again = stored_state.decode(targets)
    assert {name: type(value) for name, value in again.items()} == {
        name: type(value) for name, value in VALUES.items()
    }
    assert again["nested"].pop("tensor").equal(torch.arange(3))
    assert again["nested"] == {"list": [1, (2.5, None)]}
    del again["nested"]
    assert again == {name: VALUES[name] for name in again}


def test_a_value_that_could_run_code_is_neither_written_nor_read(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "evil"),)

    with pytest.raises(ConfigError, match="is a Evil, which cannot be saved in a checkpoint"):
        stored_state.encode({"optimizer.state": Evil()})
    buffer = io.BytesIO()
    torch.save(Evil(), buffer)
    bytes_ = torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)
    with pytest.raises(InvalidFile, match=r"object\.x cannot be read"):
        stored_state.decode({"object.x": bytes_})
    for tensor in (torch.zeros(3), torch.zeros(3, 3, dtype=torch.uint8)):
        with pytest.raises(InvalidFile, match=r"object\.x is not a byte tensor"):
            stored_state.decode({"object.x": tensor})
    with pytest.raises(InvalidFile, match=r"number\.x is not a number"):
        stored_state.decode({"number.x": torch.zeros(2)})
    assert not (tmp_path / "evil").exists()
