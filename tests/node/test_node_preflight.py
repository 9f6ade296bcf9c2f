"""The preflight test: started by launch.py on every backend, and its findings."""

from __future__ import annotations

import contextlib
import copy
import json
import random
import re
import socket

import pytest

from deploykit.cli import main as cli
from deploykit.cli.diagnose import CAUSE_FOUND
from deploykit_node.cluster import BadEnvironment, Cluster
from deploykit_node.network import rendezvous
from deploykit_node.preflight import coordinator, findings, peers
from deploykit_node.preflight.peers import Peers

HELLO = 'print("trained")\n'


def emulated(bundle, *, per_node=(), between=lambda _: None, **env):
    """Two nodes on this machine; `per_node` adds to their environments.

    `between` is called with the first one before the second starts.
    """
    (bundle.run_dir / "rendezvous.json").touch()
    words = ("torchrun", "--nnodes=2", "--nproc-per-node=1", "--", "hello.py")
    more = [*per_node, {}, {}]
    place = {"DEPLOYKIT_NODES": 2, "DEPLOYKIT_PREFLIGHT": 200, **env}
    started = []
    for node in range(2):
        given = {**place, **more[node]}
        started.append(bundle.start(*words, node=node, DEPLOYKIT_NODE_RANK=node, **given))
        if not node:
            between(started[0])
    return [one.finish(patience=280) for one in started]


@pytest.mark.torch
def test_the_trainer_starts_after_it_on_nodes_of_one_machine(bundle):
    bundle.write("hello.py", HELLO)
    first, second = emulated(bundle)
    assert (first.code, second.code) == (0, 0), first.log + second.log
    assert "preflight: passed, 2 nodes in " in first.log
    assert "preflight: all_reduce over gloo, all ranks of 2 nodes: " in first.log
    assert re.search(
        r"preflight: bus bandwidth: \S+ [GM]B/s for \d+ MiB, \S+ MB/s for 8 KiB", first.log
    )
    assert first.log.index("preflight: passed") < first.log.index("trained")
    assert "trained" in second.log


@pytest.mark.slow
@pytest.mark.torch
def test_idle_connections_of_a_stranger_do_not_stop_the_job(bundle):
    """They come before those of the other node, and stay."""
    bundle.write("hello.py", HELLO)
    with contextlib.ExitStack() as idle:

        def connect(launcher):
            launcher.wait_for("rendezvous at")
            meeting = json.loads((bundle.run_dir / "rendezvous.json").read_text())
            count = 0
            while count < 300:
                with contextlib.suppress(ConnectionRefusedError):  # it does not listen yet
                    address = meeting["host"], meeting["port"]
                    idle.enter_context(socket.create_connection(address, 60))
                    count += 1

        first, second = emulated(bundle, between=connect)
    assert (first.code, second.code) == (0, 0), first.log + second.log
    assert "connections from outside this job" in first.log


def test_different_versions_stop_the_job_on_every_node(bundle, tmp_path):
    bundle.write("hello.py", HELLO)
    (tmp_path / "torch-1.2.3.dist-info").mkdir()
    (tmp_path / "torch-1.2.3.dist-info" / "METADATA").write_text("Name: torch\nVersion: 1.2.3\n")
    ends = emulated(bundle, per_node=[{}, {"PYTHONPATH": tmp_path}])
    for node, done in enumerate(ends):
        assert done.code == 78, done.log
        assert "trained" not in done.log
        reason = bundle.end(f"node-{node}")["reason"]
        assert reason.startswith("preflight stopped the job after ")
        assert "torch differs between nodes: " in reason
        assert "1.2.3 on node 1" in reason


@pytest.mark.torch
def test_below_sagemakers_launcher_the_first_rank_of_a_machine_tests(bundle, as_rank):
    bundle.write("hello.py", HELLO)
    started, port = [], random.randrange(12000, 20000)
    for node in range(2):
        rank = {**as_rank, "RANK": node, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1}
        hosts = {"SM_HOSTS": '["127.0.0.1", "127.0.0.2"]', "SM_CURRENT_HOST": f"127.0.0.{node + 1}"}
        more = {"DEPLOYKIT_BACKEND": "sagemaker", "DEPLOYKIT_PREFLIGHT": 200, "MASTER_PORT": port}
        words = ("torchrun", "--nnodes=2", "--nproc-per-node=1", "--", "hello.py")
        started.append(bundle.start(*words, node=node, **{**rank, **hosts, **more}))
    first, second = (one.finish(patience=280) for one in started)
    assert (first.code, second.code) == (0, 0), first.log + second.log
    assert "preflight: passed, 2 nodes in " in first.log
    assert first.said["rank 0"] == second.said["rank 1"] == ["trained"]


