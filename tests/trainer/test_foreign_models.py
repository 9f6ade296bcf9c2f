"""Models that are not ours train as in a loop of ten lines, in every layout that accepts them."""

import functools
import re

import pytest
import torch
from torch.utils.data import default_collate

from tests.nightly import few
from tests.trainer import foreign_tasks
from tests.trainer.foreign_tasks import BATCH
from tests.trainer.ranks import TRAIN, latest, losses, outputs, start_ranks
from trainer import seeds
from trainer.arguments import parse
from trainer.checkpoint import checkpointer as checkpoint

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


SHARDS = {"ddp": 2, "zero1": 2, "zero2": 2, "fsdp": 2, "manual": 2, "pp-dp": 2, "pp-fsdp": 2}
SHARDS |= {"tp-dp": 2, "fsdp-tp": 2}
"""Data shards of a layout, where it has several."""
ALL = EVERY | PIPELINES | TENSOR
DRAWS = ["torch", "numpy", "python"]


def some(layouts):
    """Layouts of each kind; the others run at night."""
    kept = ("single", "ddp", "fsdp", "pp", "interleaved", "tp")
    return few(layouts, *(layout for layout in layouts if layout in kept))


def rows(task, option, layouts):
    """A task in each of these layouts."""
    for each in layouts:
        given = pytest.param(each) if isinstance(each, str) else each
        yield pytest.param(task, option, *given.values, marks=given.marks)


def drawn(task, layouts):
    """With what draws: torch in each layout, the others in one of each kind, or at night."""
    for draw in DRAWS:
        kept = [each for each in layouts if draw == "torch" or each in ("single", "pp", "tp")]
        yield from rows(task, f"draw={draw}", few(sorted(layouts), *kept))


TRAINED = [
    *rows("subclass", "", some(EVERY | PIPELINES)),
    *rows("modes", "mode=eval", some(EVERY)),
    *drawn("jittered", ["single", "ddp", "fsdp", "pp", "pp-dp"]),
    *drawn("masked_batches", ALL),
    *drawn("masked_inside", ALL.keys() - {"micro"}),
    *(
        row
        for kind in ("equal", "unequal", "experts", "gradient")
        for row in rows("branching", f"kind={kind}", ["single", "ddp", "zero1", "manual"])
    ),
    *rows("turned", "kind=sequence", some(PIPELINES)),
    *rows("turned", "kind=model", some(PIPELINES)),
    *rows("pairs", "", some(EVERY)),
    *rows("weighted", "kind=counted", some(EVERY | PIPELINES)),
    *rows("several_outputs", "kind=none", some(EVERY | PIPELINES)),
    *rows("several_outputs", "kind=mean", some(EVERY | PIPELINES)),
]
"""Task, its option and layout."""
BY_SHARD = ("jittered", "masked_batches", "masked_inside", "branching")
"""Tasks of which each data shard draws, or decides, for itself."""


@pytest.fixture
def trained(pools, tmp_path):
    """The losses of a task in a layout, by step."""

    def train(layout, task, *options, task_options=()):
        world, *given = arguments(layout, task, *options, task_options=task_options)
        pools[world].train(tmp_path, *given)
        return losses(tmp_path)

    return train


@pytest.fixture
def refused(pools, tmp_path):
    """The errors of all ranks with a task in a layout; none may wait for another."""

    def train(layout, task, *options, task_options=()):
        world, *given = arguments(layout, task, *options, task_options=task_options)
        return pools[world].try_to_train(tmp_path, *given)

    return train


def arguments(layout, task, *options, task_options=()):
    world, strategy, ways = layout
    return world, *words(task, task_options), "--strategy", strategy, *ways, *options


def words(task, task_options=()):
    return (
        *("--task", f"{TASKS}:{task}", "--batch-size", str(BATCH), "--optimizer", "sgd"),
        *("--lr", "0.1", "--log-every", "1", "--steps", "6", "--epochs", "9", "--no-tensorboard"),
        *(word for each in task_options for word in ("--task-option", each)),
    )


