"""In which networks a group is formed: by launch.py and torchrun's agent, and by fixed choices."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from deploykit.lib import paths
from tests.node import netns, topologies

HERE = Path(__file__).parent
TABLE = HERE / "topologies.md"
WAYS = {
    "ours": "deploykit",
    "eth0": "`eth0`",
    "^docker,lo,veth,eth": "`^docker,lo,veth,eth`",
    "": "nothing set",
}
"""What is set, and the head of its column."""
CANNOT = {words: build for words, (build, _) in topologies.CANNOT.items()}
pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("topologies")]


class Network:
    """One topology, and the outcome of each way in it."""

    def __init__(self, folder, build):
        self._folder = folder
        folder.mkdir()
        self.lab = netns.Lab(folder)
        self._pair = build(self.lab)

    def case(self, number, way):
        folder = self._folder / str(number)
        folder.mkdir()
        return [self._node(folder, way, rank) for rank in range(2)]

    def _node(self, folder, way, rank):
        ours = {
            "SM_HOSTS": '["n0", "n1"]',
            "SM_CURRENT_HOST": f"n{rank}",
            "DEPLOYKIT_RUN_DIR": str(folder),
        }
        machine = self._pair[rank]
        return {
            "machine": machine,
            "hostname": f"n{rank}",
            "hosts": self.lab.hosts(machine),
            "way": way,
            "rank": rank,
            "log": str(folder / f"log{rank}"),
            "store": str(folder / "store"),
            "env": ours if way == "ours" else {},
        }


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """(topology, way) -> exit code and log of both nodes."""
    netns.needed("sysctl", "nft")
    folder = tmp_path_factory.mktemp("topologies")
    built, cases, keys = [], [], {}
    try:
        for at, (words, build) in enumerate({**topologies.MEET, **CANNOT}.items()):
            built.append(Network(folder / str(at), build))
            ways = WAYS if words in topologies.MEET else ["ours"]
            for number, way in enumerate(ways):
                cases.append(built[-1].case(number, way))
                keys |= {node["log"]: (words, way) for node in cases[-1]}
        for network in built:
            network.lab.ready()
        done = _forked(cases)
    finally:
        for network in built:
            network.lab.remove()
    found = {}
    for log, (code, text) in sorted(done.items()):
        found.setdefault(keys[log], []).append((code, text))
    return found


def _forked(cases):
    path = f"{paths.shipped('entrypoints')}:{HERE}"
    done = subprocess.run(
        [sys.executable, str(HERE / "forked_groups.py")],
        input=json.dumps(cases),
        env={"PATH": os.environ["PATH"], "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("words", topologies.MEET)
def test_the_group_is_formed_wherever_the_nodes_can_meet(outcomes, words):
    for code, log in outcomes[words, "ours"]:
        assert code == 0, log
        assert "network: " in log


@pytest.mark.parametrize("words", topologies.CANNOT)
def test_where_they_cannot_meet_the_message_says_so(outcomes, words):
    for code, log in outcomes[words, "ours"]:
        assert code == 78, log
        assert topologies.CANNOT[words][1] in log


def test_the_table_shows_what_each_choice_does(outcomes):
    """DEPLOYKIT_WRITE=1 makes this test rewrite the table."""
    rows = [f"| {words} | {_cells(outcomes, words)} |" for words in topologies.MEET]
    heads = " | ".join(WAYS.values())
    table = "\n".join([f"| the network | {heads} |", "|---" * (len(WAYS) + 1) + "|", *rows])
    head, mark, _ = TABLE.read_text().partition("<!-- measured -->\n")
    page = f"{head}{mark}\n{table}\n"
    if os.environ.get("DEPLOYKIT_WRITE"):
        TABLE.write_text(page)
    assert page == TABLE.read_text()


def _cells(outcomes, words):
    return " | ".join(_cell(outcomes[words, way]) for way in WAYS)


def _cell(nodes):
    """The outcome in two words."""
    if all(code == 0 for code, _ in nodes):
        return "works"
    said = "".join(log for _, log in nodes)
    return "no such interface" if NO_INTERFACE.search(said) else "no connection"


NO_INTERFACE = re.compile("no socket interface found|Unable to find (address|interface) for")


def test_the_whole_command_in_one_of_them(bundle, tmp_path):
    """launch.py, the torchrun that it starts, and a program of the user's."""
    netns.needed()
    bundle.write("add.py", ADD)
    (bundle.run_dir / "rendezvous.json").touch()
    lab = netns.Lab(tmp_path)
    try:
        pair = topologies.named_after_docker(lab)
        lab.ready()
        started = [_launch(lab, bundle, machine, rank) for rank, machine in enumerate(pair)]
        logs = [process.communicate(timeout=600)[0] for process in started]
    finally:
        lab.remove()
    assert [process.returncode for process in started] == [0, 0], logs
    assert all("the sum is 2.0" in log for log in logs)


ADD = """\
    import torch
    from torch import distributed
    distributed.init_process_group("gloo")
    ones = torch.ones(1)
    distributed.all_reduce(ones)
    print("the sum is", ones.item(), flush=True)
    distributed.destroy_process_group()
"""


def _launch(lab, bundle, machine, rank):
    torchrun = ["torchrun", "--nnodes=2", "--nproc-per-node=1", "--", "add.py"]
    return lab.start(
        machine,
        *("sh", "-c", 'cd "$1" && shift && exec "$@"', "sh", str(bundle.source)),
        *(sys.executable, ".deploykit/launch.py", *torchrun),
        SM_HOSTS='["n0", "n1"]',
        SM_CURRENT_HOST=f"n{rank}",
        DEPLOYKIT_RUN_DIR=str(bundle.run_dir),
    )