@pytest.mark.parametrize("text", ["", "yes", "0.5", "-3", "nan", "1e9"])
def test_the_budget_is_a_number_of_seconds(text):
    with pytest.raises(BadEnvironment, match="it must be a number of seconds"):
        coordinator.budget({"DEPLOYKIT_PREFLIGHT": text})


def test_nodes_of_one_machine_have_an_address_each():
    here = Cluster("emulated", 1, ("127.0.0.1",) * 300)
    plan = peers.of_cluster(here, rendezvous.below_launcher({}, here, "127.0.0.1", 20000, b"key"))
    assert plan.addresses[:2] == ("127.0.0.1", "127.0.0.2")
    assert len(set(plan.addresses)) == 300


# what follows: sentences about four nodes

OK = {"state": "ok", "rate": 1e9, "clock": 0.0, "seconds": 0.001, "port": 20000, "bulk": 40000}
NODES = range(4)
FACTS = {
    "interface": "eth0",
    "mtu": 1500,
    "versions": {"driver": "570.1", "torch": "2.9.0", "NCCL": "2.27.5"},
    "shm": 8 << 30,
    "disks": {"/out": 90 << 30},
    "own": 2e9,
    "health": {"faults": [], "counts": {}, "skipped": []},
}
WELL = {
    "torch": "2.9.0",
    "NCCL": "2.27.5",
    "backend": "nccl",
    "port": 1,
    "correct": True,
    "speeds": {"GPU 0 matrix multiplication": 6e14},
}
GROUP = {"backend": "nccl", "correct": True, "seconds": 0.3}
LATE = {"rank": 3, "ended": False, "seconds": 20.0, "output": []}
DROPPED = {"state": "dropped"}


def nodes(count):
    names = tuple("abcdefghijklmnopqrst"[:count])
    return Peers(0, names, tuple(f"10.0.0.{node}" for node in range(count)), 20000, b"k")


PLAN = nodes(4)


def told(**links):
    """What four healthy nodes report, except for links such as ``l12={"state": "dropped"}``."""
    found = {}
    for node in NODES:
        row = {str(n): {**OK, **links.get(f"l{node}{n}", {})} for n in NODES if n != node}
        found[node] = {**copy.deepcopy(FACTS), "address": f"10.0.0.{node}", "links": row}
    return found


def judged(rows, part="pairs"):
    """The fatal sentences, and the warnings."""
    found = findings.judge(part, PLAN, rows)
    return [[one.text for one in found if one.fatal == fatal] for fatal in (True, False)]


def test_healthy_nodes_have_no_findings():
    assert judged(told()) == [[], []]
    assert judged(dict.fromkeys(NODES, WELL), "versions") == [[], []]
    assert judged(dict.fromkeys(NODES, GROUP), "group") == [[], []]


@pytest.mark.parametrize(
    ("links", "begins", "ends"),
    [
        (
            "02 12 32",
            "cannot be reached: each of the other nodes",
            "inbound rules probably block the others",
        ),
        (
            "20 21 23",
            "cannot connect to any other node, although others can reach it: node 2 gets no",
            "",
        ),
    ],
)
def test_a_node_that_is_cut_off_in_one_direction_is_one_finding(links, begins, ends):
    ((found,), _) = judged(told(**{f"l{link}": DROPPED for link in links.split()}))
    assert found.startswith(f"node 2 (c, 10.0.0.2) {begins}")
    assert found.endswith(ends)


def test_a_node_that_was_reached_and_sends_no_report():
    rows = told()
    del rows[3]
    ((found,), _) = judged(rows)
    assert found.startswith("node 3 (d, 10.0.0.3) sent no report in time: it cannot connect to")


def test_several_findings_are_all_reported():
    rows = told(l12={"state": "unknown"}, l30={"state": "other"})
    rows[2]["disks"]["/out"] = 5 << 20
    rows[1]["versions"] = {**rows[1]["versions"], "NCCL": None}
    first, second, third, fourth = judged(rows)[0]
    assert first.startswith("node 1 (b, 10.0.0.1) to node 2 (c, 10.0.0.2): node 1 cannot resolve")
    assert second.startswith(
        "node 3 (d, 10.0.0.3) to node 0 (a, 10.0.0.0): node 3 reaches a different"
    )
    assert third == (
        "NCCL differs between nodes: 2.27.5 on nodes 0, 2, 3; none on node 1. "
        "Fix node 1 (b, 10.0.0.1)"
    )
    assert fourth == "/out on node 2 (c, 10.0.0.2) has only 5 MiB free"


