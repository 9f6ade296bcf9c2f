"""Credentials of another account than the job's: moto has several, chosen by an assumed role."""

from __future__ import annotations

import json
import logging

import boto3
import pytest

from deploykit.backends import sagemaker
from deploykit.cli import main as cli
from deploykit.job.model import State
from deploykit.lib.errors import NotPermitted
from deploykit.run import state as run_state
from tests.aws_server import SECTION

pytestmark = pytest.mark.aws
OTHER = "666666666666"
SAID = f"you are logged in to account {OTHER}, and the job belongs to account 123456789012"


@pytest.fixture
def become_other(aws, monkeypatch):
    """Log in to the other account."""

    def become():
        role = f"arn:aws:iam::{OTHER}:role/other"
        sts = boto3.client("sts", "us-east-1")
        key = sts.assume_role(RoleArn=role, RoleSessionName="other")["Credentials"]
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", key["AccessKeyId"])
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", key["SecretAccessKey"])
        monkeypatch.setenv("AWS_SESSION_TOKEN", key["SessionToken"])

    return become


def test_status_says_that_the_job_is_of_another_account(become_other, planned, tmp_path):
    plan = planned()
    (tmp_path / "plan.json").write_text(plan.text)
    handle = sagemaker.submit(plan, tmp_path)
    become_other()
    status = sagemaker.status([handle])[handle]
    assert (status.state, status.reason) == (State.UNKNOWN, SAID)


def test_an_interrupted_submit_is_not_unsent_in_another_account(become_other, planned, tmp_path):
    """There is certainly no job only where one would be."""
    (tmp_path / "plan.json").write_text(planned().text)
    assert sagemaker.find("digits-1", tmp_path, "us-east-1") is None
    become_other()
    with pytest.raises(NotPermitted, match=SAID) as caught:
        sagemaker.find("digits-1", tmp_path, "us-east-1")
    assert "AWS_PROFILE" in caught.value.hint


def test_the_account_that_pays_is_the_one_that_sent(become_other, planned, tmp_path, caplog):
    """AWS refuses a role of another account; moto does not."""
    caplog.set_level(logging.WARNING)
    sagemaker.submit(planned(), tmp_path)
    assert caplog.text == ""
    become_other()
    boto3.client("s3", "us-east-1").create_bucket(Bucket="other-bucket")
    sagemaker.submit(planned("digits-2", bucket="other-bucket"), tmp_path)
    assert f"digits-2 runs in account {OTHER}, which pays for it" in caplog.text


def test_wait_ends_where_there_is_no_such_job(become_other, project, capsys, monkeypatch):
    with (project / "job.yaml").open("a") as file:
        file.write(SECTION)
    assert cli.main(["submit", "--backend", "sagemaker", "--run", "digits-1"]) == 0
    become_other()
    monkeypatch.setattr(run_state, "_MISSING", 0.0)
    capsys.readouterr()
    assert cli.main(["wait", "digits-1", "--json"]) == 83
    assert json.loads(capsys.readouterr().out)["reason"] == SAID
