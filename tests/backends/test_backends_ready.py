"""`backends` asks the target whether a job could be submitted from here, and says what is missing.

Slurm's own commands and a moto server answer; where nothing listens, nothing is simulated.
"""

from __future__ import annotations

import json

import pytest

from deploykit.backends import slurm
from deploykit.cli import main as cli
from tests.ports import free_port
from tests.programs import needs

SECRET = "aTest/Secret+of+20+letters"
needs_slurm_commands = needs("scontrol")


def ask(capsys, name):
    """The row of a backend, and everything that was printed for people."""
    assert cli.main(["backends", name, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert cli.main(["backends", name]) == 0
    printed = capsys.readouterr()
    assert all(text in printed.out for text in row["missing"])
    assert all(f"{name}: {how}" in printed.err for how in row["how"])
    return row, printed.out + printed.err


@pytest.fixture
def no_aws(monkeypatch):
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE", "AWS_ACCESS_KEY_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


def test_without_slurms_commands_a_login_node_is_proposed(capsys, monkeypatch):
    monkeypatch.setenv("PATH", "")
    row, _ = ask(capsys, "slurm")
    assert (row["usable"], row["missing"]) == (False, list(slurm.PROGRAMS))
    (how,) = row["how"]
    assert how.startswith("run deploykit on a login node, or set slurm.host")


@needs_slurm_commands
def test_slurms_commands_without_a_cluster_are_not_enough(capsys, monkeypatch, tmp_path):
    (tmp_path / "empty.conf").touch()
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "empty.conf"))
    row, _ = ask(capsys, "slurm")
    assert not row["usable"]
    assert row["missing"][0].startswith("scontrol: ")


@needs_slurm_commands
def test_a_controller_that_is_down_is_found_without_waiting_for_it(capsys, monkeypatch, tmp_path):
    conf = tmp_path / "slurm.conf"
    node = "NodeName=c1 NodeHostname=localhost\nPartitionName=p Nodes=c1\n"
    port = f"SlurmctldHost=localhost\nSlurmctldPort={free_port()}\n"
    conf.write_text(f"ClusterName=x\nAuthType=auth/munge\n{port}{node}")
    monkeypatch.setenv("SLURM_CONF", str(conf))
    row, _ = ask(capsys, "slurm")
    assert not row["usable"]
    assert "is DOWN" in row["missing"][0]
    assert row["how"][0].startswith("ask the site whether the cluster is up")


@pytest.mark.slurm
@pytest.mark.xdist_group("slurm")
def test_a_cluster_that_answers_is_usable(cluster, capsys):
    row, _ = ask(capsys, "slurm")
    assert (row["usable"], row["missing"], row["how"]) == (True, [], [])


def test_without_region_and_credentials_both_are_missing(capsys, no_aws, monkeypatch):
    row, _ = ask(capsys, "sagemaker")
    assert row["missing"] == ["no AWS region is set", "no AWS credentials found"]
    region = "set sagemaker.region in the job file; for this check: export AWS_REGION=us-east-1"
    assert row["how"] == [region, "run `aws configure` or `aws sso login`, or set AWS_PROFILE"]
    monkeypatch.setenv("AWS_PROFILE", "nope")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    row, _ = ask(capsys, "sagemaker")
    why = "no valid AWS credentials: The config profile (nope) could not be found"
    assert row["missing"] == [why]


def test_where_aws_cannot_be_reached_credentials_are_not_enough(capsys, no_aws, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    row, printed = ask(capsys, "sagemaker")
    assert row["missing"][0].startswith("cannot reach AWS in us-east-1")
    assert SECRET not in printed


@pytest.mark.aws
def test_credentials_that_aws_knows_and_refuses(aws, enforced, capsys, monkeypatch):
    """They are never printed."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    row, printed = ask(capsys, "sagemaker")
    assert (row["usable"], row["missing"]) == (True, [])
    assert SECRET not in printed
    enforced()
    row, _ = ask(capsys, "sagemaker")
    assert not row["usable"]
    assert "GetCallerIdentity" in row["missing"][0]
    assert "aws sts get-caller-identity" in row["how"][0]
