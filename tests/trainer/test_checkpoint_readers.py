"""Damaged and forged checkpoints are detected, and the previous one is used."""

import json
import os
import pickle
import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.trainer import attacks
from tests.trainer.attacks import skip_messages
from trainer.checkpoint import checkpointer as checkpoint
from trainer.checkpoint.checkpointer import CheckpointManager

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("hostile")]


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoints"


@pytest.fixture
def manager(context, folder):
    """A manager with two checkpoints of three tensors each."""
    manager = CheckpointManager(folder, context, keep=2, background=False)
    for step in (1, 2):
        manager.save(step, tensors(step), {"step": step, "best_step": 0})
    return manager


def tensors(value):
    return {
        "model.weight": torch.full((8, 3), float(value)).t(),
        "model.bias": torch.full((5,), value, dtype=torch.bfloat16),
        "optimizer.step": torch.tensor(value),
    }


def latest(folder):
    return folder / "step-00000002"


def edit(folder, change):
    """Change the metadata objects of the latest checkpoint."""
    file = latest(folder) / ".metadata"
    table = pickle.loads(file.read_bytes())
    change(table)
    file.write_bytes(pickle.dumps(table))
    attacks.update_checksums(latest(folder))


def fall_back(manager, capsys):
    """Why the latest checkpoint is skipped; asserts that both readers use the previous one."""
    path, *_ = manager.latest()
    state = tensors(0)
    manager.load(path, state)
    assert path == checkpoint.find_latest(path.parent).path
    (line, _again) = skip_messages(capsys.readouterr().out)
    for loaded in (state, checkpoint.read(path)):
        assert all(loaded[name].equal(value) for name, value in tensors(1).items())
    assert path.name == "step-00000001"
    return line.split(": ", 1)[1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.uint16, torch.bool, torch.float8_e5m2])
def test_every_dtype_is_read_as_it_was_written(dtype, context, folder):
    manager = CheckpointManager(folder, context, keep=2, background=False)
    state = {"a": torch.arange(12).reshape(3, 4).t().to(dtype), "b": torch.ones((), dtype=dtype)}
    path = manager.save(1, {**state, "empty": torch.ones(0, 3)}, {"step": 1, "best_step": 0})

    assert manager.latest()[0] == path
    loaded = checkpoint.read(path)
    assert loaded["empty"].shape == (0, 3)
    for name, value in state.items():
        assert loaded[name].dtype == dtype
        assert loaded[name].float().equal(value.float())


def weight(table):
    return table.state_dict_metadata["model.weight"]


def claim_a_terabyte(table):
    weight(table).size = weight(table).chunks[0].sizes = torch.Size((2**20, 2**18))


def claim_a_larger_shape(table):
    weight(table).size = torch.Size((2**20, 2**18))


def leave_the_tensor(table):
    weight(table).chunks[0].offsets = torch.Size((1, 0))


def share_bytes(table):
    """Otherwise a small file could claim a model of any size."""
    first, second, *_ = table.storage_data.values()
    second.offset, second.length = first.offset, first.length


def change_the_dtype(table):
    weight(table).properties.dtype = torch.float16


def lose_a_chunk(table):
    table.storage_data.pop(next(iter(table.storage_data)))


def located(**fields):
    """Change the location of a chunk."""
    return lambda table: vars(next(iter(table.storage_data.values()))).update(fields)


EDITS = [
    (claim_a_terabyte, "declares more bytes than are stored"),
    (claim_a_larger_shape, "do not fill its shape"),
    (leave_the_tensor, "lies outside its tensor"),
    (share_bytes, "chunks overlap in __0_0.distcp"),
    (change_the_dtype, "the stored tensor model.weight does not match the metadata"),
    (lose_a_chunk, "is not stored in any file"),
    (located(offset=10**9), "lies outside __0_0.distcp"),
    (located(offset=-8), "lies outside __0_0.distcp"),
    (located(length=2**40), "lies outside __0_0.distcp"),
    (located(length=200), "cannot be read"),
    (located(transform_descriptors=["zstd"]), "its data is encoded"),
    (lambda table: table.state_dict_metadata.update(x=1), "in place of a TensorStorageMetadata"),
    (lambda table: setattr(table, "storage_data", None), "invalid pickle in .metadata"),
]


@pytest.mark.parametrize(("change", "why"), EDITS, ids=[why for _, why in EDITS])
def test_a_table_that_contradicts_itself_or_the_files_is_refused(
    change, why, manager, folder, capsys
):
    edit(folder, change)
    assert why in fall_back(manager, capsys)


@pytest.mark.parametrize("name", ["../../x", "/etc/passwd", "../step-00000001/__0_0.distcp", "."])
def test_a_file_outside_of_the_checkpoint_is_refused(name, manager, folder, capsys):
    def elsewhere(table):
        for location in table.storage_data.values():
            location.relative_path = name

    edit(folder, elsewhere)
    assert "is not part of the checkpoint" in fall_back(manager, capsys)
    whole = json.loads((latest(folder) / "whole.json").read_text())
    whole["files"][name] = whole["files"]["__0_0.distcp"]
    attacks.write_manifest(latest(folder), whole)
    assert "is not a checkpoint file" in fall_back(manager, capsys)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "whole.json"])
