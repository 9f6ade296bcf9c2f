"""The security groups of a job: what its machines may send each other, and to AWS.

A packet passes when any rule of any group of the machine lets it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from deploykit.doctor import fixes
from deploykit.doctor.aws import routes, rules
from deploykit.doctor.aws.facts import Facts, Group, Network, Subnet, ports
from deploykit.doctor.aws.needs import ANY, HTTPS, Flow, Needs, Ports
from deploykit.doctor.finding import Finding, Fix

_WAYS = {False: ("inbound", "from"), True: ("outbound", "to")}
_ALL = Flow("-1")


def check(needs: Needs, facts: Facts) -> Iterator[Finding]:
    subnets = routes.ours(needs, facts)
    if facts.groups is None or not subnets:
        return
    there = [facts.groups[name] for name in needs.groups if name in facts.groups]
    if len(there) < len(needs.groups):
        yield _absent(needs, facts, subnets[0])
    strangers = [group for group in there if group.vpc != subnets[0].vpc]
    if strangers:
        yield _other_vpc(needs, facts, strangers, subnets[0])
    ours = [group for group in there if group not in strangers]
    if not ours:
        return
    for outbound in (False, True):
        yield from _between(needs, facts, ours, outbound=outbound)
    yield from _to_aws(needs, facts, ours)


def _absent(needs: Needs, facts: Facts, subnet: Subnet) -> Finding:
    known = facts.groups or {}
    absent = [name for name in needs.groups if name not in known]
    return Finding(
        "group_absent",
        "error",
        f"{', '.join(absent)} {'does' if len(absent) == 1 else 'do'} not exist in {needs.region}, "
        "or not in this account",
        (f"sagemaker.security_group_ids: {', '.join(needs.groups)}",),
        _another(needs, facts, subnet),
    )


def _other_vpc(needs: Needs, facts: Facts, strangers: list[Group], subnet: Subnet) -> Finding:
    return Finding(
        "group_vpc",
        "error",
        f"{', '.join(group.id for group in strangers)} and the subnets lie in different VPCs",
        (
            *(f"{group.id}: {group.vpc}" for group in strangers),
            f"{subnet.id}: {subnet.vpc}",
        ),
        _another(needs, facts, subnet),
    )


def _another(needs: Needs, facts: Facts, subnet: Subnet) -> Fix:
    """A group of the right VPC that lets its own members in and out, else a new one."""
    for group in (facts.groups or {}).values():
        both = all(_trusts_itself([group], outbound=outbound) for outbound in (False, True))
        if group.vpc == subnet.vpc and both:
            say = f"{group.id} in {group.vpc} lets its own members in and out"
            return fixes.job_file(say, security_group_ids=[group.id])
    return fixes.make(
        "group",
        f"make a group in {subnet.vpc} whose members may send each other everything",
        region=needs.region,
        vpc=subnet.vpc,
    )


def _trusts_itself(ours: Iterable[Group], *, outbound: bool) -> bool:
    """Whether all traffic among members passes by a rule that names a group, as EFA needs."""
    groups = list(ours)
    members = {group.id for group in groups}
    return any(
        rule.protocol == "-1" and rule.peer in members
        for rule in rules.rules(groups, outbound=outbound)
    )


def _between(needs: Needs, facts: Facts, ours: list[Group], *, outbound: bool) -> Iterator[Finding]:
    """What the machines send each other."""
    if needs.nodes == 1:
        return
    way, towards = _WAYS[outbound]
    if facts.efa:
        if not _trusts_itself(ours, outbound=outbound):
            message = (
                f"EFA ({needs.instance_type}) needs a rule for all traffic {towards} the group "
                f"itself, {way}; a rule for addresses does not count, since EFA traffic has none"
            )
            yield _finding(needs, f"efa_{way}", message, ours, [_ALL], outbound=outbound)
        return
    members = [group.id for group in ours]
    given = rules.rules(ours, outbound=outbound)
    short = {
        flow: sorted(
            {
                left
                for subnet in routes.ours(needs, facts)
                for left in rules.missing(flow, given, members, subnet.block)
            }
        )
        for flow in needs.peers
    }
    for encryption in (False, True):
        lost = [
            Flow(flow.protocol, tuple(left))
            for flow, left in short.items()
            if left and (flow.protocol != "tcp") is encryption
        ]
        if lost:
            fault = f"encryption_{way}" if encryption else f"peers_{way}"
            message = _message(lost, outbound=outbound, encryption=encryption)
            yield _finding(needs, fault, message, ours, lost, outbound=outbound)


def _message(lost: list[Flow], *, outbound: bool, encryption: bool) -> str:
    what = ", ".join(ports(flow.protocol, *piece) for flow in lost for piece in flow.ports)
    stopped = (
        f"may not send to each other on {what}"
        if outbound
        else f"do not let each other in on {what}"
    )
    if encryption:
        return f"the machines {stopped}, which encrypted traffic between them is made of"
    return (
        f"the machines {stopped}: init_process_group waits until it times out. NCCL and Gloo take "
        "any port from 32768 on"
    )


def _finding(  # noqa: PLR0913 - all of one sentence
    needs: Needs, fault: str, message: str, ours: list[Group], lost: list[Flow], *, outbound: bool
) -> Finding:
    _, towards = _WAYS[outbound]
    group = ours[0].id
    wanted = [_permission(_whole(flow), group) for flow in lost]
    names = ", ".join(ports(_whole(flow).protocol, *ANY) for flow in lost if flow.protocol != "udp")
    names += ", udp 500" if any(flow.protocol == "udp" for flow in lost) else ""
    return Finding(
        fault,
        "error",
        message,
        tuple(_listed(one, outbound=outbound) for one in ours),
        _rule_fix(
            needs,
            group,
            wanted,
            f"allow {names.strip(', ')} {towards} {group} itself",
            outbound=outbound,
        ),
    )


def _whole(flow: Flow) -> Flow:
    """All ports of TCP, since a job's next framework takes others; the rest as it is."""
    return Flow("tcp") if flow.protocol == "tcp" else flow


