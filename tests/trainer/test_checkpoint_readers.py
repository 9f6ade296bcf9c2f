"""Damaged and forged checkpoints are detected, and the previous one is used."""

import json
import pickle
import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.trainer import attacks
from tests.trainer.attacks import skip_messages
from trainer.checkpoint import checkpointer as checkpoint
from trainer.checkpoint import safe_pickle
from trainer.checkpoint.checkpointer import CheckpointManager
from trainer.checkpoint.safe_pickle import InvalidFile

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


def test_a_tensor_of_a_terabyte_is_refused(manager, folder, capsys):
    def claim(table):
        table.state_dict_metadata["model.weight"].size = torch.Size((2**20, 2**18))
        table.state_dict_metadata["model.weight"].chunks[0].sizes = torch.Size((2**20, 2**18))

    edit(folder, claim)
    assert "claims more bytes than are stored" in fall_back(manager, capsys)


def test_a_shape_larger_than_its_chunks_is_refused(manager, folder, capsys):
    def claim(table):
        table.state_dict_metadata["model.weight"].size = torch.Size((2**20, 2**18))

    edit(folder, claim)
    assert "do not fill its shape" in fall_back(manager, capsys)


@pytest.mark.parametrize(("field", "value"), [("offset", 10**9), ("offset", -8), ("length", 2**40)])
def test_bytes_outside_of_a_file_are_refused(field, value, manager, folder, capsys):
    edit(folder, lambda table: setattr(next(iter(table.storage_data.values())), field, value))
    assert "lie outside __0_0.distcp" in fall_back(manager, capsys)


def test_bytes_that_two_tensors_share_are_refused(manager, folder, capsys):
    """Otherwise a small file could claim a model of any size."""

    def share(table):
        first, second, *_ = table.storage_data.values()
        second.offset, second.length = first.offset, first.length

    edit(folder, share)
    assert "share bytes of __0_0.distcp" in fall_back(manager, capsys)


@pytest.mark.parametrize("name", ["../../x", "/etc/passwd", "../step-00000001/__0_0.distcp", "."])
def test_a_file_outside_of_the_checkpoint_is_refused(name, manager, folder, capsys):
    def elsewhere(table):
        for location in table.storage_data.values():
            location.relative_path = name

    edit(folder, elsewhere)
    assert "is not one of its files" in fall_back(manager, capsys)
    whole = json.loads((latest(folder) / "whole.json").read_text())
    whole["files"][name] = whole["files"]["__0_0.distcp"]
    attacks.write_manifest(latest(folder), whole)
    assert "is not a checkpoint file" in fall_back(manager, capsys)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "whole.json"])
def test_symbolic_links_and_pipes_are_refused(name, manager, folder, capsys, tmp_path):
    file = latest(folder) / name
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    assert fall_back(manager, capsys) == f"{name} is a symbolic link"
    attacks.pipe(file)
    assert fall_back(manager, capsys) == f"{name} is not a regular file"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda whole: whole["progress"].update(step=float("nan")), "is not valid (ValueError)"),
        (lambda whole: whole["progress"].update(step="2"), "has no step"),
        (lambda whole: whole["progress"].update(step=3), "is not that of the folder's name"),
        (
            lambda whole: whole["progress"].update(best_step=-1),
            "the best step in whole.json is negative",
        ),
        (lambda whole: whole.update(progress=[1]), "has no step"),
        (lambda whole: whole.update(files=[[1, 2]]), "is not valid (AttributeError)"),
        (lambda whole: whole.update(files={}), "does not list .metadata"),
        (
            lambda whole: whole["files"].update({".metadata": [True, 1]}),
            "has no valid size and checksum",
        ),
        (
            lambda whole: whole["files"].update({".metadata": [-1, 1]}),
            "has no valid size and checksum",
        ),
        (lambda whole: whole["files"].update({"a\x1b]52;": [1, 1]}), r"lists 'a\x1b]52;', which"),
    ],
)
def test_an_invalid_manifest_is_refused(change, why, manager, folder, capsys):
    whole = json.loads((latest(folder) / "whole.json").read_text())
    change(whole)
    attacks.write_manifest(latest(folder), whole)
    assert why in fall_back(manager, capsys)


@pytest.mark.parametrize("content", ["[" * 100_000, "9" * 5000, "[]", "null", '{"crc": 1}'])
def test_a_manifest_that_is_not_json_is_refused(content, manager, folder, capsys):
    (latest(folder) / "whole.json").write_text(content)
    assert "whole.json" in fall_back(manager, capsys)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (attacks.deep(200_000) + b"\x94h\x00.", "an unexpected object in place of a Metadata"),
        (b"\x80\x04}" + attacks.deep(200_000)[2:] + b"Ns.", "has a tuple as a key"),
        (b"\x80\x04Nr\xff\xff\xff\x7f.", "an unexpected object in place of a Metadata"),
        (b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.", "invalid pickle"),
        (b"", "invalid pickle"),
        (b"\x80\x04.", "invalid pickle"),
        (b"\x80\x04N", "invalid pickle"),
        (b"\x80\x04\x82\x01.", "pickle opcode EXT1 is not allowed"),
        (b"\x80\x04(cos\nsystem\n.", "the pickled name os.system is not allowed"),
    ],
    ids=["deep", "deep key", "huge memo", "huge length", "empty", "bare", "endless", "ext", "call"],
)
def test_invalid_metadata_is_refused(data, why, manager, folder, capsys):
    """Python's unpickler crashes on the second (SIGSEGV) and allocates 32 GB for the third."""
    (latest(folder) / ".metadata").write_bytes(data)
    attacks.update_checksums(latest(folder))
    assert why in fall_back(manager, capsys)


def test_endless_metadata_is_refused_unread(manager, folder, capsys):
    with (latest(folder) / ".metadata").open("r+b") as file:
        file.truncate(2**33)
    assert fall_back(
        manager, capsys
    ) == "the size of .metadata is 8589934592 bytes, expected " + str(
        json.loads((latest(folder) / "whole.json").read_text())["files"][".metadata"][0]
    )


def test_a_compressed_archive_is_refused(manager, folder, capsys):
    """It could expand to a thousand times its size on the disk."""
    file = latest(folder) / "__0_0.distcp"
    size = file.stat().st_size

    def pack(table):
        location = next(iter(table.storage_data.values()))
        data = file.read_bytes()[location.offset : location.offset + location.length]
        packed = attacks.rewritten_zip(data, lambda _name, content: content, packed=True)
        with file.open("ab") as end:
            end.write(packed)
        location.offset, location.length = size, len(packed)

    edit(folder, pack)
    assert "an archive was not written by torch" in fall_back(manager, capsys)


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
        if not latest.metadata.mismatch(again):
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


def test_an_unknown_escape_is_refused_without_a_warning():
    """`pickletools` warns about it, which must not become an error with ``-W error``."""
    with pytest.raises(InvalidFile, match="STRING"):
        safe_pickle.load(b"S'\\X'\n.", ())


def test_huge_integers_are_refused_and_not_logged(sound, capsys):
    """A mutation once logged an offset of 600 digits."""
    with pytest.raises(InvalidFile, match="more than 64 bits"):
        safe_pickle.load(pickle.dumps(10**300), ())
    sound.restore()
    capsys.readouterr()
    whole = sound.latest / "whole.json"
    whole.write_text('{"progress": {"step": 1' + "0" * 3000 + "}}")
    sound.load()
    assert len("".join(skip_messages(capsys.readouterr().out))) < 600


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
