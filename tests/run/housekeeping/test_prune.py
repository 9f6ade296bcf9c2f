"""`prune`: what goes, what stays, and what interrupted submits leave."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from deploykit.job.model import State
from deploykit.lib import paths
from deploykit.run import storage
from tests.run.housekeeping.state import DAY, age, names, run


@pytest.fixture
def history(add):
    """Runs of several ages and states, the newest last."""
    for name, state, days in (
        ("aaaa", State.FAILED, 50),
        ("bbbb", State.SUCCEEDED, 45),
        ("cccc", State.RUNNING, 44),
        ("dddd", State.FAILED, 20),
        ("eeee", State.SUCCEEDED, 10),
    ):
        add(name, state, days=days)


@pytest.mark.parametrize(
    ("options", "gone"),
    [
        (["--older", "30d"], {"aaaa", "bbbb"}),
        (["--keep-last", "1"], {"aaaa", "bbbb", "dddd"}),
        (["--keep-last", "3", "--older", "1d"], {"aaaa"}),
        (["--state", "failed"], {"aaaa", "dddd"}),
        (["--state", "failed", "--keep-last", "1"], {"aaaa"}),
        (["--state", "failed", "--state", "succeeded", "--older", "45d"], {"aaaa", "bbbb"}),
        (["--older", "90d"], set()),
        ([], set()),
    ],
)
def test_prune_selects_runs_and_never_active_ones(history, capsys, options, gone):
    shown = json.loads(run(capsys, "prune", *options, "--dry-run", "--json")[1])
    assert {one["name"] for one in shown["found"] if one["kind"] == "run"} == gone
    assert shown["removed"] == []
    assert names() == {"aaaa", "bbbb", "cccc", "dddd", "eeee"}
    code, out, _ = run(capsys, "prune", *options, "--yes", "--json")
    assert code == 0
    assert {one["name"] for one in json.loads(out)["removed"] if one["kind"] == "run"} == gone
    assert names() == {"aaaa", "bbbb", "cccc", "dddd", "eeee"} - gone
    assert {path.name for path in (paths.state() / "runs").iterdir()} == names()
    assert len(storage.bundles()) == 1


def test_prune_shows_sizes_and_asks_nobody_in_a_pipe(history, capsys):
    code, out, err = run(capsys, "prune", "--older", "30d", "--dry-run")
    assert code == 0
    line = next(line for line in out.splitlines() if line.endswith("\taaaa"))
    size, date, *rest = line.split("\t")
    assert size.endswith(" kB")
    assert len(date) == 10
    assert rest == ["run", "failed", "aaaa"]
    assert err.startswith("2 items to remove, ")
    code, _, err = run(capsys, "prune", "--older", "30d")
    assert (code, "add --yes" in err) == (64, True)
    assert len(names()) == 5


@pytest.mark.parametrize(("answer", "left"), [("y\n", 3), ("n\n", 5), ("\n", 5), ("", 5)])
def test_prune_asks_on_a_terminal(history, capsys, monkeypatch, answer, left):
    class Terminal:
        def isatty(self):
            return True

        def readline(self):
            return answer

    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert run(capsys, "prune", "--older", "30d")[0] == 0
    assert len(names()) == left


@pytest.mark.parametrize(
    "words", [["--older", "soon"], ["--keep-last", "-1"], ["--state", "running"]]
)
def test_prune_refuses_what_selects_nothing_that_can_go(history, capsys, words):
    assert run(capsys, "prune", "--yes", *words)[0] == 64
    assert len(names()) == 5


def test_what_an_interrupted_submit_leaves_is_found_and_removed(add, capsys):
    add("kept")
    paths.write(paths.bundles() / "orphan.tar.gz", b"x" * 5000)
    scratch = paths.private_folder(paths.bundles() / "tmpabc")
    paths.write(scratch / "half.tar.gz", b"x" * 50_000)
    folder = paths.private_folder(paths.run_folder("never-claimed"))
    paths.write(folder / "submitting", "")
    assert json.loads(run(capsys, "prune", "--json", "--dry-run")[1])["found"] == []
    for path in (paths.bundles() / "orphan.tar.gz", scratch / "half.tar.gz", scratch):
        age(path)
    for path in (folder / "submitting", folder):
        age(path)
    kinds = json.loads(run(capsys, "disk", "--json")[1])["kinds"]
    assert kinds["left over"]["count"] == 3
    assert kinds["left over"]["bytes"] >= 55_000
    assert run(capsys, "prune", "--yes")[0] == 0
    assert [path.name for path in (paths.state() / "runs").iterdir()] == ["kept"]
    assert len(list(paths.bundles().iterdir())) == 1
    assert names() == {"kept"}


def test_the_scratch_of_a_submit_that_was_killed_is_found(project, capsys):
    script = str(Path(__file__).parents[2] / "kill_at.py")
    submit = ["submit", "--backend", "local", "--run", "killed"]
    argv = [sys.executable, script, "before", "deploykit.bundle.archive:_pack", "--", *submit]
    assert subprocess.run(argv, check=False, capture_output=True).returncode < 0
    (scratch,) = paths.bundles().iterdir()
    for path in (*scratch.iterdir(), scratch):
        age(path)
    assert run(capsys, "prune", "--dry-run")[1].endswith(f"\tleft over\t\tbundles/{scratch.name}\n")
    assert run(capsys, "prune", "--yes")[0] == 0
    assert list(paths.bundles().iterdir()) == []
    assert names() == set()  # it was killed before it was a run


def test_without_a_registry_no_results_are_removed(add, capsys):
    """Its own advice is to move a registry of another version away."""
    folder = add("precious")
    (folder / "output/model.pt").write_text("weights")
    (paths.state() / "runs.sqlite").rename(paths.state() / "away.sqlite")
    for path in (*folder.iterdir(), folder, *paths.bundles().iterdir()):
        age(path)
    assert run(capsys, "prune", "--older", "0s", "--yes")[0] == 0
    assert (folder / "output/model.pt").read_text() == "weights"
    assert len(storage.bundles()) == 1
    kinds = json.loads(run(capsys, "disk", "--json")[1])["kinds"]
    assert kinds["unlisted runs"]["count"] == 1


def test_logs_of_crashes_go_when_they_are_old(capsys):
    folder = paths.private_folder(paths.state() / "crashes")
    for name, days in (("old.log", 40), ("new.log", 2)):
        paths.write(folder / name, "x")
        age(folder / name, days * DAY)
    assert run(capsys, "prune", "--older", "30d", "--yes")[0] == 0
    assert [path.name for path in folder.iterdir()] == ["new.log"]


def test_prune_goes_on_after_one_that_cannot_be_removed(history, capsys, monkeypatch):
    remove = storage.remove

    def refuse_one(path):
        if path.name == "bbbb":
            raise storage.CannotWrite("bbbb cannot be removed: busy")
        remove(path)

    monkeypatch.setattr(storage, "remove", refuse_one)
    code, _, err = run(capsys, "prune", "--older", "30d", "--yes")
    assert code == 73
    assert "bbbb: bbbb cannot be removed: busy" in err
    assert names() == {"bbbb", "cccc", "dddd", "eeee"}
