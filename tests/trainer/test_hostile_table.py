"""What a checkpoint says of itself is checked before it is used; the one before is used else."""

import json
import pickle
import random

import hostile
import pytest
import torch
from hostile import REFUSED, refusals
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainer import checkpoint, group, plain_pickle
from trainer.checkpoint import Keeper
from trainer.plain_pickle import Refused

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("hostile")]


@pytest.fixture(scope="module")
def place():
    yield group.join()
    group.leave()


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoints"


@pytest.fixture
def keeper(place, folder):
    """With two checkpoints of three tensors each."""
    keeper = Keeper(folder, place, keep=2, background=False)
    for step in (1, 2):
        keeper.save(step, tensors(step), {"step": step, "best_step": 0})
    return keeper


def tensors(value):
    return {
        "model.weight": torch.full((8, 3), float(value)).t(),
        "model.bias": torch.full((5,), value, dtype=torch.bfloat16),
        "optimizer.step": torch.tensor(value),
    }


def second(folder):
    return folder / "step-00000002"


def edit(folder, change):
    """Change the newest checkpoint's table of contents, as torch's own classes hold it."""
    file = second(folder) / ".metadata"
    table = pickle.loads(file.read_bytes())
    change(table)
    file.write_bytes(pickle.dumps(table))
    hostile.reseal(second(folder))


def fall_back(keeper, capsys):
    """The reason for which the newest is refused; the one before is used by both readers."""
    path, _ = keeper.newest()
    state = tensors(0)
    keeper.load(path, state)
    assert path == checkpoint.newest_alone(path.parent).path
    (line, _again) = refusals(capsys.readouterr().out)
    for found in (state, checkpoint.read(path)):
        assert all(found[name].equal(value) for name, value in tensors(1).items())
    assert path.name == "step-00000001"
    return line.split(REFUSED)[1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.uint16, torch.bool, torch.float8_e5m2])
def test_every_kind_of_number_is_read_as_it_was_written(dtype, place, folder):
    keeper = Keeper(folder, place, keep=2, background=False)
    state = {"a": torch.arange(12).reshape(3, 4).t().to(dtype), "b": torch.ones((), dtype=dtype)}
    path = keeper.save(1, {**state, "empty": torch.ones(0, 3)}, {"step": 1, "best_step": 0})

    assert keeper.newest()[0] == path
    found = checkpoint.read(path)
    assert found["empty"].shape == (0, 3)
    for name, value in state.items():
        assert found[name].dtype == dtype
        assert found[name].float().equal(value.float())


def test_a_tensor_of_a_terabyte_is_refused(keeper, folder, capsys):
    def claim(table):
        table.state_dict_metadata["model.weight"].size = torch.Size((2**20, 2**18))
        table.state_dict_metadata["model.weight"].chunks[0].sizes = torch.Size((2**20, 2**18))

    edit(folder, claim)
    assert "claims more bytes than are stored" in fall_back(keeper, capsys)


def test_a_shape_larger_than_its_parts_is_refused(keeper, folder, capsys):
    def claim(table):
        table.state_dict_metadata["model.weight"].size = torch.Size((2**20, 2**18))

    edit(folder, claim)
    assert "do not fill its shape" in fall_back(keeper, capsys)


@pytest.mark.parametrize(("field", "value"), [("offset", 10**9), ("offset", -8), ("length", 2**40)])
def test_bytes_outside_of_the_file_are_refused(field, value, keeper, folder, capsys):
    edit(folder, lambda table: setattr(next(iter(table.storage_data.values())), field, value))
    assert "lie outside __0_0.distcp" in fall_back(keeper, capsys)


def test_bytes_that_two_tensors_share_are_refused(keeper, folder, capsys):
    """A small file could else become as large a model as its author likes."""

    def share(table):
        first, second, *_ = table.storage_data.values()
        second.offset, second.length = first.offset, first.length

    edit(folder, share)
    assert "share bytes of __0_0.distcp" in fall_back(keeper, capsys)


