"""Ways to break a healthy place, one fault each."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from aws_places import OPEN, REGION, Closed, Natted, tcp

EFA = "ml.p4d.24xlarge"
WORLD = [{"IpProtocol": "-1", "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}]


@dataclass(frozen=True)
class Fault:
    """`break_` returns settings of the job file that go with it, if any."""

    finding: str
    place: type
    break_: Callable
    kind: str = "ml.g5.xlarge"
    severity: str = "error"

    @property
    def id(self):
        return self.break_.__name__


FAULTS: list[Fault] = []


def fault(finding, place, **more):
    def add(break_):
        FAULTS.append(Fault(finding, place, break_, **more))
        return break_

    return add


# Security groups


@fault("peers_inbound", Closed)
def no_self_rule(place):
    place.drop(place.group, egress=False)


@fault("peers_inbound", Natted)
def only_the_port_of_torchrun(place):
    place.drop(place.group, egress=False)
    place.allow(place.group, egress=False, **tcp(29400, 29500, place.group))


@fault("peers_inbound", Closed)
def ephemeral_ports_with_a_hole(place):
    place.drop(place.group, egress=False)
    place.allow(place.group, egress=False, **tcp(0, 39999, place.group))
    place.allow(place.group, egress=False, **tcp(41000, 65535, "10.0.0.0/16"))


@fault("peers_outbound", Natted)
def only_https_out(place):
    place.drop(place.group, egress=True)
    place.ec2.revoke_security_group_egress(GroupId=place.group, IpPermissions=WORLD)
    place.allow(place.group, egress=True, **tcp(443, 443, "0.0.0.0/0"))


@fault("s3_outbound", Closed)
def nothing_out_but_to_itself(place):
    place.ec2.revoke_security_group_egress(GroupId=place.group, IpPermissions=WORLD)


@fault("efa_inbound", Closed, kind=EFA)
def efa_with_tcp_only(place):
    place.drop(place.group, egress=False)
    place.allow(place.group, egress=False, **tcp(0, 65535, place.group))


@fault("efa_inbound", Closed, kind=EFA)
def efa_with_a_rule_for_addresses(place):
    place.drop(place.group, egress=False)
    rule = {"IpProtocol": "-1", "IpRanges": [{"CidrIp": "10.0.0.0/16"}]}
    place.allow(place.group, egress=False, **rule)


@fault("efa_outbound", Natted, kind=EFA)
def efa_with_the_usual_way_out(place):
    place.drop(place.group, egress=True)


ENCRYPTED = {"sagemaker.encrypt_inter_container_traffic": "true"}


@fault("encryption_inbound", Closed)
def encryption_with_tcp_only(place):
    place.drop(place.group, egress=False)
    place.allow(place.group, egress=False, **tcp(0, 65535, place.group))
    return ENCRYPTED


@fault("encryption_outbound", Natted)
def encryption_without_esp_out(place):
    place.drop(place.group, egress=True)
    place.ec2.revoke_security_group_egress(GroupId=place.group, IpPermissions=WORLD)
    place.allow(place.group, egress=True, **tcp(0, 65535, "0.0.0.0/0"))
    udp = {**tcp(500, 500, place.group), "IpProtocol": "udp"}
    place.allow(place.group, egress=True, **udp)
    return ENCRYPTED


@fault("group_absent", Closed)
def group_that_was_deleted(place):
    return {"sagemaker.security_group_ids": "[sg-0123456789abcdef0]"}


@fault("group_vpc", Closed)
def group_of_another_vpc(place):
    return {"sagemaker.security_group_ids": f"[{place.add_group('far', other_vpc(place))}]"}


@fault("group_vpc", Natted)
def group_of_another_vpc_and_no_other_here(place):
    place.drop(place.group, egress=False)  # not the job's any more
    return {"sagemaker.security_group_ids": f"[{place.add_group('far', other_vpc(place))}]"}


def other_vpc(place):
    return place.ec2.create_vpc(CidrBlock="10.7.0.0/16")["Vpc"]["VpcId"]


# Subnets


@fault("subnet_absent", Closed)
def subnet_that_was_deleted(place):
    return {"sagemaker.subnets": f"[{place.subnet}, subnet-0123456789abcdef0]"}


@fault("subnet_absent", Natted)
def subnet_of_another_region(place):
    return {"sagemaker.subnets": "[subnet-0123456789abcdef0]"}


@fault("subnet_vpcs", Natted)
def subnets_of_two_vpcs(place):
    far = place.add_subnet("10.7.0.0/24", vpc=other_vpc(place))
    return {"sagemaker.subnets": f"[{far}, {place.subnet}]"}


@fault("subnet_zones", Closed, severity="warning")
def subnets_of_two_zones(place):
    far = place.add_subnet("10.0.1.0/25", zone=f"{REGION}b")
    place.ec2.associate_route_table(RouteTableId=place.table, SubnetId=far)
    return {"sagemaker.subnets": f"[{far}, {place.subnet}]"}


@fault("subnet_zones", Natted, kind=EFA)
def efa_in_two_subnets(place):
    near = place.add_subnet("10.0.2.0/24")
    place.ec2.associate_route_table(RouteTableId=place.table, SubnetId=near)
    return {"sagemaker.subnets": f"[{place.subnet}, {near}]"}


def fill(place, block):
    """A subnet with three addresses left."""
    small = place.add_subnet(block)
    place.ec2.associate_route_table(RouteTableId=place.table, SubnetId=small)
    for _ in range(8):
        place.ec2.create_network_interface(SubnetId=small)
    return {"sagemaker.subnets": f"[{small}]"}


@fault("subnet_full", Closed)
def subnet_without_addresses(place):
    return fill(place, "10.0.3.0/28")


@fault("subnet_full", Natted)
def no_subnet_with_addresses(place):
    place.ec2.create_network_interface(SubnetId=place.subnet)
    place.zone = f"{REGION}c"  # nothing else is there
    try:
        return fill(place, "10.0.4.0/28")
    finally:
        place.zone = f"{REGION}a"


# Network ACLs


@fault("acl_outbound", Closed)
def acl_denies_https_before_it_allows_all(place):
    acl = place.own_acl(place.subnet)
    place.rule(acl, 90, egress=True, allow=False, protocol="6", ports=(443, 443))


@fault("acl_inbound", Natted)
def acl_forgets_the_answers(place):
    acl = place.own_acl(place.subnet)
    place.ec2.delete_network_acl_entry(NetworkAclId=acl, RuleNumber=100, Egress=False)
    place.rule(acl, 100, egress=False, protocol="6", ports=(443, 443))


@fault("acl_inbound", Natted)
def acl_lets_half_of_the_answers_in(place):
    acl = place.own_acl(place.subnet)
    place.rule(acl, 50, egress=False, allow=False, protocol="6", ports=(40000, 65535))


@fault("acl_outbound", Closed)
def acl_has_no_number_left(place):
    acl = place.own_acl(place.subnet)
    place.rule(acl, 1, egress=True, allow=False, protocol="6", ports=(0, 1023))


@fault("acl_inbound", Closed)
def acl_between_two_subnets(place):
    near = place.add_subnet("10.0.5.0/24")
    place.ec2.associate_route_table(RouteTableId=place.table, SubnetId=near)
    acl = place.own_acl(place.subnet)
    block = "10.0.5.0/24"
    place.rule(acl, 20, egress=False, protocol="6", ports=(7777, 7777), block=block)
    place.rule(acl, 21, egress=False, allow=False, block="10.0.5.128/25")
    return {"sagemaker.subnets": f"[{place.subnet}, {near}]"}


@fault("acl_inbound", Natted)
def acl_of_the_nat(place):
    acl = place.own_acl(place.public)
    place.rule(
        acl, 10, egress=False, allow=False, protocol="6", ports=(443, 443), block="10.0.0.0/8"
    )


# Routes


@fault("s3_route", Closed)
def no_endpoint_for_s3(place):
    place.ec2.delete_vpc_endpoints(VpcEndpointIds=[place.s3])


@fault("s3_route", Closed)
def endpoint_of_another_table(place):
    place.ec2.modify_vpc_endpoint(
        VpcEndpointId=place.s3,
        AddRouteTableIds=[place.add_table()],
        RemoveRouteTableIds=[place.table],
    )


@fault("s3_route", Closed)
def public_subnet(place):
    place.ec2.delete_vpc_endpoints(VpcEndpointIds=[place.s3])
    gateway = place.ec2.create_internet_gateway()["InternetGateway"]["InternetGatewayId"]
    place.ec2.attach_internet_gateway(InternetGatewayId=gateway, VpcId=place.vpc)
    place.ec2.create_route(
        RouteTableId=place.table, DestinationCidrBlock="0.0.0.0/0", GatewayId=gateway
    )


@fault("s3_route", Closed)
def subnet_with_the_main_table(place):
    stray = place.add_subnet("10.0.6.0/24")
    return {"sagemaker.subnets": f"[{stray}]"}


@fault("nat_broken", Natted, severity="warning")
def nat_that_was_deleted(place):
    place.add_nat(place.public)
    place.ec2.delete_nat_gateway(NatGatewayId=place.nat)


@fault("nat_broken", Natted)
def nat_in_a_private_subnet(place):
    place.ec2.delete_vpc_endpoints(VpcEndpointIds=[place.s3])
    inner = place.add_subnet("10.0.8.0/24")
    place.unroute(place.table)
    place.route(place.table, NatGatewayId=place.add_nat(inner))
    place.ec2.delete_nat_gateway(NatGatewayId=place.nat)


@fault("endpoint_policy", Closed)
def endpoint_for_another_bucket(place):
    allow = {
        "Effect": "Allow",
        "Principal": "*",
        "Action": "s3:*",
        "Resource": ["arn:aws:s3:::corpus", "arn:aws:s3:::corpus/*"],
    }
    set_policy(place, allow)


@fault("endpoint_policy", Natted)
def endpoint_that_denies_writing(place):
    deny = {"Effect": "Deny", "Principal": "*", "Action": "s3:Put*", "Resource": "*"}
    set_policy(place, {**OPEN["Statement"][0], "Principal": "*"}, deny)


def set_policy(place, *statements):
    place.ec2.modify_vpc_endpoint(VpcEndpointId=place.s3, PolicyDocument=policy(*statements))


# Endpoints and names


@fault("no_endpoint", Closed, severity="warning")
def no_door_to_ecr(place):
    place.ec2.delete_vpc_endpoints(VpcEndpointIds=[place.doors["ecr.dkr"]])


@fault("no_endpoint", Closed, severity="warning")
def no_doors_at_all(place):
    place.ec2.delete_vpc_endpoints(VpcEndpointIds=list(place.doors.values()))


@fault("no_endpoint", Closed)
def no_door_to_the_secrets(place):
    return {"env": "{TOKEN: 'secret:ssm:token'}"}


@fault("endpoint_shut", Closed, severity="warning")
def door_that_lets_nobody_in(place):
    shut = place.add_group("shut")
    door = place.doors["logs"]
    place.ec2.delete_vpc_endpoints(VpcEndpointIds=[door])
    place.add_door("logs", shut)


@fault("vpc_dns", Natted)
def vpc_without_names(place):
    place.ec2.modify_vpc_attribute(VpcId=place.vpc, EnableDnsSupport={"Value": False})


@fault("vpc_dns", Closed)
def vpc_without_host_names(place):
    place.ec2.modify_vpc_attribute(VpcId=place.vpc, EnableDnsHostnames={"Value": False})


# The account


@fault("role_absent", Closed)
def role_that_does_not_exist(place):
    return {"sagemaker.role": "arn:aws:iam::123456789012:role/trainer"}


@fault("role_trust", Closed)
def role_for_machines_only(place):
    machines = {"Service": "ec2.amazonaws.com"}
    trust = policy({"Effect": "Allow", "Principal": machines, "Action": "sts:AssumeRole"})
    place.client("iam").update_assume_role_policy(RoleName="training", PolicyDocument=trust)


@fault("role_permissions", Closed)
def role_for_buckets_of_sagemaker_only(place):
    """As the managed policy AmazonSageMakerFullAccess has it."""
    put_policy(
        place,
        {"Effect": "Allow", "NotAction": "s3:*", "Resource": "*"},
        {"Effect": "Allow", "Action": "s3:*", "Resource": "arn:aws:s3:::*sagemaker*"},
    )


@fault("role_permissions", Natted)
def role_without_network_interfaces(place):
    put_policy(place, {"Effect": "Allow", "NotAction": "ec2:Create*", "Resource": "*"})


def put_policy(place, *statements):
    place.client("iam").put_role_policy(
        RoleName="training", PolicyName="all", PolicyDocument=policy(*statements)
    )


def policy(*statements):
    return json.dumps({"Version": "2012-10-17", "Statement": statements})


@fault("bucket_absent", Closed)
def bucket_that_does_not_exist(place):
    return {"sagemaker.bucket": "my-bukket"}


@fault("bucket_region", Closed)
def bucket_of_another_region(place):
    place.client("s3").create_bucket(
        Bucket="far-bucket", CreateBucketConfiguration={"LocationConstraint": "eu-west-1"}
    )
    return {"sagemaker.bucket": "far-bucket"}


@fault("quota", Closed)
def more_machines_than_the_quota(place):
    return {"resources.nodes": "5"}
