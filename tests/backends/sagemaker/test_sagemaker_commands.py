"""A job from submit to end through the command line, over HTTP to a moto server.

moto cannot stop a job, and ends each at once; `aws.answers` replaces its responses.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from random import Random

import pytest

from deploykit.backends import sagemaker
from deploykit.bundle import archive as bundles
from deploykit.cli import main as cli
from tests.aws_server import SECTION, as_json, sent_requests
from tests.backends.sagemaker.sagemaker_jobs import vary

pytestmark = [pytest.mark.aws, pytest.mark.slow]
ROOT = Path(__file__).parents[3]
HOSTS, LINES = 4, 10_000
ATTACH = ("attach", "--backend", "sagemaker", "--target", "us-east-1")


@pytest.fixture
def deploykit(project, tmp_path, monkeypatch, capsys):
    """Run a command on one of two computers, each with its own state folder; returns its JSON."""
    with (project / "job.yaml").open("a") as file:
        file.write(SECTION)

    def run(*argv, computer="one", code=0):
        monkeypatch.setenv("DEPLOYKIT_HOME", str(tmp_path / computer))
        capsys.readouterr()
        ended = cli.main([*argv, "--json"])
        shown = capsys.readouterr()
        assert ended == code, shown.out + shown.err
        return shown.out

    return run


def test_a_job_from_submit_to_end(aws, deploykit, streams):
    sent = json.loads(deploykit("submit", "--backend", "sagemaker", "--run", "digits-1"))
    assert sent["handle"] == "sagemaker://us-east-1/digits-1"
    deploykit(*ATTACH, "digits-1", computer="other")

    for host in range(1, HOSTS + 1):
        events = [(number // 100, f"{host}:{number}") for number in range(LINES)]
        streams(f"digits-1/algo-{host}-1", events)
    printed = deploykit("logs", "digits-1", "-f", computer="other")
    logs = [json.loads(line) for line in printed.splitlines()]
    assert len(logs) == HOSTS * LINES
    for host in range(HOSTS):
        texts = [line["text"] for line in logs if line["node"] == host]
        assert texts == [f"{host + 1}:{number}" for number in range(LINES)]
    assert [line["time"] for line in logs] == sorted(line["time"] for line in logs)

    for computer in ("one", "other"):
        (status,) = json.loads(deploykit("status", "digits-1", computer=computer))
        assert (status["state"], status["native"]) == ("succeeded", "Completed/Completed")
        assert status["output"] == "s3://my-bucket/deploykit/runs/digits-1/output/output.tar.gz"
        assert json.loads(deploykit("wait", "digits-1", computer=computer))["exit_code"] == 0


def test_a_job_is_cancelled_from_another_computer(aws, deploykit):
    deploykit("submit", "--backend", "sagemaker", "--run", "digits-1")
    state = ["InProgress", "Training"]

    def stop(body):
        assert body == {"TrainingJobName": "digits-1"}
        state[:] = ["Stopped", "Stopped"]
        return {}

    def describe(body):
        arn = "arn:aws:sagemaker:us-east-1:123456789012:training-job/digits-1"
        job = {**body, "TrainingJobArn": arn}
        return {**job, "TrainingJobStatus": state[0], "SecondaryStatus": state[1]}

    aws.answers |= {"StopTrainingJob": stop, "DescribeTrainingJob": describe}
    attached = json.loads(deploykit(*ATTACH, "digits-1", computer="other"))
    assert (attached["state"], attached["reason"]) == ("running", "training")
    assert json.loads(deploykit("cancel", "digits-1", computer="other"))["state"] == "cancelled"
    assert json.loads(deploykit("wait", "digits-1", code=143))["state"] == "cancelled"


def test_every_request_to_s3_names_the_expected_bucket_owner(aws, deploykit, streams):
    """For every command that calls AWS. moto ignores the owner, so the requests are compared."""
    deploykit("submit", "--backend", "sagemaker", "--run", "digits-1")
    deploykit("submit", "--backend", "sagemaker", "--run", "digits-2")
    aws.answers |= {"StopTrainingJob": lambda _: {}, "ListServiceQuotas": lambda _: {"Quotas": []}}
    deploykit(*ATTACH, "digits-1", computer="other")
    for verb in ("status", "logs", "cancel", "wait"):
        deploykit(verb, "digits-1")
    deploykit("doctor", "--backend", "sagemaker", "--set", "data.train=s3://data-1/a", code=80)
    s3_requests = [
        one for one in aws.requests if "/s3/aws4_request" in one.headers["authorization"]
    ]
    assert [one.method for one in s3_requests] == ["HEAD", "PUT", "HEAD", "GET", "GET"]
    assert {one.headers.get("x-amz-expected-bucket-owner") for one in s3_requests} == {
        "123456789012"
    }


def test_attach_reports_a_missing_job(aws, deploykit):
    answer = json.loads(deploykit(*ATTACH, "digits-9", code=66))
    assert answer["error"]["message"] == "SageMaker has no job digits-9 in us-east-1"
    assert (
        json.loads(deploykit(*ATTACH[:-2], "digits-9", code=64))["error"]["hint"]
        == "pass --target REGION, or set AWS_REGION"
    )


JOBS = 40
THROTTLED = "throttled"
FAULTS = (THROTTLED, "failed before", "failed after")


class Unreliable:
    """5% of the responses are errors: throttled, or failed before or after taking effect."""

    def __init__(self):
        self.random, self.count, self.names = Random(11), dict.fromkeys(FAULTS, 0), []

    def __call__(self, one, forward):
        fault = self.random.choice(FAULTS) if self.random.random() < 0.05 else None
        if fault is None:
            return self._create(one, forward)
        self.count[fault] += 1
        if fault == "failed after":
            self._create(one, forward)
        if one.method != "POST":
            return 503, [], b""
        if fault == THROTTLED:
            return as_json(400, {"__type": "ThrottlingException", "message": "Rate exceeded"})
        return as_json(500, {"__type": "InternalFailure", "message": "failed"})

    def _create(self, one, forward):
        """Refuse a name that exists, as the service does and moto does not."""
        if one.action != "CreateTrainingJob":
            return forward()
        name = json.loads(one.body)["TrainingJobName"]
        if name in self.names:
            return as_json(400, {"__type": "ResourceInUse", "message": f"{name} already exists"})
        self.names.append(name)
        return forward()


def test_every_job_is_created_exactly_once(aws, tmp_path, monkeypatch, source):
    """In spite of errors, each submit succeeds and creates one job."""
    monkeypatch.setattr("botocore.endpoint.time.sleep", lambda _: None)
    aws.respond = Unreliable()
    job, options = vary()
    names = [f"digits-{number}" for number in range(JOBS)]
    for name in names:
        (source / "train.py").write_text(f"print('{name}')\n")  # so that each run uploads
        plan = sagemaker.plan(job, options, run=name, bundle=bundles.scan(source, 10**6))
        handle = sagemaker.submit(plan, tmp_path)
        assert handle.id == name
    assert aws.respond.names == names
    assert all(aws.respond.count.values())
    assert len(sent_requests(aws)) > JOBS


@pytest.mark.parametrize("created", [True, False])
def test_an_interrupted_submit_says_which_run_it_was(aws, deploykit, tmp_path, created):
    """^C while AWS creates the job: the run's id is printed, and `status` finds out."""
    sent, end = threading.Event(), threading.Event()

    def respond(one, forward):
        if one.action != "CreateTrainingJob":
            return forward()
        if created:
            forward()
        sent.set()
        end.wait(60)
        return None

    aws.respond = respond
    submit = subprocess.Popen(
        [sys.executable, "-m", "deploykit", "submit", "--backend", "sagemaker"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "DEPLOYKIT_HOME": str(tmp_path / "one")},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert sent.wait(60)
    submit.send_signal(signal.SIGINT)
    _, said = submit.communicate(timeout=60)
    end.set()
    assert submit.returncode == 130
    run = re.search(r"^(hello-\S+): interrupted during submit", said, re.MULTILINE)[1]
    assert f"`deploykit status {run}`" in said
    aws.respond = lambda _, forward: forward()
    (found,) = json.loads(deploykit("status", run))
    if created:
        assert found["state"] == "succeeded"
    else:
        assert found["state"] == "unsent"
        assert found["reason"] == (
            "the submit was interrupted, and sagemaker has no job for this run; submit it again"
        )
