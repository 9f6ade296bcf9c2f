"""The cluster's configuration, judged by AWS ParallelCluster itself, which asks a moto server."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from pathlib import Path

import boto3
import pytest

from deploykit.doctor import infra
from tests.aws_server import moto_server

PCLUSTER = Path(__file__).parents[3] / ".venv-pcluster/bin/pcluster"
REGION = "us-east-1"
AMI = {
    "ami_id": "ami-0123456789abcdef0",
    "name": "aws-parallelcluster-3.16.1-ubuntu-2204-lts-hvm-x86_64-202601010000",
    "description": "for ParallelCluster",
    "owner_id": "247102896272",
    "public": True,
    "virtualization_type": "hvm",
    "architecture": "x86_64",
    "state": "available",
    "platform": None,
    "image_type": "machine",
    "hypervisor": "xen",
    "root_device_name": "/dev/sda1",
    "root_device_type": "ebs",
    "sriov": "simple",
    "creation_date": "2026-01-01T00:00:00.000Z",
}
UNKNOWN_TO_MOTO = ("HeadNodeLaunchTemplate", "KeyPair", "ComputeResourceLaunchTemplate")
"""Validators whose questions moto does not understand."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.aws,
    pytest.mark.xdist_group("pcluster"),
    pytest.mark.skipif(not PCLUSTER.exists(), reason="run make .venv-pcluster/.ready first"),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A moto server with ParallelCluster's own image, and two of its subnets."""
    amis = tmp_path_factory.mktemp("moto") / "amis.json"
    amis.write_text(json.dumps([AMI]))
    knows = {"MOTO_AMIS_PATH": str(amis), "MOTO_IAM_LOAD_MANAGED_POLICIES": "true"}
    with moto_server(**knows) as port:
        endpoint = f"http://127.0.0.1:{port}"
        network = boto3.client("ec2", REGION, endpoint_url=endpoint, **_keys("aws_{}"))
        yield endpoint, *_subnets(network)


def _subnets(network):
    """A public one, as moto has it, and a private one: p4d has more than one network interface."""
    public = network.describe_subnets()["Subnets"][0]
    vpc = public["VpcId"]
    network.modify_vpc_attribute(VpcId=vpc, EnableDnsHostnames={"Value": True})
    private = network.create_subnet(VpcId=vpc, CidrBlock="172.31.200.0/24")["Subnet"]
    return public["SubnetId"], private["SubnetId"]


def _keys(form):
    names = ("access_key_id", "secret_access_key")
    return {form.format(name if form.islower() else name.upper()): "testing" for name in names}


@pytest.fixture
def dry_run(place, answers, tmp_path):
    """Ask ParallelCluster about the rendered file with some text in it replaced."""
    endpoint, head, compute = place

    def ask(replace=()):
        given = {"cluster.head_subnet": head, "cluster.subnet": compute}
        text = infra.files(infra.load(answers(given)))["cluster.yaml"]
        if replace:
            assert text.count(replace[0]) == 1
            text = text.replace(*replace)
        file = tmp_path / "cluster.yaml"
        file.write_text(text)
        silenced = [f"type:{name}Validator" for name in UNKNOWN_TO_MOTO]
        asked = ["create-cluster", "--dryrun", "true", "--cluster-name", "training"]
        done = subprocess.run(
            [PCLUSTER, *asked, "-c", file, "-r", REGION, "--suppress-validators", *silenced],
            env={
                **_keys("AWS_{}"),
                "AWS_ENDPOINT_URL": endpoint,
                "HOME": str(tmp_path),
                "PATH": os.environ["PATH"],
            },
            capture_output=True,
            text=True,
            check=False,
        )
        with contextlib.suppress(ValueError):
            return json.loads(done.stdout)
        raise AssertionError(done.stdout + done.stderr)

    return ask


def _errors(said):
    found = said.get("configurationValidationErrors", [])
    return [f"{one['type']}: {one['message']}" for one in found if one["level"] == "ERROR"]


def test_it_would_succeed(dry_run):
    said = dry_run()
    assert _errors(said) == []
    assert "Request would have succeeded" in said["message"]


WRONG = {
    ("p4d.24xlarge", "p4d.48xlarge"): "p4d.48xlarge",
    ("MinCount: 0", "MinCount: 5"): "min",
    ("p4d.24xlarge", "g4dn.xlarge"): "EFA",
    ("StorageCapacity: 1200", "StorageCapacity: 7"): "apacity",
}


@pytest.mark.parametrize("replaced", WRONG, ids=lambda pair: pair[1])
def test_what_it_refuses(dry_run, replaced):
    said = json.dumps(dry_run(replaced))
    assert "would have succeeded" not in said
    assert WRONG[replaced] in said