def test_symbolic_links_and_pipes_are_refused(name, manager, folder, capsys, tmp_path):
    file = latest(folder) / name
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    assert fall_back(manager, capsys) == f"{name} is not a regular file"
    file.unlink()
    os.mkfifo(file)
    assert fall_back(manager, capsys) == f"{name} is not a regular file"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"progress": {"step": float("nan")}}, "has no step"),
        ({"progress": {"step": "2", "best_step": 0}}, "has no step"),
        ({"progress": {"step": 3, "best_step": 0}}, "differs from the folder's name"),
        ({"progress": [1]}, "has no step"),
        ({"files": [[1, 2]]}, "is not valid (AttributeError)"),
        ({"files": {}}, "does not list .metadata"),
        ({"files": {".metadata": [True, 1]}}, "lacks a valid size or checksum"),
        ({"files": {".metadata": [-1, 1]}}, "lacks a valid size or checksum"),
        ({"files": {"a\x1b]52;": [1, 1]}}, r"lists 'a\x1b]52;', which"),
    ],
    ids=str,
)
def test_an_invalid_manifest_is_refused(change, why, manager, folder, capsys):
    whole = json.loads((latest(folder) / "whole.json").read_text())
    attacks.write_manifest(latest(folder), whole | change)
    assert why in fall_back(manager, capsys)


@pytest.mark.parametrize(
    "content", ["[" * 100_000, "9" * 5000, "[]", "null", '{"crc": 1' + "0" * 3000 + "}"]
)
def test_a_manifest_that_is_not_json_is_refused(content, manager, folder, capsys):
    (latest(folder) / "whole.json").write_text(content)
    assert "whole.json" in fall_back(manager, capsys)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\x80\x04)" + b"\x85" * 200_000 + b".", "an unexpected object in place of a Metadata"),
        (b"\x80\x04Nr\xff\xff\xff\x7f.", "invalid pickle"),
        (b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.", "invalid pickle"),
        (b"", "invalid pickle"),
        (b"\x80\x04.", "invalid pickle"),
        (b"\x80\x04N", "invalid pickle"),
        (b"\x80\x04\x82\x01.", "invalid pickle"),
        (b"S'\\X'\n.", "an unexpected object in place of a Metadata"),
        (
            b"\x80\x04" + attacks.text("os") + attacks.text("system") + b"\x93.",
            "unexpected object in",
        ),
    ],
    ids=["deep", "huge memo", "huge length", "empty", "bare", "endless", "ext", "text", "call"],
)
@pytest.mark.filterwarnings("ignore:invalid escape sequence")
def test_invalid_metadata_is_refused(data, why, manager, folder, capsys):
    """Python's unpickler would allocate 32 GB for the second."""
    (latest(folder) / ".metadata").write_bytes(data)
    attacks.update_checksums(latest(folder))
    assert why in fall_back(manager, capsys)


def test_endless_metadata_is_refused_unread(manager, folder, capsys):
    with (latest(folder) / ".metadata").open("r+b") as file:
        file.truncate(2**33)
    assert "the size of .metadata is 8589934592 bytes, expected " in fall_back(manager, capsys)


@pytest.fixture(scope="module")
def sound(context, tmp_path_factory):
    """A folder of two checkpoints that can be restored after each mutation."""
    folder = tmp_path_factory.mktemp("sound") / "checkpoints"
    manager = CheckpointManager(folder, context, keep=2, background=False)
    for step in (1, 2):
        manager.save(step, tensors(step), {"step": step, "best_step": 0})
    return Sound(manager, folder)


class Sound:
    def __init__(self, manager, folder):
        self.manager, self.folder, self.latest = manager, folder, latest(folder)
        self._files = {path.name: path.read_bytes() for path in self.latest.iterdir()}
        with attacks.watched() as self.usual:  # collectives unpickle, too
            self.load()
        self.examples = self.detected = 0

    def restore(self):
        for name, data in self._files.items():
            (self.latest / name).write_bytes(data)

    def load(self):
        """The path that is used and its tensors; both readers must agree."""
        latest = checkpoint.find_latest(self.folder)
        state = checkpoint.read(latest.path)
        again = tensors(0)
        if not latest.mismatch(again):
            self.manager.load(latest.path, again)
        return latest.path, state


@given(seed=st.integers(0, 2**63))
@settings(
    max_examples=max(600, settings.default.max_examples),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_no_mutation_runs_code_or_prevents_use_of_the_previous_checkpoint(
    sound, capsys, tmp_path, seed
):
    """Checksums are updated each time, so that mutations reach the parsers."""
    canary = tmp_path / "canary"
    sound.restore()
    attacks.mutated(random.Random(seed), sound.latest, canary)
    capsys.readouterr()

    with attacks.watched() as events:
        path, state = sound.load()
    assert [event for event in events if event not in sound.usual] == []
    assert not canary.exists()
    skipped = skip_messages(capsys.readouterr().out)
    sound.examples += 1
    sound.detected += bool(skipped)
    if path == sound.latest:
        assert skipped == []
        return
    (line,) = skipped
    assert line.isprintable()
    assert len(line) < 600
    assert all(state[name].equal(value) for name, value in tensors(1).items())


def test_most_mutations_were_detected(sound):
    if not sound.examples:
        pytest.skip("needs the test before it")
    assert sound.detected > sound.examples / 2


def test_the_audit_hook_sees_what_a_pickle_does(sound, tmp_path):
    """With Python's own unpickler; otherwise the test of mutations would prove nothing."""
    canary = tmp_path / "canary"
    sound.restore()
    attacks.dotted_name(sound.latest, canary)
    with attacks.watched() as seen:
        started = pickle.loads((sound.latest / ".metadata").read_bytes())
    started.wait()
    sound.restore()

    assert canary.exists()
    assert {"pickle.find_class", "subprocess.Popen"} <= {event for event, _ in seen}