@pytest.mark.parametrize("name", ["../../x", "/etc/passwd", "../step-00000001/__0_0.distcp", "."])
def test_a_file_outside_of_the_checkpoint_is_refused(name, keeper, folder, capsys):
    def elsewhere(table):
        for place in table.storage_data.values():
            place.relative_path = name

    edit(folder, elsewhere)
    assert "is none of its files" in fall_back(keeper, capsys)
    whole = json.loads((second(folder) / "whole.json").read_text())
    whole["files"][name] = whole["files"]["__0_0.distcp"]
    hostile.write_whole(second(folder), whole)
    assert "is no file of a checkpoint" in fall_back(keeper, capsys)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "whole.json"])
def test_a_link_and_a_pipe_are_refused(name, keeper, folder, capsys, tmp_path):
    file = second(folder) / name
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    assert fall_back(keeper, capsys) == f"{name} is a link"
    hostile.pipe(file)
    assert fall_back(keeper, capsys) == f"{name} is no file"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda whole: whole["progress"].update(step=float("nan")), "cannot be read (ValueError)"),
        (lambda whole: whole["progress"].update(step="2"), "does not tell the step"),
        (lambda whole: whole["progress"].update(step=3), "is of another step"),
        (lambda whole: whole["progress"].update(best_step=-1), "best step below 0"),
        (lambda whole: whole.update(progress=[1]), "does not tell the step"),
        (lambda whole: whole.update(files=[[1, 2]]), "cannot be read (AttributeError)"),
        (lambda whole: whole.update(files={}), "does not list .metadata"),
        (lambda whole: whole["files"].update({".metadata": [True, 1]}), "does not tell the size"),
        (lambda whole: whole["files"].update({".metadata": [-1, 1]}), "does not tell the size"),
        (lambda whole: whole["files"].update({"a\x1b]52;": [1, 1]}), r"names 'a\x1b]52;', which"),
    ],
)
def test_an_odd_list_of_files_is_refused(change, why, keeper, folder, capsys):
    whole = json.loads((second(folder) / "whole.json").read_text())
    change(whole)
    hostile.write_whole(second(folder), whole)
    assert why in fall_back(keeper, capsys)


@pytest.mark.parametrize("content", ["[" * 100_000, "9" * 5000, "[]", "null", '{"crc": 1}'])
def test_a_list_of_files_that_is_none_is_refused(content, keeper, folder, capsys):
    (second(folder) / "whole.json").write_text(content)
    assert "whole.json" in fall_back(keeper, capsys)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (hostile.deep(200_000) + b"\x94h\x00.", "something else in place of a Metadata"),
        (b"\x80\x04}" + hostile.deep(200_000)[2:] + b"Ns.", "a tuple as a key"),
        (b"\x80\x04Nr\xff\xff\xff\x7f.", "something else in place of a Metadata"),
        (b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.", "a broken pickle"),
        (b"", "a broken pickle"),
        (b"\x80\x04.", "a broken pickle"),
        (b"\x80\x04N", "a broken pickle"),
        (b"\x80\x04\x82\x01.", "a pickle with EXT1"),
        (b"\x80\x04(cos\nsystem\n.", "os.system has no place in a checkpoint"),
    ],
    ids=["deep", "deep key", "huge memo", "huge length", "empty", "bare", "endless", "ext", "call"],
)
def test_a_table_of_contents_that_is_none_is_refused(data, why, keeper, folder, capsys):
    """Python's unpickler crashes on the second (139) and takes 32 GB for the third."""
    (second(folder) / ".metadata").write_bytes(data)
    hostile.reseal(second(folder))
    assert why in fall_back(keeper, capsys)


def test_a_table_of_contents_without_end_is_refused_unread(keeper, folder, capsys):
    with (second(folder) / ".metadata").open("r+b") as file:
        file.truncate(2**33)
    assert fall_back(keeper, capsys) == ".metadata has 8589934592 bytes instead of " + str(
        json.loads((second(folder) / "whole.json").read_text())["files"][".metadata"][0]
    )


