"""The reference trainer as a user starts it, its data and its options."""

import re
import subprocess
import sys
from itertools import chain
from pydoc_data.topics import topics

import pytest
import torch
import yaml
from torch.utils.data import TensorDataset

from tests.trainer.ranks import (
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
from tests.trainer.test_metrics import scalars
from trainer import tasks
from trainer.arguments import parse
from trainer.data import BatchLoader, DataShard, by_length
from trainer.objective import Objective
from trainer.parallel.process_group import DistributedContext
from trainer.task import IGNORE_INDEX, Task

pytestmark = pytest.mark.torch


FAILS = f"""\
import atexit, os, sys, time
from concurrent.futures import ThreadPoolExecutor
sys.path.insert(0, {str(ENTRYPOINTS)!r})
from trainer.parallel import process_group

class Aborts:
    def __del__(self):
        os.abort()

def save():
    time.sleep(0.5)
    print("a save")

process_group.join()
atexit.register(print, "an exit handler")
ThreadPoolExecutor(1).submit(save)
outlives = Aborts()
process_group.fail(65)
"""
AT_END = str(ENTRYPOINTS.parent / "tests/trainer/threads_at_end.py")


def main_job_arguments():
    job = yaml.safe_load((ENTRYPOINTS.parent / "job.yaml").read_text())
    return [str(word) for word in job["entrypoint"]["args"]]


@pytest.mark.parametrize(
    "script", [(TRAIN, "--strategy", "ddp"), (str(ENTRYPOINTS.parent / "templates/train.py"),)]
)
def test_no_thread_of_gloo_outlives_a_run(tmp_path, script):
    """One that frees a tensor while Python shuts down aborts a process that had succeeded."""
    for text in outputs(start_ranks(tmp_path, 2, AT_END, *script, "--epochs", "1")):
        assert text.splitlines()[-1] == "threads of gloo: []"


def test_an_error_keeps_its_exit_code_whatever_outlives_python(tmp_path):
    program = tmp_path / "fails.py"
    program.write_text(FAILS)
    assert outputs([start([str(program)], tmp_path)], code=65) == ["a save\nan exit handler\n"]


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


def test_without_variables_it_writes_to_the_working_folder_and_no_bar(tmp_path, monkeypatch):
    """Here its output goes to a pipe, not to a terminal."""
    for name in ("DEPLOYKIT_OUTPUT_DIR", "DEPLOYKIT_CHECKPOINT_DIR", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    command = [sys.executable, TRAIN, "--epochs", "1", "--no-tensorboard"]
    printed = subprocess.run(
        command, cwd=tmp_path, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ).stdout

    assert b"epoch 0: " in printed
    assert b"/17" not in printed
    assert b"\r" not in printed
    assert (tmp_path / "output" / "metrics.jsonl").exists()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000017"]


def test_all_problems_of_the_options_are_reported_at_once(capsys):
    with pytest.raises(SystemExit):
        parse(["--batch-size", "-5", "--heads", "3", "--epochs", "0"])

    message = capsys.readouterr().err
    for part in (
        "--batch-size must be at least 1",
        "--epochs must be at least 1",
        "--width 64 must be a multiple",
    ):
        assert part in message


def test_importing_the_trainer_imports_no_part_of_torch_that_only_some_strategies_need():
    """DTensor and DCP take a rank 0.7 s."""
    program = "import sys, train; print(*sorted(sys.modules))"
    imported = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ENTRYPOINTS,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()

    assert "torch.distributed" in imported
    for name in ("tensor", "checkpoint", "fsdp", "pipelining"):
        assert f"torch.distributed.{name}" not in imported


def test_single_refuses_several_ranks(tmp_path):
    text = outputs(start_ranks(tmp_path, 2, TRAIN, "--strategy", "single"), code=1)[0]

    assert "train.py: error: --strategy single is for one process, not 2 ranks" in text
    assert "Traceback" not in text


def inputs_of_parts(name):
    task = tasks.load(parse(["--task", name]))
    return [part.tensors[0].flatten(1) for part in (task.training, task.validation, task.test)]


def test_the_parts_of_the_digits_are_disjoint():
    parts = inputs_of_parts("digits")

    assert [len(part) for part in parts] == [1077, 360, 360]
    assert len(torch.cat(parts).unique(dim=0)) == 1797


def test_the_parts_of_the_text_are_consecutive_and_complete():
    """Its windows cannot be compared with each other: the text repeats itself here and there."""
    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    windows = (len(text) - 1) // 64
    parts = inputs_of_parts("text")

    assert [len(part) for part in parts] == [windows - 2 * (windows // 20), *[windows // 20] * 2]
    assert bytes(torch.cat(parts).flatten().tolist()) == text[: 64 * windows]


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


def test_a_folder_without_text_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        parse(["--task", "text", "--text", str(tmp_path)])

    assert "contains no text" in capsys.readouterr().err


@pytest.mark.parametrize("world", [2, 4, 8])
def test_each_global_batch_holds_the_same_samples_on_any_number_of_ranks(world):
    assert samples_by_batch(world, epoch=1) == samples_by_batch(1, epoch=1)


def test_an_epoch_visits_every_sample_once_and_counts_the_short_batch():
    batches = samples_by_batch(4, epoch=0)

    assert sorted(chain(*batches)) == list(range(1077))
    assert list(map(len, batches)) == [64] * 16 + [53]
    counts = [batch.total for batch in shard(0, 4, epoch=0)]
    assert counts == [64] * 16 + [53]
    assert {len(batch.targets) for batch in shard(3, 4, epoch=0)} == {16}


@pytest.mark.parametrize("world", [1, 4])
def test_ignored_targets_are_not_counted(world):
    """Such as the padding of sequences: the loss is the mean over the others, as torch's is."""
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(7, (100, 5), generator=generator)
    targets[torch.rand(100, 5, generator=generator) < 0.3] = IGNORE_INDEX
    targets[::10] = IGNORE_INDEX
    context = DistributedContext(0, world, torch.device("cpu"))
    dataset = TensorDataset(torch.zeros(100, 1), targets)
    batches = batch_loader(dataset, 16, DataShard(0, world), context).in_order()

    expected = [int((part != IGNORE_INDEX).sum()) for part in targets.split(16)]
    assert [batch.total for batch in batches] == expected


def test_a_batch_without_targets_has_no_loss_and_no_error():
    context = DistributedContext(0, 1, torch.device("cpu"))
    dataset = TensorDataset(torch.zeros(4, 1), torch.full((4,), IGNORE_INDEX))
    (batch,) = batch_loader(dataset, 4, DataShard(0, 1), context).in_order()
    objective = Objective(parse([]), Task(torch.nn.Module, dataset), context.device)

    assert objective.loss(torch.ones(4, 3), batch) == 0


def test_an_epoch_can_be_resumed_at_any_batch():
    whole = [batch.inputs.tolist() for batch in shard(1, 2, epoch=3)]

    assert [batch.inputs.tolist() for batch in shard(1, 2, epoch=3, first=9)] == whole[9:]


def test_the_order_follows_from_seed_and_epoch():
    assert samples_by_batch(1, epoch=1) != samples_by_batch(1, epoch=0)
    assert samples_by_batch(1, epoch=1) != samples_by_batch(1, epoch=1, seed=1)


def test_batches_of_similar_length_hold_every_sample_once():
    lengths = torch.randint(1, 200, (1077,), generator=torch.Generator().manual_seed(0))
    orders = []
    for seed in (0, 0, 1):
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(1077, generator=generator)
        orders.append(by_length(order, lengths, 64, generator))
        assert orders[-1].sort().values.equal(torch.arange(1077))
        assert padding(orders[-1], lengths) < padding(order, lengths) / 10
    assert orders[0].equal(orders[1])
    assert not orders[0].equal(orders[2])
    means = torch.stack([lengths[row].float().mean() for row in orders[0].split(64)[:-1]])
    assert not means.equal(means.sort().values)  # short samples do not come first


def padding(order, lengths):
    """The numbers that only fill up the batches of 64."""
    return sum(int((lengths[row].max() - lengths[row]).sum()) for row in order.split(64))


def batch_loader(dataset, *arguments):
    return BatchLoader(Task(torch.nn.Module, dataset), dataset, *arguments)


def shard(rank, world, epoch, seed=0, first=0):
    """One rank's batches of an epoch over a dataset of 1077 numbers."""
    numbers = torch.arange(1077)
    context = DistributedContext(rank, world, torch.device("cpu"))
    batches = batch_loader(TensorDataset(numbers, numbers), 64, DataShard(rank, world), context)
    return batches.epoch(epoch, seed, first)


def samples_by_batch(world, epoch, seed=0):
    """The numbers in each global batch of an epoch, without padding."""
    shards = [shard(rank, world, epoch, seed) for rank in range(world)]
    return [
        sorted(n for batch in parts for n in batch.targets.tolist() if n != IGNORE_INDEX)
        for parts in zip(*shards, strict=True)
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
