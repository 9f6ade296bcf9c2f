"""Pairs of machines with common network setups: the nodes n0 and n1."""

from __future__ import annotations

from collections.abc import Callable

from tests.node import netns

Pair = tuple[str, str]
Build = Callable[[netns.Lab], Pair]

LOCALHOST = "127.0.0.1 localhost\n::1 localhost\n"
HOSTS = f"{LOCALHOST}10.0.0.1 n0\n10.0.0.2 n1\n"
MEET: dict[str, Build] = {}
"""The docs' description of a topology in which the nodes can connect, and its builder."""
CANNOT: dict[str, tuple[Build, str]] = {}
"""The same where they cannot, and a part of the expected message."""


def _meet(words: str) -> Callable[[Build], Build]:
    return lambda build: MEET.setdefault(words, build)


def _cannot(words: str, said: str) -> Callable[[Build], Build]:
    return lambda build: CANNOT.setdefault(words, (build, said))[0]


def _lan(
    lab: netns.Lab,
    interfaces: Pair = ("ens5", "ens5"),
    addresses: tuple[Pair, Pair] = (("10.0.0.1/24",), ("10.0.0.2/24",)),
    hosts: tuple[str, str] = (HOSTS, HOSTS),
) -> Pair:
    """Two machines on one switch."""
    switch = lab.switch()
    pair = lab.machine("n0"), lab.machine("n1")
    for number, machine in enumerate(pair):
        lab.plug(machine, interfaces[number], switch, *addresses[number])
        lab.name(machine, f"n{number}", hosts[number])
    return pair


def _own_name(address: str) -> tuple[str, str]:
    """Each machine's own name means `address` there, as Debian's installer writes it."""
    first = HOSTS.replace("10.0.0.1 n0", f"{address} n0")
    return first, HOSTS.replace("10.0.0.2 n1", f"{address} n1")


@_meet("one NIC, `eth0`")
def one_nic(lab):
    return _lan(lab, ("eth0", "eth0"))


@_meet("one NIC, `ens5`")
def another_name(lab):
    return _lan(lab)


@_meet("another name on each node, `ens5` and `enp3s0`")
def unlike_names(lab):
    return _lan(lab, ("ens5", "enp3s0"))


@_meet("`docker0` with the same address on both nodes")
def docker(lab):
    pair = _lan(lab, ("eth0", "eth0"))
    for machine in pair:
        lab.bridge(machine, "docker0", "172.17.0.1/16")
    return pair


@_meet("own host name means 127.0.1.1 (Debian)")
def debian(lab):
    return _lan(lab, hosts=_own_name("127.0.1.1"))


@_meet("own host name means `docker0`'s address")
def named_after_docker(lab):
    pair = _lan(lab, hosts=_own_name("172.17.0.1"))
    for machine in pair:
        lab.bridge(machine, "docker0", "172.17.0.1/16")
    return pair


@_meet("bridges `br-1a2b`, `virbr0`, `cni0` and veth pairs before the NIC")
def bridges(lab):
    pair = lab.machine("n0"), lab.machine("n1")
    switch = lab.switch()
    for number, machine in enumerate(pair):
        for net, name in enumerate(("br-1a2b", "virbr0", "cni0"), start=1):
            lab.bridge(machine, name, f"172.18.{net}.1/24")
        lab.plug(machine, "ens5", switch, f"10.0.0.{number + 1}/24")
        lab.name(machine, f"n{number}", HOSTS)
    return pair


@_meet("two subnets; `eth0`'s leads nowhere")
def two_subnets(lab):
    pair = lab.machine("n0"), lab.machine("n1")
    switch = lab.switch()
    for number, machine in enumerate(pair):
        lab.plug(machine, "eth0", lab.switch(f"only{number}"), f"192.168.1.{number + 1}/24")
        lab.plug(machine, "eth1", switch, f"10.0.0.{number + 1}/24")
        lab.name(machine, f"n{number}", HOSTS)
    return pair


@_meet("own host name means the wrong subnet's address")
def named_after_the_other(lab):
    pair = two_subnets(lab)
    for number, machine in enumerate(pair):
        hosts = HOSTS.replace(f"10.0.0.{number + 1} n", f"192.168.1.{number + 1} n")
        lab.name(machine, f"n{number}", hosts)
    return pair


@_meet("`eth0` is down")
def down(lab):
    pair = two_subnets(lab)
    for machine in pair:
        netns.ip("-n", machine, "link", "set", "eth0", "down")
    return pair


@_meet("`eth0` has no carrier")
def no_carrier(lab):
    pair = _lan(lab, ("ens5", "ens5"))
    for number, machine in enumerate(pair):
        words = ("type", "veth", "peer", "name", "unplugged")
        netns.ip("-n", machine, "link", "add", "eth0", *words)
        netns.ip("-n", machine, "link", "set", "eth0", "up")
        lab.give(machine, "eth0", f"192.168.1.{number + 1}/24")
    return pair


