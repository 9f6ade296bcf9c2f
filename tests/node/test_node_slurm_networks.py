"""Slurm's nodes as machines of their own, with the networks of `topologies.py` between them.

The reference trainer runs in each, with the loss of a run on this machine. Slurm's daemons have a
network of their own, so a job begins even where its ranks cannot meet.
"""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.backends.slurm import survival_runs as runs
from tests.node import netns, topologies
from tests.node.slurm_machines import Field
from tests.trainer_losses import losses

pytestmark = [pytest.mark.slurm, pytest.mark.torch, pytest.mark.xdist_group("topologies")]

MEET = {
    "unlike nodes": (2, "ens5", "enp3s0"),
    "named after the other": (1, "eth1", "eth1"),
    "ipv6 and docker": (1, "ens5", "ens5"),
}
"""A topology, the ranks on each node, and on each the one interface over which they can meet."""
CANNOT = {
    "apart": r"There is no route from this node to node\d \(10\.0\.0\.\d\)",
    "only docker": r"resolves to 172\.17\.0\.1 here, .* machine's own address on docker0",
}
"""One in which they cannot, and what must be said."""


def submit(run, *settings):
    chosen = ["entrypoint.script=train.py", f"entrypoint.args={runs.OPTIONS}", *settings]
    words = [word for setting in chosen for word in ("--set", setting)]
    return [sys.executable, "-m", "deploykit", "submit", "--run", run, *words]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a job file, and below it deploykit's own."""
    folder = tmp_path_factory.mktemp("networks")
    runs.source(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("DEPLOYKIT_HOME", str(folder / "state"))
        yield folder


@pytest.fixture(scope="module")
def ended(needs_slurm, home):
    """Each topology's run after its end: exit code of `wait`, what it said, and the folder."""
    netns.needed("sysctl")
    field = Field()
    try:
        pairs = {name: field.pair(builder(name)) for name in (*MEET, *CANNOT)}
        field.start()
        for name, pair in pairs.items():
            ranks = f"resources.processes_per_node={MEET.get(name, [1])[0]}"
            nodes = ("resources.nodes=2", f"slurm.nodelist={','.join(pair)}")
            field.run(*submit(run_of(name), ranks, *nodes), "--backend", "slurm")
        yield {name: waited(field, run_of(name), home) for name in pairs}
    except subprocess.CalledProcessError as error:
        pytest.fail(f"{error}\n{error.stdout}{error.stderr}")
    finally:
        field.remove()


def builder(name):
    return getattr(topologies, name.replace(" ", "_"))


def run_of(name):
    return name.replace(" ", "-")


def waited(field, run, home):
    done = field.run(sys.executable, "-m", "deploykit", "wait", run, check=False)
    return done.returncode, done.stdout + done.stderr, home / "state" / "runs" / run


@pytest.fixture(scope="module")
def reference(home):
    """The loss of each step of a run on this machine."""
    argv = [*submit("here"), "--backend", "local", "--wait"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = losses(home / "state/runs/here/output")
    assert list(found) == list(range(1, runs.STEPS + 1))
    return found


def log(folder, node):
    return (folder / f"logs/node-{node}.log").read_text()


def interface(folder, node):
    """The one that node's log says was taken."""
    said = log(folder, node)
    (found,) = re.findall(r"\[node \d\] network: (\S+) \(\S+\) is on the route to another", said)
    return found


@pytest.mark.parametrize("name", MEET)
def test_two_nodes_train_as_one_machine_does(ended, reference, name):
    code, said, folder = ended[name]
    assert code == 0, said
    assert losses(folder / "output") == pytest.approx(reference, rel=0, abs=1e-6)
    ranks, *interfaces = MEET[name]
    assert [interface(folder, 0), interface(folder, 1)] == interfaces
    assert f"{2 * ranks} rank(s) on cpu" in log(folder, 0) + log(folder, 1)


@pytest.mark.parametrize("name", CANNOT)
def test_where_they_cannot_meet_the_message_says_so(ended, name):
    code, said, _ = ended[name]
    assert code == 78, said
    assert re.search(CANNOT[name], said), said
