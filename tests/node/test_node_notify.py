"""Messages from the launcher of a node, which nobody else sends."""

from __future__ import annotations

import json
import select
import signal
import subprocess
import sys
import time

import pytest

from deploykit_node import notify
from deploykit_node.cluster import Cluster
from deploykit_node.records import NodeExit
from deploykit_node.restart.attempt import Attempt
from tests.node.conftest import ENTRYPOINTS
from tests.receivers import Dead

HERE = Cluster("alone", 0, ("localhost",))
EVENTS = ["started", "failed", "succeeded", "stalled", "preempted", "cap"]


def settings(*to, command=()):
    return json.dumps({"to": to, "events": EVENTS, "command": command})


@pytest.fixture
def launcher(tmp_path):
    """The notifier of a launcher in an attempt of a run."""

    made = []

    def make(*to, attempt=0, **env):
        env = {"DEPLOYKIT_NOTIFY": settings(*to), "DEPLOYKIT_RUN_DIR": str(tmp_path), **env}
        env |= {"SLURM_RESTART_COUNT": str(attempt), "DEPLOYKIT_RUN": "one"}
        made.append(notify.Notifier(env))
        return made[-1]

    (tmp_path / "exit_records").mkdir()
    yield make
    for child in (child for one in made for child in one.children):
        child.kill()
        child.wait()


@pytest.mark.torch
@pytest.mark.slow
def test_the_launcher_tells_of_a_failure_and_the_program_gets_nothing_of_it(bundle, hook):
    bundle.write(
        "train.py",
        """\
        import os
        assert "DEPLOYKIT_NOTIFY" not in os.environ
        raise ValueError("a shape")
        """,
    )
    bundle.run(
        "torchrun", "--", "train.py", DEPLOYKIT_NOTIFY=settings("secret:env:HOOK"), HOOK=hook.url
    )
    hook.wait_for(2)
    by_event = {message["event"]: message for message in hook.messages}
    assert set(by_event) == {"started", "failed"}
    message = by_event["failed"]
    assert message["cause"] == "rank 0 exited with code 1: ValueError: a shape"
    assert (message["where"], message["next"]) == ("train.py:3", "deploykit diagnose tried")


def test_nothing_is_sent_while_the_machine_that_submitted_follows(launcher, hook, tmp_path):
    (tmp_path / "notified").mkdir()
    (tmp_path / "notified" / notify.FOLLOWER).touch()
    one = launcher(hook.url)
    one.begin(HERE)
    one.end(HERE, NodeExit(1, "it failed"), capped=False)
    (tmp_path / "notified" / notify.FOLLOWER).unlink()
    one.end(HERE, NodeExit(0, ""), capped=False)
    hook.wait_for(1)
    assert hook.events == ["succeeded"]


def test_stalls_preemptions_and_caps(launcher, hook, tmp_path):
    first = launcher(hook.url)
    first.look(HERE)
    (tmp_path / "exit_records/stall-0.json").write_text('{"seconds": 9, "dump": ""}')
    first.look(HERE)
    first.look(HERE)
    hook.wait_for(1)
    (tmp_path / "exit_records/restart-1.json").write_text('{"why": "preemption"}')
    second = launcher(hook.url, attempt=1)
    second.begin(HERE)
    hook.wait_for(2)
    second.end(HERE, NodeExit(75, "stopped"), capped=True)
    hook.wait_for(3)
    assert hook.events == ["stalled", "preempted", "cap"]


def test_a_dead_receiver_delays_nothing(launcher, hook):
    dead = Dead()
    launcher(dead.url, hook.url).begin(HERE)
    with dead.accept() as connection:  # `begin` has returned
        hook.wait_for(1)
        assert connection.recv(1 << 16).startswith(b"POST /dead")
        assert not select.select([connection], [], [], 0)[0]
    dead.close()


def test_other_nodes_tell_of_failures_only(launcher, hook):
    there = Cluster("slurm", 1, ("a", "b"))
    one = launcher(hook.url)
    one.begin(there)
    one.end(there, NodeExit(0, ""), capped=False)
    one.end(there, NodeExit(9, "rank 1 failed"), capped=False)
    hook.wait_for(1)
    assert hook.events == ["failed"]


def test_a_success_of_node_0_hides_no_failure_of_another(launcher, hook):
    one = launcher(hook.url)
    one.end(HERE, NodeExit(0, ""), capped=False)
    hook.wait_for(1)
    one.end(Cluster("slurm", 1, ("a", "b")), NodeExit(9, "rank 1 failed"), capped=False)
    hook.wait_for(2)
    assert hook.events == ["succeeded", "failed"]


def test_no_error_reaches_the_launcher(launcher, tmp_path, monkeypatch, capsys):
    def fail(_):
        raise OSError("stale file handle")

    monkeypatch.setattr(notify.Notifier, "_is_followed", fail)
    (tmp_path / "exit_records/stall-0.json").write_text('{"seconds": 9, "dump": ""}')
    one = launcher("https://a.example")
    one.begin(HERE)
    one.look(HERE)
    one.end(HERE, NodeExit(1, "it failed"), capped=False)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("a notification could not be sent: OSError('stale file handle')")


def test_a_claim_is_settled_withdrawn_or_lost(tmp_path, monkeypatch):
    claim = notify.claim(tmp_path, "ended-0", "https://a")
    assert notify.claim(tmp_path, "ended-0", "https://a") is None
    assert notify.claim(tmp_path, "ended-0", ["a", "command"])
    notify.settle(claim, sent=False)
    assert notify.claim(tmp_path, "ended-0", "https://a") == claim
    monkeypatch.setattr(notify, "STALE", -1.0)  # its process was killed
    assert notify.claim(tmp_path, "ended-0", "https://a") == claim
    notify.settle(claim, sent=True)
    assert notify.claim(tmp_path, "ended-0", "https://a") is None


def test_the_launcher_loads_no_http_client():
    code = "import sys, deploykit_node.node\nsys.exit('urllib.request' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(ENTRYPOINTS)}, check=False
    )
    assert done.returncode == 0


def test_a_run_that_was_cancelled_is_no_failure(tmp_path, hook):
    env = {"DEPLOYKIT_NOTIFY": settings(hook.url), "DEPLOYKIT_RUN_DIR": str(tmp_path)}
    attempt = Attempt(env, HERE)
    attempt.on_signal(signal.SIGTERM, time.time())
    attempt.notify_end(NodeExit(143, "rank 0 was terminated by SIGTERM", stopped=True))
    assert attempt.notifier.children == []
    attempt.on_cap()
    attempt.notify_end(NodeExit(75, "stopped at its cost cap"))
    hook.wait_for(1)
    assert hook.events == ["cap"]
    attempt.notifier.children[0].wait()