@_meet("eight NICs; one leads to the other node")
def many(lab):
    pair = lab.machine("n0"), lab.machine("n1")
    switch = lab.switch()
    for number, machine in enumerate(pair):
        for card in range(8):
            other = switch if card == 5 else lab.switch(f"s{number}{card}")
            net = "10.0.0" if card == 5 else f"192.168.{card}"
            lab.plug(machine, f"eth{card}", other, f"{net}.{number + 1}/24")
        lab.name(machine, f"n{number}", HOSTS)
    return pair


@_meet("IPv6 only")
def ipv6(lab):
    hosts = f"{LOCALHOST}fd00::1 n0\nfd00::2 n1\n"
    return _lan(lab, ("eth0", "eth0"), (("fd00::1/64",), ("fd00::2/64",)), (hosts, hosts))


@_meet("IPv6 only, `ens5`, and an IPv4 `docker0`")
def ipv6_and_docker(lab):
    hosts = f"{LOCALHOST}fd00::1 n0\nfd00::2 n1\n"
    pair = _lan(lab, ("ens5", "ens5"), (("fd00::1/64",), ("fd00::2/64",)), (hosts, hosts))
    for machine in pair:
        lab.bridge(machine, "docker0", "172.17.0.1/16")
    return pair


@_meet("a router between the nodes' subnets")
def routed(lab):
    router, pair = lab.machine("r"), (lab.machine("n0"), lab.machine("n1"))
    netns.execute(router, "sysctl", "-qw", "net.ipv4.ip_forward=1")
    hosts = f"{LOCALHOST}10.1.0.2 n0\n10.2.0.2 n1\n"
    for number, machine in enumerate(pair):
        lab.cable(machine, "ens5", router, f"to{number}")
        lab.give(router, f"to{number}", f"10.{number + 1}.0.1/24")
        lab.give(machine, "ens5", f"10.{number + 1}.0.2/24")
        netns.ip("-n", machine, "route", "add", "default", "via", f"10.{number + 1}.0.1")
        lab.bridge(machine, "docker0", "172.17.0.1/16")
        lab.name(machine, f"n{number}", hosts)
    return pair


@_meet("two addresses on the NIC; the first leads nowhere")
def two_addresses(lab):
    first = (("192.168.50.1/24", "10.0.0.1/24"), ("192.168.60.1/24", "10.0.0.2/24"))
    return _lan(lab, addresses=first)


@_meet("the other node's name means `docker0`'s address too")
def two_meanings(lab):
    hosts = f"{LOCALHOST}172.17.0.1 n0\n172.17.0.1 n1\n10.0.0.1 n0\n10.0.0.2 n1\n"
    pair = _lan(lab, hosts=(hosts, hosts))
    for machine in pair:
        lab.bridge(machine, "docker0", "172.17.0.1/16")
    return pair


@_meet("unlike nodes: `ens5` behind `docker0`; `enp3s0` as one of five NICs, `eth0` down")
def unlike_nodes(lab):
    """Each node's own name means 127.0.1.1 there, and they have one network in common."""
    switch, pair = lab.switch(), (lab.machine("n0"), lab.machine("n1"))
    first, second = pair
    lab.bridge(first, "docker0", "172.17.0.1/16")
    lab.plug(first, "ens5", switch, "10.0.0.1/24")
    for card in range(4):
        lab.plug(second, f"eth{card}", lab.switch(f"s{card}"), f"192.168.{card}.2/24")
    netns.ip("-n", second, "link", "set", "eth0", "down")
    lab.bridge(second, "br-1a2b", "172.18.0.1/16")
    lab.plug(second, "enp3s0", switch, "10.0.0.2/24")
    for number, hosts in enumerate(_own_name("127.0.1.1")):
        lab.name(pair[number], f"n{number}", hosts)
    return pair


@_cannot("no network in common", "no route from this node to n")
def apart(lab):
    pair = lab.machine("n0"), lab.machine("n1")
    for number, machine in enumerate(pair):
        lab.plug(machine, "eth0", lab.switch(f"s{number}"), f"192.168.{number}.1/24")
        lab.name(machine, f"n{number}", HOSTS)
    return pair


@_cannot("the other node's name means loopback", "a loopback address")
def loopback(lab):
    hosts = (HOSTS.replace("10.0.0.2", "127.0.1.1"), HOSTS.replace("10.0.0.1", "127.0.1.1"))
    return _lan(lab, hosts=hosts)


@_cannot("the other node's name means only `docker0`'s address", "this machine's own address on")
def only_docker(lab):
    hosts = f"{LOCALHOST}172.17.0.1 n0\n172.17.0.1 n1\n"
    pair = _lan(lab, hosts=(hosts, hosts))
    for machine in pair:
        lab.bridge(machine, "docker0", "172.17.0.1/16")
    return pair


@_cannot("the other node's name means nothing", "does not resolve on this node")
def nameless(lab):
    return _lan(lab, hosts=(LOCALHOST, LOCALHOST))


@_cannot("the NIC is down", "There is no route from this node to n")
def unplugged(lab):
    pair = _lan(lab)
    for machine in pair:
        netns.ip("-n", machine, "link", "set", "ens5", "down")
    return pair
