"""VPCs built with moto: two healthy ones, and helpers to break them."""

from __future__ import annotations

import functools
import json

import boto3

REGION = "us-east-1"
ZONE = f"{REGION}a"
TRUST = {
    "Version": "2012-10-17",
    "Statement": [
        {
            "Effect": "Allow",
            "Principal": {"Service": "sagemaker.amazonaws.com"},
            "Action": "sts:AssumeRole",
        }
    ],
}
OPEN = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "*", "Resource": "*"}]}
SERVICES = ("ecr.api", "ecr.dkr", "logs", "sagemaker.api", "sts")


def everything(peer):
    return [{"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": peer}]}]


def tcp(low, high, peer):
    """A permission for TCP from or to a group or a block."""
    key, name = ("IpRanges", "CidrIp") if "/" in peer else ("UserIdGroupPairs", "GroupId")
    return {"IpProtocol": "tcp", "FromPort": low, "ToPort": high, key: [{name: peer}]}


@functools.cache
def client(service, endpoint):
    """One for all tests: creating it takes longer than most of them."""
    session = boto3.Session("testing", "testing", region_name=REGION)
    return session.client(service, endpoint_url=endpoint)


class TrainingVpc:
    """A VPC for training, and clients to break it with."""

    def __init__(self, moto, zone=ZONE):
        self.url, self.zone = f"http://127.0.0.1:{moto}", zone
        iam = self.client("iam")
        iam.create_role(RoleName="training", AssumeRolePolicyDocument=json.dumps(TRUST))
        iam.put_role_policy(RoleName="training", PolicyName="all", PolicyDocument=json.dumps(OPEN))
        ec2 = self.ec2
        self.id = ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
        ec2.modify_vpc_attribute(VpcId=self.id, EnableDnsHostnames={"Value": True})
        self.subnet = self.add_subnet("10.0.0.0/24")
        self.table = self.add_table(self.subnet)
        self.group = self.add_group("training")
        self.acl = self.acl_of(self.subnet)
        self.s3 = self.add_gateway(self.table)
        self.settings = {
            "sagemaker.subnets": f"[{self.subnet}]",
            "sagemaker.security_group_ids": f"[{self.group}]",
        }

    def client(self, service):
        return client(service, self.url)

    @property
    def ec2(self):
        return self.client("ec2")

    def add_subnet(self, block, zone=None, vpc=None):
        made = self.ec2.create_subnet(
            VpcId=vpc or self.id, CidrBlock=block, AvailabilityZone=zone or self.zone
        )
        return made["Subnet"]["SubnetId"]

    def add_table(self, *subnets):
        table = self.ec2.create_route_table(VpcId=self.id)["RouteTable"]["RouteTableId"]
        for subnet in subnets:
            self.ec2.associate_route_table(RouteTableId=table, SubnetId=subnet)
        return table

    def add_group(self, name, vpc=None):
        """A group that allows all traffic between its members, and EC2's default outbound rule."""
        made = self.ec2.create_security_group(
            GroupName=name, Description=name, VpcId=vpc or self.id
        )
        group = made["GroupId"]
        self.ec2.authorize_security_group_ingress(GroupId=group, IpPermissions=everything(group))
        self.ec2.authorize_security_group_egress(GroupId=group, IpPermissions=everything(group))
        return group

    def add_gateway(self, *tables):
        made = self.ec2.create_vpc_endpoint(
            VpcId=self.id,
            VpcEndpointType="Gateway",
            ServiceName=f"com.amazonaws.{REGION}.s3",
            RouteTableIds=list(tables),
        )
        return made["VpcEndpoint"]["VpcEndpointId"]

    def add_endpoint(self, service, group=None, **more):
        made = self.ec2.create_vpc_endpoint(
            VpcId=self.id,
            VpcEndpointType="Interface",
            ServiceName=f"com.amazonaws.{REGION}.{service}",
            SubnetIds=[self.subnet],
            SecurityGroupIds=[group or self.endpoint_group],
            **{"PrivateDnsEnabled": True, **more},
        )
        return made["VpcEndpoint"]["VpcEndpointId"]

    def acl_of(self, subnet):
        found = self.ec2.describe_network_acls(
            Filters=[{"Name": "association.subnet-id", "Values": [subnet]}]
        )
        return found["NetworkAcls"][0]["NetworkAclId"]

    def own_acl(self, subnet):
        """A separate ACL for a subnet, which allows everything."""
        acl = self.ec2.create_network_acl(VpcId=self.id)["NetworkAcl"]["NetworkAclId"]
        for egress in (True, False):
            self.rule(acl, 100, egress=egress)
        found = self.ec2.describe_network_acls(
            Filters=[{"Name": "association.subnet-id", "Values": [subnet]}]
        )
        for one in found["NetworkAcls"][0]["Associations"]:
            if one["SubnetId"] == subnet:
                self.ec2.replace_network_acl_association(
                    AssociationId=one["NetworkAclAssociationId"], NetworkAclId=acl
                )
        return acl

    def rule(
        self, acl, number, *, egress, allow=True, protocol="-1", ports=None, block="0.0.0.0/0"
    ):
        limits = {"PortRange": {"From": ports[0], "To": ports[1]}} if ports else {}
        self.ec2.create_network_acl_entry(
            NetworkAclId=acl,
            RuleNumber=number,
            Egress=egress,
            RuleAction="allow" if allow else "deny",
            Protocol=protocol,
            CidrBlock=block,
            **limits,
        )

    def drop(self, group, *, egress):
        """Remove the rule that allows members of the group itself."""
        name = "revoke_security_group_" + ("egress" if egress else "ingress")
        getattr(self.ec2, name)(GroupId=group, IpPermissions=everything(group))

    def allow(self, group, *permissions, egress):
        name = "authorize_security_group_" + ("egress" if egress else "ingress")
        getattr(self.ec2, name)(GroupId=group, IpPermissions=list(permissions))

    def only(self, *permissions, egress):
        """Let the job's group allow these instead of all traffic of its members."""
        self.drop(self.group, egress=egress)
        for permission in permissions:
            self.allow(self.group, permission, egress=egress)

    def revoke_default(self):
        """Remove EC2's default outbound rule from the job's group."""
        world = [{"IpProtocol": "-1", "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}]
        self.ec2.revoke_security_group_egress(GroupId=self.group, IpPermissions=world)


class IsolatedVpc(TrainingVpc):
    """No route to the internet, but endpoints for the services."""

    def __init__(self, moto, zone=ZONE):
        super().__init__(moto, zone)
        self.endpoint_group = self.add_group("endpoint_group")
        self.allow(self.endpoint_group, tcp(443, 443, self.group), egress=False)
        self.endpoints = {name: self.add_endpoint(name) for name in SERVICES}


class NatVpc(TrainingVpc):
    """A NAT gateway in a public subnet."""

    def __init__(self, moto, zone=ZONE):
        super().__init__(moto, zone)
        self.public = self.add_subnet("10.0.9.0/24")
        self.out = self.add_table(self.public)
        gateway = self.ec2.create_internet_gateway()["InternetGateway"]["InternetGatewayId"]
        self.ec2.attach_internet_gateway(InternetGatewayId=gateway, VpcId=self.id)
        self.igw = gateway
        self.route(self.out, GatewayId=gateway)
        self.nat = self.add_nat(self.public)
        self.route(self.table, NatGatewayId=self.nat)

    def add_nat(self, subnet):
        address = self.ec2.allocate_address(Domain="vpc")["AllocationId"]
        made = self.ec2.create_nat_gateway(SubnetId=subnet, AllocationId=address)
        return made["NatGateway"]["NatGatewayId"]

    def route(self, table, **target):
        self.ec2.create_route(RouteTableId=table, DestinationCidrBlock="0.0.0.0/0", **target)

    def unroute(self, table):
        self.ec2.delete_route(RouteTableId=table, DestinationCidrBlock="0.0.0.0/0")


def job_text(**section):
    lines = "".join(f"  {key}: {value}\n" for key, value in section.items())
    return (
        "name: digits\nentrypoint: {script: train.py}\n"
        "resources: {nodes: 2, processes_per_node: 1, time_limit: 30m}\n"
        "sagemaker:\n"
        "  role: arn:aws:iam::123456789012:role/training\n"
        f"  bucket: my-bucket\n  region: {REGION}\n  framework_version: 2.8.0\n"
        f"  sender: boto3\n{lines}"
    )
