"""No secret in a plan, a request, the registry, a log or any `--json`: all of them are searched."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import boto3
import pytest
import yaml

from tests.aws_server import SECTION, sent_requests

ROOT = Path(__file__).parents[2]
VALUE = "correct-horse-battery-staple"
KEY = "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY"
"""What stands for an account's secret key."""
PROGRAM = """\
import hashlib, os
print("digest", hashlib.sha256(os.environ["TOKEN"].encode()).hexdigest())
raise SystemExit(3 * (os.environ.get("FAIL") == "1"))
"""


@pytest.fixture
def told(project, tmp_path):
    """Run a verb in the project's folder; what it said is kept for `everything`."""
    said = []

    def run(*words, code=0):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-m", "deploykit", *words],
            env=environment | {"MY_TOKEN": VALUE},
            capture_output=True,
            check=False,
        )
        said.append(done.stdout + done.stderr)
        assert code in (None, done.returncode), said[-1].decode()
        return done.stdout.decode()

    run.said = said
    return run


def write_job(project, **changes):
    job = yaml.safe_load((project / "job.yaml").read_text())
    (project / "train.py").write_text(PROGRAM)
    (project / "job.yaml").write_text(yaml.safe_dump(job | changes))


def everything(told, *folders):
    """Each output, and each file of deploykit's own folder and others: name and bytes."""
    found = {f"output {number}": text for number, text in enumerate(told.said)}
    for folder in (Path(os.environ["DEPLOYKIT_HOME"]), *folders):
        found |= {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return found


def holding(found, secret):
    return [name for name, content in found.items() if secret.encode() in content]


@pytest.mark.torch
@pytest.mark.parametrize("fail", ["0", "1"])
def test_a_secret_reaches_the_program_and_nothing_else(project, told, fail):
    write_job(project, env={"TOKEN": "secret:env:MY_TOKEN", "FAIL": fail})
    told("submit", "--backend", "local", "--dry-run")
    told("submit", "--backend", "local", "--run", "one", "--wait", "--json", code=3 * int(fail))
    assert hashlib.sha256(VALUE.encode()).hexdigest() in told("logs", "one")
    for words in (["logs", "one"], ["status", "one"], ["list"], ["check", "job.yaml"]):
        told(*words, "--json")
    if fail == "1":
        told("diagnose", "one", "--json", code=None)
    found = everything(told)
    assert holding(found, "secret:env:MY_TOKEN") != []
    assert holding(found, VALUE) == []


@pytest.mark.aws
def test_no_secret_goes_to_sagemaker_or_stays_behind(aws, project, told, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", KEY)
    boto3.client("secretsmanager", "us-east-1").create_secret(Name="token", SecretString=VALUE)
    del aws.requests[:]
    section = yaml.safe_load(SECTION)["sagemaker"]
    write_job(project, env={"TOKEN": "secret:secretsmanager:token"}, sagemaker=section)
    told("submit", "--backend", "sagemaker", "--dry-run")
    told("submit", "--backend", "sagemaker", "--run", "one", "--json")
    for words in (["status", "one"], ["list"], ["logs", "one"]):
        told(*words, "--json")
    (request,) = sent_requests(aws)
    assert request["Environment"]["DEPLOYKIT_SECRETS"] == json.dumps(
        {"TOKEN": "secret:secretsmanager:token"}
    )
    found = everything(told) | {f"request {n}": one.body for n, one in enumerate(aws.requests)}
    assert holding(found, VALUE) == []
    assert holding(found, KEY) == []
    assert holding(found, "secret:secretsmanager:token") != []
