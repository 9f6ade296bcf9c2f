"""A checkpoint is either complete or absent."""

import contextlib
import enum
import io
import json
import pickle
import shutil
import types
from pathlib import Path

import pytest
import torch
from torch import distributed
from torch.distributed import _functional_collectives as functional

from tests.trainer import attacks
from tests.trainer.kill_points import COMPLETE, POINTS
from tests.trainer.ranks import outputs, start, start_ranks
from trainer.checkpoint import checkpointer as checkpoint
from trainer.checkpoint import integrity
from trainer.checkpoint.checkpointer import CheckpointManager
from trainer.errors import InvalidFile, UnusableCheckpoints
from trainer.measure import timing
from trainer.measure.timing import StepTimer
from trainer.parallel import process_group

pytestmark = pytest.mark.torch


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "new" / "folder"


@pytest.fixture
def manager(context, folder):
    return CheckpointManager(folder, context, keep=2, background=False)


def save(manager, step, best=0):
    state = {"model.weight": torch.full((1000,), float(step))}
    return manager.save(step, state, {"step": step, "best_step": best})


def load_latest(manager):
    """The latest checkpoint's step, and the one value of its tensor."""
    path, progress, _ = manager.latest()
    state = {"model.weight": torch.zeros(1000)}
    manager.load(path, state)
    (value,) = state["model.weight"].unique().tolist()
    return progress["step"], value


def test_what_was_saved_is_loaded(manager):
    path = save(manager, 3)

    assert manager.latest()[:2] == (path, {"step": 3, "best_step": 0})
    assert load_latest(manager) == (3, 3.0)
    assert checkpoint.read(path)["model.weight"].equal(torch.full((1000,), 3.0))
    assert checkpoint.find_latest(path.parent).path == path


def test_a_missing_or_empty_folder_has_no_checkpoint(manager, folder):
    assert manager.latest() is None
    folder.mkdir(parents=True)
    assert manager.latest() is None
    with pytest.raises(FileNotFoundError, match="no checkpoint found in"):
        checkpoint.find_latest(folder)


def test_only_the_latest_and_the_best_are_kept(manager, folder):
    for step in (8, 9, 10, 100):
        save(manager, step, best=8)

    names = sorted(path.name for path in folder.iterdir())
    assert names == ["step-00000008", "step-00000010", "step-00000100"]
    assert load_latest(manager) == (100, 100.0)


def test_another_node_may_be_faster_to_remove_what_is_old(manager, folder, monkeypatch):
    """Every node removes, and the view of a network file system may be stale."""
    rmtree = shutil.rmtree

    def late(path, *, ignore_errors=False):
        rmtree(path)
        rmtree(path, ignore_errors=ignore_errors)

    save(manager, 1)
    (folder / "step-00000009.saving").mkdir()
    (folder / "step-00000002.saving").mkdir()
    monkeypatch.setattr(shutil, "rmtree", late)
    monkeypatch.setattr(manager, "_keep", 1)
    save(manager, 2)
    assert [path.name for path in folder.iterdir()] == ["step-00000002"]


def test_damaged_checkpoints_do_not_displace_intact_ones(manager, context, folder, monkeypatch):
    for step in (10, 20, 30):
        save(manager, step)
    for path in folder.iterdir():
        (path / "__0_0.distcp").write_bytes(b"damaged")
    save(manager, 5)  # as a run does that resumed from an older one
    assert load_latest(manager) == (5, 5.0)
    again = CheckpointManager(folder, context, keep=2, background=False)
    assert load_latest(again) == (5, 5.0)
    for step in (6, 7, 8):
        save(again, step)
        assert load_latest(again) == (step, float(step))
    names = [path.name for path in sorted(folder.iterdir())]
    assert names == [f"step-{step:08d}" for step in (7, 8, 20, 30)]
    save(again, 20)
    save(again, 30)
    assert load_latest(again) == (30, 30.0)
    assert len(list(folder.iterdir())) == 2


