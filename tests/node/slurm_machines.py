"""A real Slurm whose nodes are machines of their own: namespaces, host names, interfaces.

Pairs of machines as `topologies.py` builds them, each plugged into one more network beside its
own, over which Slurm's daemons talk: a decoy that works. The controller has a machine too, and
commands of the user run there.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from tests import programs
from tests.backends.slurm.slurm_helpers import CLUSTER, wait_for
from tests.node import netns

CONTROL = "ctl0"
"""The interface of Slurm's own network."""
_HEAD = "10.99.0.254"


class Field:
    """Pairs of nodes, and the machine `head`. Everything is removed by `remove`."""

    def __init__(self) -> None:
        self.box = Path(tempfile.mkdtemp(prefix="box-"))
        self.names: list[str] = []
        self._labs = [netns.Lab(self.box)]
        self._switch = self._lab.switch()
        self._head = self._lab.machine("head")
        self._lab.name(self._head, "head", "127.0.0.1 localhost\n127.0.1.1 head\n")
        self._lab.plug(self._head, CONTROL, self._switch, f"{_HEAD}/24")
        self._machines: dict[str, tuple[netns.Lab, str]] = {}

    @property
    def _lab(self) -> netns.Lab:
        return self._labs[0]

    def pair(self, build) -> list[str]:
        """Build two machines and make them nodes; returns their names in Slurm."""
        lab = netns.Lab(self.box)
        self._labs.append(lab)
        machines = build(lab)
        first = len(self._machines)
        names = [f"node{first + number}" for number in range(2)]
        for number, (name, machine) in enumerate(zip(names, machines, strict=True)):
            hosts = Path(lab.hosts(machine)).read_text()
            lab.name(machine, name, re.sub(r"\bn([01])\b", lambda at: names[int(at[1])], hosts))
            lab.plug(machine, CONTROL, self._switch, f"{_address(first + number)}/24")
            self._machines[name] = lab, machine
        return names

    def start(self) -> None:
        """Start the controller on its machine, and a slurmd on each of the others."""
        for lab in self._labs:
            lab.ready()
        self.run(sys.executable, str(CLUSTER), "start", str(self.box), "--nodes", "1")
        self._end_daemons()
        conf = self.box / "slurm.conf"
        text = conf.read_text().replace("(127.0.0.1)", f"({_HEAD})")
        conf.write_text(re.sub("^NodeName=.*", self._node_lines(), text, flags=re.MULTILINE))
        self._daemon(self._lab, self._head, "slurmctld", "-c")
        for name, (lab, machine) in self._machines.items():
            self._daemon(lab, machine, "slurmd", "-N", name)
        wait_for(lambda: self._states() == {"idle"})

    def _node_lines(self) -> str:
        """All on one port, since each has addresses of its own."""
        nodes = enumerate(self._machines)
        return "\n".join(
            f"NodeName={name} NodeAddr={_address(number)} Port=6818 CPUs=8 RealMemory=8000"
            for number, name in nodes
        )

    def _end_daemons(self) -> None:
        """Those whose place is on other machines, or that know of none."""
        pids = json.loads((self.box / "cluster.json").read_text())["pids"]
        for name in ("slurmctld", "n1"):
            os.kill(pids[name][0], signal.SIGTERM)
            wait_for(lambda name=name: not Path(f"/proc/{pids[name][0]}").exists())

    def _daemon(self, lab: netns.Lab, machine: str, name: str, *words: str) -> None:
        program = programs.find(name)
        conf = str(self.box / "slurm.conf")
        lab.start(machine, program, "-D", "-f", conf, *words, SLURM_CONF=conf)

    def _states(self) -> set[str]:
        said = self.run("sinfo", "--noheader", "--Node", "--format=%T", check=False)
        return set(said.stdout.split())

    def run(self, *argv: str, check: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
        """A command of the user's, on the machine of the controller."""
        return subprocess.run(
            self._lab.inside(self._head, *argv),
            env={**os.environ, "SLURM_CONF": f"{self.box}/slurm.conf", **env},
            capture_output=True,
            text=True,
            check=check,
        )

    def remove(self) -> None:
        self.run(sys.executable, str(CLUSTER), "stop", str(self.box), check=False)
        for lab in reversed(self._labs):
            lab.remove()
        shutil.rmtree(self.box, ignore_errors=True)


def _address(number: int) -> str:
    return f"10.99.0.{number + 1}"
