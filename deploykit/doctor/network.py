"""The network and the account of a job, parsed from AWS's responses, and questions about them.

A response is what the AWS CLI prints as JSON, stored under the name of its command
(``describe-subnets``), or ``{"Error": {"Code", "Message"}}``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from ipaddress import IPv4Network
from typing import Any

from deploykit.doctor import fixes
from deploykit.doctor.requirements import Requirements
from deploykit.job.decode import from_json
from deploykit.lib.finding import Fix

Answers = Mapping[str, Any]

ANYWHERE = "0.0.0.0/0"
PEERS = {"UserIdGroupPairs": "GroupId", "IpRanges": "CidrIp", "PrefixListIds": "PrefixListId"}
"""Where a rule of a security group names its peers: a list of EC2's, and the key in each item."""
LAST = 32767
"""Number of the default rule at the end of each ACL, which denies the rest."""
_PROTOCOLS = {"6": "tcp", "17": "udp", "1": "icmp", "esp": "50"}


@dataclass(frozen=True)
class Vpc:
    """A VPC; an attribute of its DNS is None if it is unknown."""

    id: str
    blocks: tuple[IPv4Network, ...]
    tenancy: str
    dns_support: bool | None
    dns_hostnames: bool | None


@dataclass(frozen=True)
class Subnet:
    id: str
    vpc: str
    zone: str
    block: IPv4Network
    free: int
    """Free addresses."""


@dataclass(frozen=True)
class SecurityGroupRule:
    """A rule for one peer: a group, a CIDR block or a prefix list; ports from `low` to `high`."""

    protocol: str
    low: int
    high: int
    peer: str

    def __str__(self) -> str:
        return f"{ports(self.protocol, self.low, self.high)}, {self.peer}"


@dataclass(frozen=True)
class SecurityGroup:
    id: str
    vpc: str
    rules: Mapping[bool, tuple[SecurityGroupRule, ...]]
    """By whether they are for outbound traffic."""


@dataclass(frozen=True)
class AclEntry:
    number: int
    allow: bool
    protocol: str
    low: int
    high: int
    block: IPv4Network

    def __str__(self) -> str:
        action = "allow" if self.allow else "deny"
        number = "the last rule" if self.number >= LAST else f"rule {self.number}"
        return f"{number}: {action} {ports(self.protocol, self.low, self.high)}, {self.block}"


@dataclass(frozen=True)
class NetworkAcl:
    id: str
    subnets: tuple[str, ...]
    entries: Mapping[bool, tuple[AclEntry, ...]]
    """By whether they are for outbound traffic, in the order of evaluation."""


@dataclass(frozen=True)
class Route:
    """A route; `works` is False for a blackhole."""

    destination: str
    target: str
    works: bool

    @property
    def to_internet_gateway(self) -> bool:
        """Whether only instances with a public IP can use it; those of a job have none."""
        return self.target.startswith("igw-")


@dataclass(frozen=True)
class RouteTable:
    """A route table and the subnets that are associated with it explicitly."""

    id: str
    vpc: str
    main: bool
    subnets: tuple[str, ...]
    routes: tuple[Route, ...]

    @property
    def default(self) -> Route | None:
        return next((route for route in self.routes if route.destination == ANYWHERE), None)


@dataclass(frozen=True)
class Endpoint:
    id: str
    vpc: str
    service: str
    """The service's name without its prefix and region: ``s3``, ``ecr.api``."""
    gateway: bool
    works: bool
    tables: tuple[str, ...]
    subnets: tuple[str, ...]
    groups: tuple[str, ...]
    private_dns: bool
    policy: Mapping[str, Any]


@dataclass(frozen=True)
class NatGateway:
    id: str
    vpc: str
    subnet: str
    state: str