def test_an_older_checkpoint_of_an_earlier_process_goes_with_time(manager, context, folder):
    for step in (1, 2):
        save(manager, step)
    again = CheckpointManager(folder, context, keep=2, background=False)
    assert load_latest(again) == (2, 2.0)
    save(again, 3)
    assert [path.name for path in sorted(folder.iterdir())] == ["step-00000002", "step-00000003"]


def test_checkpoints_of_which_none_can_be_read_are_an_error(manager, folder):
    for step in (1, 2):
        flip_a_bit(save(manager, step) / "__0_0.distcp")
    with pytest.raises(UnusableCheckpoints, match=r"none of the 2 checkpoints in .* can be "):
        manager.latest()
    with pytest.raises(UnusableCheckpoints, match=r"step-00000002: the checksum of __0_0\.distcp"):
        checkpoint.find_latest(folder)


def test_one_that_was_chosen_and_cannot_be_read_is_an_error_about_it_alone(manager, folder):
    save(manager, 1)
    (save(manager, 2) / "__0_0.distcp").unlink()
    message = r"the checkpoint step-00000002 is damaged: __0_0\.distcp is missing\. Restore it"
    with pytest.raises(UnusableCheckpoints, match=message):
        checkpoint.find_latest(folder / "step-00000002")


class PythonOf2023(pickle.Pickler):
    """Writes the members of an enum as Python 3.11.0 to 3.11.3 do, that of Debian 12 among them."""

    def reducer_override(self, value):
        return (
            (getattr, (type(value), value.name)) if isinstance(value, enum.Enum) else NotImplemented
        )


def test_metadata_that_another_version_of_python_wrote_is_read(manager):
    path = save(manager, 4)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    buffer = io.BytesIO()
    PythonOf2023(buffer, protocol=4).dump(metadata)
    assert b"getattr" in buffer.getvalue()
    (path / ".metadata").write_bytes(buffer.getvalue())
    attacks.update_checksums(path)
    assert load_latest(manager) == (4, 4.0)


def test_a_run_leaves_the_unfinished_save_of_another_run(manager, folder, monkeypatch):
    monkeypatch.setenv("DEPLOYKIT_RUN", "one-1")
    save(manager, 1)
    for name in ("step-00000009.one-1.saving", "step-00000009.two-1.saving"):
        (folder / name).mkdir()
    save(manager, 2)
    left = ["step-00000001", "step-00000002", "step-00000009.two-1.saving"]
    assert sorted(path.name for path in folder.iterdir()) == left


def test_an_unfinished_save_is_ignored_and_removed(manager, folder):
    path = save(manager, 1)
    shutil.copytree(path, folder / "step-00000002.saving")
    shutil.copytree(path, folder / "step-00000003.saving")
    (folder / "step-00000003.saving" / "leftover").touch()

    assert manager.latest()[0] == path
    saved = save(manager, 3)
    assert load_latest(manager) == (3, 3.0)
    assert sorted(p.name for p in folder.iterdir()) == ["step-00000001", "step-00000003"]
    assert not (saved / "leftover").exists()


def test_a_step_that_is_saved_again_replaces_the_first(manager):
    save(manager, 1)
    manager.save(1, {"model.weight": torch.zeros(1000)}, {"step": 1, "best_step": 0})

    assert load_latest(manager) == (1, 0.0)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata", "whole.json"])
@pytest.mark.parametrize("damage", [truncate, flip_a_bit, lambda path: path.unlink()])
def test_a_damaged_checkpoint_is_skipped_and_the_previous_one_used(manager, capsys, file, damage):
    save(manager, 1)
    path = save(manager, 2)
    damage(path / file)

    assert load_latest(manager) == (1, 1.0)
    assert checkpoint.find_latest(path.parent).progress["step"] == 1
    message, *_ = attacks.skip_messages(capsys.readouterr().out)
    assert message.startswith(f"skipped checkpoint {path}: ")