def test_a_packed_archive_is_refused(keeper, folder, capsys):
    """It could hold a thousand times what it takes on the disk."""
    file = second(folder) / "__0_0.distcp"
    size = file.stat().st_size

    def pack(table):
        place = next(iter(table.storage_data.values()))
        data = file.read_bytes()[place.offset : place.offset + place.length]
        packed = hostile.rewritten_zip(data, lambda _name, content: content, packed=True)
        with file.open("ab") as end:
            end.write(packed)
        place.offset, place.length = size, len(packed)

    edit(folder, pack)
    assert "an archive that torch did not write" in fall_back(keeper, capsys)


@pytest.fixture(scope="module")
def sound(place, tmp_path_factory):
    """A folder of two checkpoints, and the files of the second as they were."""
    folder = tmp_path_factory.mktemp("sound") / "checkpoints"
    keeper = Keeper(folder, place, keep=2, background=False)
    for step in (1, 2):
        keeper.save(step, tensors(step), {"step": step, "best_step": 0})
    return Sound(keeper, folder)


class Sound:
    def __init__(self, keeper, folder):
        self.keeper, self.folder, self.newest = keeper, folder, second(folder)
        self._files = {path.name: path.read_bytes() for path in self.newest.iterdir()}
        with hostile.watched() as self.usual:  # what ranks send each other is pickled, too
            self.load()
        self.examples = self.refused = 0

    def restore(self):
        for name, data in self._files.items():
            (self.newest / name).write_bytes(data)

    def load(self):
        """The checkpoint used and its tensors, by both ways of reading."""
        found = checkpoint.newest_alone(self.folder)
        state = checkpoint.read(found.path)
        again = tensors(0)
        if not found.contents.unfit(again):
            self.keeper.load(found.path, again)
        return found.path, state


@given(seed=st.integers(0, 2**63))
@settings(
    max_examples=max(600, settings.default.max_examples),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_no_mutation_runs_code_or_stops_the_one_before(sound, capsys, tmp_path, seed):
    """Sums are put right each time, so that mutations come as far as the readers."""
    canary = tmp_path / "canary"
    sound.restore()
    hostile.mutated(random.Random(seed), sound.newest, canary)
    capsys.readouterr()

    with hostile.watched() as seen:
        path, state = sound.load()
    assert [event for event in seen if event not in sound.usual] == []
    assert not canary.exists()
    refused = refusals(capsys.readouterr().out)
    sound.examples += 1
    sound.refused += bool(refused)
    if path == sound.newest:
        assert refused == []
        return
    (line,) = refused
    assert line.isprintable()
    assert len(line) < 600
    assert all(state[name].equal(value) for name, value in tensors(1).items())


def test_an_unknown_escape_is_refused_without_a_warning():
    """`pickletools` warns of it; a Python that turns warnings into errors would end there."""
    with pytest.raises(Refused, match="STRING"):
        plain_pickle.load(b"S'\\X'\n.", ())


def test_an_integer_that_no_file_could_have(sound, capsys):
    """Found by the mutations: an offset of 600 digits, in the one line that is printed."""
    with pytest.raises(Refused, match="more than 64 bits"):
        plain_pickle.load(pickle.dumps(10**300), ())
    sound.restore()
    capsys.readouterr()
    whole = sound.newest / "whole.json"
    whole.write_text('{"progress": {"step": 1' + "0" * 3000 + "}}")
    sound.load()
    assert len("".join(refusals(capsys.readouterr().out))) < 600


def test_most_mutations_were_refused(sound):
    if not sound.examples:
        pytest.skip("only with the test before")
    assert sound.refused > sound.examples / 2


def test_the_watch_sees_what_a_pickle_would_do(sound, tmp_path):
    """The same mutations in Python's own unpickler: else the test above would show nothing."""
    canary = tmp_path / "canary"
    sound.restore()
    hostile.dotted_name(sound.newest, canary)
    with hostile.watched() as seen:
        started = pickle.loads((sound.newest / ".metadata").read_bytes())
    started.wait()
    sound.restore()

    assert canary.exists()
    assert {"pickle.find_class", "subprocess.Popen"} <= {event for event, _ in seen}
