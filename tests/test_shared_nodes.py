"""Users of a site share the nodes that failed, and a clear by one of them counts for all."""

from __future__ import annotations

import json
import os
import stat

import pytest

from deploykit import cli, left_out, node_lists, paths
from tests.test_left_out import ended, excluded, plan  # noqa: F401 - a fixture

OTHER = 65534
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="optional: only root can give files away")


@pytest.fixture
def shared(tmp_path_factory, monkeypatch):
    """A folder that users share, made as the guide says."""
    folder = tmp_path_factory.mktemp("shared nodes")
    folder.chmod(0o1777)
    monkeypatch.setenv("DEPLOYKIT_SHARED_NODES", str(folder))
    return folder


@pytest.fixture
def other(shared, tmp_path, monkeypatch):
    """Makes all entries another user's; this user goes on with a state folder of their own."""

    def give_away():
        (file,) = shared.glob("*.json")
        os.chown(file, OTHER, OTHER)
        file.rename(shared / f"{OTHER}.json")
        monkeypatch.setenv("DEPLOYKIT_HOME", str(tmp_path / "second state"))

    return give_away


def test_what_a_run_found_is_written_for_all_to_read(ended, shared):  # noqa: F811
    ended("a-1", {"n2": "GPU 3 is lost"})
    (file,) = shared.iterdir()
    assert file.name == f"{os.getuid()}.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o644
    assert stat.S_IMODE(paths.left_out().stat().st_mode) == 0o600
    assert [row["node"] for row in json.loads(file.read_text())] == ["n2"]


@needs_root
def test_a_node_that_failed_for_another_user_is_excluded(ended, other, capsys):  # noqa: F811
    ended("a-1", {"n2": "GPU 3 is lost"})
    other()
    assert node_lists.own() == []
    shown = plan(capsys)
    assert excluded(shown) == "n2"
    assert "n2 is excluded: GPU 3 is lost (in a run of nobody)" in shown.err
    assert cli.main(["nodes", "--report", "n2"]) == 0
    assert "\nReason: GPU 3 is lost (in a run of nobody)\n" in capsys.readouterr().out


@needs_root
def test_who_clears_a_node_clears_it_for_all_until_it_fails_again(ended, other, shared, capsys):  # noqa: F811
    ended("a-1", {"n2": "GPU 3 is lost"})
    other()
    assert cli.main(["nodes", "--clear", "n2"]) == 0
    assert excluded(plan(capsys)) is None
    assert len(list(shared.iterdir())) == 2
    (shared / f"{OTHER}.json").rename(shared / "old.json")  # whose it is does not depend on this
    assert left_out.every() == []
    ended("a-2", {"n2": "GPU 3 is lost again"})
    assert excluded(plan(capsys)) == "n2"


@needs_root
def test_two_users_who_each_lost_a_node_once_lost_it_twice(ended, other, capsys):  # noqa: F811
    ended("a-1", {"n2": "its launcher disappeared"}, failed_check=False)
    other()
    assert excluded(plan(capsys)) is None
    ended("b-1", {"n2": "its launcher disappeared"}, failed_check=False)
    assert excluded(plan(capsys)) == "n2"
    (node,) = left_out.every()
    assert node.runs == ("a-1.0", "b-1.0")


@needs_root
@pytest.mark.parametrize("text", ["", "[null]", '[{"node": 1}]', "[" * 10_000, "never"])
def test_damaged_entries_of_others_exclude_nothing(ended, other, shared, capsys, text):  # noqa: F811
    ended("a-1", {"n2": "GPU 3 is lost"})
    other()
    file = shared / f"{OTHER}.json"
    if text == "never":  # an entry that would not expire
        rows = json.loads(file.read_text())
        text = json.dumps([{**rows[0], "until": 1e12}])
    file.write_text(text)
    assert excluded(plan(capsys)) is None


def test_links_and_pipes_of_others_are_not_opened(ended, shared, tmp_path, capsys):  # noqa: F811
    secret = tmp_path / "secret"
    secret.write_text("[]")
    (shared / "1.json").symlink_to(secret)
    os.mkfifo(shared / "2.json")
    assert excluded(plan(capsys)) is None


def test_a_folder_that_is_not_there_is_named(ended, tmp_path, monkeypatch, capsys, caplog):  # noqa: F811
    monkeypatch.setenv("DEPLOYKIT_SHARED_NODES", str(tmp_path / "gone"))
    ended("a-1", {"n2": "GPU 3 is lost"})
    assert "gone cannot be written: No such file or directory" in caplog.text
    shown = plan(capsys)
    assert excluded(shown) == "n2"
    assert "gone cannot be read: No such file or directory" in shown.err
    assert cli.main(["nodes"]) == 64
    assert "unset the variable" in capsys.readouterr().err
