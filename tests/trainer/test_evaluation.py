"""evaluate.py: its numbers are those of a loop written by hand, on any number of ranks."""

import json
import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

import evaluate
from tests.trainer import own_tasks, ranks
from trainer.parallel.process_group import DistributedContext
from trainer.task import IGNORE_INDEX, Task

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("trainer")]

CPU = torch.device("cpu")
COUNT = 53
"""Samples: on no number of ranks but one do all have as many."""
RANKS = (1, 2, 3, 7)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(3)
    with torch.no_grad():
        yield


def evaluated(task, model, world, *, batch_size=8, column=None, worst=5):
    """The result of as many ranks, one after the other."""
    parts = []
    with torch.no_grad():
        for rank in range(world):
            context = DistributedContext(rank, world, CPU)
            batches = evaluate.shares(task, task.test, context, batch_size)
            parts.append(evaluate.examine(task, model.eval(), batches, CPU))
        return evaluate.summarized(parts, task.test, column, worst)


def flowers():
    """Two features and three classes, of which one is rare."""
    values = torch.randn(COUNT, 2)
    classes = (values[:, 0] > 0).long() + (values[:, 1] > 1.2).long()
    data = TensorDataset(values, classes)
    data.classes = ["daisy", "rose", "tulip"]
    return data


@pytest.mark.parametrize("world", RANKS)
def test_classes_are_judged_as_by_hand(world):
    data, model = flowers(), nn.Linear(2, 3)
    result = evaluated(Task(lambda: model, data, test=data), model, world)

    losses, chances, right = [], [], []
    matrix = Counter()
    for value, expected in data:
        scores = model(value)
        losses.append(functional.cross_entropy(scores, expected).item())
        chance, predicted = scores.softmax(0).max(0)
        chances.append(chance.item())
        right.append(predicted.item() == expected.item())
        matrix[expected.item(), predicted.item()] += 1
    assert (result["evaluated"], result["targets"], result["kind"]) == (COUNT, COUNT, "classes")
    assert result["loss"] == pytest.approx(sum(losses) / COUNT)
    assert result["accuracy"] == sum(right) / COUNT
    assert result["confusion"] == [[matrix[row, col] for col in range(3)] for row in range(3)]
    for at, name in enumerate(data.classes):
        known = result["classes"][name]
        of_class = sum(matrix[at, col] for col in range(3))
        chosen = sum(matrix[row, at] for row in range(3))
        assert known["support"] == of_class
        assert known["recall"] == pytest.approx(matrix[at, at] / max(of_class, 1))
        assert known["precision"] == pytest.approx(matrix[at, at] / max(chosen, 1))
    gap = 0.0
    for at in range(evaluate.BINS):
        inside = [n for n in range(COUNT) if at < chances[n] * evaluate.BINS <= at + 1]
        known = result["calibration"]["bins"][at]
        assert known["count"] == len(inside)
        if inside:
            assert known["accuracy"] == pytest.approx(sum(right[n] for n in inside) / len(inside))
            gap += abs(sum(chances[n] for n in inside) - sum(right[n] for n in inside))
    assert result["calibration"]["ece"] == pytest.approx(gap / COUNT)
    worst = sorted(range(COUNT), key=lambda n: -losses[n])[:5]
    assert [one["index"] for one in result["worst"]] == worst
    first = result["worst"][0]
    assert first["loss"] == pytest.approx(losses[worst[0]])
    assert first["expected"] == data.classes[data[worst[0]][1]]
    assert first["confidence"] == pytest.approx(chances[worst[0]])


def test_without_a_target_there_is_no_result():
    values = torch.randn(COUNT, 2)
    ignored = TensorDataset(values, torch.full((COUNT,), IGNORE_INDEX))
    task = Task(lambda: nn.Linear(2, 3), ignored, test=ignored)
    with pytest.raises(ValueError, match="no sample has a target"):
        evaluated(task, nn.Linear(2, 3), 2)


def test_targets_that_are_no_class_have_no_accuracy():
    """A loss of one's own may ignore another number than PyTorch's."""
    data = TensorDataset(torch.randn(COUNT, 2), torch.full((COUNT,), -1))

    def loss(outputs, targets, reduction="mean"):
        return functional.cross_entropy(outputs, targets, reduction=reduction, ignore_index=-1)

    result = evaluated(Task(lambda: None, data, test=data, loss=loss), nn.Linear(2, 3), 2)
    assert math.isnan(result["accuracy"])
    line = evaluate.summary({**result, "unit": "samples"})
    assert line.startswith("accuracy nan (53 samples); ece")


