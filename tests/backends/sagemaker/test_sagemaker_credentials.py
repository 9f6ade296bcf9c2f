"""A profile and an assumed role send a job, and ask about it; jobs of another account."""

from __future__ import annotations

import json
import re
from pathlib import Path

import boto3
import pytest

from deploykit.backends import sagemaker
from deploykit.backends.sagemaker import aws as clients
from deploykit.backends.sagemaker import jobs
from deploykit.cli import main as cli
from deploykit.lib import paths
from deploykit.lib.errors import NotPermitted
from tests.aws_server import SECTION

pytestmark = pytest.mark.aws
OTHER = "222222222222"
SUBMITTER = f"arn:aws:iam::{OTHER}:role/submitter"
CONFIG = """\
[profile research]
aws_access_key_id = RESEARCH
aws_secret_access_key = secret
"""


@pytest.fixture
def deploykit(project, tmp_path, monkeypatch, capsys):
    """Run a command with keys added to the job's section `sagemaker`; returns code and output."""
    monkeypatch.setenv("DEPLOYKIT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    (tmp_path / "config").write_text(CONFIG)
    monkeypatch.setattr(clients, "_ASSUMED", {})
    text = (project / "job.yaml").read_text()

    def run(*argv, **keys):
        more = "".join(f"  {key}: {value}\n" for key, value in keys.items())
        (project / "job.yaml").write_text(text + SECTION + more)
        code = cli.main(list(argv))
        shown = capsys.readouterr()
        return code, shown.out + shown.err

    return run


def access_keys(aws):
    """The keys that signed the requests so far, by action or method and path."""
    found = re.compile(r"Credential=(\w+)/")
    return {one.action: found.search(one.headers["authorization"])[1] for one in aws.requests}


SEND = ("submit", "--backend", "sagemaker", "--run", "digits-1")


def test_the_profile_of_the_job_sends_it_and_asks_about_it(aws, deploykit, streams):
    aws.answers["StopTrainingJob"] = lambda _: {}
    code, shown = deploykit("submit", "--backend", "sagemaker", "--dry-run", profile="research")
    assert code == 0, shown
    assert "sent with profile research" in shown
    assert "RESEARCH" not in shown
    streams("digits-1/algo-1-1", [(0, "hello")])
    aws.requests.clear()
    for argv in (SEND, ("status", "digits-1"), ("logs", "digits-1"), ("cancel", "digits-1")):
        code, shown = deploykit(*argv, profile="research")
        assert code == 0, shown
    deploykit("fetch", "digits-1", "--to", "results", profile="research")
    keys = access_keys(aws)
    assert set(keys.values()) == {"RESEARCH"}
    assert {"CreateTrainingJob", "DescribeTrainingJob", "GetLogEvents"} <= set(keys)
    assert any("list-type=2" in path for path in keys)


def test_an_unknown_profile_is_named(aws, deploykit):
    code, shown = deploykit(*SEND, profile="reserch")
    assert code == 77, shown
    assert "The config profile (reserch) could not be found" in shown


@pytest.fixture
def assumed(aws, deploykit):
    """A run that a role of another account has sent; its folder."""
    keys = {"assume_role": SUBMITTER, "bucket_owner": '"123456789012"'}
    code, shown = deploykit(*SEND, **keys)
    assert code == 0, shown
    return paths.run_folder("digits-1")


def test_an_assumed_role_sends_the_job_and_asks_about_it(aws, deploykit, assumed):
    code, shown = deploykit("status", "digits-1")
    assert (code, "succeeded" in shown) == (0, True), shown
    asked = [one for one in aws.requests if b"Action=AssumeRole" in one.body]
    assert len(asked) == 1  # not once for every client
    assert b"submitter" in asked[0].body
    arn = json.loads((assumed / "training-job.json").read_text())["TrainingJobArn"]
    assert arn.split(":")[4] == OTHER


def own_credentials(folder):
    """The same run as if its job file had named no role."""
    recorded = json.loads((folder / "job.json").read_text())
    recorded["sagemaker"].pop("assume_role")
    (folder / "job.json").write_text(json.dumps(recorded))


@pytest.mark.parametrize("verb", ["status", "logs", "cancel", "fetch"])
def test_each_verb_says_that_the_job_is_of_another_account(aws, deploykit, assumed, verb):
    """By the account that really runs it, which is not that of its role in this job."""
    aws.answers["StopTrainingJob"] = None
    aws.respond = lambda one, forward: not_found() if one.action == "StopTrainingJob" else forward()
    own_credentials(assumed)
    Path(assumed / "plan.json").unlink()  # so that fetch asks for the job
    _, shown = deploykit(verb, "digits-1")
    said = f"you are logged in to account 123456789012, but the job belongs to account {OTHER}"
    assert said in " ".join(shown.split()), shown


def not_found():
    body = json.dumps({"__type": "ValidationException", "message": "Requested resource not found."})
    return 400, [("Content-Type", "application/x-amz-json-1.1")], body.encode()


def test_the_estimators_session_has_the_same_credentials(monkeypatch, tmp_path, planned):
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    (tmp_path / "config").write_text(CONFIG)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "ENVIRONMENT")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    plan = planned(profile="research")
    session = clients.session(plan.target, plan.options.credentials)
    assert session.get_credentials().access_key == "RESEARCH"
    assert session.region_name == "us-east-1"
    with pytest.raises(NotPermitted, match="nobody"):
        clients.session("us-east-1", clients.Credentials("nobody"))


def test_the_plan_asks_nobody_about_the_credentials(planned, monkeypatch):
    monkeypatch.setattr(boto3, "Session", None)
    plan = planned(profile="no-such-profile", assume_role=SUBMITTER)
    assert plan.summary.endswith(f", sent with profile no-such-profile, assumed role {SUBMITTER}")
    assert "no-such-profile" not in plan.text


def test_a_run_without_a_job_file_uses_the_environment(tmp_path):
    assert jobs.credentials(tmp_path) == clients.ENVIRONMENT
    assert sagemaker.Options.profile is None
