"""Promotions on each backend: a real process, a real Slurm cluster, and AWS's API."""

from __future__ import annotations

import json
import time
from collections import defaultdict

import boto3
import pytest

from deploykit.backends.sagemaker.jobs import LOG_GROUP
from deploykit.lib import paths
from tests.aws_server import SECTION, as_json
from tests.sweep.halving import LENGTHS, STEPS, counts

JOB = "name: toy\nentrypoint: {script: train.py}\nresources: {time_limit: 5m}\n"

pytestmark = pytest.mark.slow


def check(sweep):
    """Run the sweep: nine trials, of which the best is trained to its end, no step twice."""
    found = sweep("start", "--json", "--sweep", "s")
    assert found["counts"] == {"pruned": 8, "succeeded": 1}
    assert found["best"]["value"] == pytest.approx(1 / STEPS)
    return found


@pytest.mark.torch
def test_on_this_machine(halving, sweep, toy, monkeypatch):
    halving()
    monkeypatch.setenv("DEPLOYKIT_BACKEND", "local")
    (toy / "job.yaml").write_text(JOB)
    assert counts(check(sweep)) == LENGTHS


@pytest.mark.slurm
@pytest.mark.xdist_group("slurm")
def test_on_slurm(cluster, halving, sweep, toy, monkeypatch):
    halving(max_cost="100 USD")
    monkeypatch.setenv("DEPLOYKIT_BACKEND", "slurm")
    section = "slurm: {price: 36 USD/node-hour, restarts: {preemption: 0, time_limit: 0}}\n"
    (toy / "job.yaml").write_text(JOB + section)
    found = check(sweep)
    assert counts(found) == LENGTHS
    assert found["cost"]["currency"] == "USD"


class Service:
    """Training jobs that train to their rung and wait; a job resumes from its checkpoints in S3."""

    def __init__(self, aws):
        self._aws, self._logs = aws, boto3.client("logs", "us-east-1")
        self._logs.create_log_group(logGroupName=LOG_GROUP)
        self.trained = defaultdict(list)
        """The steps that were trained, by the location of the checkpoints."""
        self._stopped = set()
        aws.answers["StopTrainingJob"] = self._stop
        aws.respond = self._respond

    def _stop(self, body):
        self._stopped.add(body["TrainingJobName"])
        return {}

    def _respond(self, one, forward):
        status, headers, content = forward()
        if one.action == "CreateTrainingJob" and status == 200:
            self._log(json.loads(one.body)["TrainingJobName"])
        if one.action != "DescribeTrainingJob" or status != 200:
            return status, headers, content
        job = json.loads(content)
        state = self._train(job) if job["TrainingJobName"] not in self._stopped else "Stopped"
        return as_json(200, {**job, "TrainingJobStatus": state, "SecondaryStatus": state})

    def _log(self, job, *lines):
        names = {"logGroupName": LOG_GROUP, "logStreamName": f"{job}/algo-1-1"}
        if not lines:
            self._logs.create_log_stream(**names)
            return
        at = int(time.time() * 1000)
        events = [{"timestamp": at + number, "message": one} for number, one in enumerate(lines)]
        self._logs.put_log_events(**names, logEvents=events)

    def _train(self, job):
        name, steps = job["TrainingJobName"], self.trained[job["CheckpointConfig"]["S3Uri"]]
        rung = known_rung(int(name.split("-")[1]))
        lr = float(json.loads(json.loads(job["HyperParameters"]["deploykit_argv_0"]))[-1])
        least = STEPS if rung is None else min(3**rung, STEPS)
        more = range(len(steps) + 1, least + 1)
        steps.extend(more)
        if more:
            self._log(name, *(f"step {step} loss={(lr - 0.03) ** 2 + 1 / step}" for step in more))
        return "Completed" if len(steps) == STEPS else "InProgress"


def known_rung(number):
    """The rung that a trial may train to, from the journal."""
    lines = (paths.state() / "sweeps/s/journal.log").read_text().splitlines()
    records = [one for one in map(json.loads, lines) if one.get("trial_id") == number]
    rungs = [one["user_attr"]["rung"] for one in records if "rung" in one.get("user_attr", {})]
    return [0, *rungs][-1]


@pytest.mark.aws
def test_on_sagemaker(aws, halving, sweep, toy, monkeypatch):
    service = Service(aws)
    halving(max_cost="100 USD")
    monkeypatch.setenv("DEPLOYKIT_BACKEND", "sagemaker")
    (toy / "job.yaml").write_text(JOB + SECTION + "checkpoints: s3://my-bucket/kept\n")
    found = check(sweep)
    rates = {one["trial"]: one["parameters"]["lr"] for one in found["trials"]}
    lengths = {rates[int(key.rsplit("-", 1)[1])]: one for key, one in service.trained.items()}
    assert lengths == {rate: list(range(1, length + 1)) for rate, length in LENGTHS.items()}
    assert found["best"]["value"] == pytest.approx(1 / STEPS)
