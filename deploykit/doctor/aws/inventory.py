"""The account and the network of a job, parsed from AWS's responses.

A response is what the AWS CLI prints as JSON, stored under the name of its command
(``describe-subnets``), or ``{"Error": {"Code", "Message"}}``. Resources that could not be listed
are None; the checks that need them yield nothing, and `permissions.py` reports the gap.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from deploykit.job.decode import from_json

Answers = Mapping[str, Any]
Network = ipaddress.IPv4Network

_PORTS = (("FromPort", "From"), ("ToPort", "To"))
_NAMES = {"6": "tcp", "17": "udp", "1": "icmp", "esp": "50"}


@dataclass(frozen=True)
class Vpc:
    """A VPC with its CIDR blocks and attributes; an attribute is None if it is unknown."""

    id: str
    blocks: tuple[Network, ...]
    tenancy: str
    dns_support: bool | None
    """enableDnsSupport."""
    dns_hostnames: bool | None
    """enableDnsHostnames."""


@dataclass(frozen=True)
class Subnet:
    """A subnet and the number of its free addresses."""

    id: str
    vpc: str
    zone: str
    block: Network
    free: int


@dataclass(frozen=True)
class SecurityGroupRule:
    """A rule of a security group, inbound or outbound, for one peer.

    `low` and `high`: first and last port. `peer`: a group, a CIDR block or a prefix list.
    """

    protocol: str
    low: int
    high: int
    peer: str

    def __str__(self) -> str:
        return f"{ports(self.protocol, self.low, self.high)}, {self.peer}"


@dataclass(frozen=True)
class SecurityGroup:
    """A security group with its rules, one for each peer."""

    id: str
    vpc: str
    inbound: tuple[SecurityGroupRule, ...]
    outbound: tuple[SecurityGroupRule, ...]


@dataclass(frozen=True)
class AclEntry:
    """A rule of a network ACL, for one CIDR block."""

    number: int
    allow: bool
    protocol: str
    low: int
    high: int
    block: Network

    def __str__(self) -> str:
        what = "allow" if self.allow else "deny"
        number = "the last rule" if self.number >= LAST else f"rule {self.number}"
        return f"{number}: {what} {ports(self.protocol, self.low, self.high)}, {self.block}"


LAST = 32767
"""Number of the default rule at the end of each ACL, which denies the rest."""


@dataclass(frozen=True)
class NetworkAcl:
    """A network ACL with its rules, in the order of evaluation."""

    id: str
    vpc: str
    subnets: tuple[str, ...]
    inbound: tuple[AclEntry, ...]
    outbound: tuple[AclEntry, ...]


@dataclass(frozen=True)
class Route:
    """A route; `works` is False for a blackhole."""

    destination: str
    target: str
    works: bool


@dataclass(frozen=True)
class RouteTable:
    """A route table and the subnets that are associated with it explicitly."""

    id: str
    vpc: str
    main: bool
    subnets: tuple[str, ...]
    routes: tuple[Route, ...]


@dataclass(frozen=True)
class Endpoint:
    """A VPC endpoint of type Gateway or Interface."""

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
    """A NAT gateway and the subnet it is in."""

    id: str
    vpc: str
    subnet: str
    state: str


@dataclass(frozen=True)
class Role:
    """An IAM role: its trust policy, its permission policies, its permissions boundary.

    `policies` is None if they could not be read, `boundary` if there is none.
    """

    trust: Mapping[str, Any]
    policies: tuple[Mapping[str, Any], ...] | None
    boundary: Mapping[str, Any] | None


@dataclass(frozen=True)
class Quota:
    """A service quota of the account."""

    code: str
    value: float


@dataclass(frozen=True)
class Inventory:
    """All resources that the checks look at; None where they could not be listed."""

    answers: Answers
    account: str | None
    caller: str | None
    vpcs: Mapping[str, Vpc] | None
    subnets: Mapping[str, Subnet] | None
    groups: Mapping[str, SecurityGroup] | None
    acls: tuple[NetworkAcl, ...] | None
    tables: tuple[RouteTable, ...] | None
    endpoints: tuple[Endpoint, ...] | None
    nats: Mapping[str, NatGateway] | None
    s3: tuple[str, tuple[Network, ...]] | None
    """Id of the prefix list of S3, and its CIDR blocks."""
    efa: bool
    """Whether EC2 offers EFA with the type; whether SageMaker uses it is in the requirements."""


def ports(protocol: str, low: int, high: int) -> str:
    """A protocol and its ports for messages: ``tcp 443``, ``udp 500``, ``all traffic``."""
    if protocol == "-1":
        return "all traffic"
    name = {"50": "protocol 50 (ESP)"}.get(protocol, protocol)
    if protocol not in {"tcp", "udp"}:
        return name
    if (low, high) == (0, 65535):
        return f"{name}, all ports"
    return f"{name} {low}" if low == high else f"{name} {low}-{high}"


def error_code(answers: Answers, name: str) -> str | None:
    """The error code that a request returned; None if it succeeded or was not sent."""
    answer = answers.get(name)
    return None if answer is None else answer.get("Error", {}).get("Code")


def parse(answers: Answers, instance_type: str) -> Inventory:
    """Parse the responses. `instance_type` is EC2's name, whose EFA support is looked up.

    Responses from a folder may have any shape: raises what indexing them raises.
    """
    caller = _successful(answers, "get-caller-identity") or {}
    return Inventory(
        answers=answers,
        account=caller.get("Account"),
        caller=caller.get("Arn"),
        vpcs=_by_id(answers, "describe-vpcs", "Vpcs", lambda raw: _vpc(answers, raw)),
        subnets=_by_id(answers, "describe-subnets", "Subnets", _subnet),
        groups=_by_id(answers, "describe-security-groups", "SecurityGroups", _group),
        acls=_list(answers, "describe-network-acls", "NetworkAcls", _acl),
        tables=_list(answers, "describe-route-tables", "RouteTables", _table),
        endpoints=_list(answers, "describe-vpc-endpoints", "VpcEndpoints", _endpoint),
        nats=_by_id(answers, "describe-nat-gateways", "NatGateways", _nat),
        s3=_s3(answers),
        efa=_efa(answers, instance_type),
    )


def role(answers: Answers) -> Role | None:
    """The execution role; None if it could not be read."""
    answer = _successful(answers, "get-role")
    if answer is None:
        return None
    policies = _successful(answers, "role-policies")
    trust = document(answer["Role"]["AssumeRolePolicyDocument"])
    documents = None if policies is None else tuple(map(document, policies["Documents"]))
    boundary = (policies or {}).get("Boundary")
    return Role(trust, documents, document(boundary) if boundary else None)


def quota(answers: Answers, name: str) -> Quota | None:
    """The quota with this name; None if it could not be read."""
    answer = _successful(answers, "list-service-quotas") or {}
    named = (one for one in answer.get("Quotas", ()) if one.get("QuotaName") == name)
    return next((Quota(one["QuotaCode"], one["Value"]) for one in named), None)


def document(policy: Any) -> Mapping[str, Any]:
    """A policy document, which some commands return as text and others as JSON."""
    return dict(from_json(policy)) if isinstance(policy, str) else dict(policy or {})


def _successful(answers: Answers, name: str) -> Any:
    answer = answers.get(name)
    return None if answer is None or "Error" in answer else answer


def _list(answers: Answers, name: str, key: str, make: Any) -> Any:
    answer = _successful(answers, name)
    return None if answer is None else tuple(make(raw) for raw in answer.get(key, ()))


def _by_id(answers: Answers, name: str, key: str, make: Any) -> Any:
    resources = _list(answers, name, key, make)
    return None if resources is None else {one.id: one for one in resources}


def _vpc(answers: Answers, raw: Any) -> Vpc:
    blocks = [one["CidrBlock"] for one in raw.get("CidrBlockAssociationSet", ())]
    return Vpc(
        raw["VpcId"],
        tuple(map(_block, blocks or [raw["CidrBlock"]])),
        raw.get("InstanceTenancy", "default"),
        _attribute(answers, raw["VpcId"], "EnableDnsSupport"),
        _attribute(answers, raw["VpcId"], "EnableDnsHostnames"),
    )


def _block(text: Any) -> Network:
    """A CIDR block. Without `str`, ip_network would accept a number as an address."""
    return Network(str(text))


def _attribute(answers: Answers, vpc: str, name: str) -> bool | None:
    answer = _successful(answers, f"describe-vpc-attribute-{name[0].lower()}{name[1:]}-{vpc}")
    return None if answer is None else bool(answer[name]["Value"])


def _subnet(raw: Any) -> Subnet:
    return Subnet(
        raw["SubnetId"],
        raw["VpcId"],
        raw["AvailabilityZone"],
        _block(raw["CidrBlock"]),
        raw["AvailableIpAddressCount"],
    )


def _group(raw: Any) -> SecurityGroup:
    return SecurityGroup(
        raw["GroupId"],
        raw["VpcId"],
        tuple(_rules(raw.get("IpPermissions", ()))),
        tuple(_rules(raw.get("IpPermissionsEgress", ()))),
    )


def _rules(permissions: Any) -> Iterator[SecurityGroupRule]:
    for raw in permissions:
        protocol, low, high = _protocol(raw["IpProtocol"], raw)
        peers = [
            *(pair["GroupId"] for pair in raw.get("UserIdGroupPairs", ())),
            *(block["CidrIp"] for block in raw.get("IpRanges", ())),
            *(listed["PrefixListId"] for listed in raw.get("PrefixListIds", ())),
        ]
        yield from (SecurityGroupRule(protocol, low, high, peer) for peer in peers)


def _protocol(name: str, limits: Mapping[str, Any]) -> tuple[str, int, int]:
    """A protocol and its ports; 0 to 65535 if it has no ports, or the rule allows all."""
    name = _NAMES.get(str(name), str(name))
    low, high = (limits.get(key, limits.get(other)) for key, other in _PORTS)
    if name not in {"tcp", "udp"} or low is None or low == -1:
        return name, 0, 65535
    return name, int(low), int(high)


def _acl(raw: Any) -> NetworkAcl:
    return NetworkAcl(
        raw["NetworkAclId"],
        raw["VpcId"],
        tuple(one["SubnetId"] for one in raw.get("Associations", ())),
        tuple(_entries(raw, outbound=False)),
        tuple(_entries(raw, outbound=True)),
    )


def _entries(raw: Any, *, outbound: bool) -> Iterator[AclEntry]:
    """The rules of one direction, in the order of evaluation."""
    for one in sorted(raw.get("Entries", ()), key=lambda one: int(one["RuleNumber"])):
        if one["Egress"] is outbound and "CidrBlock" in one:
            protocol, low, high = _protocol(one["Protocol"], one.get("PortRange") or {})
            number, allow = int(one["RuleNumber"]), one["RuleAction"] == "allow"
            yield AclEntry(number, allow, protocol, low, high, _block(one["CidrBlock"]))


def _table(raw: Any) -> RouteTable:
    associations = raw.get("Associations", ())
    return RouteTable(
        raw["RouteTableId"],
        raw["VpcId"],
        any(one.get("Main") for one in associations),
        tuple(one["SubnetId"] for one in associations if one.get("SubnetId")),
        tuple(_routes(raw)),
    )


def _routes(raw: Any) -> Iterator[Route]:
    for one in raw.get("Routes", ()):
        destination = one.get("DestinationCidrBlock") or one.get("DestinationPrefixListId")
        if destination:
            targets = [key for key in one if key.endswith("Id") and not key.startswith("Dest")]
            target = next((str(one[key]) for key in targets if one[key]), "")
            yield Route(destination, target, one.get("State", "active") == "active")


def _endpoint(raw: Any) -> Endpoint:
    return Endpoint(
        raw["VpcEndpointId"],
        raw["VpcId"],
        re.sub(r"^.*\bamazonaws\.[a-z0-9-]+\.", "", raw["ServiceName"]),
        raw.get("VpcEndpointType", "Gateway") == "Gateway",
        raw.get("State", "available").lower() == "available",
        tuple(raw.get("RouteTableIds", ())),
        tuple(raw.get("SubnetIds", ())),
        tuple(one["GroupId"] for one in raw.get("Groups", ())),
        bool(raw.get("PrivateDnsEnabled")),
        document(raw.get("PolicyDocument")),
    )


def _nat(raw: Any) -> NatGateway:
    return NatGateway(raw["NatGatewayId"], raw["VpcId"], raw.get("SubnetId", ""), raw["State"])


def _s3(answers: Answers) -> tuple[str, tuple[Network, ...]] | None:
    for one in (_successful(answers, "describe-prefix-lists") or {}).get("PrefixLists", ()):
        if one["PrefixListName"].endswith(".s3"):
            return one["PrefixListId"], tuple(map(_block, one.get("Cidrs", ())))
    return None


def _efa(answers: Answers, instance_type: str) -> bool:
    types = (_successful(answers, "describe-instance-types") or {}).get("InstanceTypes", ())
    networks = (t.get("NetworkInfo", {}) for t in types if t.get("InstanceType") == instance_type)
    return any(network.get("EfaSupported", False) for network in networks)