def _permission(flow: Flow, peer: str) -> dict[str, object]:
    """A permission as EC2's API takes it; ports of -1 stand for a protocol that has none."""
    low, high = flow.ports[0] if flow.protocol in {"tcp", "udp"} else (-1, -1)
    limits = {} if flow.protocol == "-1" else {"FromPort": low, "ToPort": high}
    kind = {"sg-": ("UserIdGroupPairs", "GroupId"), "pl-": ("PrefixListIds", "PrefixListId")}
    key, name = kind.get(peer[:3], ("IpRanges", "CidrIp"))
    return {"IpProtocol": flow.protocol, **limits, key: [{name: peer}]}


def _rule_fix(
    needs: Needs, group: str, wanted: list[dict[str, object]], say: str, *, outbound: bool
) -> Fix:
    return fixes.make(
        "group-rule",
        say,
        region=needs.region,
        group=group,
        outbound=outbound,
        permissions=wanted,
    )


def _listed(group: Group, *, outbound: bool) -> str:
    way, towards = _WAYS[outbound]
    given = group.outbound if outbound else group.inbound
    listed = "; ".join(
        f"{ports(rule.protocol, rule.low, rule.high)} {towards} {rule.peer}" for rule in given
    )
    return f"{group.id} {way}: {listed or 'no rules'}"


def _to_aws(needs: Needs, facts: Facts, ours: list[Group]) -> Iterator[Finding]:
    """HTTPS to S3, without which no job starts."""
    if not any(routes.reaches_s3(facts, table) for table in routes.map_tables(needs, facts)):
        return  # `routes` has said so
    given = rules.rules(ours, outbound=True)
    https = Flow("tcp", (HTTPS,))
    listed, blocks = facts.s3 or ("", ())
    lost: list[Ports] = [
        left
        for block in blocks or (rules.WORLD,)
        for left in rules.missing(https, given, {listed}, block)
    ]
    if not lost:
        return
    gateways = [routes.gateway(facts, table) for table in routes.map_tables(needs, facts)]
    peer = listed if listed and all(gateways) else str(rules.WORLD)
    group = ours[0].id
    yield Finding(
        "s3_outbound",
        "error",
        "the machines may not send HTTPS (tcp 443) to S3, where source and data lie",
        tuple(_listed(one, outbound=True) for one in ours),
        _rule_fix(
            needs,
            group,
            [_permission(https, peer)],
            f"allow tcp 443 to {'the prefix list of S3' if peer == listed else peer}",
            outbound=True,
        ),
    )


def reachable(group_rules: Iterable[Group], members: set[str], block: Network) -> bool:
    """Whether HTTPS from `members` in `block` is let into groups."""
    given = rules.rules(group_rules, outbound=False)
    return not rules.missing(Flow("tcp", (HTTPS,)), given, members, block)
