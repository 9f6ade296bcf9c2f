"""The project's own trainer under SageMaker's real launcher, beside plain torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from sagemaker_hosts import run_on_hosts
from sagemaker_jobs import vary

from deploykit import bundle as bundles
from deploykit.backends import sagemaker

pytestmark = [pytest.mark.aws, pytest.mark.torch, pytest.mark.xdist_group("port-7777")]

TRAINER = Path(__file__).parents[3] / "entrypoints"
ARGUMENTS = ("--epochs", "2", "--batch-size", "64", "--log-every", "1", "--seed", "0")


def test_losses_equal_those_of_four_processes_on_one_machine(aws, tmp_path):
    job, options = vary(sender="boto3", args=ARGUMENTS, env={"OMP_NUM_THREADS": "1"})
    bundle = bundles.scan(TRAINER, job.max_bundle)
    sagemaker.submit(sagemaker.plan(job, options, run="digits-1", bundle=bundle), tmp_path)
    (request,) = [json.loads(one.body) for one in aws.seen if one.action == "CreateTrainingJob"]
    hosts = tmp_path / "hosts"
    hosts.mkdir()
    first, second = run_on_hosts(request, aws.endpoint, 2, hosts)

    theirs, ours = _losses(first), _losses(_on_one_machine(tmp_path / "alone"))
    assert not list(second.iterdir())
    assert list(theirs) == list(range(1, 35))
    assert theirs == pytest.approx(ours, rel=0, abs=1e-6)


def _on_one_machine(folder):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    places = {"DEPLOYKIT_OUTPUT_DIR": str(folder), "DEPLOYKIT_CHECKPOINT_DIR": str(folder)}
    subprocess.run(
        [*torchrun, "train.py", *ARGUMENTS],
        cwd=TRAINER,
        env={**os.environ, **places, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        check=True,
    )
    return folder


def _losses(output):
    lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}
