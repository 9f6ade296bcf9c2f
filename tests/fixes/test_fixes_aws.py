"""Commands of fixes for SageMaker, by the AWS CLI and deploykit against a moto server.

Moto starts no job, so none fails: each command must be accepted, and show what its step is about.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import boto3
import pytest

from tests.aws_server import SECTION
from tests.doctor.aws_vpcs import TRUST
from tests.doctor.terraform import AWS
from tests.fixes.printed import commands, shell, starting

pytestmark = [
    pytest.mark.aws,
    pytest.mark.slow,
    pytest.mark.skipif(AWS is None, reason="the AWS CLI is not installed"),
]
JOB = """\
name: one
entrypoint: {script: train.py}
resources: {nodes: 1, processes_per_node: 1, time_limit: 5m}
"""


@pytest.fixture
def found(tmp_path, capsys):
    """A function: the commands in the fix of the cause that a line of a log has."""

    def of(cause, line):
        log = tmp_path / "a.log"
        log.write_text(line + "\n")
        return commands(capsys, log, cause)

    return of


@pytest.fixture
def accepted(aws):
    """A function that runs a command, with words in capitals replaced: what it prints."""

    def run(command, **words):
        for word, value in words.items():
            command = command.replace(word, value)
        folders = f"{Path(AWS).parent}:{os.environ['PATH']}"
        done = shell(f"PATH={folders}:$PATH {command}", AWS_DEFAULT_REGION="us-east-1")
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture
def job(tmp_path, monkeypatch):
    """A job for SageMaker in this folder."""
    folder = tmp_path / "source"
    folder.mkdir()
    monkeypatch.chdir(folder)
    Path("train.py").write_text("print('ran')\n")
    Path("job.yaml").write_text(JOB + SECTION)


def test_a_bucket(found, accepted):
    s3 = boto3.client("s3", "us-east-1")
    s3.put_object(Bucket="my-bucket", Key="data/part", Body=b"x")
    steps = found("sagemaker_s3_access", "s3://my-bucket/data: AccessDenied")
    assert " part" in accepted(starting(steps, "aws s3 ls s3://my-bucket/"), PATH="data/")
    accepted(starting(steps, "aws s3api head-bucket --bucket my-bucket"))
    policy = {"Version": "2012-10-17", "Statement": []}
    s3.put_bucket_policy(Bucket="my-bucket", Policy=json.dumps(policy))
    steps = found("source_replaced", "train.py is not the one that was submitted (sha256)")
    shown = accepted(starting(steps, "aws s3api get-bucket-policy "), BUCKET="my-bucket")
    assert "2012-10-17" in shown


def test_a_role_and_an_identity(found, accepted):
    boto3.client("iam", "us-east-1").create_role(
        RoleName="training", AssumeRolePolicyDocument=json.dumps(TRUST)
    )
    steps = found("sagemaker_role", "Could not assume role")
    shown = accepted(starting(steps, "aws iam get-role "), **{" ROLE": " training"})
    assert "sagemaker.amazonaws.com" in shown
    steps = found("sagemaker_permission", "Unable to locate credentials")
    assert "123456789012" in accepted(starting(steps, "aws sts get-caller-identity"))


def test_an_endpoint_and_the_zones_of_an_instance_type(found, accepted):
    ec2 = boto3.client("ec2", "us-east-1")
    vpc = ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
    table = ec2.create_route_table(VpcId=vpc)["RouteTable"]["RouteTableId"]
    steps = found("sagemaker_vpc_s3", "Please ensure that the subnet's route table has a route")
    words = {"VPC": vpc, "REGION": "us-east-1", "TABLE": table}
    made = accepted(starting(steps, "aws ec2 create-vpc-endpoint "), **words)
    assert json.loads(made)["VpcEndpoint"]["RouteTableIds"] == [table]
    steps = found("sagemaker_instance_unavailable", "Invalid instance type")
    words = {"TYPE": "g5.xlarge", "REGION": "us-east-1"}
    shown = accepted(starting(steps, "aws ec2 describe-instance-type-offerings "), **words)
    assert "us-east-1" in shown


def test_deploykit_itself(found, accepted, job):
    """A submit that is repeated, one with a larger disk, and the check of the job file."""
    steps = found("sagemaker_capacity", "InsufficientInstanceCapacity: try later")
    again = accepted(starting(steps, "deploykit submit --backend sagemaker"))
    steps = found("sagemaker_instance_unavailable", "Invalid instance type")
    assert "no errors for sagemaker" in accepted(starting(steps, "deploykit check"))
    steps = found("disk_full", "OSError: [Errno 28] No space left on device: 'ckpt.pt'")
    larger = starting(steps, "deploykit submit --backend sagemaker --set sagemaker.volume_size=")
    run = accepted(larger, GIGABYTES="70").partition(":")[0]
    described = boto3.client("sagemaker", "us-east-1").describe_training_job(TrainingJobName=run)
    assert described["ResourceConfig"]["VolumeSizeInGB"] == 70
    assert again.partition(":")[0] != run
