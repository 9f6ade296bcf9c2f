"""A run that was stopped, killed or cut in two ends as one that never was."""

import re
import signal

import pytest
from ranks import (
    FOUR_EPOCHS,
    TRAIN,
    lines,
    losses,
    outputs,
    start,
    start_ranks,
    train_alone,
    train_ranks,
    weights,
)

from trainer import checkpoint

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("trainer")]

ENDLESS = ("--epochs", "100000", "--log-every", "1", "--no-tensorboard")


def wait_for(process, beginning):
    """Read what `process` prints until a line that begins so; that line."""
    for line in process.stdout:
        if line.startswith(beginning):
            return line
    raise AssertionError(f"it ended without a line {beginning!r}")


def test_two_halves_equal_the_whole(one_rank, tmp_path, monkeypatch, capsys):
    train_alone(tmp_path, *FOUR_EPOCHS, "--epochs", "2")
    assert "resumed" not in capsys.readouterr().out

    monkeypatch.setenv("DEPLOYKIT_RESTART_COUNT", "1")
    train_alone(tmp_path, *FOUR_EPOCHS)

    assert "32 steps done (restart 1)" in capsys.readouterr().out
    assert lines(tmp_path) == lines(one_rank)
    assert weights(tmp_path).equal(weights(one_rank))


def test_sigterm_to_one_rank_stops_all_and_the_rest_follows_exactly(two_ranks, tmp_path):
    ranks = start_ranks(tmp_path, 2, TRAIN, *FOUR_EPOCHS)
    wait_for(ranks[0], "2 rank(s) on")
    ranks[1].send_signal(signal.SIGTERM)
    stopped = outputs(ranks)[0]
    path, state = checkpoint.newest(tmp_path / "checkpoints")

    assert f"stopped early after step 1, as told; resume from {path}" in stopped
    assert state["step"] == 1
    assert "test accuracy" not in stopped

    resumed = train_ranks(tmp_path, 2, *FOUR_EPOCHS)

    assert f"resumed from {path}, 1 steps done (restart 0)" in resumed
    assert lines(tmp_path) == lines(two_ranks)
    assert weights(tmp_path).equal(weights(two_ranks))
    assert not list((tmp_path / "rank-1").iterdir())


def test_sigusr2_stops_in_the_middle_of_an_epoch(tmp_path):
    process = start([TRAIN, *ENDLESS], tmp_path)
    wait_for(process, "epoch 1:")
    process.send_signal(signal.SIGUSR2)
    text = outputs([process])[0]
    step = int(re.search(r"stopped early after step (\d+)", text)[1])

    assert step > 32
    assert list(losses(tmp_path)) == list(range(1, step + 1))
    assert checkpoint.newest(tmp_path / "checkpoints")[1]["step"] == step


def test_a_killed_run_loses_at_most_one_interval(one_rank, tmp_path):
    process = start([TRAIN, *ENDLESS], tmp_path)
    wait_for(process, "epoch 2:")
    process.kill()
    process.wait()
    process.stdout.close()
    logged = max(losses(tmp_path))
    done = checkpoint.newest(tmp_path / "checkpoints")[1]["step"]
    epochs = done // 16 + 1
    train_alone(tmp_path, *FOUR_EPOCHS, "--epochs", str(epochs))

    assert done >= 32
    assert logged - done <= 32, "an epoch is 16 steps; the kill may have hit the save of the next"
    assert list(losses(tmp_path)) == list(range(1, epochs * 16 + 1))
    shared = [step for step in losses(tmp_path) if step <= 64]
    assert [losses(tmp_path)[n] for n in shared] == [losses(one_rank)[n] for n in shared]


def test_a_finished_run_is_only_evaluated_again(one_rank, tmp_path, capsys):
    (tmp_path / "checkpoints").symlink_to(one_rank / "checkpoints")
    before = sorted((one_rank / "checkpoints").iterdir())
    train_alone(tmp_path, *FOUR_EPOCHS)

    assert "epoch" not in capsys.readouterr().out
    assert lines(tmp_path)[-1] == lines(one_rank)[-1]
    assert sorted((one_rank / "checkpoints").iterdir()) == before


def test_other_settings_are_refused(one_rank, tmp_path):
    (tmp_path / "checkpoints").symlink_to(one_rank / "checkpoints")
    with pytest.raises(SystemExit) as ended:
        train_alone(tmp_path, *FOUR_EPOCHS, "--batch-size", "32")

    assert "'batch_size': 64" in ended.value.code
    assert "use the same, or another checkpoint folder" in ended.value.code
