"""The port and the key on which the nodes of a job agree."""

from __future__ import annotations

import json
import os
import socket
import stat
from pathlib import Path

import pytest

from deploykit_node.cluster import BadEnvironment, Cluster
from deploykit_node.network import rendezvous

SLURM = {"SLURM_JOB_ID": "60123", "DEPLOYKIT_RUN": "hello-1", "SLURM_RESTART_COUNT": "2"}


@pytest.fixture
def slurm(tmp_path):
    return {**SLURM, "DEPLOYKIT_RUN_DIR": str(tmp_path)}


def test_on_slurm_every_node_learns_the_port_of_the_first(slurm):
    hosts = ("n1", "n2")
    first = rendezvous.meet(Cluster("slurm", 0, hosts), slurm, "127.0.0.1")
    second = rendezvous.meet(Cluster("slurm", 1, hosts), slurm, "127.0.0.2")
    assert first.options() == [
        "--rdzv-backend=deploykit",
        f"--rdzv-endpoint=127.0.0.1:{first.port}",
        "--rdzv-id=hello-1.2",
        f"--rdzv-conf=node=0,count=2,fd={first.held.fileno()}",
        "--local-addr=127.0.0.1",
    ]
    assert second.options()[:3] == first.options()[:3]
    assert second.options()[3:] == ["--rdzv-conf=node=1,count=2", "--local-addr=127.0.0.2"]
    assert first.key == second.key
    first.held.close()


def test_the_key_is_new_each_time_and_private(slurm, tmp_path):
    path = tmp_path / "rendezvous.json"
    path.touch(0o644)
    keys = set()
    for _ in range(2):
        found = rendezvous.meet(Cluster("slurm", 0, ("a", "b")), slurm, "127.0.0.1")
        found.held.close()
        keys.add(found.key)
        assert found.key.hex() in path.read_text()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(keys) == 2
    assert all(len(key) == 32 for key in keys)


def test_no_other_program_can_take_the_port(slurm):
    """With SO_REUSEADDR another program could, as long as the socket does not listen."""
    found = rendezvous.meet(Cluster("slurm", 0, ("a", "b")), slurm, "127.0.0.1")
    for address in ("127.0.0.1", "0.0.0.0"):
        with socket.socket() as thief:
            thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with pytest.raises(OSError, match="in use"):
                thief.bind((address, found.port))
    found.held.close()


def test_an_earlier_attempts_port_is_ignored(slurm):
    nodes = Cluster("slurm", 0, ("a", "b"))
    first = rendezvous.meet(nodes, slurm, "127.0.0.1")
    first.held.close()
    later = {**slurm, "SLURM_RESTART_COUNT": "3"}
    with pytest.raises(BadEnvironment, match="Node 0 wrote no port to"):
        rendezvous._published(nodes, later, patience=0.2)


def test_ports_stay_below_the_ephemeral_range(slurm):
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for _ in range(50):
        found = rendezvous.meet(Cluster("slurm", 0, ("a", "b")), slurm, "127.0.0.1")
        assert 10_000 <= found.port < min(30_000, lowest)
        found.held.close()


def test_a_port_in_use_is_skipped(slurm):
    """By another job that is still starting, or by a program that listens."""
    nodes = Cluster("slurm", 0, ("a", "b"))
    with socket.socket() as listens:
        listens.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listens.bind(("", 0))
        listens.listen()
        low = listens.getsockname()[1]
        env = {**slurm, "DEPLOYKIT_PORTS": f"{low}-{low + 9}"}
        first = rendezvous.meet(nodes, env, "127.0.0.1")
        second = rendezvous.meet(nodes, env, "127.0.0.1")
    assert low < first.port < second.port
    first.held.close()
    second.held.close()


@pytest.mark.parametrize("text", ["20000", "b-a", "9-8", "0-5", "1-70000", "-"])
def test_an_invalid_port_range_is_an_error(slurm, text):
    with pytest.raises(BadEnvironment, match="must be a range such as"):
        rendezvous._ports({"DEPLOYKIT_PORTS": text})


def test_no_free_port_is_an_error():
    with pytest.raises(BadEnvironment, match="DEPLOYKIT_PORTS"):
        rendezvous._reserve("127.0.0.1", [])


def test_an_ipv6_address_is_in_brackets():
    there = rendezvous.Rendezvous("fd00::1", 1, "x", 1, 2, "fd00::2", b"")
    assert "--rdzv-endpoint=[fd00::1]:1" in there.options()


def test_emulated_nodes_learn_the_port_of_the_first(tmp_path):
    env = {"DEPLOYKIT_RUN_DIR": str(tmp_path)}
    hosts = ("127.0.0.1",) * 2
    first = rendezvous.meet(Cluster("emulated", 0, hosts), env, "127.0.0.1")
    second = rendezvous.meet(Cluster("emulated", 1, hosts), env, "127.0.0.1")
    assert (second.host, second.port) == (first.host, first.port)
    first.held.close()


def test_a_dead_launchers_port_is_ignored(tmp_path):
    env = {"DEPLOYKIT_RUN_DIR": str(tmp_path)}
    nodes = Cluster("emulated", 1, ("127.0.0.1",) * 2)
    record = {"port": 1, "launch": "run.0", "pid": 2**22 + 1}
    (tmp_path / "rendezvous.json").write_text(json.dumps(record))
    with pytest.raises(BadEnvironment, match="Node 0 wrote no port to"):
        rendezvous._published(nodes, env, patience=0.2)
    record["pid"] = os.getpid()
    (tmp_path / "rendezvous.json").write_text(json.dumps(record))
    assert rendezvous._published(nodes, env, patience=60) == record


def test_emulated_nodes_need_a_folder():
    with pytest.raises(BadEnvironment, match="set DEPLOYKIT_RUN_DIR"):
        rendezvous.meet(Cluster("emulated", 0, ("a", "a")), {}, "127.0.0.1")


def test_an_address_of_another_machine_is_an_error(slurm):
    with pytest.raises(BadEnvironment, match=r"address 192\.0\.2\.1 is not assigned to this node"):
        rendezvous.meet(Cluster("slurm", 0, ("a", "b")), slurm, "192.0.2.1")
