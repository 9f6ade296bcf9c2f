"""Files of the working folder that `outputs` names: what is collected, kept and brought back."""

from __future__ import annotations

import json
import os
import zipfile

import pytest

from deploykit_node import outputs
from deploykit_node.outputs import KEPT, Outputs
from deploykit_node.restart import checkpoints


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working folder with two files of the source, both unpacked long ago."""
    work = tmp_path / "source"
    (work / ".deploykit").mkdir(parents=True)
    for name in ("train.py", "init.pt"):
        (work / name).write_text(name)
    listing = {"train.py": [0o644, 8], "init.pt": [0o644, 7]}
    (work / ".deploykit/files.json").write_text(json.dumps(listing))
    for path in work.rglob("*.*"):
        os.utime(path, (0, 0))
    monkeypatch.chdir(work)
    return tmp_path


def environ(place, *patterns, shared=True):
    """The launcher's variables for a run with these patterns."""
    folder = {"DEPLOYKIT_RUN_DIR": str(place)} if shared else {}
    return {
        **folder,
        "DEPLOYKIT_OUTPUTS": json.dumps(patterns),
        "DEPLOYKIT_OUTPUT_DIR": str(place / "output"),
        "DEPLOYKIT_CHECKPOINT_DIR": str(place / "checkpoints"),
    }


