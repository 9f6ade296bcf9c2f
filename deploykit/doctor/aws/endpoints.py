"""Where there is no internet: the VPC's own doors to AWS, and what their policies let through."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from deploykit.doctor import fixes
from deploykit.doctor.aws import groups, policies, routes
from deploykit.doctor.aws.facts import Endpoint, Facts, Group, Subnet, Vpc
from deploykit.doctor.aws.needs import Needs
from deploykit.doctor.finding import Finding, Fix

_USUAL = ("ecr.api", "ecr.dkr", "logs", "sagemaker.api", "sts")
"""Services that a training script may call. SageMaker itself pulls the image and ships the logs
past the VPC: https://docs.aws.amazon.com/sagemaker/latest/dg/train-vpc.html."""


def check(needs: Needs, facts: Facts) -> Iterator[Finding]:
    if facts.endpoints is None or facts.tables is None or facts.nats is None:
        return
    ours = routes.ours(needs, facts)
    for vpc in sorted({subnet.vpc for subnet in ours}):
        here = [subnet for subnet in ours if subnet.vpc == vpc]
        yield from _names(needs, facts, vpc)
        yield from _policy(needs, facts, here)
        if _is_closed(facts, here):
            yield from _doors(needs, facts, here)


def _members(needs: Needs, facts: Facts, vpc: str) -> list[Group]:
    """The job's groups, of those that its VPC has."""
    known = facts.groups or {}
    there = [known[name] for name in needs.groups if name in known]
    return [group for group in there if group.vpc == vpc]


def _is_closed(facts: Facts, subnets: list[Subnet]) -> bool:
    """Whether none of the subnets has, or is meant to have, a way to the internet."""
    tables = (routes.table_of(facts, subnet.id) for subnet in subnets)
    found = [routes.default_route(table) for table in tables if table is not None]
    return all(route is None or route.target.startswith("igw-") for route in found)


def _names(needs: Needs, facts: Facts, vpc: str) -> Iterator[Finding]:
    home = (facts.vpcs or {}).get(vpc)
    if home is None:
        return
    if home.resolves is False:
        yield _attribute(
            needs, home, "enableDnsSupport", "no name can be resolved in the VPC, not even S3's"
        )
    private = [one for one in facts.endpoints or () if one.vpc == vpc and not one.gateway]
    if home.names_hosts is False and any(one.answers_for_name for one in private):
        yield _attribute(
            needs,
            home,
            "enableDnsHostnames",
            "the VPC's endpoints do not answer for the names of their services",
        )


def _attribute(needs: Needs, home: Vpc, name: str, message: str) -> Finding:
    return Finding(
        "vpc_dns",
        "error",
        message,
        (f"{home.id}: {name} is false",),
        fixes.make(
            "vpc-dns",
            f"turn {name} on",
            region=needs.region,
            vpc=home.id,
            block=str(home.blocks[0]),
            option="--enable-dns-support" if "Support" in name else "--enable-dns-hostnames",
        ),
    )


def _doors(needs: Needs, facts: Facts, subnets: list[Subnet]) -> Iterator[Finding]:
    there = {one.service: one for one in facts.endpoints or () if _serves(one, subnets[0].vpc)}
    wanted = [*_USUAL, *needs.secrets]
    absent = [name for name in wanted if name not in there]
    if absent:
        yield _absent(needs, facts, subnets, absent)
    for name in wanted:
        if name in there:
            yield from _door(needs, facts, subnets, there[name])


def _serves(endpoint: Endpoint, vpc: str) -> bool:
    return endpoint.vpc == vpc and not endpoint.gateway and endpoint.works


def _severity(needs: Needs, names: list[str]) -> Any:
    return "error" if set(needs.secrets).intersection(names) else "warning"


def _absent(needs: Needs, facts: Facts, subnets: list[Subnet], absent: list[str]) -> Finding:
    asked = ", ".join(name for name in absent if name in needs.secrets)
    lost = (
        f"The job's secrets cannot be read without {asked}."
        if asked
        else (
            "What a script does there (pip, downloads, trackers, these services) hangs until it "
            "times out; training itself needs S3 only."
        )
    )
    mine = _members(needs, facts, subnets[0].vpc)
    return Finding(
        "no_endpoint",
        _severity(needs, absent),
        f"no internet from these subnets, and no endpoint for {', '.join(absent)}. {lost}",
        tuple(_way_out(facts, subnet) for subnet in subnets),
        fixes.make(
            "endpoints",
            "make the endpoints (billed by the hour), or route 0.0.0.0/0 to a NAT gateway",
            region=needs.region,
            vpc=subnets[0].vpc,
            services=absent,
            subnets=_one_a_zone(subnets),
            groups=(chosen := _door_groups(facts, mine, subnets)),
            inside=[group.id for group in mine if group.id in chosen and not _open(group, subnets)],
        ),
    )


def _way_out(facts: Facts, subnet: Subnet) -> str:
    table = routes.table_of(facts, subnet.id)
    route = routes.default_route(table) if table else None
    name = table.id if table else "no route table"
    if route is None:
        return f"{subnet.id}, {name}: no route to 0.0.0.0/0"
    return f"{subnet.id}, {name}: 0.0.0.0/0 -> {route.target}, for public addresses only"


