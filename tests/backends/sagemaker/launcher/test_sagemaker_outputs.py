"""`outputs` with AWS's own launcher: collected on each machine, kept for an interruption."""

from __future__ import annotations

import textwrap

import pytest

from tests.backends.sagemaker.launcher.sagemaker_hosts import (
    LauncherFailedError,
    on_loopback,
    run_on_hosts,
)
from tests.backends.sagemaker.launcher.test_sagemaker_launcher import PLAIN

pytestmark = [pytest.mark.aws, pytest.mark.torch, pytest.mark.xdist_group("port-7777")]

TUTORIAL = textwrap.dedent(
    """\
    import json, os, time
    from pathlib import Path

    rank, snapshot, seen = int(os.environ["RANK"]), Path("snapshot.pt"), Path("seen")
    node = rank // 2
    old = json.loads(snapshot.read_text()) if snapshot.exists() else {"epoch": 0, "node": node}
    print("rank", rank, "starts at epoch", old["epoch"], "of node", old["node"], flush=True)
    if os.environ["LOCAL_RANK"] == "1":
        seen.touch()
    else:
        while not seen.exists():
            time.sleep(0.1)
        snapshot.write_text(json.dumps({"epoch": old["epoch"] + 1, "node": node}))
    """
)
KEPT = "checkpoints/working_folder"


@pytest.fixture
def hosts(tmp_path):
    """A function that makes hosts in a folder of that name."""

    def make(name, count):
        (tmp_path / name).mkdir()
        return on_loopback(tmp_path / name, count)

    return make


def log(host):
    return (host.folder / "log.txt").read_text()


def test_each_machine_collects_its_own_and_finds_it_again(aws, captured, program, hosts):
    request = captured(program(TUTORIAL), outputs=("snapshot.pt",), nodes=2)
    first = hosts("first", 2)
    outputs = run_on_hosts(request, aws.endpoint, first)
    assert (outputs[0] / "snapshot.pt").is_file()
    assert (outputs[1] / "node-1/snapshot.pt").is_file()
    assert (first[0].folder / KEPT / "snapshot.pt").is_file()
    assert (first[1].folder / KEPT / "node-1/snapshot.pt").is_file()
    assert log(first[0]).count("[node 0] outputs collected: 1 file") == 1
    second = hosts("second", 2)
    run_on_hosts(request, aws.endpoint, second, earlier=first)
    for number, host in enumerate(second):
        assert log(host).count(f"starts at epoch 1 of node {number}") == 2


KILLED = """\
import os, signal, time
open("a.pt", "w").write("1")
while not os.path.exists(os.environ["DEPLOYKIT_CHECKPOINT_DIR"] + "/working_folder/a.pt"):
    time.sleep(0.1)
os.killpg(0, signal.SIGKILL)
"""
"""Kills its launcher too, as the end of a container does."""


def test_an_interrupted_machine_has_kept_what_was_complete(aws, captured, program, hosts):
    alone = {"nodes": 1, "processes_per_node": 1}
    request = captured(program(KILLED), outputs=("*.pt",), **alone)
    (host,) = hosts("one", 1)
    often = {"DEPLOYKIT_COLLECT_SECONDS": "0.5"}
    with pytest.raises(LauncherFailedError, match="exit codes are"):
        run_on_hosts(request, aws.endpoint, [host], image=often, timeout=200)
    assert (host.folder / KEPT / "a.pt").read_text() == "1"
    assert not (host.folder / "output/data/a.pt").exists()


def test_what_a_failing_program_wrote_is_collected(aws, captured, program, hosts):
    text = "open('a.pt', 'w').write('1'); raise ValueError('no')"
    request = captured(program(text), outputs=("*.pt",), **PLAIN)
    (host,) = hosts("one", 1)
    with pytest.raises(LauncherFailedError):
        run_on_hosts(request, aws.endpoint, [host])
    assert (host.folder / "output/data/a.pt").read_text() == "1"


@pytest.mark.parametrize("distribution", ["torch_distributed", "none"])
def test_without_outputs_the_log_says_what_is_lost(aws, captured, program, hosts, distribution):
    text = "open('a.pt', 'w').write('1' * 1500)"
    request = captured(program(text), **PLAIN | {"distribution": distribution})
    (host,) = hosts("one", 1)
    run_on_hosts(request, aws.endpoint, [host])
    said = "[node 0] written to the working folder: 1 file, 1.5 kB: a.pt (1.5 kB); to keep them"
    assert said in log(host)
