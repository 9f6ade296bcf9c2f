"""Optimizers, learning rates that follow their formula exactly, and float8."""

import math
import sys

import pytest
import torch

from trainer.arguments import parse
from trainer.errors import ConfigError
from trainer.optim import float8, optimizers

pytestmark = pytest.mark.torch

STEPS = 40


def formula(options, step):
    """The learning rate of step `step`, counted from 1."""
    warmup = min(1.0, step / options.warmup) if options.warmup else 1.0
    if options.lr_schedule == "constant":
        return options.lr * warmup
    decayed = (step - options.warmup) / max(1, STEPS - options.warmup)
    return options.lr * warmup * (1 + math.cos(math.pi * min(max(decayed, 0.0), 1.0))) / 2


def learning_rates(options, completed=0):
    """Those that the optimizer uses in the remaining steps."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.ones(1)
    optimizer = optimizers.create(options, [parameter])
    schedule = optimizers.lr_schedule(options, optimizer, STEPS, completed)
    for _ in range(completed, STEPS):
        (group,) = optimizer.param_groups
        yield group["lr"]
        assert schedule.get_last_lr() == [group["lr"]]
        optimizer.step()
        schedule.step()


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
@pytest.mark.parametrize("warmup", ["0", "1", "7", "60"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_learning_rate_follows_its_formula(schedule, warmup, optimizer):
    words = f"--lr-schedule {schedule} --warmup {warmup} --optimizer {optimizer} --lr 0.03"
    options = parse(words.split())
    expected = [formula(options, step) for step in range(1, STEPS + 1)]

    assert list(learning_rates(options)) == expected
    assert list(learning_rates(options, completed=17)) == expected[17:]


@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize("implementation", ["foreach", "fused"])
def test_each_implementation_makes_the_same_update(name, implementation):
    def updated(how):
        options = parse(["--optimizer", name, "--optimizer-implementation", how])
        parameters = [torch.nn.Parameter(torch.linspace(-1, 1, size)) for size in (3, 50)]
        optimizer = optimizers.create(options, parameters)
        for _ in range(5):
            for each in parameters:
                each.grad = each.detach().sin()
            optimizer.step()
        return optimizer.param_groups[0], torch.cat([each.detach() for each in parameters])

    group, values = updated(implementation)
    other, expected = updated("for-loop")

    assert group[implementation] is True
    assert other["foreach"] is False
    assert not other["fused"]
    torch.testing.assert_close(values, expected, rtol=1e-6, atol=1e-7)
    assert not torch.equal(values, torch.cat([torch.linspace(-1, 1, size) for size in (3, 50)]))


def test_a_skipped_first_step_of_fp16_gives_no_warning(recwarn):
    options = parse(["--precision", "fp16"])
    optimizer = optimizers.create(options, [torch.nn.Parameter(torch.zeros(1))])
    optimizers.lr_schedule(options, optimizer, STEPS).step()

    assert not recwarn.list


def test_without_torchao_float8_says_what_to_install(monkeypatch):
    """`tests/frameworks/test_models.py` trains with it."""
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16))
    with pytest.raises(ConfigError, match="requires torchao: pip install torchao"):
        float8.convert(model, ["0"], torch.device("cpu"))