def test_a_broken_switch_does_not_fill_the_log():
    rows = {}
    for node in range(8):
        links = {str(n): DROPPED if n // 4 != node // 4 else OK for n in range(8) if n != node}
        rows[node] = {**FACTS, "links": links}
    assert len(findings.judge("pairs", nodes(8), rows)) == 16
    rows[0]["links"]["1"] = DROPPED
    assert findings.judge("pairs", nodes(8), rows)[16:] == [
        ("1 more finding(s) not shown", True, None)
    ]


def test_what_may_still_work_is_a_warning():
    rows = told(l02={"clock": -400.0})
    for row in rows.values():
        row["links"] = {n: {**link, "rate": link["rate"] / 40} for n, link in row["links"].items()}
    rows[1]["links"]["3"] |= {"state": "slow", "rate": 9e6}
    rows[0]["shm"] = 60 << 20
    fatal, texts = judged(rows)
    assert fatal == []
    assert [text[:40] for text in texts] == [
        "node 1 (b, 10.0.0.1) to node 3 (d, 10.0.",
        "the clock of node 2 (c, 10.0.0.2) is 400",
        "/dev/shm on node 0 (a, 10.0.0.0) has onl",
    ]


@pytest.mark.parametrize(
    ("part", "rows", "fatal", "warning"),
    [
        (
            "group",
            {0: LATE, 1: LATE | {"rank": 1, "ended": True, "output": ["WARN no socket"]}, 2: GROUP},
            "the process group failed on node 1 (b, 10.0.0.1), rank 1: WARN no socket",
            "",
        ),
        (
            "versions",
            {2: LATE | {"ended": True, "output": ["OSError: libcudart.so.12"]}, 3: LATE},
            "node 2 (c, 10.0.0.2): OSError: libcudart.so.12",
            "node 3 (d, 10.0.0.3) did not finish importing PyTorch in 20 s",
        ),
        (
            "versions",
            {2: WELL | {"backend": "gloo"}},
            "backend differs between nodes: nccl on nodes 0, 1, 3; gloo on",
            "",
        ),
        (
            "versions",
            {2: WELL | {"correct": False}},
            "node 2 (c, 10.0.0.2) computes wrong matrix products",
            "",
        ),
        (
            "versions",
            {3: WELL | {"speeds": {"GPU 0 matrix multiplication": 4e14}}},
            "",
            "node 3 (d, 10.0.0.3): GPU 0 matrix multiplication runs at 67% of the median",
        ),
        ("bandwidth", {2: LATE}, "", "the all_reduce bandwidth test timed out"),
    ],
    ids=["a rank", "a broken PyTorch", "no GPUs", "wrong product", "slow GPU", "late"],
)
def test_the_parts_after_the_links(part, rows, fatal, warning):
    usual = {"group": GROUP, "versions": WELL, "bandwidth": {}}[part]
    for found, says in zip(
        judged({**dict.fromkeys(NODES, usual), **rows}, part), (fatal, warning), strict=True
    ):
        assert len(found) == bool(says)
        assert says in "".join(found)


def test_many_nodes_get_no_matrix():
    count = 40
    plan = Peers(0, ("n",) * count, ("10.0.0.1",) * count, 20000, b"k")
    rows = {node: {**told()[0], "links": {}} for node in range(count)}
    rows[7]["links"]["9"] = DROPPED
    lines = findings.lines(plan, {"pairs": rows, "group": {}}, [], 2.0)
    assert len(lines) == count + 2
    assert lines[-2] == "7 to 9: dropped"


@pytest.mark.parametrize(
    ("link", "cause"),
    [
        ({"state": "dropped"}, "net_blocked"),
        ({"state": "unreachable"}, "net_blocked"),
        ({"state": "ports", "how": "dropped"}, "net_blocked"),
        ({"state": "stalled"}, "net_blocked"),
        ({"state": "refused"}, "net_unreachable"),
        ({"state": "closed"}, "net_unreachable"),
        ("NCCL", "nccl_version_mismatch"),
        ("driver", "lib_incompatible"),
    ],
)
def test_diagnose_knows_the_findings(link, cause, tmp_path, capsys):
    rows = told() if isinstance(link, str) else told(l12=link)
    if isinstance(link, str):
        rows[2]["versions"][link] = "1"
    ((found,), _) = judged(rows)
    line = f"2026-11-21T17:22:52.123Z [node 0] preflight: FAILED: {found}"
    (tmp_path / "a.log").write_text(f"{line}\n")
    assert cli.main(["diagnose", str(tmp_path / "a.log"), "--json"]) == CAUSE_FOUND
    assert json.loads(capsys.readouterr().out)["causes"][0]["cause"] == cause
