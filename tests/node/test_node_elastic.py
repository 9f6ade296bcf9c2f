"""The rendezvous of a job against another user of the machine, and restarts on several nodes."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import elastic

ATTACK = """\
    import base64, os, pickle, sys
    from torch.distributed import TCPStore

    if os.getuid() == 0:
        os.setgroups([]), os.setgid(65534), os.setuid(65534)

    class Payload:
        def __reduce__(self):
            return os.system, (f"touch '{sys.argv[1]}'",)

    bomb = base64.b64encode(pickle.dumps((Payload(), 0)))
    names = ["torch.rendezvous.tried.0", "2/torchrun/torchelastic/role_info/0",
             "2/torchrun/torchelastic/assigned_ranks/0", "2/port", "store_based_barrier_key:0"]
    for place in sys.argv[2:]:
        host, _, port = place.rpartition(":")
        store = TCPStore(host, int(port), is_master=False)
        for name in names:
            store.set(name, bomb)
        store.get(names[0])
        print("wrote to", place, "as", os.getuid())
"""

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


def listeners(pids):
    """``address:port`` of every TCP socket on which the processes listen."""
    inodes = set()
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            if (target := os.readlink(entry)).startswith("socket:["):  # noqa: PTH115 - no path
                inodes.add(target[8:-1])
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pids[0]}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in inodes:
                found.add(_readable(words[1]))
    return found


def _readable(local):
    """The kernel writes an address as words of the machine's order."""
    address, port = local.split(":")
    packed = b"".join(bytes.fromhex(address[at : at + 8])[::-1] for at in range(0, len(address), 8))
    return f"{ipaddress.ip_address(packed)}:{int(port, 16)}"


def family(pid):
    """A process and all below it."""
    below = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(found for child in below for found in family(int(child)))]


def stores(launchers):
    """Where torchrun listens; a port of gloo's need never answer a store's words."""
    pids = [pid for one in launchers for pid in family(one.process.pid)]
    return listeners(
        [pid for pid in pids if b"--rdzv-id" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    )


def attack(canary, places):
    argv = [sys.executable, "-c", textwrap.dedent(ATTACK), str(canary), *sorted(places)]
    done = subprocess.run(argv, capture_output=True, text=True)  # noqa: PLW1510 - what it prints counts
    assert done.returncode == 0, done.stderr
    return done.stdout


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
    said = attack(canary, stores(launchers))
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


@pytest.mark.torch
@pytest.mark.parametrize("count", [1, 2])
def test_on_one_machine_all_that_listens_is_on_loopback(bundle, count):
    launchers = started(bundle, count)
    places = {place for one in launchers for place in listeners(family(one.process.pid))}
    assert places
    assert all(place.startswith("127.") for place in places), places
    (bundle.run_dir / "go on").touch()
    assert [launcher.finish().code for launcher in launchers] == [0] * count


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
@pytest.mark.parametrize(
    "value",
    [b"", b"0", b"65536", b"-1", b"9" * 5000, b"\xff", "٣".encode(), b"80\n", b"127.0.0.1:80"],
)
def test_a_port_that_another_user_has_written_is_refused(alone, value):
    handler, store = alone
    store.add("1/joined", 1)
    store.set("1/port", value)
    with pytest.raises(elastic.RendezvousStateError, match="port"):
        handler.next_rendezvous()


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
