"""The stall rule on one node, with real processes that hang, spin and write."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from deploykit_node import cluster, records
from deploykit_node.cluster import BadEnvironment
from deploykit_node.observe import hooks, processes, ras, stall
from tests import ras_server
from tests.backends.slurm.slurm_helpers import wait_for

RELAY = "import subprocess, sys; sys.exit(subprocess.call([sys.executable, *sys.argv[1:]]))"
SLEEPS = "import time\nwhile True:\n    time.sleep(900)\n"
SPINS = "while True:\n    pass\n"
ALONE = cluster.Cluster("alone", 0, ("localhost",))
TWO = cluster.Cluster("slurm", 0, ("a", "b"))


class Node:
    """The folders of a node with one rank, whose program runs below a process like its relay."""

    def __init__(self, tmp_path, program, **env):
        self.run, self.ranks = tmp_path / "run", tmp_path / "ranks"
        self.ranks.mkdir(exist_ok=True)
        self.env = {"DEPLOYKIT_RUN_DIR": str(self.run), "PATH": os.environ["PATH"], **env}
        self.env.setdefault("DEPLOYKIT_STALL_SECONDS", "0.5")
        self.said = []
        script = tmp_path / "train.py"
        script.write_text(program)
        hooked, file = hooks.environment(self.env, tmp_path, 0)
        self.relay = subprocess.Popen([sys.executable, "-c", RELAY, script], env=hooked)
        records.write(self.ranks / "rank-0.pid", {"pid": self.relay.pid})
        (self.pid,) = wait_for(lambda: processes.children(self.relay.pid))
        rank = cluster.Rank("torchrun", 0, 0, 1, 1)
        processes.register(self.env, rank, self.pid, stacks=file)
        self.heard = (self.ranks / "rank-0.heard").touch

    def watch(self, here=ALONE):
        self.watched = stall.Watch(self.env, here, self.ranks, self.said.append)
        return self.watched

    def record(self):
        return records.read(self.run / "exit_records/stall-0.json")

    def stalls(self, seconds=250):
        """Look until a stall is recorded; the record."""

        def looked():
            self.watched.look()
            return self.record()

        return wait_for(looked, seconds)

    def looks_for(self, seconds):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.watched.look()
            time.sleep(0.02)

    def stop(self):
        for pid in (self.pid, self.relay.pid):
            subprocess.run(["kill", "-9", str(pid)], check=False, stderr=subprocess.DEVNULL)
        self.relay.wait()


@pytest.fixture
def node(tmp_path):
    started = []

    def start(program, **env):
        started.append(Node(tmp_path, program, **env))
        return started[-1]

    yield start
    for one in started:
        one.stop()


def test_a_rank_that_waits_is_stalled_until_it_prints_again(node):
    here = node(SLEEPS)
    watch = here.watch()
    here.heard()
    watch.look()
    assert watch.limit == 0.5
    found = here.stalls()
    assert (found["nodes"], found["attempt"]) == (1, 0)
    (kept,) = (here.run / "stacks" / found["dump"]).iterdir()
    frames = records.read(kept)["ranks"][0]["process"]["threads"][0]["frames"]
    assert frames[0]["source"] == "time.sleep(900)"
    assert here.said[0].startswith("no progress for ")
    Path(here.ranks / "rank-0.heard").unlink()
    here.heard()
    watch.look()
    assert here.record() is None
    assert here.said[1].startswith("progress resumed after ")
    assert watch.limit > 1.5, "three times the pause, which was usual after all"


def test_the_first_output_has_twice_the_time(node):
    here = node(SLEEPS)
    watch = here.watch()
    watch.look()
    assert watch.limit == 1.0


@pytest.mark.slow
def test_an_endless_loop_has_the_time_of_a_slow_evaluation(node):
    here = node(SPINS, DEPLOYKIT_STALL_SECONDS="1")
    watch = here.watch()
    here.heard()
    watch.look()
    assert here.stalls()["seconds"] >= stall.COMPUTING * watch.limit


def test_a_report_keeps_no_stacks(node):
    here = node(SLEEPS, DEPLOYKIT_ON_STALL="report")
    here.watch()
    assert here.stalls()["dump"] == ""
    assert not (here.run / "stacks").exists()


def test_a_restart_ends_the_program_and_not_its_relay(node):
    here = node(SLEEPS, DEPLOYKIT_ON_STALL="restart")
    watch = here.watch()
    here.stalls()
    watch.look()
    assert here.relay.wait(250) == 256 - 9
    assert "SIGKILL" in here.said[-1]


def test_a_restart_waits_for_all_nodes(node):
    here = node(SLEEPS, DEPLOYKIT_ON_STALL="restart")
    watch = here.watch(TWO)
    found = here.stalls()
    watch.look()
    assert processes.stat(here.pid).state != "Z"
    other = {**found, "attempt": 1}
    records.write(here.run / "exit_records/stall-1.json", other)
    watch.look()
    assert "SIGKILL" not in here.said[-1]
    records.write(here.run / "exit_records/stall-1.json", found)
    watch.look()
    assert "SIGKILL" in here.said[-1]


def test_time_in_which_the_launcher_was_stopped_is_no_pause(node, monkeypatch):
    here = node(SLEEPS, DEPLOYKIT_STALL_SECONDS="100")
    watch = here.watch()
    here.heard()
    watch.look()
    woken = time.monotonic() + 3600
    monkeypatch.setattr(stall.time, "monotonic", lambda: woken)
    watch.look()
    assert watch._dump is None, "it would look at the ranks, as after an hour without a sign"
    monkeypatch.setattr(stall.time, "monotonic", lambda: woken + 1)
    watch.look()
    assert watch._dump is None
    assert watch.limit == 100, "and no pause of an hour is usual from now on"


def test_without_ranks_there_is_no_stall(node):
    here = node(SLEEPS)
    (here.ranks / "rank-0.pid").unlink()
    here.watch()
    here.looks_for(2)
    assert here.record() is None


def test_an_error_of_the_rule_does_not_end_the_run(node):
    here = node(SLEEPS)
    watch = here.watch()
    (here.ranks / "rank-0.heard").symlink_to("nowhere")
    watch.look()
    watch.look()
    assert here.said == [here.said[0]]
    assert here.said[0].startswith("stall detection failed and is now off: FileNotFoundError")


def test_what_a_process_writes_is_counted(node):
    here = node("import time\nwhile True:\n    open('/dev/null', 'wb').write(bytes(1 << 21))\n")
    before = processes.written(here.pid)
    wait_for(lambda: processes.written(here.pid) > before + (1 << 21))
    assert processes.written(10**9) == 0


def waits(here):
    """Look until the rank has made no progress for long enough that a stop is no end of its own."""
    watch = here.watch()
    here.heard()
    watch.look()
    wait_for(lambda: watch.look() or watch._ask_at > watch._stop_limit)
    return watch


def test_a_rank_that_waits_when_it_is_told_to_stop_leaves_its_stacks(node):
    here = node(SLEEPS, DEPLOYKIT_STALL_SECONDS="20")
    watch = waits(here)
    assert here.record() is None
    watch.stop(60)
    found = here.record()
    assert (found["stopped"], found["nodes"]) == (True, 1)
    (kept,) = (here.run / "stacks" / found["dump"]).iterdir()
    assert "time.sleep(900)" in kept.read_text()
    assert " when the run was told to stop (" in here.said[0]


def test_stacks_of_a_rank_that_slurm_has_ended_already_are_those_from_before(node):
    """Slurm sends its signal to the launcher and to the ranks at the same time."""
    here = node(SLEEPS, DEPLOYKIT_STALL_SECONDS="20")
    watch = waits(here)
    here.stop()
    watch.stop(60)
    (kept,) = (here.run / "stacks" / here.record()["dump"]).iterdir()
    assert "time.sleep(900)" in kept.read_text()


def test_so_are_stacks_that_have_only_just_been_taken(node):
    here = node(SLEEPS, DEPLOYKIT_STALL_SECONDS="20")
    watch = here.watch()
    wait_for(lambda: watch.look() or watch._dump)
    wait_for(lambda: list(here.ranks.glob("look-*/*.json")))
    here.stop()
    watch.stop(60)
    (kept,) = (here.run / "stacks" / here.record()["dump"]).iterdir()
    assert "time.sleep(900)" in kept.read_text()


def test_a_rank_that_prints_leaves_no_stacks_when_it_is_told_to_stop(node):
    here = node(SLEEPS, DEPLOYKIT_STALL_SECONDS="600")
    watch = here.watch()
    here.heard()
    watch.look()
    watch.stop(60)
    assert here.record() is None
    assert here.said == []


@pytest.mark.slow
def test_a_rank_that_computes_made_progress_when_it_is_told_to_stop(node):
    """The pause is too short for an endless loop."""
    here = node(SPINS, DEPLOYKIT_STALL_SECONDS="200")
    watch = waits(here)
    watch.stop(60)
    assert here.record() is None


def test_what_a_rank_prints_about_its_end_is_no_progress(node):
    here = node(SLEEPS, DEPLOYKIT_STALL_SECONDS="20")
    watch = waits(here)
    Path(here.ranks / "rank-0.heard").unlink()
    here.heard()
    watch.stop(60)
    assert here.record()["stopped"]


def test_the_report_of_nccl_is_kept_with_the_stacks(node):
    with ras_server.serving(ras_server.REPORTS["counts"], silent=1) as server:
        here = node(SLEEPS, NCCL_RAS_ADDR=server.address)
        here.watch()
        here.heard()
        found = here.stalls()
    (kept,) = (here.run / "stacks" / found["dump"]).glob("*.ras")
    assert kept.read_text() == ras_server.REPORTS["counts"]
    assert server.commands[-3:] == ["client protocol 2", "timeout 5", "verbose status"]


def greets(server):
    with server.accept()[0] as connection:
        connection.sendall(b"220 ready\r\n")


def test_another_service_at_the_port_of_nccl_is_left_alone():
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        thread = threading.Thread(target=greets, args=(other,))
        thread.start()
        assert ras.query({"NCCL_RAS_ADDR": address}) == ""
        thread.join()
    assert ras.query({"NCCL_RAS_ADDR": address}) == ""
    assert ras.query({"NCCL_RAS_ADDR": "nowhere"}) == ""


@pytest.mark.parametrize("text", ["0", "-1", "soon", "nan"])
def test_a_minimum_that_is_no_time_is_refused(text):
    with pytest.raises(BadEnvironment, match="positive number of seconds"):
        stall.settings({"DEPLOYKIT_STALL_SECONDS": text})
