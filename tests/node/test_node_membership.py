"""Which nodes train together: what they agree on through files, with real connections."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading

import pytest

from deploykit_node import records
from deploykit_node.cluster import Cluster
from deploykit_node.command import Command
from deploykit_node.records import NodeExit
from deploykit_node.restart import membership, slurm_job
from deploykit_node.restart.attempt import Attempt
from deploykit_node.restart.membership import Membership, Size, TooFewNodes
from tests.node.test_node_requeue import RUNNING

LOCALHOST = "127.0.0.1"


@pytest.fixture
def env(tmp_path, monkeypatch):
    monkeypatch.setattr(membership, "_LAST_CALL", 0.5)
    monkeypatch.setattr(membership, "EVERY", 0.0)
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    (tmp_path / "exit_records").mkdir()
    return {"DEPLOYKIT_RUN_DIR": str(tmp_path), "DEPLOYKIT_CHECKPOINT_DIR": str(checkpoints)}


@pytest.fixture
def node(env):
    """A function that makes a node of a job of two to three."""
    made = []

    def make(number):
        made.append(Membership(env, number, Size(2, 3), LOCALHOST))
        return made[-1]

    yield make
    for one in made:
        one.close()


def joined(*nodes):
    """The nodes of the generation that each joins at the same time."""
    found = {}

    def join(one):
        found[one] = one.join(lambda _: None)

    threads = [threading.Thread(target=join, args=(one,), daemon=True) for one in nodes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [found[one] and [member.node for member in found[one].members] for one in nodes]


def dies(one):
    one.close()


def test_all_nodes_that_come_train_and_the_last_call_ends_the_waiting(node):
    assert joined(node(0), node(2)) == [[0, 2], [0, 2]]


def test_the_others_go_on_without_a_lost_node_even_if_it_is_the_first(node):
    first, *others = (node(number) for number in range(3))
    assert joined(first, *others) == [[0, 1, 2]] * 3
    assert [one.change() for one in others] == [None, None]
    dies(first)
    assert others[1].change() == "node 0 was lost"
    assert others[0].change() == "node 0 was lost", "it hears of it, and need not look itself"
    assert joined(*others) == [[1, 2], [1, 2]]
    assert [one.change() for one in others] == [None, None]


def test_a_node_that_comes_back_joins_at_a_new_checkpoint(node, env, tmp_path):
    nodes = [node(number) for number in range(3)]
    joined(*nodes)
    dies(nodes[1])
    survivors = nodes[::2]
    assert survivors[0].change() == "node 1 was lost"
    joined(*survivors)
    back, said = node(1), []
    waiting = threading.Thread(target=lambda: back.join(said.append), daemon=True)
    waiting.start()
    while not said:
        assert survivors[0].change() is None
    assert said == ["2 nodes are training; this node will join at the next checkpoint"]
    assert survivors[0].change() is None
    (tmp_path / "checkpoints/step.pt").write_text("saved")
    assert survivors[0].change() == survivors[1].change() == "node 1 joins"
    assert joined(*survivors) == [[0, 1, 2], [0, 1, 2]]
    waiting.join(60)
    assert not waiting.is_alive()


def test_a_member_that_ended_by_itself_is_not_lost(node, env):
    first, second = node(0), node(1)
    joined(first, second)
    records.record_node(env, 1, NodeExit(1, "rank 1 exited with code 1"))
    dies(second)
    assert first.change() is None
    assert first.change_after_end() is None


def test_ranks_that_fail_because_a_node_is_lost_are_no_failure(node):
    first, second = node(0), node(1)
    joined(first, second)
    dies(second)
    assert first.change_after_end() == "node 1 was lost"


def test_the_records_of_the_ranks_before_are_deleted(node, env, tmp_path):
    first, second = node(0), node(1)
    record = tmp_path / "exit_records/process-1.json"
    record.write_text("{}")
    joined(first, second)
    assert not record.exists()


def test_a_node_that_comes_too_late_joins_nothing(node, env):
    membership.end_job(env, 3)
    membership.end_job(env, 4)
    assert node(1).join(lambda _: None) is None
    assert records.read(membership.folder(env) / "over") == {"code": 3}, "the first one counts"


def test_too_few_nodes_end_the_job(node, monkeypatch):
    monkeypatch.setattr(membership, "_PATIENCE", 0.3)
    with pytest.raises(TooFewNodes, match="fewer than 2 nodes were available") as raised:
        node(0).join(lambda _: None)
    assert raised.value.missing == [1, 2]


def test_too_few_nodes_are_a_node_failure_for_which_slurm_may_requeue(env, monkeypatch):
    """With a job of Slurm's as `scontrol` shows it, of which node 1 is gone for good."""
    monkeypatch.setattr(membership, "_PATIENCE", 0.3)
    monkeypatch.setattr(membership, "_own_address", lambda _: LOCALHOST)
    env |= {"DEPLOYKIT_RESTARTS": '{"node_failure": 10}', "SLURM_JOB_ID": "7"}
    attempt = Attempt(env, Cluster("slurm", 0, ("n1", "n2")))
    words = Command(("--nnodes=2:2",), ("train.py",))
    end = membership.run(words, env, Cluster("slurm", 0, ("n1", "n2")), attempt, pytest.fail)
    assert (end.code, end.reason) == (78, "fewer than 2 nodes were available within 0.3 seconds")
    why, full = attempt._cause(end, slurm_job.parse(RUNNING))
    assert why == "node_failure"
    assert full.reason == f"node 1 no longer responds, and {end.reason}"
    assert records.read(membership.folder(env) / "over") == {"code": 78}


def test_another_attempt_starts_anew(node, env):
    membership.end_job(env, 75)
    assert not membership.over({**env, "SLURM_RESTART_COUNT": "1"})


def test_many_looks_do_not_make_a_node_seem_lost(node):
    """More connections than a socket keeps in its queue (128 by default in Python)."""
    first, second = node(0), node(1)
    joined(first, second)
    for _ in range(1000):
        assert first.change() is None
        assert second.change() is None


FLOOD = """
import socket, sys
address = ("127.0.0.1", int(sys.argv[1]))
print("up", flush=True)
while True:
    with socket.socket() as connection:
        connection.connect_ex(address)
"""


def test_a_flood_of_connections_neither_holds_a_node_nor_makes_it_seem_lost(node):
    first, second = node(0), node(1)
    joined(first, second)
    words = [sys.executable, "-c", FLOOD, str(second._me.port)]
    with contextlib.ExitStack() as floods:
        for _ in range(4):
            flood = floods.enter_context(subprocess.Popen(words, stdout=subprocess.PIPE))
            floods.callback(flood.kill)
            flood.stdout.readline()
        for _ in range(5):
            assert second.change() is None
            assert first.change() is None


def test_the_cluster_of_a_generation_has_no_gaps(node):
    first, third = node(0), node(2)
    threading.Thread(target=lambda: first.join(lambda _: None), daemon=True).start()
    generation = third.join(lambda _: None)
    here = generation.cluster(Cluster("slurm", 2, ("a", "b", "c")))
    assert (here.node, here.hosts, here.number) == (1, ("a", "c"), 2)
