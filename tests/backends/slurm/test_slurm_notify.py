"""Messages about jobs on a real cluster: from the node where nobody follows, else from here."""

from __future__ import annotations

import json
import time

import pytest

from deploykit.cli import main as cli
from deploykit.cost import cap
from deploykit.lib import paths
from deploykit.lib.errors import TryAgain
from tests.backends.slurm.slurm_helpers import output, wait_for
from tests.receivers import HANGS, SAVES, unfollowed

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.xdist_group("slurm"),
]


def submit(run, *settings, code=0):
    argv = ["submit", "--backend", "slurm", "--run", run, "--set", "entrypoint.launcher=python"]
    argv += [word for one in settings for word in ("--set", one)]
    while (exit_code := cli.main(argv)) == TryAgain.exit_code:  # the controller is busy
        time.sleep(1)
    assert exit_code == code


@pytest.mark.nightly
def test_a_restarted_job_fails_once_whoever_sends_the_message(
    cluster, project, hook, monkeypatch, capsys
):
    """Two nodes fail twice; `wait` comes to its end too."""
    (project / "train.py").write_text("raise ValueError('a shape')\n")
    receivers = {"to": ["secret:env:HOOK"], "events": ["started", "failed", "succeeded"]}
    settings = (f"notify={json.dumps(receivers)}", "slurm.restarts={error: 1}")
    settings += ("restarts={policy: always, back_off: 0s}", "resources.nodes=2")
    monkeypatch.setenv("HOOK", hook.url)
    submit("followed", *settings)
    with unfollowed():
        submit("alone", *settings)
    assert cli.main(["wait", "alone", "followed"]) == 1
    capsys.readouterr()
    assert cli.main(["notify", "alone"]) == cli.main(["notify", "followed"]) == 0
    hook.wait_for(3)
    assert [one["event"] for one in hook.of("alone")] == ["started", "failed"]
    assert [one["event"] for one in hook.of("followed")][-1:] == ["failed"]
    assert sum(one["event"] == "failed" for one in hook.messages) == 2
    message = hook.of("alone")[-1]
    assert "ValueError: a shape" in message["cause"]
    assert message["where"].startswith("train.py:1")
    records = paths.run_folder("alone") / "exit_records"
    assert list(records.glob("notified-failed-1-*.json")), "the node has sent it"


@pytest.mark.nightly
def test_a_preemption_is_reported_by_the_node_and_from_here(cluster, project, hook, capsys):
    (project / "train.py").write_text(
        "import os, time\n"
        "print('up', flush=True)\n"
        "time.sleep(900 if os.environ['DEPLOYKIT_RESTART_COUNT'] == '0' else 0)\n"
    )
    receivers = {"to": [hook.url], "events": ["preempted", "succeeded"]}
    settings = (f"notify={json.dumps(receivers)}", "slurm.partition=low")
    with unfollowed():
        submit("alone", *settings, "resources.nodes=2")
    submit("followed", *settings)
    logs = [paths.run_folder(run) / "logs/node-0.log" for run in ("alone", "followed")]
    wait_for(lambda: all(log.exists() and "] up" in log.read_text() for log in logs))
    hosts = ",".join(output("squeue", "--noheader", "--format=%N").split())
    wanted = ["--exclusive", "--partition=high", "--nodes=3", f"--nodelist={hosts}"]
    output("sbatch", *wanted, "--output=/dev/null", "--wrap", "sleep 1")
    hook.wait_for(4)
    events = {(one["run"], one["event"]) for one in hook.messages}
    runs = ("alone", "followed")
    assert events == {(run, event) for run in runs for event in ("preempted", "succeeded")}
    assert cli.main(["wait", "alone", "followed"]) == 0
    capsys.readouterr()
    assert len(hook.messages) == 4


def test_a_stall_is_reported_by_the_node_and_from_here(cluster, project, hook, capsys):
    (project / "train.py").write_text(HANGS)
    receivers = {"to": [hook.url], "events": ["stalled"]}
    settings = (f"notify={json.dumps(receivers)}", "env.DEPLOYKIT_STALL_SECONDS='3'")
    with unfollowed():
        submit("alone", *settings)
    submit("followed", *settings)
    hook.wait_for(2)
    (alone,), (followed,) = hook.of("alone"), hook.of("followed")
    assert (alone["event"], followed["event"]) == ("stalled", "stalled")
    assert "; the stacks are in stacks/" in alone["cause"]
    assert ": rank 0 is in <module> (train.py:3)" in followed["cause"]
    assert cli.main(["cancel", "alone", "followed"]) == 0
    assert cli.main(["wait", "alone", "followed"]) == 143
    capsys.readouterr()


def test_a_cap_and_a_budget_are_reported_by_the_node_and_from_here(
    cluster, project, hook, monkeypatch, capsys
):
    """A second for a USD. The job that the budget refuses has no node that could send."""
    monkeypatch.setattr(cap, "_MIN_SECONDS", 30)
    (project / "train.py").write_text(SAVES)
    receivers = {"to": [hook.url], "events": ["cap", "budget", "failed"]}
    settings = (f"notify={json.dumps(receivers)}", "slurm.price=3600 USD/node-hour")
    capped = ("max_cost=40 USD", "stop_at_cap=true", "budget=250 USD for tests")
    with unfollowed():
        submit("alone", *settings, *capped)
    submit("followed", *settings, *capped)
    submit("refused", *settings, *capped, code=64)
    hook.wait_for(3)
    assert cli.main(["wait", "alone", "followed"]) == 75
    capsys.readouterr()
    assert cli.main(["notify", "alone"]) == cli.main(["notify", "followed"]) == 0
    for run in ("alone", "followed"):
        (message,) = hook.of(run)
        assert message["event"] == "cap"
        assert message["cause"].startswith("stopped at its cost cap (40.00 USD, at 3600.00 USD")
    (refused,) = hook.of("refused")
    assert refused["event"] == "budget"
    assert refused["cause"].startswith("the job may cost ")
