"""SIGKILL of the controller at random points: no trial is lost, and none is started twice."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from deploykit.lib import paths
from tests.aws_server import SECTION, as_json
from tests.nightly import few
from tests.sweep import plain

CALLS = 8000
"""Of which each controller survives a part: half of them go by until it has taken over."""

pytestmark = pytest.mark.slow


def killed_after(calls, *argv):
    script = Path(__file__).parent / "kill_after.py"
    full = [sys.executable, str(script), str(calls), "--", "sweep", *argv]
    done = subprocess.run(full, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    assert "unexpected" not in done.stderr, done.stderr
    return done.returncode


def killed(sweep, calls=CALLS, count=20):
    """Kill the controller `count` times, then let it end: the sweep, finished."""
    chance, kills, code = random.Random(os.environ.get("CI")), 0, 66
    while kills < count and code != 0:
        code = killed_after(chance.randint(1, calls), "resume", "s")
        if code == 66:  # killed before there was a sweep
            code = killed_after(chance.randint(1, calls), "start", "--sweep", "s")
        kills += code == -signal.SIGKILL
    found = sweep("resume", "s", "--json")
    assert found["state"] == "finished"
    assert kills == count
    return found


def survives(sweep, runs, started=plain.started, calls=CALLS, count=20):
    """The sweep after `count` kills; `runs` are all that must have run, once."""
    found = killed(sweep, calls, count)
    assert found["counts"] == {"succeeded": found["total"]}
    assert started(paths.state()) == dict.fromkeys(runs, 1)
    return found


def shown(found):
    """What the journal says, but for the ids of runs."""
    return [(one["trial"], one["parameters"], one["value"]) for one in found["trials"]]


@pytest.mark.parametrize("count", few([6, 20], 6))
def test_the_journal_is_that_of_an_undisturbed_sweep(write, sweep, count):
    trials = count + 4
    write(trials=trials, parallel=3)
    found = survives(sweep, [f"s-{number}" for number in range(trials)], calls=5000, count=count)
    assert shown(found) == shown(sweep("start", "--json"))


@pytest.mark.nightly
def test_with_repeats_and_a_sampler_that_learns(write, sweep):
    write(trials=10, parallel=4, sampler="tpe", repeat=2, repeat_as="--n {value}")
    survives(sweep, [f"s-{number}-s{seed}" for number in range(10) for seed in range(2)])


@pytest.mark.torch
@pytest.mark.nightly
def test_on_this_machine(write, sweep, monkeypatch):
    monkeypatch.setenv("DEPLOYKIT_BACKEND", "local")
    write(trials=12, parallel=3)
    found = survives(sweep, [f"s-{number}" for number in range(12)], calls=4500)
    assert [one["trial"] for one in found["trials"]] == list(range(12))


@pytest.mark.nightly
@pytest.mark.slurm
@pytest.mark.xdist_group("slurm")
def test_on_slurm(write, sweep, monkeypatch, cluster, toy):
    monkeypatch.setenv("DEPLOYKIT_BACKEND", "slurm")
    (toy / "job.yaml").write_text(
        "name: toy\nentrypoint: {script: train.py}\nresources: {time_limit: 5m}\n"
    )
    write(trials=12, parallel=3)
    survives(sweep, [f"s-{number}" for number in range(12)])


@pytest.mark.aws
@pytest.mark.nightly
def test_on_sagemaker(write, sweep, monkeypatch, aws, toy):
    """A service that starts a job as often as it is asked to; its metric is the learning rate."""
    started = Counter()

    def respond(one, forward):
        status, headers, content = forward()
        if one.action == "CreateTrainingJob" and status == 200:
            started[json.loads(one.body)["TrainingJobName"]] += 1
        if one.action != "DescribeTrainingJob" or status != 200:
            return status, headers, content
        job = json.loads(content)
        words = json.loads(json.loads(job["HyperParameters"]["deploykit_argv_0"]))
        metric = {"MetricName": "loss", "Value": float(words[-1]), "Timestamp": 1.0}
        ended = {"TrainingJobStatus": "Completed", "SecondaryStatus": "Completed"}
        return as_json(200, {**job, **ended, "FinalMetricDataList": [metric]})

    aws.respond = respond
    monkeypatch.setenv("DEPLOYKIT_BACKEND", "sagemaker")
    job = "name: toy\nentrypoint: {script: train.py}\nresources: {time_limit: 5m}\n"
    (toy / "job.yaml").write_text(job + SECTION)
    write(trials=12, parallel=3)
    found = survives(sweep, [f"s-{number}" for number in range(12)], lambda _: started)
    for one in found["trials"]:
        assert one["value"] == float(one["parameters"]["lr"])