@pytest.mark.parametrize("world", RANKS)
def test_numbers_are_judged_as_by_hand(world):
    task = replace(own_tasks.regression(None), test=own_tasks.Points(COUNT))
    model = own_tasks.Net()
    result = evaluated(task, model, world)

    pairs = [(model(*inputs), targets) for inputs, targets in task.test]
    errors = torch.stack([predicted - expected for predicted, expected in pairs]).double()
    expected = torch.stack([expected for _, expected in pairs]).double()
    assert result["kind"] == "numbers"
    assert result["loss"] == pytest.approx(float(errors.square().mean()))
    assert result["mae"] == pytest.approx(float(errors.abs().mean()))
    assert result["rmse"] == pytest.approx(float(errors.square().mean().sqrt()))
    spread = float((expected - expected.mean(0)).square().sum())
    assert result["r2"] == pytest.approx(1 - float(errors.square().sum()) / spread)
    by_sample = errors.square().mean(1)
    assert [one["index"] for one in result["worst"]] == by_sample.argsort(descending=True)[
        :5
    ].tolist()
    assert result["worst"][0]["loss"] == pytest.approx(float(by_sample.max()), rel=1e-5)


class Sentences(Dataset):
    """Tokens, of which those after the end do not count; a stream if asked."""

    def __init__(self):
        self.tokens = torch.randint(0, 11, (COUNT, 9))
        self.lengths = torch.randint(1, 9, (COUNT,)).tolist()

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        labels = self.tokens[index, 1:].clone()
        labels[self.lengths[index] :] = IGNORE_INDEX
        language = ("en", "fr")[index % 2]
        return {"tokens": self.tokens[index, :-1], "labels": labels, "language": language}


class Stream(IterableDataset):
    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return (self.data[number] for number in range(COUNT))


def without_language(batch):
    return batch["tokens"], batch["labels"]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("world", RANKS)
def test_tokens_are_judged_as_by_hand(world, streamed):
    data = Sentences()
    model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11))
    test = Stream(data) if streamed else data
    task = Task(lambda: model, data, test=test, split=without_language)
    result = evaluated(task, model, world, column="language")

    sums = Counter()
    for sample in data:
        scores, labels = model(sample["tokens"]), sample["labels"]
        counted = labels != IGNORE_INDEX
        loss = functional.cross_entropy(scores[counted], labels[counted], reduction="sum").item()
        hits = int((scores.argmax(-1) == labels)[counted].sum())
        for group in ("all", sample["language"]):
            sums[group, "tokens"] += int(counted.sum())
            sums[group, "loss"] += loss
            sums[group, "hits"] += hits
    tokens = sums["all", "tokens"]
    assert (result["kind"], result["targets"]) == ("tokens", tokens)
    assert result["loss"] == pytest.approx(sums["all", "loss"] / tokens, rel=1e-6)
    assert result["perplexity"] == pytest.approx(math.exp(sums["all", "loss"] / tokens), rel=1e-5)
    assert result["accuracy"] == pytest.approx(sums["all", "hits"] / tokens)
    for one in result["slices"]["values"]:
        group = one["value"]
        assert one["loss"] == pytest.approx(sums[group, "loss"] / sums[group, "tokens"], rel=1e-5)
        assert one["accuracy"] == pytest.approx(sums[group, "hits"] / sums[group, "tokens"])
    assert sum(one["evaluated"] for one in result["slices"]["values"]) == COUNT
    assert sum(each["count"] for each in result["calibration"]["bins"]) == tokens


@pytest.mark.parametrize("world", RANKS)
def test_decisions_are_judged_as_by_hand(world):
    data = TensorDataset(torch.randn(COUNT, 4), (torch.rand(COUNT, 2) > 0.6).float())
    model = nn.Linear(4, 2)
    loss = functional.binary_cross_entropy_with_logits
    result = evaluated(Task(lambda: model, data, test=data, loss=loss), model, world)

    inputs, targets = data.tensors
    predicted = model(inputs) > 0
    assert result["kind"] == "yes or no"
    assert result["accuracy"] == pytest.approx(
        float((predicted == (targets > 0.5)).double().mean())
    )
    assert result["loss"] == pytest.approx(float(loss(model(inputs), targets)), rel=1e-5)
    assert sum(map(sum, result["confusion"])) == 2 * COUNT


def test_a_column_of_numbers_is_divided_into_ranges_and_a_subset_has_its_rows():
    data, model = flowers(), nn.Linear(2, 3)
    data.age = [float(number) for number in range(COUNT)]
    subset = Subset(data, list(range(0, COUNT, 2)))
    result = evaluated(Task(lambda: model, data, test=subset), model, 2, column="age")
    values = result["slices"]["values"]
    assert len(values) == evaluate.RANGES
    assert (values[0]["value"], values[-1]["value"]) == ("0 to 10.4", "41.6 to 52")
    assert sum(one["evaluated"] for one in values) == len(subset)


