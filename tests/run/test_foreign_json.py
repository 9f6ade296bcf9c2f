"""Untrusted JSON, deeply nested or of another shape: an error message, never a crash."""

from __future__ import annotations

import json

import pytest

from deploykit.cli import main as cli

DEEP = "[" * 100_000
DIGITS = '{"exit_code": ' + "9" * 5000 + "}"
AWS = (
    "sagemaker={region: us-east-1, bucket: my-bucket, instance_type: ml.g5.xlarge, "
    "subnets: [subnet-0123456789abcdef0], security_group_ids: [sg-0123456789abcdef0], "
    "role: 'arn:aws:iam::123456789012:role/r', "
    "image_uri: '763104351884.dkr.ecr.us-east-1.amazonaws.com/p:1'}"
)
SHAPES = {
    "get-caller-identity": {"Account": [], "Arn": {}},
    "get-role": {"Role": {"AssumeRolePolicyDocument": DEEP}},
    "role-policies": {"Documents": 7},
    "describe-subnets": {"Subnets": [{"SubnetId": 7}]},
    "describe-vpcs": {"Vpcs": [{"VpcId": "v", "CidrBlock": "x; touch canary"}]},
    "describe-route-tables": {"RouteTables": "x"},
    "describe-network-acls": {"NetworkAcls": [{"NetworkAclId": "a", "VpcId": "b", "Entries": [7]}]},
    "describe-security-groups": {"SecurityGroups": [None]},
}


def doctor(folder, *argv):
    return cli.main(["doctor", "--from", str(folder), *argv])


@pytest.mark.parametrize(
    "text", [DEEP, DIGITS, "", "\0", "7", "[]", '"x"', '{"python": 7}'], ids=lambda text: text[:20]
)
@pytest.mark.parametrize(
    ("backend", "name"),
    [("local", "machine.json"), ("slurm", "site.json"), ("sagemaker", "get-role.json")],
)
def test_invalid_facts(project, capsys, text, backend, name):
    (project / "facts").mkdir()
    (project / "facts" / name).write_text(text)
    code = doctor("facts", "--backend", backend, "--set", AWS, "--set", "slurm.partition=x")
    said = capsys.readouterr().err
    assert (code, "facts" in said, "Traceback" in said) == (66, True, False), said


@pytest.mark.parametrize("name", SHAPES)
def test_answers_of_another_shape(project, capsys, name):
    (project / "facts").mkdir()
    (project / "facts" / f"{name}.json").write_text(json.dumps(SHAPES[name]))
    code = doctor("facts", "--backend", "sagemaker", "--set", AWS)
    shown = capsys.readouterr()
    assert code in {66, 80}, shown
    assert code == 80 or "the files in facts are not valid AWS responses" in shown.err


@pytest.mark.parametrize("python", ["true", "echo", "yes | head -c 9999999"])
def test_a_python_that_is_no_program(project, capsys, python):
    (project / "python").write_text(f"#!/bin/sh\n{python}\n")
    (project / "python").chmod(0o755)
    argv = ["--backend", "local", "--set", f"local.python={project}/python"]
    assert cli.main(["doctor", *argv]) == 69
    assert "exited with code 0 but printed no facts" in capsys.readouterr().err
