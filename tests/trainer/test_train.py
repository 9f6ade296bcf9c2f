"""The reference trainer as a user starts it."""

import re
import subprocess
import sys
from itertools import chain

import pytest
import torch
import yaml
from ranks import (
    ENTRYPOINTS,
    PATIENCE,
    TRAIN,
    lines,
    losses,
    outputs,
    start,
    start_ranks,
    train_alone,
)
from test_metrics import scalars
from torch.utils.data import TensorDataset

from trainer import strategies, tasks
from trainer.data import IGNORED, Batches, Share
from trainer.group import Place
from trainer.options import parse

pytestmark = pytest.mark.torch


def main_job_arguments():
    job = yaml.safe_load((ENTRYPOINTS.parent / "job.yaml").read_text())
    return [str(word) for word in job["entrypoint"]["args"]]


def test_the_main_job_reaches_its_accuracy_on_two_processes(tmp_path):
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    text = outputs([start([*torchrun, TRAIN, *main_job_arguments()], tmp_path)])[0]
    final = lines(tmp_path)[-1]
    accuracy = float(re.search(r"^test accuracy (\S+) \(360 images\)$", text, re.MULTILINE)[1])

    assert accuracy >= 0.97
    assert final["test_accuracy"] == pytest.approx(accuracy, abs=1e-4)
    assert final["val_accuracy"] >= 0.95
    assert text.count("test accuracy") == 1
    assert "terminate called" not in text

    shown = scalars(tmp_path / "output")
    logged = {line["step"]: line["loss"] for line in lines(tmp_path) if "loss" in line}
    assert shown["loss"] == pytest.approx(logged)
    assert shown["test_accuracy"] == pytest.approx({final["step"]: accuracy}, abs=1e-4)


def test_without_any_variable_it_writes_beside_itself(tmp_path, monkeypatch):
    for name in ("DEPLOYKIT_OUTPUT_DIR", "DEPLOYKIT_CHECKPOINT_DIR", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    subprocess.run(
        [sys.executable, TRAIN, "--epochs", "1", "--no-tensorboard"], cwd=tmp_path, check=True
    )

    assert (tmp_path / "output" / "metrics.jsonl").exists()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000017"]


def test_a_batch_that_does_not_fit_the_ranks_is_refused():
    place = Place(0, 3, torch.device("cpu"))
    with pytest.raises(ValueError, match="--batch-size 64 must be a multiple of 3: 3 share"):
        strategies.find(parse([]), place)


@pytest.mark.parametrize("size", ["0", "-3"])
def test_a_batch_of_nothing_is_refused(size, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(["--batch-size", size])

    assert ended.value.code == 2
    assert "--batch-size must be at least 1" in capsys.readouterr().err


def test_every_problem_of_the_options_is_told_at_once(capsys):
    with pytest.raises(SystemExit):
        parse(["--batch-size", "-5", "--heads", "3", "--epochs", "0"])

    said = capsys.readouterr().err
    for part in (
        "--batch-size must be at least 1",
        "--epochs must be at least 1",
        "--width 64 must be a multiple",
    ):
        assert part in said


def test_more_than_one_rank_is_not_single(tmp_path):
    text = outputs(start_ranks(tmp_path, 2, TRAIN, "--strategy", "single"), code=1)[0]

    assert "train.py: error: --strategy single is one process, and there are 2 ranks" in text
    assert "Traceback" not in text


@pytest.mark.parametrize("name", ["digits", "text"])
def test_no_sample_is_in_two_parts(name):
    task = tasks.find(parse(["--task", name]))
    parts = [part.tensors[0] for part in (task.training, task.validation, task.test)]
    whole = torch.cat(parts).flatten(1)

    assert len(whole) == {"digits": 1797, "text": len(whole)}[name]
    assert min(map(len, parts)) > 300
    # the texts repeat themselves here and there; the digits never
    assert len(whole.unique(dim=0)) > {"digits": 1796, "text": 0.98 * len(whole)}[name]


def test_the_text_model_learns_any_folder_of_text(tmp_path, capsys):
    (tmp_path / "texts" / "deeper").mkdir(parents=True)
    (tmp_path / "texts" / "a.txt").write_text("to be or not to be " * 200)
    (tmp_path / "texts" / "deeper" / "b.md").write_text("that is the question " * 200)
    size = ("--layers", "1", "--width", "16", "--heads", "2", "--sequence", "16")
    options = ("--task", "text", "--text", str(tmp_path / "texts"), *size, "--lr", "0.01")
    train_alone(tmp_path, *options, "--epochs", "8", "--no-tensorboard")

    final = lines(tmp_path)[-1]
    assert final["test_accuracy"] > 0.9
    assert final["test_loss"] < 0.5


def test_only_empty_texts_are_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        parse(["--task", "text", "--text", str(tmp_path)])

    assert "holds no text" in capsys.readouterr().err


@pytest.mark.parametrize("world", [2, 4, 8])
def test_each_global_batch_holds_the_same_samples_on_any_number_of_ranks(world):
    assert seen(world, epoch=1) == seen(1, epoch=1)


def test_every_sample_is_seen_once_an_epoch_and_the_short_batch_is_counted_right():
    batches = seen(4, epoch=0)

    assert sorted(chain(*batches)) == list(range(1077))
    assert list(map(len, batches)) == [64] * 16 + [53]
    counts = [batch.count for batch in share(0, 4, epoch=0)]
    assert counts == [64] * 16 + [53]
    assert {len(batch.targets) for batch in share(3, 4, epoch=0)} == {16}


def test_an_epoch_can_be_entered_anywhere():
    whole = [batch.inputs.tolist() for batch in share(1, 2, epoch=3)]

    assert [batch.inputs.tolist() for batch in share(1, 2, epoch=3, first=9)] == whole[9:]


def test_the_order_follows_from_seed_and_epoch():
    assert seen(1, epoch=1) != seen(1, epoch=0)
    assert seen(1, epoch=1) != seen(1, epoch=1, seed=1)


def share(rank, world, epoch, seed=0, first=0):
    """One rank's batches of an epoch over a dataset of 1077 numbers."""
    numbers = torch.arange(1077)
    place = Place(rank, world, torch.device("cpu"))
    batches = Batches(TensorDataset(numbers, numbers), 64, Share(rank, world), place)
    return batches.epoch(epoch, seed, first)


def seen(world, epoch, seed=0):
    """The numbers in each global batch of an epoch, those that fill up left out."""
    shares = [share(rank, world, epoch, seed) for rank in range(world)]
    return [
        sorted(n for batch in parts for n in batch.targets.tolist() if n != IGNORED)
        for parts in zip(*shares, strict=True)
    ]


def test_compiled_layers_compute_the_same(tmp_path):
    small = ("--task", "text", "--layers", "1", "--width", "32", "--heads", "2", "--sequence", "16")
    options = ("--strategy", "single", *small, "--steps", "3", "--log-every", "1")
    train_alone(tmp_path / "eager", *options, "--no-tensorboard")
    cache = tmp_path / "cache"
    command = (TRAIN, *options, "--no-tensorboard", "--compile")
    process = start(command, tmp_path / "compiled", TORCHINDUCTOR_CACHE_DIR=str(cache))
    said, _ = process.communicate(timeout=PATIENCE)

    assert process.returncode == 0, said
    assert list(cache.rglob("*.so"))
    eager = losses(tmp_path / "eager")
    assert len(eager) == 3
    assert losses(tmp_path / "compiled") == pytest.approx(eager, rel=1e-6)
