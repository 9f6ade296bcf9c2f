"""Doctor, `when` and the guide where AWS does not answer some queries: the rest goes on."""

from __future__ import annotations

import json
import re

import pytest

from deploykit.cli import main as cli
from tests.aws_server import SECTION, as_json
from tests.doctor.aws_vpcs import IsolatedVpc, tcp

pytestmark = pytest.mark.aws
GUIDE = ["guide", "security-groups", "--job", "job.yaml"]
ROLE = "arn:aws:iam::123456789012:role/training"
FAILURE = as_json(500, {"__type": "InternalFailure", "message": "broken"})


@pytest.fixture(autouse=True)
def _brief(monkeypatch):
    monkeypatch.setattr("botocore.endpoint.time.sleep", lambda _: None)


@pytest.fixture
def job(project):
    with (project / "job.yaml").open("a") as file:
        file.write(SECTION)


def failing(name, answer):
    """Answer the query of this name so; forward the others."""

    def respond(one, forward):
        asked = f"{one.action} {one.body.decode(errors='replace')}"
        return answer if name in asked else forward()

    return respond


QUERIES = {
    "ListServiceQuotas": "servicequotas:ListServiceQuotas",
    "GetCallerIdentity": "sts:GetCallerIdentity",
    "Action=GetRole&": "iam:GetRole",
    "ListRolePolicies": "iam:ListRolePolicies",
    "DescribeNetworkAcls": "ec2:DescribeNetworkAcls",
    "DescribeVpcAttribute": "ec2:DescribeVpcAttribute",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", QUERIES)
@pytest.mark.parametrize("lost", [False, True], ids=["500", "closed"])
def test_one_failing_query_is_unchecked_and_the_rest_goes_on(doctor, aws, moto, name, lost):
    vpc = IsolatedVpc(moto)
    vpc.drop(vpc.group, egress=False)
    aws.respond = failing(name, None if lost else FAILURE)
    answer = doctor(vpc.settings)
    by_code = {one["code"]: one for one in answer.findings}
    assert set(by_code) == {"peers_inbound", "not_answered"}
    unanswered = by_code["not_answered"]
    assert unanswered["severity"] == "unchecked"
    assert unanswered["message"].startswith(f"not checked, because {QUERIES[name]} failed: ")
    assert answer.code == 80


def test_moto_without_service_quotas_is_one_unchecked_finding(aws, moto, job, capsys):
    """Plain moto answers ListServiceQuotas with a page and status 500."""
    IsolatedVpc(moto)
    assert cli.main(["doctor", "--backend", "sagemaker", "--json"]) == 80
    found = json.loads(capsys.readouterr().out)["findings"]
    assert [(one["code"], one["severity"]) for one in found] == [("not_answered", "unchecked")]
    assert "HTTP 500" in found[0]["message"]


def test_nothing_answers(aws, job, monkeypatch, capsys):
    aws.respond = lambda *_: None
    assert cli.main(["doctor", "--backend", "sagemaker"]) == 69
    assert "cannot reach AWS in us-east-1" in capsys.readouterr().err
    assert cli.main(["when", "--backend", "sagemaker"]) == 69


def test_when_goes_on_without_the_quotas(aws, job, capsys):
    argv = ["when", "--backend", "sagemaker", "--json"]
    denied = as_json(400, {"__type": "AccessDeniedException", "message": "you may not"})
    for answer, said in ((FAILURE, "broken"), (denied, "you may not"), (None, "cannot reach")):
        aws.respond = failing("ListServiceQuotas", answer)
        assert cli.main(argv) == 0
        own, _ = json.loads(capsys.readouterr().out)["starts"]
        assert own["possible"]
        assert own["reason"].startswith(
            "the quota 'ml.g5.xlarge for training job usage' is unknown ("
        )
        assert said in own["reason"]


def test_when_needs_a_login(aws, job, monkeypatch, capsys):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    assert cli.main(["when", "--backend", "sagemaker"]) == 77


def test_the_guide_without_credentials_checks_nothing(aws, job, monkeypatch, capsys):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    network = ["--set", "sagemaker.subnets=[subnet-1]", "--set"]
    assert cli.main([*GUIDE, *network, "sagemaker.security_group_ids=[sg-1]"]) == 0
    page = capsys.readouterr().out
    assert "found no problems" not in page
    assert "### error: no valid AWS credentials" in page


def test_the_offered_policy_has_the_keys_and_the_sessions(doctor, moto):
    vpc = IsolatedVpc(moto)
    arn = "arn:aws:kms:us-east-1:123456789012:key/1234abcd-12ab-34cd-56ef-1234567890ab"
    settings = {
        **vpc.settings,
        "sagemaker.output_kms_key": arn,
        "sagemaker.volume_kms_key": "alias/disks",
        "sagemaker.remote_debug": "true",
    }
    assert doctor(settings, kind="ml.p3.2xlarge").findings == []
    (missing,) = doctor({**settings, "sagemaker.role": f"{ROLE}x"}, kind="ml.p3.2xlarge").findings
    policies = re.findall(r"'(\{.*?Statement.*?\})'", missing["fix"]["cli"], re.DOTALL)
    by_resource = {
        str(one["Resource"]): one["Action"]
        for text in policies
        for one in json.loads(text)["Statement"]
        if "Resource" in one
    }
    assert by_resource[arn] == ["kms:Decrypt", "kms:Encrypt", "kms:GenerateDataKey"]
    assert {"kms:CreateGrant", "ssmmessages:OpenDataChannel"} <= set(by_resource["*"])


@pytest.mark.parametrize("kind", ["ml.g5.12xlarge", "ml.g5.48xlarge"])
def test_efa_is_required_only_where_sagemaker_uses_it(doctor, moto, kind):
    """EC2 offers EFA with both; SageMaker's launcher uses it on the larger."""
    vpc = IsolatedVpc(moto)
    vpc.drop(vpc.group, egress=False)
    vpc.allow(vpc.group, tcp(0, 65535, vpc.group), egress=False)
    answer = doctor(vpc.settings, kind=kind)
    certain = kind == "ml.g5.48xlarge"
    assert [(one["code"], one["severity"]) for one in answer.findings] == [
        ("efa_inbound", "error" if certain else "warning")
    ]
    assert answer.code == (80 if certain else 0)


def test_a_nat_gateway_without_a_way_out_gets_the_free_endpoint_for_s3(doctor, moto):
    """No subnet of the VPC is public, so only a person can build the way to the internet."""
    vpc = IsolatedVpc(moto)
    vpc.ec2.delete_vpc_endpoints(VpcEndpointIds=[vpc.s3])
    inner = vpc.add_subnet("10.0.8.0/24")
    address = vpc.ec2.allocate_address(Domain="vpc")["AllocationId"]
    nat = vpc.ec2.create_nat_gateway(SubnetId=inner, AllocationId=address)["NatGateway"]
    vpc.ec2.create_route(
        RouteTableId=vpc.table,
        DestinationCidrBlock="0.0.0.0/0",
        NatGatewayId=nat["NatGatewayId"],
    )
    (broken,) = doctor(vpc.settings).findings
    assert (broken["code"], broken["severity"]) == ("nat_broken", "error")
    assert "free of charge" in broken["fix"]["summary"]
    assert "create-vpc-endpoint" in broken["fix"]["cli"]
    assert vpc.table in broken["fix"]["cli"]


def test_the_guide_where_aws_cannot_be_reached_has_the_rules(aws, job, capsys):
    aws.respond = lambda *_: None
    network = ["--set", "sagemaker.subnets=[subnet-1]", "--set"]
    assert cli.main([*GUIDE, *network, "sagemaker.security_group_ids=[sg-1]"]) == 0
    page = capsys.readouterr().out
    assert "### unchecked: not checked: cannot reach AWS in us-east-1" in page
    assert "found no problems" not in page
    assert "authorize-security-group-ingress --region us-east-1 --group-id sg-1" in page