def test_a_search_goes_on_until_a_checkpoint_is_accepted(manager, capsys):
    paths = [save(manager, step, best=1) for step in (1, 2, 3)]

    def check(candidate):
        return "" if candidate.progress["step"] == 1 else "not this one"

    assert manager.latest(check)[0] == paths[0]
    assert attacks.skip_messages(capsys.readouterr().out) == [
        f"skipped checkpoint {path}: not this one" for path in (paths[2], paths[1])
    ]
    with pytest.raises(ValueError, match=r"no checkpoint matches this model: wrong\. Use another"):
        manager.latest(lambda _: "wrong")


def test_every_rank_must_find_a_checkpoint_valid(tmp_path, manager):
    """The file with the tensors is damaged, which only the rank that verifies it notices."""
    path = save(manager, 1)
    flip_a_bit(path / "__0_0.distcp")
    assert not isinstance(integrity.verify(path, 0, 2), str)
    problem = integrity.verify(path, 1, 2)
    logged = []

    for rank in range(2):
        with pytest.raises(UnusableCheckpoints):
            checkpoint.first_valid(
                [path], lambda _: "", (rank, 2), lambda _: ["", problem], logged.append
            )
    assert logged == [f"skipped checkpoint {path}: {problem}"] * 2


def test_code_in_a_checkpoint_is_never_run(manager, tmp_path):
    class Evil:
        def __reduce__(self):
            return type(tmp_path).mkdir, (tmp_path / "evil",)

    path = save(manager, 1)
    (path / ".metadata").write_bytes(pickle.dumps(Evil()))
    attacks.update_checksums(path)

    with pytest.raises(InvalidFile, match="an unexpected object in place of a Metadata"):
        checkpoint.read(path)
    assert not (tmp_path / "evil").exists()


def test_a_background_save_copies_the_tensors_and_reports_its_error(context, folder, monkeypatch):
    manager = CheckpointManager(folder, context, keep=2, background=True)
    weight = torch.full((1000,), 1.0)
    manager.save(1, {"model.weight": weight}, {"step": 1, "best_step": 0})
    weight.zero_()
    manager.wait()
    assert load_latest(manager) == (1, 1.0)

    def fail(*_arguments):
        raise OSError("disk full")

    monkeypatch.setattr(integrity, "write_manifest", fail)
    save(manager, 2)
    with pytest.raises(OSError, match="disk full"):
        manager.wait()
    with pytest.raises(OSError, match="disk full"):
        save(manager, 3)
    assert load_latest(manager) == (1, 1.0)


def test_background_saves_copy_into_the_same_memory(context, folder, monkeypatch):
    """Pinning memory takes longer than a copy, so it is done once."""
    manager = CheckpointManager(folder, context, keep=2, background=True)
    weight, written = torch.full((1000,), 1.0), []
    monkeypatch.setattr(manager, "_write", lambda _, state, __: written.append(state["weight"]))
    for value in (2.0, 3.0):
        weight.fill_(value)
        manager.save(1, {"weight": weight}, {"step": 1, "best_step": 0})
        manager.wait()
        assert written[-1][0] == value
    assert written[0].data_ptr() == written[1].data_ptr() != weight.data_ptr()


def test_a_checkpoint_is_flushed_to_the_disk_around_its_rename(manager, folder, monkeypatch):
    """Its files before it gets its name, and the folder's names afterwards."""
    flushed = []
    monkeypatch.setattr(integrity, "fsync", flushed.append)
    save(manager, 1)

    assert [path.name for path in flushed] == ["__0_0.distcp", ".metadata", "whole.json", "folder"]
    assert {path.parent.name for path in flushed[:3]} == {"step-00000001.saving"}


def test_waits_for_other_ranks_in_a_save_do_not_count_as_communication(manager, monkeypatch):
    """The time of a step says how long training waited."""
    counted = []

    def timer(section):
        counted.append(section)
        return contextlib.nullcontext()

    wait = timing._timed(lambda group: None, timer)
    monkeypatch.setattr(checkpoint.distributed, "barrier", wait)
    save(manager, 1)
    assert counted == []
    wait(group=None)
    assert counted == [timing.WAITING]