def tree(folder):
    """Every file of a folder, and its text."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_text() for path in found}


def write(place, name, text):
    path = place / "source" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("snapshot.pt", "snapshot.pt", True),
        ("snapshot.pt", "old/snapshot.pt", False),
        ("*.pt", "a.pt", True),
        ("*.pt", "old/a.pt", False),
        ("**/*.pt", "a.pt", True),
        ("**/*.pt", "x/y/a.pt", True),
        ("logs", "logs/version_0/metrics.csv", True),
        ("logs", "logs.txt", False),
        ("x/**/b", "x/b", True),
        ("x/**/b", "x/1/2/b/c", True),
        ("[ab].pt", "b.pt", True),
        ("*", "a", True),
    ],
)
def test_patterns_are_relative_to_the_working_folder(pattern, path, expected):
    assert outputs.matches(path.split("/"), pattern.split("/")) is expected


def test_new_and_changed_files_are_collected_and_those_of_the_source_are_not(place):
    write(place, "a.pt", "a")
    write(place, "logs/b.txt", "b")
    write(place, "other", "no")
    Outputs(environ(place, "./*.pt", "logs/"), 0).collect()
    assert tree(place / "output") == {"a.pt": "a", "logs/b.txt": "b"}
    assert tree(place / "checkpoints") == {f"{KEPT}/a.pt": "a", f"{KEPT}/logs/b.txt": "b"}
    write(place, "init.pt", "changed")
    Outputs(environ(place, "*.pt"), 0).collect()
    assert tree(place / "output")["init.pt"] == "changed"


def test_a_second_copy_takes_no_space_and_is_made_only_of_changed_files(place, capfd):
    path = write(place, "a.pt", "one")
    mine = Outputs(environ(place, "*.pt"), 0)
    mine.collect()
    first = (place / "output/a.pt").stat()
    assert (place / f"checkpoints/{KEPT}/a.pt").stat().st_ino == first.st_ino
    mine.collect()
    assert (place / "output/a.pt").stat().st_ino == first.st_ino
    assert capfd.readouterr().err.count("outputs collected: 1 file, 3 B: a.pt (3 B)") == 1
    path.write_text("another")
    mine.collect()
    for folder in (place / "output", place / "checkpoints" / KEPT):
        assert tree(folder) == {"a.pt": "another"}


def test_nothing_leaves_the_working_folder_through_a_link(place):
    secret = place / "secret.pt"
    secret.write_text("secret")
    (place / "folder").mkdir()
    (place / "folder/b.pt").write_text("secret")
    (place / "source/link.pt").symlink_to(secret)
    (place / "source/linked").symlink_to(place / "folder")
    os.mkfifo(place / "source/pipe.pt")
    Outputs(environ(place, "**", "*.pt", "linked"), 0).collect()
    assert tree(place / "output") == {}


def test_missing_files_come_back_and_others_stay(place):
    kept = place / "checkpoints" / KEPT
    kept.mkdir(parents=True)
    for name in ("a.pt", "init.pt", "torch.py", "train.py", "no.txt"):
        (kept / name).write_text("kept")
    write(place, "here.pt", "newer")
    (kept / "here.pt").write_text("kept")
    Outputs(environ(place, "*.pt", "*.py"), 0).restore()
    found = tree(place / "source")
    assert found["a.pt"] == "kept"
    assert found["here.pt"] == "newer"
    assert (found["init.pt"], found["train.py"]) == ("init.pt", "train.py")
    assert not {"torch.py", "no.txt"} & set(found)


def archive(path, content):
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("data.pkl", content)


def cut_off(path):
    path.write_bytes(path.read_bytes()[:60])


def test_a_file_that_was_cut_off_replaces_no_complete_one(place, capfd):
    path = place / "source/snapshot.pt"
    archive(path, "x" * 1000)
    whole = path.read_bytes()
    mine = Outputs(environ(place, "snapshot.pt"), 0)
    mine.collect()
    cut_off(path)
    mine.collect()
    assert (place / "output/snapshot.pt").read_bytes() == whole
    assert "'snapshot.pt' is incomplete" in capfd.readouterr().err
    mine.restore()
    assert path.read_bytes() == whole


def test_each_machine_without_a_common_folder_keeps_its_own(place):
    env = environ(place, "*.pt", shared=False)
    write(place, "a.pt", "first")
    Outputs(env, 0).collect()
    write(place, "a.pt", "second")
    Outputs(env, 1).collect()
    expected = {"a.pt": "first", "node-1/a.pt": "second"}
    assert tree(place / "output") == tree(place / "checkpoints" / KEPT) == expected
    for node, text in ((1, "second"), (0, "first"), (2, "first")):
        (place / "source/a.pt").unlink()
        Outputs(env, node).restore()
        assert (place / "source/a.pt").read_text() == text
    Outputs(env, 2).collect()  # what came from the first machine is not machine 2's
    assert tree(place / "output") == expected
    assert not (place / "source/node-1").exists()


def test_while_the_program_runs_only_files_that_rest_are_kept(place):
    mine = Outputs(environ(place, "*.pt", shared=False), 0)
    write(place, "a.pt", "a")
    path = write(place, "b.pt", "b")
    seen = mine.keep_stable({})
    assert tree(place / "checkpoints") == {}
    path.write_text("longer")
    seen = mine.keep_stable(seen)
    assert tree(place / "checkpoints" / KEPT) == {"a.pt": "a"}
    mine.keep_stable(seen)
    assert tree(place / "checkpoints" / KEPT) == {"a.pt": "a", "b.pt": "longer"}
    assert tree(place / "output") == {}


def test_a_copy_that_fails_is_said_and_does_no_harm(place, capfd):
    write(place, "a.pt", "a")
    (place / "output").write_text("a file")
    Outputs(environ(place, "*.pt"), 0).collect()
    assert "outputs: 'a.pt' cannot be copied" in capfd.readouterr().err


def test_on_a_shared_folder_the_first_node_copies(place):
    write(place, "a.pt", "a")
    with outputs.around(environ(place, "*.pt"), 1):
        pass
    assert tree(place / "output") == {}
    with outputs.around(environ(place, "*.pt"), 0):
        pass
    assert tree(place / "output") == {"a.pt": "a"}


def test_the_record_names_the_largest_files_of_both_folders(place):
    (place / "claim").symlink_to("4242")
    for number in range(12):
        write(place, f"{number}.log", "x" * (100 + number))
    write(place, "__pycache__/a.pyc", "x" * 9000)
    (place / "output").mkdir()
    (place / "output/old").write_text("x" * 500)
    os.utime(place / "output/old", (1, 1))
    (place / "output/new").write_text("x" * 20)
    with outputs.around(environ(place), 0):
        pass
    record = json.loads((place / "exit_records/written.json").read_text())
    working = record["working_folder"]
    assert (working["count"], working["bytes"]) == (12, sum(range(100, 112)))
    assert working["largest"][:2] == [["11.log", 111], ["10.log", 110]]
    assert len(working["largest"]) == 10
    assert record["output"]["largest"] == [["new", 20]]
    assert record["checkpoints"]["count"] == 0
    assert record["outputs"] == []


def test_the_record_names_the_checkpoints_and_not_the_outputs_that_they_keep(place):
    write(place, "a.pt", "a")
    (place / "checkpoints").mkdir()
    (place / "checkpoints/last.pt").write_text("x" * 20)
    with outputs.around(environ(place, "*.pt"), 0):
        pass
    record = json.loads((place / "exit_records/written.json").read_text())
    assert (place / f"checkpoints/{KEPT}/a.pt").exists()
    assert record["checkpoints"]["largest"] == [["last.pt", 20]]


def test_where_the_folder_is_lost_the_log_says_what_to_keep(place, capfd):
    write(place, "a.pt", "x" * 1500)
    env = environ(place, shared=False) | {"DEPLOYKIT_RUN": "one-1"}
    with outputs.around(env, 0):
        pass
    said = capfd.readouterr().err
    assert "written to the working folder: 1 file, 1.5 kB: a.pt (1.5 kB); to keep them" in said


def test_a_kept_log_is_no_checkpoint(tmp_path):
    before = checkpoints.snapshot(str(tmp_path))
    (tmp_path / KEPT).mkdir()
    (tmp_path / KEPT / "train.log").write_text("step 1")
    assert checkpoints.newest(before, str(tmp_path)) is None
    (tmp_path / KEPT / "snapshot.pt").write_text("x")
    assert checkpoints.newest(before, str(tmp_path)) == f"{KEPT}/snapshot.pt"


def test_a_folder_that_does_not_exist_has_no_files(tmp_path):
    assert list(outputs.files(tmp_path / "nothing")) == []
