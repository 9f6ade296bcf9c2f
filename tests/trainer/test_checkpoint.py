"""A checkpoint is whole or not there."""

import json
import pickle
import shutil
import time
from pathlib import Path

import hostile
import pytest
import torch
from ranks import outputs, start, start_ranks

from trainer import checkpoint, group
from trainer.checkpoint import Keeper
from trainer.plain_pickle import Refused

pytestmark = pytest.mark.torch

SAVE_FOR_EVER = """
import itertools, sys, torch
from pathlib import Path
from trainer import group
from trainer.checkpoint import Keeper

keeper = Keeper(Path(sys.argv[1]), group.join(), keep=2, background=sys.argv[2] == "background")
for step in itertools.count(1):
    state = {"model.weight": torch.full((2_000_000,), float(step))}
    keeper.save(step, state, {"step": step, "best_step": 0})
    print(step, flush=True)
"""


@pytest.fixture(scope="module")
def place():
    yield group.join()
    group.leave()


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "new" / "folder"


@pytest.fixture
def keeper(place, folder):
    return Keeper(folder, place, keep=2, background=False)


def save(keeper, step, best=0):
    state = {"model.weight": torch.full((1000,), float(step))}
    return keeper.save(step, state, {"step": step, "best_step": best})


def loaded(keeper):
    """The newest checkpoint's progress, and the one value of its tensor."""
    path, progress = keeper.newest()
    state = {"model.weight": torch.zeros(1000)}
    keeper.load(path, state)
    (value,) = state["model.weight"].unique().tolist()
    return progress["step"], value


def test_what_was_saved_is_loaded(keeper):
    path = save(keeper, 3)

    assert keeper.newest() == (path, {"step": 3, "best_step": 0})
    assert loaded(keeper) == (3, 3.0)
    assert checkpoint.read(path)["model.weight"].equal(torch.full((1000,), 3.0))


def test_an_empty_or_missing_folder_has_none(keeper, folder):
    assert keeper.newest() is None
    folder.mkdir(parents=True)
    assert keeper.newest() is None


def test_only_the_newest_and_the_best_stay(keeper, folder):
    for step in (8, 9, 10, 100):
        save(keeper, step, best=8)

    names = sorted(path.name for path in folder.iterdir())
    assert names == ["step-00000008", "step-00000010", "step-00000100"]
    assert loaded(keeper) == (100, 100.0)


def test_an_unfinished_save_is_not_a_checkpoint_and_is_cleared(keeper, folder):
    path = save(keeper, 1)
    shutil.copytree(path, folder / "step-00000002.saving")

    assert keeper.newest()[0] == path
    save(keeper, 3)
    assert loaded(keeper) == (3, 3.0)
    assert sorted(p.name for p in folder.iterdir()) == ["step-00000001", "step-00000003"]


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata", "whole.json"])
@pytest.mark.parametrize("harm", [truncate, flip_a_bit, lambda path: path.unlink()])
def test_a_damaged_newest_is_named_and_the_one_before_used(keeper, capsys, file, harm):
    save(keeper, 1)
    path = save(keeper, 2)
    harm(path / file)

    assert loaded(keeper) == (1, 1.0)
    assert f"{path} is not whole, trying the one before: " in capsys.readouterr().out


def test_code_in_a_checkpoint_is_never_run(keeper, tmp_path):
    class Evil:
        def __reduce__(self):
            return type(tmp_path).mkdir, (tmp_path / "evil",)

    path = save(keeper, 1)
    (path / ".metadata").write_bytes(pickle.dumps(Evil()))
    hostile.reseal(path)

    with pytest.raises(Refused, match="has no place in a checkpoint"):
        checkpoint.read(path)
    assert not (tmp_path / "evil").exists()


def test_the_progress_is_readable_by_anybody(keeper):
    path = save(keeper, 7, best=5)

    assert json.loads((path / "whole.json").read_text())["progress"]["best_step"] == 5


def test_a_folder_that_the_nodes_do_not_share_is_named(tmp_path):
    find = (
        "import sys\nfrom pathlib import Path\nfrom trainer import group\n"
        "from trainer.checkpoint import Keeper\n"
        "place = group.join()\n"
        "folder = Path(sys.argv[1], f'node-{place.rank}')\n"
        "if place.first:\n    (folder / 'step-00000001').mkdir(parents=True)\n"
        "try:\n    Keeper(folder, place, keep=2, background=False).newest()\n"
        "except ValueError as error:\n    print(error)\n"
        "group.leave()\n"
    )
    for text in outputs(start_ranks(tmp_path, 2, "-c", find, str(tmp_path))):
        assert "is not the same on every node: rank 0 sees ['step-00000001']" in text


@pytest.mark.parametrize("how", ["at once", "background"])
def test_sigkill_while_saving_leaves_a_loadable_newest(tmp_path, keeper, folder, how):
    interrupted = 0
    for milliseconds in (5, 10, 20, 35, 50):
        process = start(["-c", SAVE_FOR_EVER, str(folder), how], tmp_path)
        said = [process.stdout.readline(), process.stdout.readline()]
        time.sleep(milliseconds / 1000)
        process.kill()
        said += process.stdout.readlines()
        process.wait()
        process.stdout.close()
        interrupted += bool(list(folder.glob("*.saving")))
        path, progress = keeper.newest()
        values = checkpoint.read(path)["model.weight"]

        assert path == max(folder.glob("step-????????")), "the newest itself, no fallback"
        assert progress["step"] >= int(said[-1]) - (how == "background")
        assert values.eq(progress["step"]).all()
        shutil.rmtree(folder)
    assert interrupted, "no kill of five fell into a save: choose other moments"


def test_a_node_leaves_alone_what_another_one_has_named(tmp_path, monkeypatch):
    """Two nodes on one folder: what the second sees of it may be old."""
    monkeypatch.setattr(Path, "exists", lambda _: True)
    saving, path = tmp_path / "step-00000007.saving", tmp_path / "step-00000007"
    for folder, text in ((path, "old"), (saving, "new")):
        folder.mkdir()
        (folder / "whole.json").write_text(text)
    for _node in range(2):
        checkpoint._rename(saving, path)
        assert (path / "whole.json").read_text() == "new"
    assert [found.name for found in tmp_path.iterdir()] == [path.name]
