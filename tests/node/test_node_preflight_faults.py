"""Faults of a real network, made in namespaces: the test must name the pair and the cause."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass

import pytest

from deploykit.backends import base as backend
from deploykit.lib import paths
from tests.node import netns

pytestmark = pytest.mark.slow

PROBE = """
import os, sys
from deploykit_node import cluster
from deploykit_node.network import addresses, interfaces, rendezvous
from deploykit_node.preflight import coordinator, peers
env = dict(os.environ)
try:
    here = cluster.find(env)
    route = interfaces.route_to_any(addresses.peer_addresses(here))
    env.update(interfaces.choose(route, {}).variables)
    local = route.source if route else ""
    meeting = rendezvous.below_launcher(env, here, local, 20123, b"the key of this run")
    coordinator.test(peers.of_cluster(here, meeting), env, 1, print)
except cluster.LaunchError as error:
    print(error)
    sys.exit(error.exit_code)
"""
SYN = "tcp flags & (syn|ack) == syn"
BRIEF = 24
"""Seconds, for the faults that are only seen by waiting: under half of them."""


@dataclass(frozen=True)
class Report:
    """What the nodes printed, and their exit codes; None where a node was never started."""

    codes: list[int]
    logs: list[str]

    @property
    def failures(self) -> list[str]:
        return re.findall(r"^preflight: FAILED: (.*)$", self.logs[0], re.MULTILINE)

    @property
    def seconds(self) -> list[float]:
        return [
            float(found)
            for log in self.logs
            for found in re.findall(r"in ([\d.]+) s$", log, re.MULTILINE)
        ]


class Nodes:
    """Nodes 10.77.0.1, 10.77.0.2, ... (or as `subnet` says) on one switch."""

    def __init__(self, lab: netns.Lab, count: int, subnet: str = "10.77.0.{}") -> None:
        self.lab, self._subnet = lab, subnet
        self.switch = lab.switch()
        self.names = [lab.machine(f"n{number}") for number in range(count)]
        for number, name in enumerate(self.names, start=1):
            lab.plug(
                name, "eth0", self.switch, f"{subnet.format(number)}/{64 if ':' in subnet else 24}"
            )
        lab.ready()

    def run(self, *, without=(), env=None, budget=backend.PREFLIGHT) -> Report:
        numbers = range(1, len(self.names) + 1)
        hosts = ",".join(self._subnet.format(number) for number in numbers)
        started = [
            self.lab.start(
                name,
                *(sys.executable, "-c", PROBE),
                SLURM_JOB_ID="1",
                SLURM_STEP_ID="0",
                SLURM_NODEID=str(number),
                SLURM_STEP_NODELIST=hosts,
                DEPLOYKIT_PREFLIGHT=str(budget),
                PYTHONPATH=":".join(
                    [*(env or {}).get(number, []), str(paths.shipped("entrypoints"))]
                ),
            )
            for number, name in enumerate(self.names)
            if number not in without
        ]
        logs = [process.communicate(timeout=180)[0] for process in started]
        return Report([process.returncode for process in started], logs)


@pytest.fixture
def lab(tmp_path):
    netns.needed("nft", "tc")
    made = netns.Lab(tmp_path)
    yield made
    made.remove()


def stopped(report):
    """Every node stopped, in time by its own clock, for the one reason that node 0 gives."""
    assert set(report.codes) == {78}, report.logs
    assert len(report.seconds) == len(report.codes)
    assert max(report.seconds) < backend.PREFLIGHT, report.logs
    assert len(report.failures) == 1, report.logs[0]
    return report.failures[0]


def test_four_healthy_nodes_pass(lab):
    report = Nodes(lab, 4).run(budget=150)
    assert report.codes == [0, 0, 0, 0], report.logs
    first = report.logs[0]
    assert "all_reduce over gloo, all ranks of 4 nodes" in first
    assert (
        len(re.findall(r"^preflight: node \d .* eth0 10\.77\.0\.\d mtu 1500", first, re.MULTILINE))
        == 4
    )
    assert len(re.findall(r"^preflight: +\d( +(-|(slow )?[\d.]+)){4}$", first, re.MULTILINE)) == 4


def test_ports_that_the_trainer_needs_are_closed(lab):
    nodes = Nodes(lab, 3)
    lab.firewall(nodes.names[2], f"ip saddr 10.77.0.2 tcp dport 32768-60999 {SYN} drop")
    found = stopped(nodes.run(budget=BRIEF))
    assert found.startswith("node 1 (10.77.0.2) to node 2 (10.77.0.3): port 20123 works, but port")
    assert "(pairs: 1 to 2)" in found
    assert "is dropped" in found


def test_one_direction_is_blocked(lab):
    nodes = Nodes(lab, 3)
    lab.firewall(nodes.names[2], f"ip saddr 10.77.0.2 {SYN} drop")
    found = stopped(nodes.run(budget=BRIEF))
    assert found.startswith(
        "node 1 (10.77.0.2) to node 2 (10.77.0.3): node 1 gets no response from"
    )
    assert "The other direction works: check the inbound rules of node 2" in found


def test_nothing_passes_between_two_nodes(lab):
    """Node 1 is cut off from node 0 too, so its report travels through node 2."""
    nodes = Nodes(lab, 3)
    lab.firewall(nodes.names[0], "ip saddr 10.77.0.2 drop")
    report = nodes.run(budget=BRIEF)
    found = stopped(report)
    assert found.startswith(
        "node 0 (10.77.0.1) to node 1 (10.77.0.2): node 0 gets no response from"
    )
    assert "node 1 cannot reach node 0 either" in found
    assert found in report.logs[1]


@pytest.mark.parametrize(
    ("unplugged", "how"), [(False, "nothing is listening there"), (True, "no machine responds")]
)
def test_a_dead_node(lab, unplugged, how):
    nodes = Nodes(lab, 3)
    if unplugged:
        netns.ip("-n", nodes.names[1], "link", "set", "eth0", "down")
    found = stopped(nodes.run(without=[1], budget=BRIEF))
    assert found.startswith("node 1 (10.77.0.2) cannot be reached: each of the other nodes that")
    assert how in found


def test_an_mtu_that_the_network_does_not_carry(lab):
    nodes = Nodes(lab, 3)
    for number in (0, 2):  # the switch in between has 1500
        words = ("mtu", 9000, "gso_max_segs", 1)
        netns.ip("-n", nodes.names[number], "link", "set", "eth0", *words)
    report = nodes.run(budget=150)  # what is lost is sent again and again, which takes a while
    assert "small packets arrive, but large ones are lost" in report.failures[0]
    assert "(9000 on node 0, 9000 on node 2)" in report.failures[0]


def test_a_slow_link(lab):
    nodes = Nodes(lab, 3)
    shape = ["tbf", "rate", "2mbit", "burst", "16k", "latency", "400ms"]
    tc = ["tc", "-n", nodes.names[2], "qdisc", "add", "dev", "eth0", "root", *shape]
    subprocess.run(tc, check=True)
    report = nodes.run()
    assert set(report.codes) == {78}
    assert all("node 2 (10.77.0.3)" in found for found in report.failures)  # its ACKs wait too
    slow = (
        r"node 2 \(10.77.0.3\)( to node \d \S+)? is slow: \S+ MB/s.*, but the median node reaches"
    )
    assert re.search(slow, report.failures[0])


@pytest.mark.parametrize("subnet", ["10.77.0.{}", "fd77::{}"])
def test_versions_that_differ(lab, tmp_path, subnet):
    (tmp_path / "torch-1.2.3.dist-info").mkdir()
    (tmp_path / "torch-1.2.3.dist-info" / "METADATA").write_text("Name: torch\nVersion: 1.2.3\n")
    found = stopped(Nodes(lab, 3, subnet).run(env={1: [str(tmp_path)]}))
    assert found.startswith("torch differs between nodes: ")
    assert "1.2.3 on node 1" in found
    assert found.endswith(f"Fix node 1 ({subnet.format(2)})")
