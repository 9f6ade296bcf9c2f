"""Metrics: JSON lines, TensorBoard, and sums over ranks with shards of unequal size."""

import json
import sys

import pytest

from tests.trainer.ranks import outputs, start_ranks
from trainer.metrics import MetricsWriter

pytestmark = pytest.mark.torch

EVALUATE = """
import torch, train
from trainer.parallel import process_group
from trainer.arguments import parse

run = train.Trainer(parse(["--batch-size", "4"]), process_group.join(), stop_signals=[])
right = torch.tensor([1, 0, 1, 1, 0, 1, 1])          # 5 of 7
labels = torch.arange(7)
guesses = torch.where(right == 1, labels, (labels + 1) % 7)
outputs = 3.0 * torch.nn.functional.one_hot(guesses, 7)
run.strategy.forward = lambda inputs: inputs
for size in (7, 1):
    dataset = torch.utils.data.TensorDataset(outputs[:size], labels[:size])
    result = run.evaluate(dataset)
    accuracy, loss = result["accuracy"], result["loss"]
    exact = torch.nn.functional.cross_entropy(outputs[:size], labels[:size]).item()
    print(f"{accuracy:.12f} {right[:size].double().mean():.12f} {abs(loss - exact) < 1e-6}")
del run
process_group.leave()
"""


def read(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def scalars(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {
        tag: {event.step: event.value for event in events.Scalars(tag)}
        for tag in events.Tags()["scalars"]
    }


def test_unequal_and_empty_shards_are_counted_exactly(tmp_path):
    texts = outputs(start_ranks(tmp_path, 2, "-c", EVALUATE))

    for text in texts:
        (seven, seven_exact, seven_loss), (one, one_exact, one_loss) = map(
            str.split, text.splitlines()
        )
        assert (seven, one) == (seven_exact, one_exact)
        assert (seven_loss, one_loss) == ("True", "True")


def write(folder, *steps, after=0, tensorboard=False, factor=1.0):
    """Write the losses of `steps` by a run that was resumed after a step."""
    writer = MetricsWriter(folder, after, tensorboard=tensorboard)
    for step in steps:
        writer.write(step, 0, loss=factor * step)
    return writer


def test_numbers_are_written_in_full_and_at_once(tmp_path):
    writer = write(tmp_path, 1, factor=0.1 + 0.2)

    assert read(tmp_path) == [{"step": 1, "epoch": 0, "loss": 0.1 + 0.2}]
    writer.close()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_resuming_drops_the_steps_that_are_repeated(tmp_path):
    write(tmp_path, *range(1, 6)).close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "ep')
    write(tmp_path, 4, after=3, factor=10.0).close()
    assert [line["loss"] for line in read(tmp_path)] == [1.0, 2.0, 3.0, 40.0]

    write(tmp_path, 1).close()
    assert len(read(tmp_path)) == 1, "a fresh run starts a fresh file"


def test_tensorboard_has_the_same_and_drops_repeated_steps(tmp_path):
    write(tmp_path, 1, 2, 3, tensorboard=True).close()
    write(tmp_path, 3, after=2, tensorboard=True, factor=10.0).close()

    assert scalars(tmp_path)["loss"] == {1: 1.0, 2: 2.0, 3: 30.0}


def test_without_tensorboard_there_is_a_notice(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    write(tmp_path, 1, tensorboard=True).close()

    assert len(read(tmp_path)) == 1
    printed = capsys.readouterr().out
    assert printed == "tensorboard is not installed: metrics go to metrics.jsonl only\n"


def test_other_ranks_write_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(None, 1, tensorboard=True).close()

    assert not list(tmp_path.iterdir())