def test_waits_are_timed_in_the_block_alone():
    before = distributed.Work.wait, functional.wait_tensor
    with timing.timed_waits(StepTimer(torch.device("cpu"))):
        assert distributed.Work.wait is not before[0]
        assert functional.wait_tensor is not before[1]
    assert (distributed.Work.wait, functional.wait_tensor) == before


FIND_LATEST = """
import sys
from pathlib import Path
from trainer.parallel import process_group
from trainer.checkpoint.checkpointer import CheckpointManager

context = process_group.join()
folder = Path(sys.argv[1], f"node-{context.rank}")
if context.is_rank_zero:
    (folder / "step-00000001").mkdir(parents=True)
try:
    CheckpointManager(folder, context, keep=2, background=False).latest()
except ValueError as error:
    print(error)
process_group.leave()
"""


def test_a_folder_that_the_nodes_do_not_share_is_an_error(tmp_path):
    for text in outputs(start_ranks(tmp_path, 2, "-c", FIND_LATEST, str(tmp_path))):
        assert "differs between nodes: rank 0 sees ['step-00000001']. Use a folder shared" in text


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """The folder of `kill_points`, after all its processes were killed."""
    folder = tmp_path_factory.mktemp("killed")
    text = outputs([start(["-m", "tests.trainer.kill_points", str(folder)], folder)])[0]
    results = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    assert len(results) == 2 * len(POINTS)
    assert {each["signal"] for each in results} == {9}, results
    return folder


@pytest.mark.xdist_group("kill-points")
@pytest.mark.parametrize("mode", ["foreground", "background"])
@pytest.mark.parametrize("point", POINTS)
def test_a_kill_at_any_point_of_a_save_leaves_a_complete_latest(
    killed, context, tmp_path, mode, point
):
    """The next save removes what the kill has left."""
    latest = checkpoint.find_latest(killed / mode / point)
    step = 2 if point in COMPLETE else 1

    assert latest.progress["step"] == step
    assert latest.path == max((killed / mode / point).glob("step-????????"))
    assert checkpoint.read(latest.path)["model.weight"].eq(step).all()

    shutil.copytree(killed / mode / point, tmp_path / "copy")
    manager = CheckpointManager(tmp_path / "copy", context, keep=1, background=False)
    save(manager, 3, best=3)

    assert [path.name for path in (tmp_path / "copy").iterdir()] == ["step-00000003"]


def test_a_node_does_not_touch_what_another_has_renamed(tmp_path, monkeypatch):
    """Two nodes on one folder, whose view of it may be stale."""
    monkeypatch.setattr(Path, "exists", lambda _: True)
    saving, path = tmp_path / "step-00000007.saving", tmp_path / "step-00000007"
    for folder, text in ((path, "old"), (saving, "new")):
        folder.mkdir()
        (folder / "whole.json").write_text(text)
    for _node in range(2):
        checkpoint._rename(saving, path)
        assert (path / "whole.json").read_text() == "new"
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("rank", "steps"),
    [
        (0, ["manifest", "barrier", "rename", "barrier", "rename"]),
        (1, ["barrier", "barrier", "rename"]),
    ],
)
def test_rank_0_renames_before_another_node_does(manager, folder, monkeypatch, rank, steps):
    """Otherwise the nodes would remove and replace an older checkpoint all at once."""
    done = []
    saving = save(manager, 1)
    node = types.SimpleNamespace(
        rank=rank, world_size=1, is_rank_zero=rank == 0, is_local_rank_zero=True
    )
    monkeypatch.setattr(manager, "_context", node)
    for owner, name in (
        (integrity, "write_manifest"),
        (checkpoint.distributed, "barrier"),
        (checkpoint, "_rename"),
    ):
        step = name.removeprefix("write_").removeprefix("_")
        monkeypatch.setattr(owner, name, lambda *_, step=step, **__: done.append(step))
    manager._finish(saving, folder / "step-00000002", {"step": 2, "best_step": 0})
    assert done == steps


def test_process_groups_of_manager_and_training_differ(context):
    """A background save must not mix its collectives with those of a step."""
    manager = CheckpointManager(Path("unused"), context, keep=1, background=True)
    assert manager._group is not process_group.distributed.group.WORLD