@dataclass(frozen=True)
class Network:
    """What a job requires, and the account and network that it will meet.

    A resource that AWS did not list is absent: `answered` distinguishes that from "does not exist".
    """

    job: Requirements
    answers: Answers
    vpcs: Mapping[str, Vpc]
    subnets: Mapping[str, Subnet]
    groups: Mapping[str, SecurityGroup]
    acls: tuple[NetworkAcl, ...]
    tables: tuple[RouteTable, ...]
    endpoints: tuple[Endpoint, ...]
    nats: Mapping[str, NatGateway]
    s3_prefix_list: str
    """Its id; empty if it is unknown."""
    s3_blocks: tuple[IPv4Network, ...]

    @property
    def account(self) -> str | None:
        account: str | None = self.answers.get("get-caller-identity", {}).get("Account")
        return account

    @property
    def caller(self) -> str | None:
        arn: str | None = self.answers.get("get-caller-identity", {}).get("Arn")
        return arn

    def answered(self, *commands: str) -> bool:
        return all("Error" not in self.answers.get(name, {"Error": {}}) for name in commands)

    @property
    def knows_routes(self) -> bool:
        """Whether AWS has listed what the routes of a subnet lead to."""
        return self.answered(
            "describe-route-tables", "describe-vpc-endpoints", "describe-nat-gateways"
        )

    def error_code(self, command: str) -> str | None:
        """The error that a request returned; None if it succeeded or was not sent."""
        code: str | None = self.answers.get(command, {}).get("Error", {}).get("Code")
        return code

    def fix(self, template: str, summary: str, /, **values: Any) -> Fix:
        """A fix by commands in the job's region; see `fixes.make`."""
        return fixes.make(template, summary, region=self.job.region, **values)

    @cached_property
    def existing_subnets(self) -> list[Subnet]:
        return [self.subnets[name] for name in self.job.subnets if name in self.subnets]

    @cached_property
    def existing_groups(self) -> list[SecurityGroup]:
        return [self.groups[name] for name in self.job.groups if name in self.groups]

    @cached_property
    def vpc(self) -> str | None:
        """The VPC of the first subnet that is in one with a security group, else of the first."""
        vpcs = [subnet.vpc for subnet in self.existing_subnets]
        group_vpcs = {group.vpc for group in self.existing_groups}
        return next((vpc for vpc in vpcs if vpc in group_vpcs), next(iter(vpcs), None))

    @cached_property
    def job_subnets(self) -> list[Subnet]:
        return [subnet for subnet in self.existing_subnets if subnet.vpc == self.vpc]

    @cached_property
    def job_groups(self) -> list[SecurityGroup]:
        return [group for group in self.existing_groups if group.vpc == self.vpc]

    @cached_property
    def job_tables(self) -> list[RouteTable]:
        tables = (self.table_of(subnet.id) for subnet in self.job_subnets)
        return list({table.id: table for table in tables if table is not None}.values())

    def table_of(self, subnet: str) -> RouteTable | None:
        """The route table of a subnet: the associated one, else the main one of its VPC."""
        own = next((table for table in self.tables if subnet in table.subnets), None)
        if own is not None or subnet not in self.subnets:
            return own
        vpc = self.subnets[subnet].vpc
        return next((table for table in self.tables if table.main and table.vpc == vpc), None)

    def default_route(self, subnet: str) -> Route | None:
        table = self.table_of(subnet)
        return None if table is None else table.default

    def acl_of(self, subnet: str) -> NetworkAcl | None:
        return next((acl for acl in self.acls if subnet in acl.subnets), None)

    def is_public(self, subnet: str) -> bool:
        """Whether the default route of a subnet leads to an internet gateway."""
        route = self.default_route(subnet)
        return route is not None and route.works and route.to_internet_gateway

    def why_broken(self, route: Route) -> str | None:
        """Why a default route is broken; None if it works or that is unknown."""
        if not route.works:
            return f"{route.target or 'its target'} does not exist"
        if not route.target.startswith("nat-"):
            return None
        nat = self.nats.get(route.target)
        if nat is None or nat.state not in {"available", "pending"}:
            return f"{route.target} {f'is {nat.state}' if nat else 'does not exist'}"
        if not self.is_public(nat.subnet):
            return f"{nat.id} is in {nat.subnet}, which has no route to an internet gateway"
        return None

    def reaches_internet(self, table: RouteTable) -> bool:
        """Whether `table` gives internet access to instances without a public IP."""
        route = table.default
        return (
            route is not None and not route.to_internet_gateway and self.why_broken(route) is None
        )

    def working_endpoints(self, vpc: str, *services: str) -> list[Endpoint]:
        return [
            endpoint
            for endpoint in self.endpoints
            if endpoint.vpc == vpc and endpoint.service in services and endpoint.works
        ]

    def s3_gateways(self, vpc: str) -> list[Endpoint]:
        return [endpoint for endpoint in self.working_endpoints(vpc, "s3") if endpoint.gateway]

    def s3_gateway(self, table: RouteTable) -> Endpoint | None:
        gateways = self.s3_gateways(table.vpc)
        return next((gateway for gateway in gateways if table.id in gateway.tables), None)

    def reaches_s3(self, table: RouteTable) -> bool:
        private = any(
            endpoint.private_dns and not endpoint.gateway
            for endpoint in self.working_endpoints(table.vpc, "s3")
        )
        return private or self.s3_gateway(table) is not None or self.reaches_internet(table)


