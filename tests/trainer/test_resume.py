"""A run that was stopped, killed or split in two ends like an uninterrupted one."""

import re
import signal
import threading

import pytest

import train
from tests.trainer.ranks import (
    FOUR_EPOCHS,
    TRAIN,
    latest,
    lines,
    losses,
    outputs,
    saved_step,
    start,
    start_ranks,
    train_alone,
    train_with_signal,
    weights,
)
from trainer.checkpoint import checkpointer as checkpoint
from trainer.parallel import process_group
from trainer.stop_vote import StopVote

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("trainer")]

ENDLESS = ("--epochs", "100000", "--log-every", "1", "--no-tensorboard")
AT_ONCE = "--no-background-save"
"""A checkpoint is complete before the next step."""


def wait_for(process, beginning):
    """Read the output of `process` until a line that starts so, and return it."""
    for line in process.stdout:
        if line.startswith(beginning):
            return line
    raise AssertionError(f"no line starts with {beginning!r}")


def test_two_halves_equal_the_whole(one_rank, tmp_path, monkeypatch, capsys):
    train_alone(tmp_path, *FOUR_EPOCHS, "--epochs", "2")
    assert "resumed" not in capsys.readouterr().out

    monkeypatch.setenv("DEPLOYKIT_RESTART_COUNT", "1")
    train_alone(tmp_path, *FOUR_EPOCHS)

    assert "after 34 steps (restart 1)" in capsys.readouterr().out
    assert lines(tmp_path) == lines(one_rank)
    assert weights(tmp_path).equal(weights(one_rank))


def test_sigterm_to_one_rank_stops_all_and_resuming_continues_exactly(two_ranks, pools, tmp_path):
    program = train_with_signal(tmp_path, rank=1, step=5, number=signal.SIGTERM)
    stopped = outputs(start_ranks(tmp_path, 2, program, *FOUR_EPOCHS), code=75)[0]

    path, step = latest(tmp_path), saved_step(tmp_path)
    assert f"stopped early after step {step}; checkpoint: {path}" in stopped
    assert step == 6
    assert "test accuracy" not in stopped

    resumed, _ = pools[2].train(tmp_path, *FOUR_EPOCHS)

    assert f"resumed from {path} after {step} steps (restart 0)" in resumed
    assert lines(tmp_path) == lines(two_ranks)
    assert weights(tmp_path).equal(weights(two_ranks))


def test_the_second_step_has_a_vote_too():
    """The time before the first vote is not a step time, so it does not delay the second one."""
    process_group.join()
    try:
        stop_signals = []
        vote = StopVote(stop_signals)
        vote.start()
        assert not vote.result()
        stop_signals.append(signal.SIGTERM)
        vote.start()
        assert vote.result()
    finally:
        process_group.leave()


def test_sigusr2_stops_in_the_middle_of_an_epoch(tmp_path):
    process = start([TRAIN, *ENDLESS], tmp_path)
    wait_for(process, "epoch 1:")
    process.send_signal(signal.SIGUSR2)
    text = outputs([process], code=75)[0]
    step = int(re.search(r"stopped early after step (\d+)", text)[1])

    assert step > 34
    assert list(losses(tmp_path)) == list(range(1, step + 1))
    assert saved_step(tmp_path) == step


def test_a_killed_run_loses_at_most_one_epoch(one_rank, tmp_path):
    process = start([TRAIN, *ENDLESS, AT_ONCE], tmp_path)
    wait_for(process, "epoch 2:")
    process.kill()
    process.wait()
    process.stdout.close()
    logged = max(losses(tmp_path))
    done = saved_step(tmp_path)
    epochs = done // 17 + 1
    train_alone(tmp_path, *FOUR_EPOCHS, "--epochs", str(epochs))

    assert done >= 34
    assert logged - done <= 34, "one epoch of 17 steps and the kill may hit the save of the next"
    assert list(losses(tmp_path)) == list(range(1, epochs * 17 + 1))
    shared = [step for step in losses(tmp_path) if step <= 68]
    assert [losses(tmp_path)[n] for n in shared] == [losses(one_rank)[n] for n in shared]


def test_a_finished_run_is_only_evaluated_again(one_rank, tmp_path, capsys):
    (tmp_path / "checkpoints").symlink_to(one_rank / "checkpoints")
    before = sorted((one_rank / "checkpoints").iterdir())
    train_alone(tmp_path, *FOUR_EPOCHS)

    assert "epoch" not in capsys.readouterr().out
    assert lines(tmp_path)[-1] == lines(one_rank)[-1]
    assert sorted((one_rank / "checkpoints").iterdir()) == before


CHANGED = {
    "--batch-size 32": "--batch-size was 64, now 32",
    "--precision bf16": "--precision was fp32, now bf16",
    "--lr-schedule cosine": "--lr-schedule was constant, now cosine",
    "--warmup 5": "--warmup was 0, now 5",
    "--weight-decay 0.5": "--weight-decay was 0.0, now 0.5",
    "--clip 1 --seed 3": "--clip was None, now 1.0; --seed was 0, now 3",
}


@pytest.mark.parametrize("options", CHANGED)
def test_other_settings_are_refused(options, one_rank, tmp_path):
    (tmp_path / "checkpoints").symlink_to(one_rank / "checkpoints")
    with pytest.raises(
        ValueError, match="use the same settings or another checkpoint folder"
    ) as refused:
        train_alone(tmp_path, *FOUR_EPOCHS, *options.split())

    assert f"was saved with different settings: {CHANGED[options]};" in str(refused.value)


