"""Checks of a job's security groups: traffic between its nodes, and to AWS.

A packet passes if any rule of any of the node's groups allows it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from deploykit.doctor import fixes
from deploykit.doctor.aws import packet_filters, routes
from deploykit.doctor.aws.inventory import Inventory, Network, SecurityGroup, Subnet, ports
from deploykit.doctor.aws.requirements import ANY, HTTPS, Flow, Ports, Requirements
from deploykit.lib.finding import Finding, Fix

_DIRECTIONS = {False: ("inbound", "from"), True: ("outbound", "to")}
_ALL = Flow("-1")


def findings(requirements: Requirements, inventory: Inventory) -> Iterator[Finding]:
    """Missing groups, groups of another VPC, and traffic that no rule allows."""
    subnets = routes.subnets_of_job(requirements, inventory)
    if inventory.groups is None or not subnets:
        return
    existing = [inventory.groups[name] for name in requirements.groups if name in inventory.groups]
    if len(existing) < len(requirements.groups):
        yield _missing(requirements, inventory, subnets[0])
    foreign = [group for group in existing if group.vpc != subnets[0].vpc]
    if foreign:
        yield _other_vpc(requirements, inventory, foreign, subnets[0])
    groups = [group for group in existing if group not in foreign]
    if not groups:
        return
    for outbound in (False, True):
        yield from _between(requirements, inventory, groups, outbound=outbound)
    yield from _to_aws(requirements, inventory, groups)


def _missing(requirements: Requirements, inventory: Inventory, subnet: Subnet) -> Finding:
    known = inventory.groups or {}
    missing = [name for name in requirements.groups if name not in known]
    return Finding(
        "group_not_found",
        "error",
        f"security group not found in {requirements.region} of this account: {', '.join(missing)}",
        (f"sagemaker.security_group_ids: {', '.join(requirements.groups)}",),
        _replacement(requirements, inventory, subnet),
    )


def _other_vpc(
    requirements: Requirements, inventory: Inventory, foreign: list[SecurityGroup], subnet: Subnet
) -> Finding:
    return Finding(
        "group_vpc",
        "error",
        f"{', '.join(group.id for group in foreign)} and the subnets are in different VPCs",
        (
            *(f"{group.id}: {group.vpc}" for group in foreign),
            f"{subnet.id}: {subnet.vpc}",
        ),
        _replacement(requirements, inventory, subnet),
    )


def _replacement(requirements: Requirements, inventory: Inventory, subnet: Subnet) -> Fix:
    """A group of the subnet's VPC that allows all traffic among its members, else a new one."""
    for group in (inventory.groups or {}).values():
        both = all(_allows_members([group], outbound=outbound) for outbound in (False, True))
        if group.vpc == subnet.vpc and both:
            summary = f"{group.id} in {group.vpc} allows all traffic among its members"
            return fixes.job_file(summary, security_group_ids=[group.id])
    return fixes.make(
        "group",
        f"create a group in {subnet.vpc} that allows all traffic among its members",
        region=requirements.region,
        vpc=subnet.vpc,
    )


def _allows_members(groups: Iterable[SecurityGroup], *, outbound: bool) -> bool:
    """Whether a rule that names a group allows all traffic among members, as EFA requires."""
    groups = list(groups)
    members = {group.id for group in groups}
    return any(
        rule.protocol == "-1" and rule.peer in members
        for rule in packet_filters.rules_of(groups, outbound=outbound)
    )


def _between(
    requirements: Requirements, inventory: Inventory, groups: list[SecurityGroup], *, outbound: bool
) -> Iterator[Finding]:
    """Traffic between the nodes."""
    if requirements.nodes == 1:
        return
    way, towards = _DIRECTIONS[outbound]
    efa = requirements.efa or inventory.efa
    if efa and not _allows_members(groups, outbound=outbound):
        message = (
            f"EFA ({requirements.instance_type}) requires a rule for all traffic {towards} the "
            f"group itself, {way}; a rule for CIDR blocks does not match EFA traffic"
        )
        if not requirements.efa:
            message = f"if SageMaker uses EFA here, as EC2 can: {message}. TCP needs no such rule"
        one = _finding(requirements, f"efa_{way}", message, groups, [_ALL], outbound=outbound)
        yield one if requirements.efa else replace(one, severity="warning")
    if requirements.efa:
        return
    members = [group.id for group in groups]
    given = packet_filters.rules_of(groups, outbound=outbound)
    missing_ports = {
        flow: sorted(
            {
                left
                for subnet in routes.subnets_of_job(requirements, inventory)
                for left in packet_filters.missing(flow, given, members, subnet.block)
            }
        )
        for flow in requirements.peers
    }
    for encryption in (False, True):
        blocked = [
            Flow(flow.protocol, tuple(left))
            for flow, left in missing_ports.items()
            if left and (flow.protocol != "tcp") is encryption
        ]
        if blocked:
            code = f"encryption_{way}" if encryption else f"peers_{way}"
            message = _message(blocked, outbound=outbound, encryption=encryption)
            yield _finding(requirements, code, message, groups, blocked, outbound=outbound)