def ports(protocol: str, low: int, high: int) -> str:
    """A protocol and its ports for messages: ``tcp 443``, ``udp 500``, ``all traffic``."""
    if protocol == "-1":
        return "all traffic"
    if protocol not in {"tcp", "udp"}:
        return "protocol 50 (ESP)" if protocol == "50" else protocol
    if (low, high) == (0, 65535):
        return f"{protocol}, all ports"
    return f"{protocol} {low}" if low == high else f"{protocol} {low}-{high}"


def parse(job: Requirements, answers: Answers) -> Network:
    """Parse the responses for a job.

    Responses from a folder may have any shape: raises what indexing them raises.
    """

    def listed(command: str, key: str) -> Any:
        return answers.get(command, {}).get(key, ())

    lists = listed("describe-prefix-lists", "PrefixLists")
    s3 = next((raw for raw in lists if raw["PrefixListName"].endswith(".s3")), None)
    vpcs = (_vpc(answers, raw) for raw in listed("describe-vpcs", "Vpcs"))
    subnets = (
        Subnet(
            id=raw["SubnetId"],
            vpc=raw["VpcId"],
            zone=raw["AvailabilityZone"],
            block=_block(raw["CidrBlock"]),
            free=raw["AvailableIpAddressCount"],
        )
        for raw in listed("describe-subnets", "Subnets")
    )
    groups = map(_group, listed("describe-security-groups", "SecurityGroups"))
    nats = (
        NatGateway(raw["NatGatewayId"], raw["VpcId"], raw.get("SubnetId", ""), raw["State"])
        for raw in listed("describe-nat-gateways", "NatGateways")
    )
    return Network(
        job=job,
        answers=answers,
        vpcs={vpc.id: vpc for vpc in vpcs},
        subnets={subnet.id: subnet for subnet in subnets},
        groups={group.id: group for group in groups},
        acls=tuple(
            NetworkAcl(
                id=raw["NetworkAclId"],
                subnets=tuple(item["SubnetId"] for item in raw.get("Associations", ())),
                entries={way: tuple(_entries(raw, outbound=way)) for way in (False, True)},
            )
            for raw in listed("describe-network-acls", "NetworkAcls")
        ),
        tables=tuple(map(_table, listed("describe-route-tables", "RouteTables"))),
        endpoints=tuple(map(_endpoint, listed("describe-vpc-endpoints", "VpcEndpoints"))),
        nats={nat.id: nat for nat in nats},
        s3_prefix_list=s3["PrefixListId"] if s3 else "",
        s3_blocks=tuple(map(_block, s3.get("Cidrs", ()))) if s3 else (),
    )


def _block(text: Any) -> IPv4Network:
    """A CIDR block. Raises ValueError; of a number, ipaddress itself would make an address."""
    return IPv4Network(str(text))


def document(policy: Any) -> Mapping[str, Any]:
    """A policy document, which some commands return as text and others as JSON."""
    return dict(from_json(policy)) if isinstance(policy, str) else dict(policy or {})


