"""Models that are not ours train as in a loop of ten lines, in every layout that accepts them."""

import pytest
import torch
from torch.utils.data import default_collate

from tests.trainer import foreign_tasks
from tests.trainer.foreign_tasks import BATCH
from tests.trainer.rank_pool import RankPool
from tests.trainer.ranks import latest, losses
from trainer import checkpoint
from trainer.arguments import parse

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("trainer")]

TASKS = "tests.trainer.foreign_tasks"
ROUNDING = 1e-5
"""Relative, of a loss: single precision, summed in another order."""
EVERY = {
    "single": (1, "single", ()),
    "ddp": (2, "ddp", ()),
    "manual": (2, "manual", ()),
    "zero1": (2, "zero1", ()),
    "zero2": (2, "zero2", ()),
    "fsdp": (2, "fsdp", ()),
    "micro": (1, "single", ("--micro-batches", "2")),
}
"""Layouts that accept any model: ranks, strategy and options."""
PIPELINES = {
    "pp": (2, "pp", ("--micro-batches", "2")),
    "pp-dp": (4, "pp-dp", ("--micro-batches", "2")),
    "pp-fsdp": (4, "pp-fsdp", ("--micro-batches", "2")),
    "interleaved": (2, "pp", ("--micro-batches", "2", "--schedule", "interleaved")),
}
TENSOR = {
    "tp": (2, "tp", ()),
    "tp-dp": (4, "tp-dp", ("--tensor-parallel", "2")),
    "fsdp-tp": (4, "fsdp-tp", ("--tensor-parallel", "2")),
}


@pytest.fixture(scope="module")
def pools(tmp_path_factory):
    started = {n: RankPool(n, tmp_path_factory.mktemp(f"{n}-ranks")) for n in (1, 2, 4)}
    yield started
    for pool in started.values():
        pool.close()


@pytest.fixture
def trained(pools, tmp_path):
    """The losses of a task in a layout, by step."""

    def train(layout, task, *options, task_options=()):
        world, strategy, ways = layout
        pools[world].train(
            tmp_path, *words(task, task_options), "--strategy", strategy, *ways, *options
        )
        return losses(tmp_path)

    return train


@pytest.fixture
def refused(pools, tmp_path):
    """The errors of all ranks with a task in a layout; none may wait for another."""

    def train(layout, task, *options, task_options=()):
        world, strategy, ways = layout
        arguments = (*words(task, task_options), "--strategy", strategy, *ways, *options)
        return pools[world].try_to_train(tmp_path, *arguments)

    return train


def words(task, task_options=()):
    return (
        *("--task", f"{TASKS}:{task}", "--batch-size", str(BATCH), "--optimizer", "sgd"),
        *("--lr", "0.1", "--log-every", "1", "--steps", "6", "--epochs", "9", "--no-tensorboard"),
        *(word for each in task_options for word in ("--task-option", each)),
    )


def by_hand(task, *task_options, steps=6):
    """The losses of a loop as in a tutorial, in one process."""
    task = getattr(foreign_tasks, task)(parse(words(task, task_options)))
    torch.manual_seed(0)
    model, data, found = task.model(), task.training, {}
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    while len(found) < steps:
        epoch = len(found) * BATCH // len(data)
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(epoch))
        for rows in order.split(BATCH):
            inputs, targets = default_collate([data[row] for row in rows.tolist()])
            torch.manual_seed((len(found) + 1) * 1_000_003)  # as the trainer's first data shard
            loss = task.loss(model(inputs), targets).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found[len(found) + 1] = loss.item()
    return {step: found[step] for step in range(1, steps + 1)}


@pytest.mark.parametrize("layout", EVERY | PIPELINES)
def test_a_subclass_of_tensor_dataset_is_asked(trained, layout):
    expected = by_hand("subclass")
    assert trained((EVERY | PIPELINES)[layout], "subclass") == pytest.approx(expected, rel=ROUNDING)


@pytest.mark.parametrize("layout", EVERY)
def test_a_model_in_evaluation_mode_stays_in_it(trained, layout):
    """Before the first evaluation, which is after step 2, and after it."""
    expected = by_hand("modes", "mode=eval")
    found = trained(EVERY[layout], "modes", task_options=["mode=eval"])
    assert found == pytest.approx(expected, rel=ROUNDING)


@pytest.mark.parametrize("layout", ["single", "ddp", "fsdp"])
def test_a_frozen_normalization_stays_frozen(trained, tmp_path, layout):
    found = trained(EVERY[layout], "modes", task_options=["mode=part"])
    if layout == "single":
        assert found == pytest.approx(by_hand("modes", "mode=part"), rel=ROUNDING)
    saved = checkpoint.read(latest(tmp_path))
    assert not saved["model.norm.running_mean"].any()
    assert (saved["model.norm.running_var"] == 1).all()
