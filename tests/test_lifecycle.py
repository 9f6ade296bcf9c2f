"""The life of runs when the target misbehaves."""

from __future__ import annotations

import json

import pytest

from deploykit import cli, jobfile, paths, registry
from deploykit.backends import local
from deploykit.errors import BackendUnavailable, SubmitRefused, Uncertain
from deploykit.model import Handle, State, Status


def add(run, state=State.RUNNING, identity="7", created=None, reason=""):
    folder = paths.run_folder(run)
    folder.mkdir(parents=True)
    row = registry.Run(
        *(run, "job", "local", "here", str(folder), "a", "b", None),
        registry.now() if created is None else created,
        "/out",
    )
    registry.add(row)
    if identity is not None:
        registry.confirm(run, identity)
    registry.update(run, Status(state, reason=reason))
    return run


def listed(capsys):
    assert cli.main(["list", "--json"]) == 0
    return {row["run"]: row for row in json.loads(capsys.readouterr().out)}


@pytest.fixture
def unreachable(monkeypatch):
    def refuse(*_, **__):
        raise BackendUnavailable("no route to the cluster")

    for name in ("status", "find"):
        monkeypatch.setattr(local, name, refuse)


def test_a_backend_that_cannot_be_asked_hides_no_run(capsys, unreachable):
    add("running")
    add("ended", State.SUCCEEDED)
    found = listed(capsys)
    assert found["running"]["state"] == "running"
    assert "local cannot be reached: no route to the cluster" in found["running"]["reason"]
    assert found["ended"]["reason"] == ""
    assert registry.get("running").reason == ""


def test_one_question_for_many_runs(capsys, monkeypatch):
    asked = []

    def answer(handles):
        asked.append(len(handles))
        return dict.fromkeys(handles, Status(State.QUEUED, reason="waits"))

    monkeypatch.setattr(local, "status", answer)
    for number in range(19):
        add(f"run-{number}")
    add("ended", State.FAILED)
    assert {row["state"] for row in listed(capsys).values()} == {"queued", "failed"}
    assert asked == [19]


def test_a_job_that_arrives_late_is_found(capsys, monkeypatch):
    """The process that sends the job may outlive the killed submit."""
    there = []
    monkeypatch.setattr(local, "find", lambda run, folder, place: there[0] if there else None)
    monkeypatch.setattr(
        local, "status", lambda handles: dict.fromkeys(handles, Status(State.RUNNING))
    )
    add("late", State.SUBMITTING, identity=None)
    add("old", State.UNSENT, identity=None, created=1.0, reason="refused")
    assert listed(capsys)["late"]["state"] == "unsent"
    there.append(Handle("local", "here", "8", "late", "/f"))
    found = listed(capsys)
    assert (found["late"]["state"], found["late"]["handle"]) == ("running", "local://here/8")
    assert (found["old"]["state"], found["old"]["reason"]) == ("unsent", "refused")


@pytest.mark.parametrize(
    ("error", "state"),
    [(SubmitRefused("no such partition"), "unsent"), (Uncertain("broke off"), "submitting")],
)
def test_what_a_failed_submit_leaves(project, capsys, monkeypatch, error, state):
    def fail(*_):
        raise error

    monkeypatch.setattr(local, "submit", fail)
    assert cli.main(["submit", "--backend", "local", "--run", "one"]) == error.exit_code
    assert registry.get("one").state == state
    assert str(error) in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["submit", "--dry-run"], ["check"], ["doctor", "--from", "no"]])
def test_a_job_file_is_read_once(project, monkeypatch, argv):
    read, parse = [], jobfile.parse
    monkeypatch.setattr(jobfile, "parse", lambda path: read.append(path) or parse(path))
    cli.main(argv)
    assert len(read) == 1
