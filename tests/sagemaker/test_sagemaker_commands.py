"""The whole life of a job through the command line, over HTTP to a moto server.

moto cannot stop a job, and ends each at once: what it says of that comes from `aws.answers`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from aws_server import SECTION, as_json, sent_requests
from sagemaker_jobs import vary

from deploykit import bundle as bundles
from deploykit.backends import sagemaker

pytestmark = pytest.mark.aws
ROOT = Path(__file__).parents[2]
HOSTS, LINES = 4, 10_000


@pytest.fixture
def tell(project, tmp_path):
    """Run a verb as a user does, on one machine or another; its answer as JSON."""
    with (project / "job.yaml").open("a") as file:
        file.write(SECTION)

    def run(*words, machine="one", code=0):
        done = subprocess.run(
            [sys.executable, "-m", "deploykit", *words, "--json"],
            env={**os.environ, "PYTHONPATH": str(ROOT), "DEPLOYKIT_HOME": str(tmp_path / machine)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    return run


def test_a_life(aws, tell, streams):
    sent = json.loads(tell("submit", "--backend", "sagemaker", "--run", "digits-1"))
    assert sent["handle"] == "sagemaker://us-east-1/digits-1"
    tell("attach", "digits-1", "--region", "us-east-1", machine="other")

    for host in range(1, HOSTS + 1):
        events = [(number // 100, f"{host}:{number}") for number in range(LINES)]
        streams(f"digits-1/algo-{host}-1", events)
    said = tell("logs", "digits-1", "-f", machine="other")
    logs = [json.loads(line) for line in said.splitlines()]
    assert len(logs) == HOSTS * LINES
    for host in range(HOSTS):
        mine = [line["text"] for line in logs if line["node"] == host]
        assert mine == [f"{host + 1}:{number}" for number in range(LINES)]
    assert [line["time"] for line in logs] == sorted(line["time"] for line in logs)

    for machine in ("one", "other"):
        (status,) = json.loads(tell("status", "digits-1", machine=machine))
        assert (status["state"], status["native"]) == ("succeeded", "Completed/Completed")
        assert status["output"] == "s3://my-bucket/deploykit/runs/digits-1/output/output.tar.gz"
        assert json.loads(tell("wait", "digits-1", machine=machine))["exit_code"] == 0


def test_a_job_that_is_stopped_from_another_machine(aws, tell):
    tell("submit", "--backend", "sagemaker", "--run", "digits-1")
    state = ["InProgress", "Training"]

    def stop(body):
        assert body == {"TrainingJobName": "digits-1"}
        state[:] = ["Stopped", "Stopped"]
        return {}

    def describe(body):
        return {**body, "TrainingJobStatus": state[0], "SecondaryStatus": state[1]}

    aws.answers |= {"StopTrainingJob": stop, "DescribeTrainingJob": describe}
    taken = json.loads(tell("attach", "digits-1", "--region", "us-east-1", machine="other"))
    assert (taken["state"], taken["reason"]) == ("running", "training")
    assert json.loads(tell("cancel", "digits-1", machine="other"))["state"] == "cancelled"
    assert json.loads(tell("wait", "digits-1", code=143))["state"] == "cancelled"


def test_every_request_to_s3_names_the_account_that_must_own_the_bucket(aws, tell, streams):
    """Through every verb that asks AWS. moto lets anybody's bucket pass, so the requests count."""
    tell("submit", "--backend", "sagemaker", "--run", "digits-1")
    tell("submit", "--backend", "sagemaker", "--run", "digits-2")
    aws.answers |= {"StopTrainingJob": lambda _: {}, "ListServiceQuotas": lambda _: {"Quotas": []}}
    tell("attach", "digits-1", "--region", "us-east-1", machine="other")
    for verb in ("status", "logs", "cancel", "wait"):
        tell(verb, "digits-1")
    tell("doctor", "--backend", "sagemaker", "--set", "data.train=s3://data-1/a", code=80)
    stored = [one for one in aws.seen if "/s3/aws4_request" in one.headers["authorization"]]
    assert [one.method for one in stored] == ["HEAD", "PUT", "HEAD", "GET", "GET"]
    assert {one.headers.get("x-amz-expected-bucket-owner") for one in stored} == {"123456789012"}


def test_there_is_no_such_job_to_take_up(aws, tell):
    said = json.loads(tell("attach", "digits-9", "--region", "us-east-1", code=66))
    assert said["error"]["message"] == "sagemaker has no job digits-9 in us-east-1"
    assert (
        json.loads(tell("attach", "digits-9", code=64))["error"]["hint"]
        == "--region, or AWS_REGION"
    )


JOBS = 100
BUSY = "throttled"
FAULTS = (BUSY, "broken before", "broken after")


class Moody:
    """5% of all answers are bad: throttled, or broken before or after the request took effect."""

    def __init__(self):
        self.chance, self.count, self.names = Random(11), dict.fromkeys(FAULTS, 0), []

    def __call__(self, one, forward):
        fault = self.chance.choice(FAULTS) if self.chance.random() < 0.05 else None
        if fault is None:
            return self._create(one, forward)
        self.count[fault] += 1
        if fault == "broken after":
            self._create(one, forward)
        if one.method != "POST":
            return 503, [], b""
        if fault == BUSY:
            return as_json(400, {"__type": "ThrottlingException", "message": "Rate exceeded"})
        return as_json(500, {"__type": "InternalFailure", "message": "broken"})

    def _create(self, one, forward):
        """moto takes a name twice; the service does not."""
        if one.action != "CreateTrainingJob":
            return forward()
        name = json.loads(one.body)["TrainingJobName"]
        if name in self.names:
            return as_json(400, {"__type": "ResourceInUse", "message": f"{name} is there already"})
        self.names.append(name)
        return forward()


def test_every_job_is_sent_exactly_once(aws, tmp_path, monkeypatch, source):
    """Whatever the answers: each submit has worked, and nothing was started twice."""
    monkeypatch.setattr("botocore.endpoint.time.sleep", lambda _: None)
    aws.mood = Moody()
    job, options = vary(sender="boto3")
    names = [f"digits-{number}" for number in range(JOBS)]
    for name in names:
        (source / "train.py").write_text(f"print('{name}')\n")  # so that each is uploaded
        plan = sagemaker.plan(job, options, run=name, bundle=bundles.scan(source, 10**6))
        handle = sagemaker.submit(plan, tmp_path)
        assert handle.id == name
    assert aws.mood.names == names
    assert all(aws.mood.count.values())
    assert len(sent_requests(aws)) > JOBS