def _message(blocked: list[Flow], *, outbound: bool, encryption: bool) -> str:
    traffic = ", ".join(ports(flow.protocol, *piece) for flow in blocked for piece in flow.ports)
    direction = "outbound" if outbound else "inbound"
    blocked_traffic = f"the security groups block {direction} {traffic} between the nodes"
    if encryption:
        return f"{blocked_traffic}, which inter-container traffic encryption uses"
    return (
        f"{blocked_traffic}: init_process_group times out. NCCL and Gloo listen on any port from "
        "32768 on"
    )


def _finding(  # noqa: PLR0913 - the parts of one finding
    requirements: Requirements,
    code: str,
    message: str,
    groups: list[SecurityGroup],
    blocked: list[Flow],
    *,
    outbound: bool,
) -> Finding:
    _, towards = _DIRECTIONS[outbound]
    group = groups[0].id
    wanted = [_permission(_whole(flow), group) for flow in blocked]
    names = ", ".join(
        ports(_whole(flow).protocol, *ANY) for flow in blocked if flow.protocol != "udp"
    )
    names += ", udp 500" if any(flow.protocol == "udp" for flow in blocked) else ""
    return Finding(
        code,
        "error",
        message,
        tuple(_listed(one, outbound=outbound) for one in groups),
        _rule_fix(
            requirements,
            group,
            wanted,
            f"allow {names.strip(', ')} {towards} {group} itself",
            outbound=outbound,
        ),
    )


def _whole(flow: Flow) -> Flow:
    """All ports for TCP, since other frameworks use other ports; other protocols unchanged."""
    return Flow("tcp") if flow.protocol == "tcp" else flow


def _permission(flow: Flow, peer: str) -> dict[str, object]:
    """An IpPermission of EC2's API; ports are -1 for a protocol that has none."""
    low, high = flow.ports[0] if flow.protocol in {"tcp", "udp"} else (-1, -1)
    limits = {} if flow.protocol == "-1" else {"FromPort": low, "ToPort": high}
    kind = {"sg-": ("UserIdGroupPairs", "GroupId"), "pl-": ("PrefixListIds", "PrefixListId")}
    key, name = kind.get(peer[:3], ("IpRanges", "CidrIp"))
    return {"IpProtocol": flow.protocol, **limits, key: [{name: peer}]}


def _rule_fix(
    requirements: Requirements,
    group: str,
    wanted: list[dict[str, object]],
    summary: str,
    *,
    outbound: bool,
) -> Fix:
    return fixes.make(
        "group-rule",
        summary,
        region=requirements.region,
        group=group,
        outbound=outbound,
        permissions=wanted,
    )


def _listed(group: SecurityGroup, *, outbound: bool) -> str:
    way, towards = _DIRECTIONS[outbound]
    given = group.outbound if outbound else group.inbound
    listed = "; ".join(
        f"{ports(rule.protocol, rule.low, rule.high)} {towards} {rule.peer}" for rule in given
    )
    return f"{group.id} {way}: {listed or 'no rules'}"


def _to_aws(
    requirements: Requirements, inventory: Inventory, groups: list[SecurityGroup]
) -> Iterator[Finding]:
    """HTTPS to S3, which every job requires."""
    tables = routes.tables_of_job(requirements, inventory)
    if not any(routes.reaches_s3(inventory, table) for table in tables):
        return  # `routes` reports it
    given = packet_filters.rules_of(groups, outbound=True)
    https = Flow("tcp", (HTTPS,))
    prefix_list, blocks = inventory.s3 or ("", ())
    blocked: list[Ports] = [
        left
        for block in blocks or (packet_filters.WORLD,)
        for left in packet_filters.missing(https, given, {prefix_list}, block)
    ]
    if not blocked:
        return
    gateways = [routes.gateway(inventory, table) for table in tables]
    peer = prefix_list if prefix_list and all(gateways) else str(packet_filters.WORLD)
    group = groups[0].id
    yield Finding(
        "s3_outbound",
        "error",
        "the security groups block HTTPS (tcp 443) to S3, where the source and the data are",
        tuple(_listed(one, outbound=True) for one in groups),
        _rule_fix(
            requirements,
            group,
            [_permission(https, peer)],
            f"allow tcp 443 to {'the prefix list of S3' if peer == prefix_list else peer}",
            outbound=True,
        ),
    )


def admit_https(groups: Iterable[SecurityGroup], members: set[str], block: Network) -> bool:
    """Whether groups admit HTTPS from hosts in `block` that belong to groups `members`."""
    given = packet_filters.rules_of(groups, outbound=False)
    return not packet_filters.missing(Flow("tcp", (HTTPS,)), given, members, block)
