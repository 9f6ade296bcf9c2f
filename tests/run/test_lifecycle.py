"""The life of runs when the target misbehaves."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace

import pytest

import deploykit
from deploykit.backends import base as backend
from deploykit.backends import local
from deploykit.cli import main as cli
from deploykit.job.model import Handle, State, Status
from deploykit.lib import paths
from deploykit.lib.errors import (
    BackendUnavailable,
    NeverStarts,
    NotPermitted,
    SubmitRefused,
    Uncertain,
)
from deploykit.run import registry
from deploykit.run import state as run_state


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


def test_wait_leaves_a_run_that_can_never_start(capsys, monkeypatch):
    answers = dict.fromkeys(("stuck", "waits"), Status(State.QUEUED, reason="waits"))
    answers["stuck"] = Status(State.BLOCKED, reason="requests too much, so it can never start")
    monkeypatch.setattr(local, "status", lambda handles: {h: answers[h.run] for h in handles})
    monkeypatch.setattr(run_state, "_BLOCKED", 0.0)
    assert cli.main(["wait", add("stuck")]) == 81
    told = capsys.readouterr()
    assert "stuck: blocked\n  reason  requests too much, so it can never start" in told.out
    assert "stuck is still queued; `deploykit cancel stuck` removes it" in told.err
    assert cli.main(["wait", add("waits"), "--timeout", "0.1"]) == 124


def test_wait_leaves_only_a_run_that_stays_blocked(monkeypatch):
    """The site may be reconfigured, and Slurm's first reason may pass."""
    states = [*[State.BLOCKED, State.QUEUED] * 3, State.SUCCEEDED]
    answers = iter([Status(state, reason=str(n)) for n, state in enumerate(states)])
    monkeypatch.setattr(local, "status", lambda handles: dict.fromkeys(handles, next(answers)))
    monkeypatch.setattr(run_state, "_POLL", (0.01, 0.01))
    assert [row.state for (row,) in run_state.wait_all([add("one")])] == [
        state.value for state in states
    ]


def test_submit_and_wait_ends_for_a_run_that_can_never_start(project, capsys, monkeypatch):
    """Its log never ends, so it must not be waited for."""
    blocked = Status(State.BLOCKED, reason="requests too much, so it can never start")
    monkeypatch.setattr(local, "status", lambda handles: dict.fromkeys(handles, blocked))
    monkeypatch.setattr(local, "logs", lambda _, follow: iter(threading.Event().wait, None))
    monkeypatch.setattr(run_state, "_BLOCKED", 0.0)
    assert cli.main(["submit", "--backend", "local", "--wait", "--json"]) == 81
    assert json.loads(capsys.readouterr().out)["state"] == "blocked"


def test_python_gets_an_error_for_a_run_that_can_never_start(monkeypatch):
    blocked = Status(State.BLOCKED, reason="requests too much, so it can never start")
    monkeypatch.setattr(local, "status", lambda handles: dict.fromkeys(handles, blocked))
    monkeypatch.setattr(run_state, "_BLOCKED", 0.0)
    with pytest.raises(NeverStarts, match="stuck is queued, but requests too much") as caught:
        deploykit.get(add("stuck")).wait()
    assert caught.value.exit_code == 81


def test_each_run_is_cancelled_although_one_cannot_be(monkeypatch):
    tried = []

    def cancel(handle):
        tried.append(handle)
        if handle == "one":
            raise NotPermitted("one belongs to another user")

    monkeypatch.setattr(backend, "find", lambda _: SimpleNamespace(cancel=cancel))
    rows = [SimpleNamespace(backend="any", handle=handle) for handle in ("one", None, "two")]
    with pytest.raises(NotPermitted, match="another user"):
        run_state.cancel_all(rows)
    assert tried == ["one", "two"]
