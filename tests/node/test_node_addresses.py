"""Addresses of host names: from DNS, /etc/hosts and Slurm, loopback last."""

from __future__ import annotations

import socket
import stat

import pytest

from deploykit_node.cluster import BadEnvironment, Cluster
from deploykit_node.network import addresses


@pytest.fixture
def names(monkeypatch):
    """The addresses of each host name: a dictionary to fill."""
    known = {}

    def getaddrinfo(host, *_, **__):
        if host not in known:
            raise socket.gaierror
        return [(0, 0, 0, "", (address, 0)) for address in known[host]]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setenv("PATH", "")
    return known


@pytest.fixture
def scontrol(tmp_path, monkeypatch):
    """A scontrol that prints one node's address."""
    program = tmp_path / "bin" / "scontrol"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\necho "NodeName=$4 Arch=x NodeAddr=10.0.0.9 NodeHostName=h"\n')
    program.chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{program.parent}:/bin:/usr/bin")


def test_a_real_address_wins_over_127_0_1_1(names):
    names["n1"] = ["127.0.1.1", "fe80::1%eth0", "fd00::1", "10.0.0.1"]
    assert addresses.address("n1") == "10.0.0.1"


def test_slurms_address_is_used_if_the_name_does_not_help(names, scontrol):
    names["10.0.0.9"] = ["10.0.0.9"]
    names["n1"] = ["127.0.1.1"]
    names["n3"] = ["10.0.0.3"]
    assert addresses.address("n1") == "10.0.0.9"
    assert addresses.address("n2") == "10.0.0.9"
    assert addresses.address("n3") == "10.0.0.3"


def test_a_name_that_does_not_resolve_is_an_error(names):
    with pytest.raises(BadEnvironment, match="host name n1 does not resolve on this node"):
        addresses.address("n1")


def test_loopback_is_refused_while_another_node_is_elsewhere(names):
    names.update({"n1": ["127.0.0.1"], "n2": ["127.0.1.1"], "n3": ["10.0.0.3"]})
    with pytest.raises(BadEnvironment, match=r"n1 resolves to 127\.0\.0\.1 here"):
        addresses.peer_addresses(Cluster("slurm", 1, ("n1", "n2", "n3")))
    assert addresses.peer_addresses(Cluster("slurm", 0, ("n1", "n3"))) == ["10.0.0.3"]


def test_loopback_is_right_where_all_nodes_are_this_machine(names):
    names.update({"n1": ["127.0.0.1"], "n2": ["127.0.0.1"]})
    assert addresses.peer_addresses(Cluster("slurm", 1, ("n1", "n2"))) == ["127.0.0.1"]