def _vpc(answers: Answers, raw: Any) -> Vpc:
    def attribute(name: str) -> bool | None:
        key = f"{name[0].upper()}{name[1:]}"
        answer = answers.get(f"describe-vpc-attribute-{name}-{raw['VpcId']}", {"Error": {}})
        return None if "Error" in answer else bool(answer[key]["Value"])

    blocks = [item["CidrBlock"] for item in raw.get("CidrBlockAssociationSet", ())]
    return Vpc(
        id=raw["VpcId"],
        blocks=tuple(map(_block, blocks or [raw["CidrBlock"]])),
        tenancy=raw.get("InstanceTenancy", "default"),
        dns_support=attribute("enableDnsSupport"),
        dns_hostnames=attribute("enableDnsHostnames"),
    )


def _group(raw: Any) -> SecurityGroup:
    keys = {False: "IpPermissions", True: "IpPermissionsEgress"}
    rules = {outbound: tuple(_rules(raw.get(key, ()))) for outbound, key in keys.items()}
    return SecurityGroup(raw["GroupId"], raw["VpcId"], rules)


def _rules(permissions: Any) -> Iterator[SecurityGroupRule]:
    for raw in permissions:
        protocol, low, high = _traffic(raw["IpProtocol"], raw.get("FromPort"), raw.get("ToPort"))
        peers = [peer[name] for key, name in PEERS.items() for peer in raw.get(key, ())]
        yield from (SecurityGroupRule(protocol, low, high, peer) for peer in peers)


def _traffic(protocol: Any, low: Any, high: Any) -> tuple[str, int, int]:
    """A protocol and its ports; 0 to 65535 if it has no ports, or the rule allows all."""
    name = _PROTOCOLS.get(str(protocol), str(protocol))
    if name not in {"tcp", "udp"} or low is None or low == -1:
        return name, 0, 65535
    return name, int(low), int(high)


def _entries(raw: Any, *, outbound: bool) -> Iterator[AclEntry]:
    for entry in sorted(raw.get("Entries", ()), key=lambda entry: int(entry["RuleNumber"])):
        if entry["Egress"] is outbound and "CidrBlock" in entry:
            limits = entry.get("PortRange") or {}
            protocol, low, high = _traffic(entry["Protocol"], limits.get("From"), limits.get("To"))
            yield AclEntry(
                number=int(entry["RuleNumber"]),
                allow=entry["RuleAction"] == "allow",
                protocol=protocol,
                low=low,
                high=high,
                block=_block(entry["CidrBlock"]),
            )


def _table(raw: Any) -> RouteTable:
    associations = raw.get("Associations", ())
    return RouteTable(
        id=raw["RouteTableId"],
        vpc=raw["VpcId"],
        main=any(item.get("Main") for item in associations),
        subnets=tuple(item["SubnetId"] for item in associations if item.get("SubnetId")),
        routes=tuple(_routes(raw)),
    )


def _routes(raw: Any) -> Iterator[Route]:
    for route in raw.get("Routes", ()):
        destination = route.get("DestinationCidrBlock") or route.get("DestinationPrefixListId")
        if destination:
            keys = [key for key in route if key.endswith("Id") and not key.startswith("Dest")]
            target = next((str(route[key]) for key in keys if route[key]), "")
            yield Route(destination, target, works=route.get("State", "active") == "active")


def _endpoint(raw: Any) -> Endpoint:
    return Endpoint(
        id=raw["VpcEndpointId"],
        vpc=raw["VpcId"],
        service=re.sub(r"^.*\bamazonaws\.[a-z0-9-]+\.", "", raw["ServiceName"]),
        gateway=raw.get("VpcEndpointType", "Gateway") == "Gateway",
        works=raw.get("State", "available").lower() == "available",
        tables=tuple(raw.get("RouteTableIds", ())),
        subnets=tuple(raw.get("SubnetIds", ())),
        groups=tuple(group["GroupId"] for group in raw.get("Groups", ())),
        private_dns=bool(raw.get("PrivateDnsEnabled")),
        policy=document(raw.get("PolicyDocument")),
    )
