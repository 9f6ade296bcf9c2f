"""The choice of the interface, on this machine's own and in network namespaces."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time

import pytest

from deploykit.lib import paths
from deploykit_node.network import interfaces
from deploykit_node.network.interfaces import Choice, Route
from tests.node import netns

ENTRYPOINTS = paths.shipped("entrypoints")

PROBE = """
import json, sys
from deploykit_node.network import interfaces
way = interfaces.route_to(sys.argv[1])
print(json.dumps([way and [way.source, way.interface], interfaces.choose(way, {}).variables]))
"""


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True)


def settle(namespace, text):
    """Wait until ``ip link`` shows `text`; the kernel tells of a carrier up to a second late."""
    deadline = time.monotonic() + 120
    show = ["ip", "-n", namespace, "-o", "link", "show", "fast0"]
    while text not in subprocess.run(show, check=True, capture_output=True, text=True).stdout:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def namespaces():
    """Two nodes on 10.77.0.0/24, each with a bridge docker0 that has the same address."""
    netns.needed()
    names = [f"dk{os.getpid()}{letter}" for letter in "ab"]
    try:
        for name in names:
            ip("netns", "add", name)
        peer = ("peer", "name", "fast0", "netns", names[1])
        ip("link", "add", "fast0", "netns", names[0], "type", "veth", *peer)
        for number, name in enumerate(names, start=1):
            inside = ("-n", name)
            ip(*inside, "link", "set", "lo", "up")
            ip(*inside, "address", "add", f"10.77.0.{number}/24", "dev", "fast0")
            ip(*inside, "address", "add", f"fd77::{number}/64", "dev", "fast0", "nodad")
            ip(*inside, "link", "set", "fast0", "up")
            ip(*inside, "link", "add", "docker0", "type", "bridge")
            ip(*inside, "address", "add", "172.17.0.1/16", "dev", "docker0")
            ip(*inside, "link", "set", "docker0", "up")
        for name in names:
            settle(name, "state UP")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def probe(namespace, peer):
    done = subprocess.run(
        ["ip", "netns", "exec", namespace, sys.executable, "-c", PROBE, peer],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ENTRYPOINTS)},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def test_the_route_to_the_other_node_decides(namespaces):
    chosen = {"NCCL_SOCKET_IFNAME": "=fast0", "GLOO_SOCKET_IFNAME": "fast0"}
    assert probe(namespaces[0], "10.77.0.2") == [["10.77.0.1", "fast0"], chosen]
    assert probe(namespaces[1], "10.77.0.1") == [["10.77.0.2", "fast0"], chosen]
    assert probe(namespaces[0], "fd77::2") == [["fd77::1", "fast0"], chosen]


def test_further_addresses_of_an_interface_count(namespaces):
    ip("-n", namespaces[0], "address", "add", "10.78.0.1/24", "dev", "fast0", "label", "fast0:x")
    assert probe(namespaces[0], "10.78.0.2")[0] == ["10.78.0.1", "fast0"]


def test_a_bridge_and_a_missing_route_choose_nothing(namespaces):
    assert probe(namespaces[0], "172.17.0.9") == [["172.17.0.1", "docker0"], {}]
    assert probe(namespaces[0], "192.168.9.9") == [None, {}]


def test_an_interface_without_carrier_is_not_chosen(namespaces):
    ip("-n", namespaces[1], "link", "set", "fast0", "down")
    settle(namespaces[0], "NO-CARRIER")
    assert probe(namespaces[0], "10.77.0.2") == [["10.77.0.1", "fast0"], {}]


def test_loopback_is_found_and_up():
    assert interfaces.route_to("127.0.0.2") == Route("127.0.0.2", "127.0.0.1", "lo")
    assert interfaces.is_up("lo")
    assert not interfaces.is_up("nosuch0")


def test_every_address_of_this_machine_has_its_interface():
    names = {name for _, name in socket.if_nameindex()}
    found = interfaces._interfaces_v4()
    assert found["127.0.0.1"] == "lo"
    assert set(found.values()) <= names


def test_the_users_choice_is_kept():
    lo = Route("127.0.0.1", "127.0.0.1", "lo")
    user = {"NCCL_SOCKET_IFNAME": "^docker", "GLOO_SOCKET_IFNAME": "lo"}
    both = interfaces.choose(lo, user)
    assert both.variables == user
    assert "WARNING" not in both.why
    one = interfaces.choose(lo, {"NCCL_SOCKET_IFNAME": "nosuch"})
    assert one.variables == {"NCCL_SOCKET_IFNAME": "nosuch", "GLOO_SOCKET_IFNAME": "lo"}
    assert "WARNING: NCCL_SOCKET_IFNAME matches none of the interfaces that are up here" in one.why
    assert interfaces.choose(None, {"GLOO_SOCKET_IFNAME": "lo"}).variables == {
        "GLOO_SOCKET_IFNAME": "lo"
    }


@pytest.mark.parametrize(
    ("way", "why"),
    [
        (None, "there is no route to another node of the job"),
        (
            Route("10.0.0.2", "10.0.0.1", None),
            "no interface has 10.0.0.1, which this node uses to reach 10.0.0.2",
        ),
        (Route("10.0.0.2", "10.0.0.1", "lo"), "the route to 10.0.0.2 goes through loopback"),
        (Route("10.0.0.2", "10.0.0.1", "nosuch0"), "nosuch0, on the route to 10.0.0.2, is down"),
    ],
)
def test_without_a_usable_route_nothing_is_set_and_the_log_says_why(way, why):
    assert interfaces.choose(way, {}) == Choice({}, f"network: no interface chosen, because {why}")


@pytest.mark.parametrize(
    ("variable", "value", "fits"),
    [
        ("NCCL_SOCKET_IFNAME", "eth", True),
        ("NCCL_SOCKET_IFNAME", "=eth", False),
        ("NCCL_SOCKET_IFNAME", "=eth0,ib0", True),
        ("NCCL_SOCKET_IFNAME", "ib,eth", True),
        ("NCCL_SOCKET_IFNAME", "^eth", True),
        ("GLOO_SOCKET_IFNAME", "eth", False),
        ("GLOO_SOCKET_IFNAME", "eth0", True),
    ],
)
def test_interface_patterns(variable, value, fits):
    assert interfaces._matches(variable, value, ["lo", "eth0"]) is fits
