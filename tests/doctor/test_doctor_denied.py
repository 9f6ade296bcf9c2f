"""Doctor for a user with limited permissions, on a moto server that enforces IAM."""

from __future__ import annotations

import json

import pytest

from tests.doctor.aws_vpcs import IsolatedVpc
from tests.doctor.terraform import check_terraform, needs_programs

pytestmark = [pytest.mark.aws, pytest.mark.slow]
READ = ["ec2:Describe*", "iam:Get*", "iam:List*", "s3:*", "sts:*", "servicequotas:*"]


def user(vpc, monkeypatch, *statements):
    """Become a user with these statements."""
    iam = vpc.client("iam")
    iam.create_user(UserName="ada")
    policy = {"Version": "2012-10-17", "Statement": statements}
    iam.put_user_policy(UserName="ada", PolicyName="own", PolicyDocument=json.dumps(policy))
    key = iam.create_access_key(UserName="ada")["AccessKey"]
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key["AccessKeyId"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", key["SecretAccessKey"])


@needs_programs
def test_a_denied_question_is_a_finding_and_the_others_go_on(
    doctor, moto, enforced, monkeypatch, tmp_path
):
    vpc = IsolatedVpc(moto)
    vpc.drop(vpc.group, egress=False)
    allow = {"Effect": "Allow", "Action": READ, "Resource": "*"}
    deny = {"Effect": "Deny", "Action": "ec2:DescribeNetworkAcls", "Resource": "*"}
    user(vpc, monkeypatch, allow, deny)
    enforced()
    found = doctor(vpc.settings, "--save", str(tmp_path))
    assert [one["code"] for one in found.findings] == ["peers_inbound", "not_permitted"]
    assert found.code == 80
    unchecked = found.findings[1]
    assert unchecked["message"] == "permission denied: the check requires ec2:DescribeNetworkAcls"
    assert "ada" in unchecked["evidence"][0]
    assert "put-user-policy --user-name ada" in unchecked["fix"]["cli"]
    check_terraform(unchecked["fix"])
    assert doctor(vpc.settings, "--from", str(tmp_path)) == found


def test_nobody_is_logged_in(doctor, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    found = doctor({"sagemaker.subnets": "[subnet-1]", "sagemaker.security_group_ids": "[sg-1]"})
    assert [one["code"] for one in found.findings] == ["credentials"]
    assert found.code == 80


def test_a_folder_without_some_answers_says_so(doctor, moto, tmp_path):
    vpc = IsolatedVpc(moto)
    doctor(vpc.settings, "--save", str(tmp_path))
    (tmp_path / "describe-network-acls.json").unlink()
    found = doctor(vpc.settings, "--from", str(tmp_path))
    assert [(one["code"], one["severity"]) for one in found.findings] == [
        ("not_saved", "unchecked")
    ]
    assert "describe-network-acls" in found.findings[0]["message"]
    assert found.code == 80
    for path in tmp_path.glob("*.json"):
        if not path.name.startswith("describe-"):
            path.unlink()
    (tmp_path / "describe-network-acls.json").write_text('{"NetworkAcls": []}')
    found = doctor(vpc.settings, "--from", str(tmp_path))
    assert [one["severity"] for one in found.findings] == ["note"]
    assert found.code == 0


def test_a_saved_answer_that_is_no_json_is_named(doctor, moto, tmp_path, capsys):
    (tmp_path / "describe-subnets.json").write_text("subnet-1\n")
    from deploykit.cli import main as cli

    doctor({}, as_json=False)
    assert cli.main(["doctor", "--backend", "sagemaker", "--from", str(tmp_path)]) == 66
    assert "describe-subnets.json is not a JSON response from AWS" in capsys.readouterr().err


def test_a_role_of_another_account(doctor, moto):
    vpc = IsolatedVpc(moto)
    role = "arn:aws:iam::999999999999:role/training"
    found = doctor({**vpc.settings, "sagemaker.role": role})
    assert [one["code"] for one in found.findings] == ["role_account"]


def test_a_deny_and_a_boundary_are_named(doctor, moto):
    vpc = IsolatedVpc(moto)
    iam = vpc.client("iam")
    limit = {"Effect": "Allow", "NotAction": "logs:*", "Resource": "*"}
    arn = iam.create_policy(
        PolicyName="limit", PolicyDocument=json.dumps({"Version": "2012-10-17", "Statement": limit})
    )["Policy"]["Arn"]
    iam.put_role_permissions_boundary(RoleName="training", PermissionsBoundary=arn)
    deny = {"Effect": "Deny", "Action": "s3:Put*", "Resource": "*"}
    iam.put_role_policy(
        RoleName="training",
        PolicyName="deny",
        PolicyDocument=json.dumps({"Version": "2012-10-17", "Statement": deny}),
    )
    found = doctor(vpc.settings)
    assert [one["code"] for one in found.findings] == ["role_denied", "role_denied"]
    said = " ".join(one["message"] for one in found.findings)
    assert "s3:PutObject: a policy" in said
    assert "logs:PutLogEvents: the role's permissions boundary" in said


UNKNOWN_TO_MOTO = {
    "vpc_tenancy": (
        *("describe-vpcs", '"InstanceTenancy": "default"', '"InstanceTenancy": "dedicated"'),
        *("error", "modify-vpc-tenancy", "--instance-tenancy default"),
    ),
    "endpoint_dns": (
        *("describe-vpc-endpoints", '"PrivateDnsEnabled": true', '"PrivateDnsEnabled": false'),
        *("warning", "modify-vpc-endpoint", "--private-dns-enabled"),
    ),
}


@needs_programs
@pytest.mark.parametrize("code", UNKNOWN_TO_MOTO)
def test_what_moto_cannot_create(doctor, moto, tmp_path, code):
    """Its response is modified, and the command of the fix only read."""
    vpc = IsolatedVpc(moto)
    doctor(vpc.settings, "--save", str(tmp_path))
    name, given, replaced, severity, command, option = UNKNOWN_TO_MOTO[code]
    file = tmp_path / f"{name}.json"
    assert given in file.read_text()
    file.write_text(file.read_text().replace(given, replaced))
    found = doctor(vpc.settings, "--from", str(tmp_path)).findings
    assert {(one["code"], one["severity"]) for one in found} == {(code, severity)}
    for one in found:
        assert one["fix"]["cli"].startswith(f"aws ec2 {command} --region us-east-1 ")
        assert one["fix"]["cli"].rstrip().endswith(option)
        check_terraform(one["fix"])


def test_a_bucket_that_is_another_accounts_is_not_looked_at(doctor, aws, moto):
    """S3 denies a request that names another owner; moto does not, so the response is faked."""
    vpc = IsolatedVpc(moto)

    def deny(one, forward):
        if one.headers.get("x-amz-expected-bucket-owner") != "666666666666":
            return forward()
        return 403, [], b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>"

    aws.respond = deny
    assert doctor(vpc.settings).code == 0
    foreign = vpc.settings | {"sagemaker.bucket_owner": '"666666666666"'}
    (finding,) = doctor(foreign).findings
    assert finding["code"] == "not_permitted"
    assert (
        "account 666666666666 does not own the bucket (sagemaker.bucket_owner)"
        in finding["evidence"][1]
    )
