"""A checkpoint is whole or not there."""

import os
import time

import pytest
import torch
from ranks import start

from trainer import checkpoint

pytestmark = pytest.mark.torch

SAVE_FOR_EVER = """
import itertools, sys, torch
from pathlib import Path
from trainer import checkpoint

for step in itertools.count(1):
    checkpoint.save(Path(sys.argv[1]), step, {"step": step, "data": torch.full((2_000_000,), step)})
    print(step, flush=True)
"""


def state(step):
    return {"step": step, "model": {"weight": torch.full((1000,), float(step))}}


def test_what_was_saved_is_loaded(tmp_path):
    path = checkpoint.save(tmp_path / "new" / "folder", 3, state(3))

    found, loaded = checkpoint.newest(tmp_path / "new" / "folder")
    assert found == path
    assert loaded["step"] == 3
    assert loaded["model"]["weight"].equal(state(3)["model"]["weight"])


def test_an_empty_or_missing_folder_has_none(tmp_path):
    assert checkpoint.newest(tmp_path) is None
    assert checkpoint.newest(tmp_path / "missing") is None


def test_only_the_newest_stay(tmp_path):
    for step in (8, 9, 10, 100):
        checkpoint.save(tmp_path, step, state(step))

    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-00000010.pt",
        "step-00000100.pt",
    ]
    assert checkpoint.newest(tmp_path)[1]["step"] == 100


def test_half_a_temporary_file_is_not_a_checkpoint(tmp_path):
    path = checkpoint.save(tmp_path, 1, state(1))
    (tmp_path / "saving.tmp").write_bytes(path.read_bytes()[:1000])

    assert checkpoint.newest(tmp_path)[0] == path
    checkpoint.save(tmp_path, 2, state(2))
    assert checkpoint.newest(tmp_path)[1]["step"] == 2
    assert not (tmp_path / "saving.tmp").exists()


@pytest.mark.parametrize("size", [0, 1, 100, 2000, -1])
def test_a_truncated_newest_is_named_and_the_one_before_used(tmp_path, capsys, size):
    checkpoint.save(tmp_path, 1, state(1))
    path = checkpoint.save(tmp_path, 2, state(2))
    path.write_bytes(path.read_bytes()[:size])

    assert checkpoint.newest(tmp_path)[1]["step"] == 1
    assert f"{path} cannot be read, trying the one before" in capsys.readouterr().out


def test_code_in_a_checkpoint_is_never_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "evil"),)

    checkpoint.save(tmp_path, 1, state(1))
    checkpoint.save(tmp_path, 2, {"step": Evil()})

    assert checkpoint.newest(tmp_path)[1]["step"] == 1
    assert not (tmp_path / "evil").exists()


def test_sigkill_while_saving_leaves_a_loadable_newest(tmp_path):
    interrupted = 0
    for milliseconds in (5, 10, 20, 35, 50):
        process = start(["-c", SAVE_FOR_EVER, str(tmp_path)], tmp_path)
        said = [process.stdout.readline()]
        time.sleep(milliseconds / 1000)
        process.kill()
        said += process.stdout.readlines()
        process.wait()
        process.stdout.close()
        interrupted += (tmp_path / "saving.tmp").exists()
        found = checkpoint.newest(tmp_path)

        assert found[0] == max(tmp_path.glob("step-*.pt")), "the newest itself, no fallback"
        assert found[1]["step"] >= int(said[-1])
        assert found[1]["data"].eq(found[1]["step"]).all()
        for path in tmp_path.iterdir():
            path.unlink()
    assert interrupted, "no kill of five fell into a save: choose other moments"