def test_checkpoints_that_cannot_be_read_end_the_run_rather_than_start_it_again(tmp_path):
    train_alone(tmp_path, *FOUR_EPOCHS, "--epochs", "1")
    before = lines(tmp_path)
    (latest(tmp_path) / ".metadata").unlink()
    text = outputs([start([TRAIN, *FOUR_EPOCHS], tmp_path)], code=65)[0]
    assert "train.py: error: no checkpoint in " in text
    assert "can be read (step-00000017: .metadata is missing). Restore one from a backup; " in text
    assert "Traceback" not in text
    assert lines(tmp_path) == before


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    """The first write, after step 17, ends only once step 18 is done."""
    next_step, ended = threading.Event(), []
    train_step, write = train.Trainer.train_step, checkpoint.CheckpointManager._write

    def noted_step(trainer, batch):
        train_step(trainer, batch)
        if trainer.step == 18:
            next_step.set()

    def late_write(manager, path, *state):
        ended.append(next_step.wait(60))
        write(manager, path, *state)

    monkeypatch.setattr(train.Trainer, "train_step", noted_step)
    monkeypatch.setattr(checkpoint.CheckpointManager, "_write", late_write)
    train_alone(tmp_path, "--epochs", "2", "--no-tensorboard")
    assert ended == [True, True]
    assert saved_step(tmp_path) == 34


def test_dropout_continues_where_it_stopped(tmp_path):
    words = (*FOUR_EPOCHS, "--task", "tests.trainer.dropout:task", "--batch-size", "64")
    for folder, epochs in (("whole", "2"), ("halves", "1"), ("halves", "2")):
        train_alone(tmp_path / folder, *words, "--epochs", epochs)

    assert losses(tmp_path / "halves") == losses(tmp_path / "whole")
    assert weights(tmp_path / "halves").equal(weights(tmp_path / "whole"))


def test_dropout_differs_between_ranks_and_steps(pools, tmp_path):
    given = ("--task", "tests.trainer.dropout:task", "--steps", "3", "--no-tensorboard")
    texts = pools[2].train(tmp_path, *given, "--strategy", "manual")  # DDP tries a batch first
    kept = [re.findall(r"kept ([01]{32})", text) for text in texts]

    assert list(map(len, kept)) == [3, 3]
    assert len({*kept[0], *kept[1]}) == 6


def test_torchrun_starts_a_killed_worker_again_and_the_run_goes_on(two_ranks, tmp_path):
    """With gloo in torch 2.13 this fails unless a restart has a store prefix of its own."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    program = train_with_signal(tmp_path, rank=1, step=40, number=signal.SIGKILL)
    arguments = ("--max-restarts=3", program, *FOUR_EPOCHS, AT_ONCE)
    text = outputs([start([*torchrun, *arguments], tmp_path)])[0]

    assert re.search(r"resumed from \S+ after 34 steps", text)
    assert lines(tmp_path) == lines(two_ranks)


def test_patience_stops_a_run_that_no_longer_improves(tmp_path, capsys):
    options = ("--lr", "0", "--epochs", "9", "--patience", "2", "--no-tensorboard")
    train_alone(tmp_path, *options)
    assert [line["step"] for line in lines(tmp_path) if "val_loss" in line] == [17, 34, 51, 51]

    stopped = "stopped after step 51 of 153: the validation loss has not improved for 2 epochs"
    assert stopped in capsys.readouterr().out
    train_alone(tmp_path, *options)
    assert not re.search(r"epoch \d", capsys.readouterr().out.split("resumed")[1])


def test_a_run_that_patience_stopped_is_judged_by_its_best_checkpoint(tmp_path, capsys):
    """At this rate the loss rises after the first epochs."""
    adam = ("--optimizer", "adamw", "--lr", "0.1")
    options = (*adam, "--epochs", "9", "--patience", "2", "--no-tensorboard")
    train_alone(tmp_path, *options)
    logged = capsys.readouterr().out
    by_step = {
        line["step"]: line["val_loss"] for line in lines(tmp_path)[:-1] if "val_loss" in line
    }
    best, last = min(by_step, key=by_step.get), max(by_step)
    assert best < last < 153
    assert f"the best validation loss was at step {best}:" in logged
    assert lines(tmp_path)[-1]["val_loss"] == by_step[best]

    folder = tmp_path / "checkpoints"
    assert checkpoint.find_latest(folder).progress["step"] == best
    for step in (best, last):
        assert checkpoint.find_latest(folder / f"step-{step:08d}").progress["step"] == step
    train_alone(tmp_path, *options)
    assert lines(tmp_path)[-1]["val_loss"] == by_step[best]
    train_alone(tmp_path, *adam, "--no-tensorboard", "--steps", str(last + 1))
    assert f"after {last} steps" in capsys.readouterr().out, "training goes on from the latest"


def test_the_best_checkpoint_is_kept(tmp_path, monkeypatch):
    def result(loss):
        return {"targets": 1, "loss": loss, "accuracy": 0.5}

    losses = iter([0.9, 0.4, 0.6, 0.7, 0.7, 0.7])
    monkeypatch.setattr(train.Trainer, "evaluate", lambda *_: result(next(losses)))
    train_alone(tmp_path, *FOUR_EPOCHS, "--keep", "1")

    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-00000034", "step-00000068"]
