"""`rm`: what it removes, and what it refuses."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from deploykit.job.model import State
from deploykit.lib import paths
from deploykit.run import storage
from tests.run.housekeeping.state import AT_REST, names, run, tree


@pytest.mark.parametrize("state", AT_REST)
def test_rm_removes_the_folder_the_row_and_the_bundle(add, capsys, state):
    folder = add("exp-alpha", state)
    code, out, _ = run(capsys, "rm", "exp-a")
    assert (code, out.startswith("exp-alpha: removed, ")) == (0, True)
    assert not folder.exists()
    assert names() == set()
    assert list(paths.bundles().iterdir()) == []


def test_rm_keeps_a_bundle_that_another_run_refers_to(add, capsys):
    add("first"), add("second")
    assert run(capsys, "rm", "first")[0] == 0
    assert len(storage.bundles()) == 1
    assert run(capsys, "rm", "second")[0] == 0
    assert storage.bundles() == {}


@pytest.mark.parametrize("state", [State.SUBMITTING, State.QUEUED, State.RUNNING, State.UNKNOWN])
def test_rm_refuses_a_run_that_has_not_ended(add, capsys, state):
    """The machine of one with an unknown state cannot be asked from here."""
    folder = add("exp-alpha", state, target="elsewhere" if state is State.UNKNOWN else None)
    before = tree(folder)
    add("exp-beta")
    code, _, err = run(capsys, "rm", "exp-beta", "exp-alpha")
    assert code == 64
    assert "only finished runs can be removed" in err
    assert "exp-alpha is " in err
    assert tree(folder) == before
    assert names() == {"exp-alpha", "exp-beta"}


def test_rm_says_how_to_end_a_run_and_force_is_no_help(add, capsys):
    add("exp-alpha", State.RUNNING)
    for more in ([], ["--force"]):
        code, _, err = run(capsys, "rm", "exp-alpha", *more)
        assert code == 64
        assert "`deploykit cancel exp-alpha` stops it" in err
    assert names() == {"exp-alpha"}


def test_rm_force_removes_a_run_whose_target_is_gone(add, capsys):
    add("exp-alpha", State.QUEUED, target="another-machine")
    code, _, err = run(capsys, "rm", "exp-alpha")
    assert (code, "if the job no longer exists, add --force" in err) == (64, True)
    assert run(capsys, "rm", "exp-alpha", "--force")[0] == 0
    assert names() == set()


@pytest.mark.parametrize("name", ["exp", "alpha", "exp-", "exp-x"])
def test_rm_takes_an_id_or_a_unique_beginning_of_four_characters(add, capsys, name):
    add("exp-alpha"), add("exp-beta")
    assert run(capsys, "rm", name)[0] == 66
    assert names() == {"exp-alpha", "exp-beta"}


def test_rm_removes_all_or_none_and_names_every_mistake(add, capsys):
    add("exp-alpha")
    code, _, err = run(capsys, "rm", "exp-alpha", "nothing-1", "nothing-2")
    assert code == 64
    assert "nothing-1" in err
    assert "nothing-2" in err
    assert names() == {"exp-alpha"}


def test_rm_names_what_is_left_elsewhere(add, capsys):
    add("exp-alpha")
    with contextlib.closing(sqlite3.connect(paths.state() / "runs.sqlite")) as database, database:
        database.execute("UPDATE runs SET output = '/shared/results'")
    (one,) = json.loads(run(capsys, "rm", "exp-alpha", "--json")[1])
    assert one["run"] == "exp-alpha"
    assert one["bytes"] > 40_000
    assert one["left"] == [{"location": "/shared/results", "command": None}]


def test_rm_names_the_folder_on_a_login_node(add, capsys):
    folder = add("exp-alpha")
    there = "/home/me/my runs/exp-alpha"
    paths.write(folder / "remote.json", json.dumps({"host": "login", "folder": there}))
    with contextlib.closing(sqlite3.connect(paths.state() / "runs.sqlite")) as database, database:
        database.execute("UPDATE runs SET backend = 'slurm'")
    ((left,),) = (one["left"] for one in json.loads(run(capsys, "rm", "exp-alpha", "--json")[1]))
    assert left["location"] == f"login:{there}"
    *ssh, remotely = shlex.split(left["command"])
    assert ssh == ["ssh", "--", "login"]
    assert shlex.split(remotely) == ["rm", "-r", "--", there]


def test_rm_removes_a_run_whose_folder_was_deleted(add, capsys):
    add("exp-alpha", whole=False)
    assert run(capsys, "rm", "exp-alpha")[0] == 0
    assert names() == set()


def test_a_link_in_place_of_a_run_folder_is_removed_and_not_followed(add, capsys, tmp_path):
    folder = add("exp-alpha")
    elsewhere = tmp_path / "elsewhere"
    folder.rename(elsewhere)
    folder.symlink_to(elsewhere)
    before = tree(elsewhere)
    assert run(capsys, "rm", "exp-alpha")[0] == 0
    assert not folder.is_symlink()
    assert tree(elsewhere) == before


def test_links_in_a_run_folder_are_not_followed(add, capsys, tmp_path):
    folder, elsewhere = add("exp-alpha"), tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").write_text("kept")
    (folder / "output/link").symlink_to(elsewhere)
    assert run(capsys, "rm", "exp-alpha")[0] == 0
    assert (elsewhere / "kept").read_text() == "kept"


def test_nothing_but_entries_of_the_state_folders_own_folders_is_removed(tmp_path):
    for path in (
        *(tmp_path / "other", paths.state() / "runs", paths.state() / "runs/.."),
        *(paths.state() / "runs/one/source", Path("/")),
    ):
        with pytest.raises(storage.CannotWrite):
            storage.remove(path)


def test_folders_and_files_without_permissions_are_removed():
    """As package managers leave in caches: folders that even their owner may not write to."""
    code = (
        "from deploykit.lib import paths; from deploykit.run import storage\n"
        "folder = paths.private_folder(paths.run_folder('one'))\n"
        "(folder / 'output/cache/deep').mkdir(parents=True)\n"
        "(folder / 'output/cache/deep/file').touch(0)\n"
        "for name in ('output/cache/deep', 'output/cache', 'output', ''):\n"
        "    os.chmod(folder / name, 0)\n"
        "assert storage.run_usage('one').size > 0\n"
        "storage.remove(folder)\n"
        "assert not folder.exists()\n"
    )
    become = "os.setgroups([]), os.setgid(65534), os.setuid(65534)\n" if os.getuid() == 0 else ""
    with tempfile.TemporaryDirectory() as home:
        if become:  # root may do anything
            os.chown(home, 65534, 65534)
        done = subprocess.run(
            [sys.executable, "-c", f"import os\nfrom deploykit.run import storage\n{become}{code}"],
            env={**os.environ, "DEPLOYKIT_HOME": f"{home}/state", "HOME": home},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr


def test_a_file_that_cannot_be_removed_leaves_the_run_in_the_list(add, capsys, monkeypatch):
    folder = add("exp-alpha")

    def refused(*_args, **_kwargs):
        raise OSError(16, "Device or resource busy", "output")

    with monkeypatch.context() as patched:
        patched.setattr(storage.shutil, "rmtree", refused)
        code, _, err = run(capsys, "rm", "exp-alpha")
    assert code == 73
    assert f"cannot remove {folder}: Device or resource busy" in err
    assert names() == {"exp-alpha"}
    assert run(capsys, "rm", "exp-alpha")[0] == 0