def test_a_column_with_missing_values_and_lists():
    data, model = flowers(), nn.Linear(2, 3)
    data.site = [None, 1, ["a"]] + ["x"] * (COUNT - 3)
    result = evaluated(Task(lambda: model, data, test=data), model, 2, column="site")
    found = {one["value"]: one["evaluated"] for one in result["slices"]["values"]}
    assert found == {"1": 1, "None": 1, "['a']": 1, "x": COUNT - 3}


def test_a_column_that_the_data_does_not_have():
    data, model = flowers(), nn.Linear(2, 3)
    with pytest.raises(
        ValueError, match="--slice-by age: the data has no such column; a column is"
    ):
        evaluated(Task(lambda: model, data, test=data), model, 2, column="age")
    data.age = [1, 2]
    with pytest.raises(ValueError, match=f"has 2 values for {COUNT} samples"):
        evaluated(Task(lambda: model, data, test=data), model, 2, column="age")


def test_outputs_of_an_unknown_kind_have_a_loss_and_the_worst_samples():
    data = TensorDataset(torch.randn(COUNT, 2), torch.randn(COUNT, 5))

    def loss(outputs, targets):
        return (outputs.sum(1) - targets.sum(1)).abs()

    model = nn.Linear(2, 3)
    result = evaluated(Task(lambda: model, data, test=data, loss=loss), model, 2)
    assert result["kind"] == "other"
    assert result["loss"] == pytest.approx(
        float(loss(model(data.tensors[0]), data.tensors[1]).mean())
    )
    assert set(result["worst"][0]) == {"index", "loss"}


def test_many_classes_have_their_most_frequent_confusions_instead_of_a_matrix():
    classes = torch.arange(COUNT) * 3 % 150
    data = TensorDataset(torch.randn(COUNT, 2), classes)
    model = nn.Linear(2, 150)
    result = evaluated(Task(lambda: model, data, test=data), model, 2)
    assert "confusion" not in result
    assert 0 < len(result["confused"]) <= evaluate.MAX_CONFUSIONS


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """A run of the digits, two epochs."""
    folder = tmp_path_factory.mktemp("digits")
    ranks.train_alone(folder, "--epochs", "2", "--no-tensorboard")
    return folder


def test_two_ranks_have_the_numbers_of_one(digits, tmp_path):
    """Of 1077 samples, an odd number."""
    ranks.call(evaluate, digits / "checkpoints", tmp_path / "one", "--split", "training")
    words = [str(digits / "checkpoints"), "--output", str(tmp_path / "two"), "--split", "training"]
    program = str(ranks.ENTRYPOINTS / "evaluate.py")
    text, other = ranks.outputs(ranks.start_ranks(tmp_path / "two", 2, program, *words))
    one, two = (
        json.loads((tmp_path / name / "evaluation.json").read_text()) for name in ("one", "two")
    )
    assert "evaluation.json: training accuracy " in text
    assert "(1077 images); " in text
    assert "evaluation.json" not in other
    assert (one["evaluated"], one["split"]) == (1077, "training")
    assert one["confusion"] == two["confusion"]
    for name in ("loss", "accuracy"):
        assert one[name] == pytest.approx(two[name], rel=1e-9)
    assert [each["index"] for each in one["worst"]] == [each["index"] for each in two["worst"]]
    (line,) = (tmp_path / "two/metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["training_accuracy"] == two["accuracy"]


def test_your_own_task_is_evaluated_if_you_name_it(tmp_path):
    task = f"{own_tasks.__name__}:regression"
    options = ("--task", task, "--steps", "2", "--no-tensorboard")
    with torch.enable_grad():
        ranks.train_alone(tmp_path, *options)
    ranks.call(evaluate, tmp_path / "checkpoints", tmp_path, "--task", task)
    result = json.loads((tmp_path / "evaluation.json").read_text())
    assert result["loss"] == pytest.approx(ranks.lines(tmp_path)[-1]["test_loss"], rel=1e-5)
    with pytest.raises(SystemExit, match="no checkpoint found in"):
        ranks.call(evaluate, tmp_path / "missing", tmp_path, "--task", task)


def test_a_split_that_the_task_does_not_have(digits):
    task = replace(own_tasks.regression(None), test=None)
    assert evaluate.choose(task, None)[0] == "validation"
    with pytest.raises(ValueError, match="no test data; choose --split validation or training"):
        evaluate.choose(task, "test")
