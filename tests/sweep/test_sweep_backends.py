"""A sweep on each backend: real torchrun, a real Slurm cluster, and AWS's API."""

from __future__ import annotations

import json

import pytest

from deploykit.cli import main as cli
from deploykit.lib import paths
from tests.aws_server import SECTION, sent_requests
from tests.sweep import plain

JOB = "name: toy\nentrypoint: {script: train.py, args: [--lr, 9]}\nresources: {time_limit: 5m}\n"


@pytest.fixture
def job(toy, monkeypatch):
    """The job file of a backend."""

    def file(backend, text=""):
        monkeypatch.setenv("DEPLOYKIT_BACKEND", backend)
        (toy / "job.yaml").write_text(JOB + text)

    return file


@pytest.mark.torch
@pytest.mark.quick
def test_on_this_machine(write, sweep, job, monkeypatch):
    job("local")
    monkeypatch.setenv("DEPLOYKIT_BACKEND", "local")
    write(sampler="tpe", parallel=3)
    found = sweep("start", "--json")
    assert found["counts"] == {"succeeded": 3}
    best = found["best"]
    assert best["value"] == min(one["value"] for one in found["trials"])
    sweep("best", "--write", "best.yaml")
    assert cli.main(["submit", "best.yaml", "--run", "again", "--wait"]) == 0
    passed = eval((paths.run_folder("again") / "args").read_text())
    assert passed == ["--lr", "9", "--lr", best["parameters"]["lr"]]


@pytest.mark.slurm
@pytest.mark.xdist_group("slurm")
def test_on_slurm(cluster, write, sweep, job):
    """A bad trial is cancelled early, a better one is not, and the price of all is known."""
    job("slurm", "slurm: {price: 36 USD/node-hour, restarts: {preemption: 0, time_limit: 0}}\n")
    endless = "while lr > 0.1: step += 1; print(f'step {step} loss={lr}', flush=1); time.sleep(1)"
    parameters = {"lr": {"choice": [0.031, 0.9, 0.03]}, "do": {"choice": [endless]}}
    keys = {"sampler": "grid", "seed": 5, "pruner": "asha", "max_cost": "100 USD"}  # in this order
    write(parameters=json.dumps(parameters), **keys)
    found = sweep("start", "--json")
    states = [one["state"] for one in found["trials"]]
    assert states == ["succeeded", "pruned", "succeeded"]
    assert found["trials"][1]["runs"][0]["state"] == "cancelled"
    assert found["best"]["parameters"]["lr"] == "0.03"
    assert found["cost"]["currency"] == "USD"
    assert set(plain.started(paths.state()).values()) == {1}


@pytest.mark.aws
def test_on_sagemaker(aws, write, sweep, job):
    """moto runs nothing, and ends each job at once; the service tells the metric."""
    job("sagemaker", SECTION)
    values = iter((0.5, 0.25, 0.75))
    known = {}

    def describe(body):
        name = body["TrainingJobName"]
        if name not in known:
            known[name] = next(values)
        metric = {"MetricName": "loss", "Value": known[name], "Timestamp": 1.0}
        ended = {"TrainingJobStatus": "Completed", "SecondaryStatus": "Completed"}
        ended["TrainingJobArn"] = f"arn:aws:sagemaker:us-east-1:123456789012:training-job/{name}"
        return {**body, **ended, "FinalMetricDataList": [metric], "BillableTimeInSeconds": 360}

    aws.answers["DescribeTrainingJob"] = describe
    write(sampler="grid", trials=3, parameters="{lr: {choice: [0.10, 0.20, 0.30]}}")
    found = sweep("start", "--json", "--sweep", "s")
    assert found["best"]["trial"] == 1
    assert found["cost"] == {"amount": 0.42, "currency": "USD"}
    requests = sent_requests(aws)
    assert [one["TrainingJobName"] for one in requests] == ["s-0", "s-1", "s-2"]
    for one, value in zip(requests, ("0.10", "0.20", "0.30"), strict=True):
        words = json.loads(json.loads(one["HyperParameters"]["deploykit_argv_0"]))
        assert words[words.index("--") + 1 :] == ["train.py", "--lr", "9", "--lr", value]