@functools.cache
def by_hand(task, *task_options, shards=1, parts=1, steps=6):
    """The losses of a loop as in a tutorial, in one process, in so many parts of each batch."""
    seeds.seed_all(0)
    task = getattr(foreign_tasks, task)(parse(words(task, task_options)))
    seeds.seed_all(0)
    model, found = task.model(), {}
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step, batch in enumerate(batches(task, shards, steps), 1):
        loss, count = torch.zeros(()), sum(int((targets != -100).sum()) for _, targets in batch)
        for shard, (inputs, targets) in enumerate(batch):
            seed_step(step, shard)
            pieces = zip(inputs.chunk(parts), targets.chunk(parts), strict=True)
            for part, (x, y) in enumerate(pieces):
                if parts > 1:
                    seeds.seed_all(seeds.mixed(seeds.mixed(3, 0, step, shard), part))
                value = task.loss(model(x), y)
                loss = loss + (value.sum() / count if value.dim() else value)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found[step] = loss.item()
    return found


def batches(task, shards, steps):
    """For each step, the part of each data shard, drawn as the trainer does."""
    data, collate = task.training, task.collate or default_collate
    for step in range(steps):
        epoch, number = divmod(step * BATCH, len(data))
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(epoch))
        rows, batch = order[number : number + BATCH].tolist(), []
        for shard in range(shards):
            seeds.seed_batch(0, epoch, number // BATCH, shard)
            batch.append(collate([data[row] for row in rows[shard::shards]]))
        yield batch


def seed_step(step, shard):
    seeds.seed_torch(seeds.mixed(0, step, shard))
    seeds.seed_python(seeds.mixed(3, 0, step, shard))


@pytest.mark.parametrize(("task", "option", "layout"), TRAINED)
def test_losses_are_those_of_a_loop_by_hand(trained, task, option, layout):
    given = [option] if option else []
    # several numbers for a target are averaged
    expected = by_hand(
        task,
        *(each.replace("none", "mean") for each in given),
        shards=SHARDS.get(layout, 1) if task in BY_SHARD else 1,
        parts=2 if task == "masked_inside" and layout in PIPELINES else 1,
    )
    unused = task == "branching" and layout in ("ddp", "zero1")
    ways = ["--find-unused-parameters"] * unused
    found = trained(ALL[layout], task, *ways, task_options=given)
    assert found == pytest.approx(expected, rel=ROUNDING)


@pytest.mark.parametrize("layout", ["single", "ddp", "fsdp"])
def test_a_frozen_normalization_stays_frozen(trained, tmp_path, layout):
    found = trained(EVERY[layout], "modes", task_options=["mode=part"])
    if layout == "single":
        assert found == pytest.approx(by_hand("modes", "mode=part"), rel=ROUNDING)
    saved = checkpoint.read(latest(tmp_path))
    assert not saved["model.norm.running_mean"].any()
    assert (saved["model.norm.running_var"] == 1).all()


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("task", ["jittered", "masked_inside", "jittered_stream"])
def test_a_resumed_run_draws_the_same(pools, once, tmp_path, task, draw):
    given = (*words(task, [f"draw={draw}"]), "--strategy", "single", "--checkpoint-steps", "1")
    for steps in ("3", "6"):
        pools[1].train(tmp_path, *given, "--steps", steps)
    assert losses(tmp_path) == losses(once(1, *given))
    assert len(losses(tmp_path)) == 6


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("task", ["jittered_stream", "split_by_chance"])
def test_ranks_read_the_same_stream_and_split_alike(once, task, draw):
    one, two = (once(n, *words(task, [f"draw={draw}"]), "--strategy", "ddp") for n in (1, 2))
    assert losses(two) == pytest.approx(losses(one), rel=ROUNDING)


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("workers", ["1", "2"])
def test_workers_draw_the_same(once, workers, draw):
    given = (*words("jittered", [f"draw={draw}"]), "--strategy", "single", "--workers")
    assert losses(once(1, *given, workers)) == losses(once(1, *given, "0"))


FOUR = {"fsdp": (4, "fsdp", ()), "zero2": (4, "zero2", ())}
FOUR["hsdp"] = (4, "hsdp", ("--shard-ranks", "2"))
BRANCHES = {
    "equal": r"rank \d reached branches.\d and rank \d reached branches.\d",
    "unequal": r"rank \d reached branches.\d and rank \d reached branches.\d",
    "drop": r"rank \d reached (branches|the end).* and rank \d reached (branches|the end)",
    "experts": r"rank \d reached (branches|the end).* and rank \d reached (branches|the end)",
    "gradient": r"only rank \d has gradients of branches.\d.bias, branches.\d.weight",
}


@pytest.mark.parametrize("layout", FOUR)
@pytest.mark.parametrize("kind", BRANCHES)
def test_ranks_that_gather_different_layers_stop(refused, layout, kind):
    errors = refused(FOUR[layout], "branching", task_options=[f"kind={kind}"])
    for error in errors:
        assert error.startswith(
            f"UnequalRanksError: --strategy {FOUR[layout][1]} requires the same"
        )
        assert re.search(BRANCHES[kind], error)
        assert "use --strategy ddp --find-unused-parameters" in error


def test_the_command_says_in_one_line_which_layers_differ(tmp_path):
    arguments = (*words("branching", ["kind=equal"]), "--strategy", "fsdp")
    texts = outputs(start_ranks(tmp_path, 2, TRAIN, *arguments), code=1)
    lines = [line for text in texts for line in text.splitlines() if "error" in line]
    assert len(lines) == 1
    assert lines[0].startswith("train.py: error: --strategy fsdp requires the same layers on every")
    assert "Traceback" not in "".join(texts)


@pytest.mark.parametrize("kind", ["sequence", "model"])
@pytest.mark.parametrize("layout", ["ddp", "fsdp", "pp", "pp-dp", "pp-fsdp", "interleaved"])
def test_a_frozen_backbone_is_trained_on(trained, layout, kind):
    expected = by_hand("frozen_backbone", f"kind={kind}")
    options = ("--clip", "1e9", "--ema", "0.5", "--steps", "3")
    first = trained(ALL[layout], "frozen_backbone", *options, task_options=[f"kind={kind}"])
    found = trained(ALL[layout], "frozen_backbone", *options[:-2], task_options=[f"kind={kind}"])
    assert len(first) == 3
    assert found == pytest.approx(expected, rel=ROUNDING)


@pytest.mark.parametrize(
    ("layout", "task", "message"),
    [
        ("pp", "pairs", "but Two returns a tuple of 2 values; choose another strategy"),
        ("pp", "frozen", "the model has no trainable parameters"),
        ("ddp", "frozen", "the model has no trainable parameters"),
        ("fsdp", "sparse", "embed has sparse gradients"),
        ("ddp", "sparse", "embed has sparse gradients"),
        ("single", "sparse", "remove sparse=True"),
        ("ddp", "without_rate", "Task.optimizer: the learning rate is None"),
        ("pp-tp", "turned", "Masked has no tensor-parallel plan"),
    ],
)
def test_what_does_not_fit_is_one_sentence_on_every_rank(refused, layout, task, message):
    ways = ALL | {"pp-tp": (4, "pp-tp", ("--micro-batches", "2"))}
    errors = refused(ways[layout], task, task_options=["kind=model"])
    for error in errors:
        assert error.startswith("ConfigError: ")
        assert message in error


@pytest.mark.parametrize("workers", ["1", "2", "3"])
@pytest.mark.parametrize("layout", ["single", "ddp"])
def test_a_stream_that_divides_itself_is_read_once(once, layout, workers):
    """A pass has 6 batches, as many as steps."""
    world, strategy, _ = EVERY[layout]
    given = (*words("dividing"), "--strategy", strategy, "--workers")
    some = losses(once(world, *given, workers))
    assert some == losses(once(world, *given, "0"))
    assert len(some) == 6


@pytest.mark.parametrize(("kind", "warnings"), [("plain", 1), ("counted", 0)])
@pytest.mark.parametrize("layout", ["ddp", "fsdp", "pp"])
def test_a_loss_that_depends_on_the_division_of_a_batch_is_said(
    pools, tmp_path, layout, kind, warnings
):
    world, *given = arguments(ALL[layout], "weighted", task_options=[f"kind={kind}"])
    texts = pools[world].train(tmp_path, *given)
    said = "warning: a batch's loss is not the mean of its parts' losses weighted by their targets"
    assert "".join(texts).count(said) == warnings


@pytest.mark.parametrize("kind", ["same", "shifted", "masked"])
@pytest.mark.parametrize("layout", ["single", "ddp", "fsdp", "pp"])
def test_labels_that_are_not_shifted_are_refused(refused, layout, kind):
    for error in refused(ALL[layout], "labelled", task_options=[f"kind={kind}"]):
        expected = "ConfigError: the labels are the input_ids themselves" if kind == "same" else ""
        assert error[: len(expected) + 1].rstrip(",") == expected
