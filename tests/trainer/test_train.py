"""The reference trainer as a user starts it."""

import re
import subprocess
import sys
from itertools import chain

import pytest
import yaml
from ranks import ENTRYPOINTS, FOUR_EPOCHS, TRAIN, lines, outputs, start, train_alone
from test_metrics import scalars
from torch.utils.data import DistributedSampler

import train
from trainer import data
from trainer.group import Place

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
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000016.pt"]


@pytest.mark.parametrize("size", ["64", "0", "-3", "1080"])
def test_a_batch_that_does_not_fit_the_ranks_is_refused(size, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(SystemExit) as ended:
        train.parse(["--batch-size", size])

    assert ended.value.code == 2
    expected = f"--batch-size {size} must be a multiple of the 3 ranks and at most 1077"
    assert expected in capsys.readouterr().err


def test_the_split_has_no_image_twice():
    indices = [index for part in data.splits() for index in part.indices]

    assert sorted(indices) == list(range(1797))
    assert [len(part) for part in data.splits()] == [data.TRAINING, data.VALIDATION, data.TEST]


@pytest.mark.parametrize("world", [2, 4, 8])
def test_each_global_batch_holds_the_same_images_on_any_number_of_ranks(world):
    assert batches(world, epoch=1) == batches(1, epoch=1)


def test_the_order_follows_from_seed_and_epoch():
    assert batches(1, epoch=1) != batches(1, epoch=0)
    assert batches(1, epoch=1) != batches(1, epoch=1, seed=1)


def test_each_epoch_is_shuffled_anew(tmp_path, monkeypatch):
    epochs = []
    monkeypatch.setattr(DistributedSampler, "set_epoch", lambda _, epoch: epochs.append(epoch))
    train_alone(tmp_path, *FOUR_EPOCHS)

    assert epochs == [0, 1, 2, 3]


def batches(world, epoch, seed=0):
    """The positions in each global batch of an epoch."""
    shares = []
    for rank in range(world):
        loader = data.training_loader(range(data.TRAINING), 64, seed, Place(rank, world, None))
        loader.sampler.set_epoch(epoch)
        shares.append([batch.tolist() for batch in loader])
    return [sorted(chain(*parts)) for parts in zip(*shares, strict=True)]
