"""Faults in an otherwise healthy VPC, one function for each."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from tests.doctor.aws_vpcs import OPEN, REGION, IsolatedVpc, NatVpc, tcp

EFA = "ml.p4d.24xlarge"


@dataclass(frozen=True)
class Fault:
    """`break_` returns settings of the job file that go with it, if any."""

    finding: str
    vpc: type
    break_: Callable
    kind: str = "ml.g5.xlarge"
    severity: str = "error"

    @property
    def id(self):
        return self.break_.__name__


FAULTS: list[Fault] = []


def fault(finding, vpc, **more):
    def add(break_):
        FAULTS.append(Fault(finding, vpc, break_, **more))
        return break_

    return add


# Security groups


@fault("peers_inbound", IsolatedVpc)
def no_self_rule(vpc):
    vpc.only(egress=False)


@fault("peers_inbound", NatVpc)
def only_the_port_of_torchrun(vpc):
    vpc.only(tcp(29400, 29500, vpc.group), egress=False)


@fault("peers_inbound", IsolatedVpc)
def ephemeral_ports_with_a_hole(vpc):
    vpc.only(tcp(0, 39999, vpc.group), tcp(41000, 65535, "10.0.0.0/16"), egress=False)


@fault("peers_outbound", NatVpc)
def only_https_out(vpc):
    vpc.revoke_default()
    vpc.only(tcp(443, 443, "0.0.0.0/0"), egress=True)


@fault("s3_outbound", IsolatedVpc)
def nothing_out_but_to_itself(vpc):
    vpc.revoke_default()


@fault("efa_inbound", IsolatedVpc, kind=EFA)
def efa_with_tcp_only(vpc):
    vpc.only(tcp(0, 65535, vpc.group), egress=False)


@fault("efa_inbound", IsolatedVpc, kind=EFA)
def efa_with_a_rule_for_addresses(vpc):
    vpc.only({"IpProtocol": "-1", "IpRanges": [{"CidrIp": "10.0.0.0/16"}]}, egress=False)


@fault("efa_outbound", NatVpc, kind=EFA)
def efa_with_the_usual_way_out(vpc):
    vpc.only(egress=True)


@fault("efa_inbound", IsolatedVpc, kind="ml.g5.12xlarge", severity="warning")
def perhaps_efa_with_tcp_only(vpc):
    vpc.only(tcp(0, 65535, vpc.group), egress=False)


ENCRYPTED = {"sagemaker.encrypt_inter_container_traffic": "true"}


@fault("encryption_inbound", IsolatedVpc)
def encryption_with_tcp_only(vpc):
    vpc.only(tcp(0, 65535, vpc.group), egress=False)
    return ENCRYPTED


@fault("encryption_outbound", NatVpc)
def encryption_without_esp_out(vpc):
    vpc.revoke_default()
    udp = {**tcp(500, 500, vpc.group), "IpProtocol": "udp"}
    vpc.only(tcp(0, 65535, "0.0.0.0/0"), udp, egress=True)
    return ENCRYPTED


@fault("group_not_found", IsolatedVpc)
def group_that_was_deleted(vpc):
    return {"sagemaker.security_group_ids": "[sg-0123456789abcdef0]"}


@fault("group_vpc", IsolatedVpc)
def group_of_another_vpc(vpc):
    return {"sagemaker.security_group_ids": f"[{vpc.add_group('far', other_vpc(vpc))}]"}


@fault("group_vpc", NatVpc)
def group_of_another_vpc_and_no_other_here(vpc):
    vpc.drop(vpc.group, egress=False)  # not the job's any more
    return {"sagemaker.security_group_ids": f"[{vpc.add_group('far', other_vpc(vpc))}]"}


def other_vpc(vpc):
    return vpc.ec2.create_vpc(CidrBlock="10.7.0.0/16")["Vpc"]["VpcId"]


# Subnets


@fault("subnet_not_found", IsolatedVpc)
def subnet_that_was_deleted(vpc):
    return {"sagemaker.subnets": f"[{vpc.subnet}, subnet-0123456789abcdef0]"}


@fault("subnet_not_found", NatVpc)
def subnet_of_another_region(vpc):
    return {"sagemaker.subnets": "[subnet-0123456789abcdef0]"}


@fault("subnet_vpcs", NatVpc)
def subnets_of_two_vpcs(vpc):
    far = vpc.add_subnet("10.7.0.0/24", vpc=other_vpc(vpc))
    return {"sagemaker.subnets": f"[{far}, {vpc.subnet}]"}


@fault("subnet_zones", IsolatedVpc, severity="warning")
def subnets_of_two_zones(vpc):
    far = vpc.add_subnet("10.0.1.0/25", zone=f"{REGION}b")
    vpc.ec2.associate_route_table(RouteTableId=vpc.table, SubnetId=far)
    return {"sagemaker.subnets": f"[{far}, {vpc.subnet}]"}


@fault("subnet_zones", NatVpc, kind=EFA)
def efa_in_two_subnets(vpc):
    near = vpc.add_subnet("10.0.2.0/24")
    vpc.ec2.associate_route_table(RouteTableId=vpc.table, SubnetId=near)
    return {"sagemaker.subnets": f"[{vpc.subnet}, {near}]"}


def fill(vpc, block):
    """A subnet with three addresses left."""
    small = vpc.add_subnet(block)
    vpc.ec2.associate_route_table(RouteTableId=vpc.table, SubnetId=small)
    for _ in range(8):
        vpc.ec2.create_network_interface(SubnetId=small)
    return {"sagemaker.subnets": f"[{small}]"}


@fault("subnet_full", IsolatedVpc)
def subnet_without_addresses(vpc):
    return fill(vpc, "10.0.3.0/28")


@fault("subnet_full", NatVpc)
def no_subnet_with_addresses(vpc):
    vpc.ec2.create_network_interface(SubnetId=vpc.subnet)
    vpc.zone = f"{REGION}c"  # nothing else is there
    try:
        return fill(vpc, "10.0.4.0/28")
    finally:
        vpc.zone = f"{REGION}a"


# Network ACLs


@fault("acl_outbound", IsolatedVpc)
def acl_denies_https_before_it_allows_all(vpc):
    acl = vpc.own_acl(vpc.subnet)
    vpc.rule(acl, 90, egress=True, allow=False, protocol="6", ports=(443, 443))


@fault("acl_inbound", NatVpc)
def acl_forgets_the_answers(vpc):
    acl = vpc.own_acl(vpc.subnet)
    vpc.ec2.delete_network_acl_entry(NetworkAclId=acl, RuleNumber=100, Egress=False)
    vpc.rule(acl, 100, egress=False, protocol="6", ports=(443, 443))


@fault("acl_inbound", NatVpc)
def acl_lets_half_of_the_answers_in(vpc):
    acl = vpc.own_acl(vpc.subnet)
    vpc.rule(acl, 50, egress=False, allow=False, protocol="6", ports=(40000, 65535))


@fault("acl_outbound", IsolatedVpc)
def acl_has_no_number_left(vpc):
    acl = vpc.own_acl(vpc.subnet)
    vpc.rule(acl, 1, egress=True, allow=False, protocol="6", ports=(0, 1023))


@fault("acl_inbound", IsolatedVpc)
def acl_between_two_subnets(vpc):
    near = vpc.add_subnet("10.0.5.0/24")
    vpc.ec2.associate_route_table(RouteTableId=vpc.table, SubnetId=near)
    acl = vpc.own_acl(vpc.subnet)
    block = "10.0.5.0/24"
    vpc.rule(acl, 20, egress=False, protocol="6", ports=(7777, 7777), block=block)
    vpc.rule(acl, 21, egress=False, allow=False, block="10.0.5.128/25")
    return {"sagemaker.subnets": f"[{vpc.subnet}, {near}]"}


@fault("acl_inbound", NatVpc)
def acl_of_the_nat(vpc):
    acl = vpc.own_acl(vpc.public)
    vpc.rule(acl, 10, egress=False, allow=False, protocol="6", ports=(443, 443), block="10.0.0.0/8")


# Routes


@fault("s3_route", IsolatedVpc)
def no_endpoint_for_s3(vpc):
    vpc.ec2.delete_vpc_endpoints(VpcEndpointIds=[vpc.s3])


@fault("s3_route", IsolatedVpc)
def endpoint_of_another_table(vpc):
    vpc.ec2.modify_vpc_endpoint(
        VpcEndpointId=vpc.s3,
        AddRouteTableIds=[vpc.add_table()],
        RemoveRouteTableIds=[vpc.table],
    )


@fault("s3_route", IsolatedVpc)
def public_subnet(vpc):
    vpc.ec2.delete_vpc_endpoints(VpcEndpointIds=[vpc.s3])
    gateway = vpc.ec2.create_internet_gateway()["InternetGateway"]["InternetGatewayId"]
    vpc.ec2.attach_internet_gateway(InternetGatewayId=gateway, VpcId=vpc.id)
    vpc.ec2.create_route(
        RouteTableId=vpc.table, DestinationCidrBlock="0.0.0.0/0", GatewayId=gateway
    )


@fault("s3_route", IsolatedVpc)
def subnet_with_the_main_table(vpc):
    stray = vpc.add_subnet("10.0.6.0/24")
    return {"sagemaker.subnets": f"[{stray}]"}


@fault("nat_broken", NatVpc, severity="warning")
def nat_that_was_deleted(vpc):
    vpc.add_nat(vpc.public)
    vpc.ec2.delete_nat_gateway(NatGatewayId=vpc.nat)


@fault("nat_broken", NatVpc)
def nat_in_a_private_subnet(vpc):
    vpc.ec2.delete_vpc_endpoints(VpcEndpointIds=[vpc.s3])
    inner = vpc.add_subnet("10.0.8.0/24")
    vpc.unroute(vpc.table)
    vpc.route(vpc.table, NatGatewayId=vpc.add_nat(inner))
    vpc.ec2.delete_nat_gateway(NatGatewayId=vpc.nat)


@fault("endpoint_policy", IsolatedVpc)
def endpoint_for_another_bucket(vpc):
    allow = {
        "Effect": "Allow",
        "Principal": "*",
        "Action": "s3:*",
        "Resource": ["arn:aws:s3:::corpus", "arn:aws:s3:::corpus/*"],
    }
    set_policy(vpc, allow)


@fault("endpoint_policy", NatVpc)
def endpoint_that_denies_writing(vpc):
    deny = {"Effect": "Deny", "Principal": "*", "Action": "s3:Put*", "Resource": "*"}
    set_policy(vpc, {**OPEN["Statement"][0], "Principal": "*"}, deny)


def set_policy(vpc, *statements):
    vpc.ec2.modify_vpc_endpoint(VpcEndpointId=vpc.s3, PolicyDocument=policy(*statements))


# Endpoints and names


@fault("no_endpoint", IsolatedVpc, severity="warning")
def no_door_to_ecr(vpc):
    vpc.ec2.delete_vpc_endpoints(VpcEndpointIds=[vpc.endpoints["ecr.dkr"]])


@fault("no_endpoint", IsolatedVpc, severity="warning")
def no_doors_at_all(vpc):
    vpc.ec2.delete_vpc_endpoints(VpcEndpointIds=list(vpc.endpoints.values()))


@fault("no_endpoint", IsolatedVpc)
def no_door_to_the_secrets(vpc):
    return {"env": "{TOKEN: 'secret:ssm:token'}"}


@fault("endpoint_blocked", IsolatedVpc, severity="warning")
def door_that_lets_nobody_in(vpc):
    shut = vpc.add_group("shut")
    endpoint = vpc.endpoints["logs"]
    vpc.ec2.delete_vpc_endpoints(VpcEndpointIds=[endpoint])
    vpc.add_endpoint("logs", shut)


@fault("vpc_dns", NatVpc)
def vpc_without_names(vpc):
    vpc.ec2.modify_vpc_attribute(VpcId=vpc.id, EnableDnsSupport={"Value": False})


@fault("vpc_dns", IsolatedVpc)
def vpc_without_host_names(vpc):
    vpc.ec2.modify_vpc_attribute(VpcId=vpc.id, EnableDnsHostnames={"Value": False})


# The account


@fault("role_not_found", IsolatedVpc)
def role_that_does_not_exist(vpc):
    return {"sagemaker.role": "arn:aws:iam::123456789012:role/trainer"}


@fault("role_trust", IsolatedVpc)
def role_for_machines_only(vpc):
    machines = {"Service": "ec2.amazonaws.com"}
    trust = policy({"Effect": "Allow", "Principal": machines, "Action": "sts:AssumeRole"})
    vpc.client("iam").update_assume_role_policy(RoleName="training", PolicyDocument=trust)


@fault("role_permissions", IsolatedVpc)
def role_for_buckets_of_sagemaker_only(vpc):
    """As the managed policy AmazonSageMakerFullAccess has it."""
    put_policy(
        vpc,
        {"Effect": "Allow", "NotAction": "s3:*", "Resource": "*"},
        {"Effect": "Allow", "Action": "s3:*", "Resource": "arn:aws:s3:::*sagemaker*"},
    )


KEY = "arn:aws:kms:us-east-1:123456789012:key/1234abcd-12ab-34cd-56ef-1234567890ab"


@fault("role_permissions_kms", IsolatedVpc, kind="ml.p3.2xlarge", severity="warning")
def role_without_the_key_of_the_output(vpc):
    put_policy(vpc, {"Effect": "Allow", "NotAction": "kms:*", "Resource": "*"})
    return {"sagemaker.output_kms_key": KEY, "sagemaker.volume_kms_key": "alias/disks"}


@fault("role_permissions_ssmmessages", IsolatedVpc, severity="warning")
def role_without_sessions(vpc):
    put_policy(vpc, {"Effect": "Allow", "NotAction": "ssmmessages:*", "Resource": "*"})
    return {"sagemaker.remote_debug": "true"}


@fault("role_permissions", NatVpc)
def role_without_network_interfaces(vpc):
    put_policy(vpc, {"Effect": "Allow", "NotAction": "ec2:Create*", "Resource": "*"})


def put_policy(vpc, *statements):
    vpc.client("iam").put_role_policy(
        RoleName="training", PolicyName="all", PolicyDocument=policy(*statements)
    )


def policy(*statements):
    return json.dumps({"Version": "2012-10-17", "Statement": statements})


@fault("bucket_not_found", IsolatedVpc)
def bucket_that_does_not_exist(vpc):
    return {"sagemaker.bucket": "my-bukket"}


@fault("bucket_region", IsolatedVpc)
def bucket_of_another_region(vpc):
    vpc.client("s3").create_bucket(
        Bucket="far-bucket", CreateBucketConfiguration={"LocationConstraint": "eu-west-1"}
    )
    return {"sagemaker.bucket": "far-bucket"}


@fault("quota", IsolatedVpc)
def more_machines_than_the_quota(vpc):
    return {"resources.nodes": "5"}
