"""What security groups, network ACLs and policies allow, compared with brute force."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploykit.backends.sagemaker import doctor
from deploykit.backends.sagemaker.options import InstanceGroup
from deploykit.doctor import account, firewall, network
from deploykit.doctor.network import AclEntry, SecurityGroupRule
from deploykit.doctor.requirements import Flow
from tests.backends.sagemaker.sagemaker_jobs import vary

PEER = ipaddress.IPv4Network("10.0.0.0/29")
BLOCKS = [ipaddress.IPv4Network(text) for text in ("10.0.0.0/30", "10.0.0.4/31", "10.0.0.0/8")]
PORTS = st.tuples(st.integers(0, 12), st.integers(0, 12)).map(sorted)


@st.composite
def entries(draw):
    found = []
    for number in range(draw(st.integers(0, 5))):
        low, high = draw(PORTS)
        protocol = draw(st.sampled_from(["tcp", "udp", "-1"]))
        ends = (0, 65535) if protocol == "-1" else (low, high)
        block = draw(st.sampled_from(BLOCKS))
        found.append(AclEntry(number + 1, draw(st.booleans()), protocol, *ends, block))
    return found


@settings(max_examples=300, deadline=None)
@given(entries(), PORTS)
def test_an_acl_blocks_what_trying_every_packet_says(listed, wanted):
    flow = Flow("tcp", (tuple(wanted),))
    said = {
        port
        for piece in firewall.blocked(flow, PEER, listed)
        for port in range(piece.ports[0], piece.ports[1] + 1)
    }
    tried = set()
    for port in range(wanted[0], wanted[1] + 1):
        for address in PEER:
            fits = (
                entry
                for entry in listed
                if entry.protocol in {"tcp", "-1"}
                and entry.low <= port <= entry.high
                and address in entry.block
            )
            first = next(fits, None)
            if first is None or not first.allow:
                tried.add(port)
    assert said == tried


@settings(max_examples=300, deadline=None)
@given(st.lists(PORTS, max_size=5), PORTS)
def test_missing_ports_are_those_that_no_rule_opens(opened, wanted):
    given_ = [SecurityGroupRule("tcp", low, high, "sg-1") for low, high in opened]
    left = firewall.missing_ports(Flow("tcp", (tuple(wanted),)), given_, {"sg-1"}, PEER)
    said = {port for low, high in left for port in range(low, high + 1)}
    open_ = {port for low, high in opened for port in range(low, high + 1)}
    assert said == set(range(wanted[0], wanted[1] + 1)) - open_


def test_towards_the_world_only_public_addresses_count():
    private = AclEntry(1, False, "-1", 0, 65535, ipaddress.IPv4Network("10.0.0.0/8"))
    rest = AclEntry(2, True, "-1", 0, 65535, firewall.WORLD)
    assert firewall.blocked(Flow("tcp", ((443, 443),)), firewall.WORLD, [private, rest]) == []
    public = AclEntry(1, False, "-1", 0, 65535, ipaddress.IPv4Network("52.0.0.0/8"))
    (one,) = firewall.blocked(Flow("tcp", ((443, 443),)), firewall.WORLD, [public, rest])
    assert one.by == public


ALL = {"Effect": "Allow", "Action": "*", "Resource": "*"}
GET = ("s3:GetObject", "arn:aws:s3:::mine/x")


@pytest.mark.parametrize(
    ("statements", "said"),
    [
        ([ALL], "allowed"),
        ([], "absent"),
        ([ALL, {"Effect": "Deny", "Action": "s3:get*", "Resource": "*"}], "denied"),
        ([{**ALL, "Resource": "arn:aws:s3:::mine*"}], "allowed"),
        ([{**ALL, "Resource": "arn:aws:s3:::yours/*"}], "absent"),
        ([{**ALL, "Condition": {"Bool": {"aws:SecureTransport": "true"}}}], "perhaps"),
        ([{"Effect": "Allow", "NotAction": "s3:*", "Resource": "*"}], "absent"),
        ([{"Effect": "Allow", "Action": "s3:*", "NotResource": "arn:aws:s3:::y/*"}], "allowed"),
        ([{"Effect": "Allow", "Action": ["S3:Get?bject"], "Resource": ["*"]}], "allowed"),
        ([ALL, {"Effect": "Deny", "Action": "*", "Resource": "arn:aws:s3:::other/*"}], "allowed"),
    ],
)
def test_policies_are_read_as_iam_reads_them(statements, said):
    assert account.decide([{"Statement": statements}], *GET) == said


@pytest.mark.parametrize(
    ("service", "named"),
    [
        ("com.amazonaws.us-east-1.ecr.api", "ecr.api"),
        ("cn.com.amazonaws.cn-north-1.ecr.dkr", "ecr.dkr"),
        ("com.amazonaws.us-east-1.s3", "s3"),
    ],
)
def test_the_service_of_an_endpoint(service, named):
    raw = {"VpcEndpointId": "vpce-1", "VpcId": "vpc-1", "ServiceName": service}
    job = doctor.requirements_of(*vary(), "us-east-1")
    answers = {"describe-vpc-endpoints": {"VpcEndpoints": [raw]}}
    assert [one.service for one in network.parse(job, answers).endpoints] == [named]


def test_a_job_of_several_groups_needs_the_type_that_trains():
    groups = (InstanceGroup("cpu", "ml.c5.xlarge", 1), InstanceGroup("gpu", "ml.p4d.24xlarge", 2))
    changes = {"instance_type": None, "instance_groups": groups, "distribution_group": "gpu"}
    found = doctor.requirements_of(*vary(distribution="mpi", **changes), "us-east-1")
    assert (found.instance_type, found.nodes) == ("p4d.24xlarge", 2)
    assert found.quota == "ml.p4d.24xlarge for training job usage"


@pytest.mark.parametrize(
    ("distribution", "port"),
    [("torch_distributed", 7777), ("smdistributed.modelparallel", 7777), ("mpi", 22)],
)
def test_the_port_by_which_the_ranks_are_started(distribution, port):
    (flow,) = doctor.requirements_of(*vary(distribution=distribution), "us-east-1").peers
    assert flow.ports[0] == (port, port)
