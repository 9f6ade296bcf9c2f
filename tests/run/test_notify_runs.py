"""Real runs on this machine and the messages that they send, from here and from the launcher."""

from __future__ import annotations

import contextlib
import json

import pytest

from deploykit.cli import main as cli
from deploykit.cost import cap
from tests.receivers import HANGS, SAVES, unfollowed

pytestmark = [pytest.mark.torch, pytest.mark.slow]


@pytest.fixture(params=[pytest.param("followed", marks=pytest.mark.nightly), "alone"])
def run(request):
    """The run's name: who sends its messages."""
    with unfollowed() if request.param == "alone" else contextlib.nullcontext():
        yield request.param


def submit(hook, run, events, *settings, code=0):
    notify = json.dumps({"to": [hook.url], "events": events})
    words = [word for one in (f"notify={notify}", *settings) for word in ("--set", one)]
    assert cli.main(["submit", "--backend", "local", "--run", run, *words]) == code


def test_a_run_that_fails(run, project, hook, capsys):
    (project / "train.py").write_text("raise ValueError('a shape')\n")
    submit(hook, run, ["started", "failed"])
    hook.wait_for(1 + (run == "alone"))
    assert cli.main(["wait", run]) == 1
    message = hook.of(run)[-1]
    assert (message["event"], message["state"]) == ("failed", "failed")
    assert "ValueError: a shape" in message["cause"]
    assert message["where"].startswith("train.py:1")
    assert message["next"] == f"deploykit diagnose {run}"
    assert bool(message["fix"]) is (run == "followed")


def test_a_run_that_stalls(run, project, hook, capsys):
    (project / "train.py").write_text(HANGS)
    submit(hook, run, ["stalled"], "env.DEPLOYKIT_STALL_SECONDS='3'")
    hook.wait_for(1)
    (message,) = hook.messages
    assert (message["event"], message["state"]) == ("stalled", "running")
    assert message["cause"].startswith("no progress for ")
    expected = ": rank 0 is in " if run == "followed" else "; the stacks are in stacks/"
    assert expected in message["cause"]
    assert message["next"] == f"deploykit dump {run}"
    assert cli.main(["cancel", run]) == 0
    assert cli.main(["wait", run]) == 143
    assert cli.main(["notify", run]) == 0
    assert hook.events == ["stalled"]


def test_a_run_that_is_stopped_at_its_cap(run, project, hook, monkeypatch, capsys):
    """A USD buys a second. A second run does not fit into the budget; no node could report that."""
    monkeypatch.setattr(cap, "_MIN_SECONDS", 30)
    (project / "train.py").write_text(SAVES)
    settings = ("local.price=3600 USD", "max_cost=30 USD", "stop_at_cap=true")
    settings += ("budget=150 USD for tests",)
    submit(hook, run, ["cap", "budget", "failed"], *settings)
    submit(hook, "refused", ["budget"], *settings, code=64)
    hook.wait_for(1 + (run == "followed"))
    assert cli.main(["wait", run]) == 75
    assert cli.main(["notify", run]) == cli.main(["notify", "refused"]) == 0
    (message,) = hook.of(run)
    assert (message["event"], message["state"]) == ("cap", "failed")
    assert message["cause"].startswith("stopped at its cost cap (30.00 USD, at 3600.00 USD an hour")
    (refused,) = hook.of("refused")
    assert (refused["event"], refused["state"]) == ("budget", "unsent")
    assert refused["cause"].startswith("the job may cost 90.00 USD, more than is left")
