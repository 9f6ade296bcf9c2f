"""Responses of AWS or of a fake endpoint, and of a folder of saved responses."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploykit.backends.sagemaker import doctor
from deploykit.backends.slurm import doctor as slurm_doctor
from deploykit.backends.slurm import options as slurm_options
from deploykit.backends.slurm import site
from deploykit.doctor import collect, infra, local, network
from deploykit.doctor.infra import Answers
from deploykit.doctor.requirements import HTTPS, Flow, Requirements
from deploykit.job.decode import decode
from deploykit.job.model import Entrypoint, JobSpec, Resources
from deploykit.lib.errors import NotFound
from tests.fuzz.foreign import files, given, outcome, unlike

NEEDS = Requirements(
    region="us-east-1",
    role="arn:aws:iam::123456789012:role/training",
    instance_type="p4d.24xlarge",
    nodes=2,
    subnets=("subnet-1",),
    groups=("sg-1",),
    written=("bucket",),
    read=("other",),
    owner="123456789012",
    quota="ml.p4d.24xlarge for training job usage",
    secrets=("ssm",),
    peers=(Flow("tcp", (HTTPS,)),),
)
POLICY = {
    "Version": "2012-10-17",
    "Statement": [
        {"Effect": "Allow", "Principal": {"Service": "sagemaker.amazonaws.com"}, "Action": "*"}
    ],
}
PERMISSION = {
    "IpProtocol": "tcp",
    "FromPort": 1,
    "ToPort": 2,
    "IpRanges": [{"CidrIp": "10.0.0.0/8"}],
    "UserIdGroupPairs": [{"GroupId": "sg-1"}],
    "PrefixListIds": [{"PrefixListId": "pl-1"}],
}
ENTRY = {
    "RuleNumber": 100,
    "Egress": False,
    "CidrBlock": "0.0.0.0/0",
    "Protocol": "6",
    "RuleAction": "allow",
    "PortRange": {"From": 1, "To": 65535},
}
ANSWERS = {
    "get-caller-identity": {"Account": "123456789012", "Arn": "arn:aws:iam::123456789012:user/me"},
    "get-role": {"Role": {"AssumeRolePolicyDocument": POLICY}},
    "role-policies": {"Documents": [POLICY], "Boundary": POLICY},
    "get-bucket-location": {"LocationConstraint": None},
    "get-bucket-location-bucket": {"LocationConstraint": "eu-west-1"},
    "list-service-quotas": {
        "Quotas": [{"QuotaCode": "L-1", "QuotaName": NEEDS.quota, "Value": 1.0}]
    },
    "describe-vpcs": {
        "Vpcs": [{"VpcId": "vpc-1", "CidrBlock": "10.0.0.0/16", "InstanceTenancy": "dedicated"}]
    },
    "describe-vpc-attribute-enableDnsSupport-vpc-1": {"EnableDnsSupport": {"Value": False}},
    "describe-vpc-attribute-enableDnsHostnames-vpc-1": {"EnableDnsHostnames": {"Value": False}},
    "describe-subnets": {
        "Subnets": [
            {
                "SubnetId": "subnet-1",
                "VpcId": "vpc-1",
                "AvailabilityZone": "us-east-1a",
                "CidrBlock": "10.0.0.0/24",
                "AvailableIpAddressCount": 1,
            }
        ]
    },
    "describe-security-groups": {
        "SecurityGroups": [
            {
                "GroupId": "sg-1",
                "VpcId": "vpc-1",
                "IpPermissions": [PERMISSION],
                "IpPermissionsEgress": [PERMISSION],
            }
        ]
    },
    "describe-network-acls": {
        "NetworkAcls": [
            {
                "NetworkAclId": "acl-1",
                "VpcId": "vpc-1",
                "Entries": [ENTRY],
                "Associations": [{"SubnetId": "subnet-1"}],
            }
        ]
    },
    "describe-route-tables": {
        "RouteTables": [
            {
                "RouteTableId": "rtb-1",
                "VpcId": "vpc-1",
                "Associations": [{"Main": True}],
                "Routes": [{"DestinationCidrBlock": "0.0.0.0/0", "NatGatewayId": "nat-1"}],
            }
        ]
    },
    "describe-vpc-endpoints": {
        "VpcEndpoints": [
            {
                "VpcEndpointId": "vpce-1",
                "VpcId": "vpc-1",
                "VpcEndpointType": "Interface",
                "ServiceName": "com.amazonaws.us-east-1.ecr.api",
                "SubnetIds": ["subnet-1"],
                "Groups": [{"GroupId": "sg-1"}],
                "PolicyDocument": POLICY,
            }
        ]
    },
    "describe-nat-gateways": {
        "NatGateways": [{"NatGatewayId": "nat-1", "VpcId": "vpc-1", "State": "failed"}]
    },
    "describe-prefix-lists": {
        "PrefixLists": [
            {
                "PrefixListName": "com.amazonaws.us-east-1.s3",
                "PrefixListId": "pl-1",
                "Cidrs": ["52.0.0.0/8"],
            }
        ]
    },
}
MACHINE = {
    "python": "python3",
    "torch": "2.10",
    "cuda": "",
    "import_error": "",
    "visible_gpus": 0,
    "gpus": 1,
    "shm_free": 1 << 30,
    "max_open_files": 1024,
    "max_processes": 1,
    "max_locked_memory": 0,
    "has_infiniband": True,
    "interfaces_up": ["eth0"],
    "host_address": "",
}
SITE = {
    "cluster": "prod",
    "version": "23.11",
    "asked": "2026-11-21T00:00:00",
    "accounting": False,
    "gpu_style": "gres",
    "memory": True,
    "pyxis": False,
    "requeue": True,
    "array": 1001,
    "preemption": "preempt/qos REQUEUE",
    "partitions": [
        {
            "name": "gpu",
            "default": True,
            "state": "UP",
            "nodes": 3,
            "seconds": 60,
            "most_nodes": 1,
            "least_nodes": 3,
            "accounts": ["a"],
            "qos": None,
            "preemption": "REQUEUE",
        }
    ],
    "shapes": [
        {
            "partitions": ["gpu"],
            "count": 3,
            "usable": 1,
            "cpus": 4,
            "memory": 1,
            "gpus": 0,
            "features": ["ib"],
        }
    ],
}
INFRA = {
    "name": "training",
    "region": "us-east-1",
    "zone": "us-east-1a",
    "bucket": "my-bucket",
    "email": "me@example.com",
    "monthly_budget": 500,
    "block": "10.0.0.0/16",
    "cluster": {
        "head_subnet": "subnet-0123456789abcdef0",
        "subnet": "subnet-0123456789abcdef1",
        "instance_type": "p4d.24xlarge",
        "max_nodes": 4,
        "efa": True,
        "storage": 1200,
    },
}
JOB = JobSpec("one", Entrypoint("train.py"), Resources(time_limit=600, nodes=2, gpus_per_node=1))


@given(answers=unlike(ANSWERS))
def test_saved_answers_are_judged_or_refused(answers):
    if isinstance(answers, dict) and all(isinstance(one, dict) for one in answers.values()):
        outcome(_judge, answers)


def _judge(answers):
    with doctor.reading(Path("facts")):
        found = list(doctor.findings(network.parse(NEEDS, answers)))
        assert all(one.message for one in found)


def test_the_answers_are_judged_where_nothing_is_wrong_with_them():
    """Else the test above would prove little."""
    found = {one.code for one in doctor.findings(network.parse(NEEDS, ANSWERS))}
    assert len(found) > 5


def test_an_answer_that_aws_does_not_give_is_refused():
    """Before, it ended with exit code 70."""
    with pytest.raises(NotFound, match="not valid AWS responses"):
        _judge({**ANSWERS, "describe-subnets": {"Subnets": [{}]}})


@given(content=files(ANSWERS["describe-vpcs"]))
def test_a_file_of_answers_is_read_or_refused(tmp_path_factory, content):
    folder = tmp_path_factory.mktemp("facts")
    (folder / "describe-vpcs.json").write_bytes(content)
    outcome(collect.load, folder)


@given(content=files(MACHINE))
def test_saved_facts_of_a_machine_are_judged_or_refused(tmp_path_factory, content):
    folder = tmp_path_factory.mktemp("facts")
    (folder / local.FILE).write_bytes(content)
    found = outcome(local.load, folder)
    if isinstance(found, local.LocalMachine):
        assert list(local.findings(JOB, found))


@given(content=files(SITE))
def test_a_saved_site_is_judged_or_refused(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("facts") / "site.json"
    path.write_bytes(content)
    found = outcome(site.load, str(path))
    if isinstance(found, site.Site):
        options = slurm_options.Options()
        problems = list(site.problems(JOB, options, found))
        list(slurm_doctor.findings(found, found.partition(None), problems, None))


@given(tree=unlike(INFRA))
def test_answers_for_infra_are_read_or_refused(tree):
    found, problems = decode(Answers, tree)
    assert (found is None) == bool(problems)
    if found is not None:
        assert all(problem.message for problem in infra.problems(found))