def _one_a_zone(subnets: list[Subnet]) -> list[str]:
    """An endpoint takes one subnet of each zone."""
    return list({subnet.zone: subnet.id for subnet in reversed(subnets)}.values())


def _door_groups(facts: Facts, mine: list[Group], subnets: list[Subnet]) -> list[str]:
    """Groups of the VPC's endpoints if they let the job in, else the job's own."""
    members = {group.id for group in mine}
    known = facts.groups or {}
    for one in facts.endpoints or ():
        behind = [known[name] for name in one.groups if name in known]
        if one.vpc == subnets[0].vpc and behind and _lets_in(behind, members, subnets):
            return [group.id for group in behind]
    return sorted(members)


def _lets_in(behind: list[Group], members: set[str], subnets: list[Subnet]) -> bool:
    return all(groups.reachable(behind, members, subnet.block) for subnet in subnets)


def _open(group: Group, subnets: list[Subnet]) -> bool:
    return _lets_in([group], {group.id}, subnets)


def _door(needs: Needs, facts: Facts, subnets: list[Subnet], door: Endpoint) -> Iterator[Finding]:
    known = facts.groups or {}
    behind = [known[name] for name in door.groups if name in known]
    members = {group.id for group in _members(needs, facts, door.vpc)}
    if not door.answers_for_name:
        yield _nameless(needs, door)
    if facts.groups is not None and members and not _lets_in(behind, members, subnets):
        yield _shut(needs, door, behind, min(members))


def _nameless(needs: Needs, door: Endpoint) -> Finding:
    return Finding(
        "endpoint_dns",
        _severity(needs, [door.service]),
        f"the endpoint for {door.service} does not answer for the service's own name, which "
        "programs call",
        (f"{door.id}: PrivateDnsEnabled is false",),
        fixes.make(
            "endpoint-dns",
            "turn private DNS on",
            region=needs.region,
            vpc=door.vpc,
            endpoint=door.id,
            service=door.service,
            subnets=list(door.subnets),
            groups=list(door.groups),
        ),
    )


def _shut(needs: Needs, door: Endpoint, behind: list[Group], member: str) -> Finding:
    permission = {
        "IpProtocol": "tcp",
        "FromPort": 443,
        "ToPort": 443,
        "UserIdGroupPairs": [{"GroupId": member}],
    }
    listed = [f"{door.id}: {', '.join(door.groups)}"]
    listed += [
        f"{group.id} inbound: {'; '.join(map(str, group.inbound)) or 'no rules'}"
        for group in behind
    ]
    return Finding(
        "endpoint_shut",
        _severity(needs, [door.service]),
        f"the endpoint for {door.service} does not let the job in on tcp 443",
        tuple(listed),
        fixes.make(
            "group-rule",
            f"allow tcp 443 from {member}",
            region=needs.region,
            group=door.groups[0] if door.groups else member,
            outbound=False,
            permissions=[permission],
        ),
    )


def _policy(needs: Needs, facts: Facts, subnets: list[Subnet]) -> Iterator[Finding]:
    """What the policy of the gateway to S3 refuses of what the job does with its buckets."""
    tables = (routes.table_of(facts, subnet.id) for subnet in subnets)
    found = (routes.gateway(facts, table) for table in tables if table is not None)
    for door in {door.id: door for door in found if door is not None}.values():
        lost = {
            bucket: refused
            for bucket in needs.buckets
            if (refused := _refused(needs, door, bucket))
        }
        if lost:
            yield _policy_finding(needs, door, lost)


def _refused(needs: Needs, door: Endpoint, bucket: str) -> list[str]:
    return [
        action
        for action, resource in policies.bucket_actions(bucket, write=bucket in needs.written)
        if policies.decide([door.policy], action, resource) in {"denied", "absent"}
    ]


def _policy_finding(needs: Needs, door: Endpoint, lost: Mapping[str, list[str]]) -> Finding:
    statements = list(policies.statements(door.policy))
    harmful = [
        one
        for one in statements
        if any(policies.denies(one, a, r) for b in lost for a, r in policies.bucket_actions(b))
    ]
    kept = [one for one in statements if one not in harmful]
    kept += [policies.allow_bucket(bucket) | {"Principal": "*"} for bucket in lost]
    wanted = {"Version": "2012-10-17", "Statement": kept}
    shown = harmful or statements
    say = "let the job's buckets through" + (", without the Deny" if harmful else "")
    return Finding(
        "endpoint_policy",
        "error",
        f"the policy of {door.id} (S3) refuses "
        + "; ".join(f"{', '.join(actions)} on {bucket}" for bucket, actions in lost.items()),
        tuple(f"{door.id}: {policies.shown(one)}" for one in shown),
        _policy_fix(needs, door, wanted, say),
    )


def _policy_fix(needs: Needs, door: Endpoint, policy: Mapping[str, Any], say: str) -> Fix:
    return fixes.make(
        "endpoint-policy",
        say,
        region=needs.region,
        vpc=door.vpc,
        endpoint=door.id,
        tables=list(door.tables),
        policy=policy,
    )
