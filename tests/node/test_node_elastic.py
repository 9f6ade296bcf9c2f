"""The rendezvous of a job against another user of the machine, and restarts on several nodes."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest

from deploykit_node.network import elastic
from tests.intruder import attack, listeners, processes, stores

TRAIN = """\
    import os, sys, time
    from pathlib import Path
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    one = torch.ones(1)
    dist.all_reduce(one)
    again = os.environ["DEPLOYKIT_RESTART_COUNT"]
    print("met", int(one.item()), "restart", again, os.environ["TORCHELASTIC_RESTART_COUNT"],
          "pid", os.getpid(), flush=True)
    while again == "0" and not Path(sys.argv[1]).exists():
        time.sleep(0.1)
    dist.all_reduce(one)
    print("summed", flush=True)
    os._exit(0)
"""


def started(bundle, count, **env):
    """The launchers of `count` nodes, once all two ranks of each have met."""
    (bundle.run_dir / "rendezvous.json").touch()
    bundle.write("train.py", TRAIN)
    words = [
        *("torchrun", f"--nnodes={count}", "--nproc-per-node=2", "--max-restarts=2", "--"),
        *("train.py", str(bundle.run_dir / "go on")),
    ]
    launchers = []
    for node in range(count):
        place = {"DEPLOYKIT_NODE_RANK": node, "DEPLOYKIT_NODES": count} if count > 1 else {}
        launchers.append(bundle.start(*words, node=node, **place, **env))
    for launcher in launchers:
        launcher.wait_for(" met ", 2)
    return launchers


@pytest.mark.torch
@pytest.mark.parametrize("count", [1, 2])
def test_another_user_who_writes_to_the_stores_runs_no_code(bundle, tmp_path, count):
    """With torchrun's own rendezvous the payload ran within a second, as the submitter."""
    canary = tmp_path / "it ran"
    launchers = started(bundle, count)
    listens_on_loopback_only(bundle)
    said = attack(canary, stores(bundle.run_dir))
    assert said.count("wrote to") == count, said  # the ranks' store, and that of several nodes
    if os.getuid() == 0:
        assert "as 65534" in said
    victim = next(line for line in launchers[-1].log.splitlines() if " pid " in line)
    with contextlib.suppress(ProcessLookupError):  # torchrun's own rendezvous has ended it already
        os.kill(int(victim.split()[-1]), signal.SIGKILL)
    (bundle.run_dir / "go on").touch()
    for launcher in launchers:
        launcher.finish()
    assert not canary.exists()


def listens_on_loopback_only(bundle):
    """Of nodes of one machine."""
    places = listeners(processes(bundle.run_dir))
    assert places
    assert all(place.startswith("127.") for place in places), places


@pytest.mark.torch
def test_a_rank_that_dies_on_one_node_is_started_again_on_all(bundle):
    """Each rank is told the same number of restarts; torchrun counts each node's own."""
    launchers = started(bundle, 2)
    victim = next(line for line in launchers[1].log.splitlines() if " pid " in line)
    os.kill(int(victim.split()[-1]), signal.SIGKILL)
    done = [launcher.finish() for launcher in launchers]
    assert [one.code for one in done] == [0, 0], done
    said = {**done[0].said, **done[1].said}
    for rank in range(4):
        words = said[f"rank {rank}"]
        assert [line.partition(" pid")[0] for line in words if "met" in line] == [
            "met 4 restart 0 0",
            "met 4 restart 1 1",
        ]
        assert words[-1] == "summed"


@pytest.fixture
def alone():
    store = elastic.HashStore()
    return elastic.FixedNodes("run.0", elastic.Nodes(1, 2, "127.0.0.1"), store), store


@pytest.mark.torch
def test_a_node_that_has_given_up_is_not_waited_for(alone):
    handler, store = alone
    assert handler.num_nodes_waiting() == 0
    store.add("1/joined", 1)
    assert handler.num_nodes_waiting() == 1
    elastic.FixedNodes("run.0", elastic.Nodes(0, 2, "127.0.0.1"), store).shutdown()
    store.add("1/joined", -1)
    with pytest.raises(elastic.RendezvousClosedError):
        handler.next_rendezvous()
