"""Measure `dump` of 8 ranks on two nodes of a real Slurm cluster here, by different users.

    python benchmarks/dump.py

One rank keeps the others waiting. The users are the one who runs this, and where that is root also
an ordinary one: on the cluster, and through ssh. Prints JSON with wall and CPU seconds, those of
the command itself, and returns 1 when a target is missed. Needs Debian's packages of Slurm and of
the OpenSSH server (see README.md).
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slurm import TOP, children_cpu, cluster

sys.path.insert(0, str(TOP))

from tests.backends.slurm.login_node import LoginNode, login_node, program

REPEATS = 6
MOST = 2.0
"""Seconds for the stacks of all ranks."""
PATIENCE = 300
"""Seconds for all of a person's dumps, and for PyTorch to start."""
STANDING = """
import time
import torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 5:
    time.sleep(600)
dist.barrier()
"""
ODD = [[5], [0, 1, 2, 3, 4, 6, 7]]
JOB = (
    "name: dump\nentrypoint: {script: train.py}\nbackend: slurm\n"
    "resources: {time_limit: 20m, nodes: 2, processes_per_node: 4}\n"
)


@dataclass(frozen=True)
class Person:
    """Someone who submits and dumps: the command line, in a folder, with settings of the job."""

    folder: Path
    command: Sequence[str]
    settings: Sequence[str] = ()
    variables: Mapping[str, str] = field(default_factory=dict)

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """One of deploykit's verbs."""
        argv = [*self.command, "-m", "deploykit", *words]
        env = {**os.environ, **self.variables}
        return subprocess.run(
            argv, cwd=self.folder, env=env, capture_output=True, text=True, check=False
        )


def main() -> int:
    """Measure for each person; return the exit code."""
    with cluster(accounting=False) as box:
        for folder in (box, box / "munge"):
            folder.chmod(0o755)  # others need slurm.conf and the socket of munge
        with login_node(box / "slurm.conf") as node:
            figures = {name: figure(person, name) for name, person in people(box, node)}
    print(json.dumps(figures, indent=1))
    return 0 if all(one["longest_s"] <= MOST for one in figures.values()) else 1


def people(box: Path, node: LoginNode) -> Iterator[tuple[str, Person]]:
    """Who submits."""
    here = box / "work"
    here.mkdir()
    state = {"DEPLOYKIT_HOME": str(box / "deploykit"), "PYTHONPATH": str(TOP)}
    yield "this-user", Person(here, [sys.executable], (), state)
    path = {"PATH": f"{node.folder}/bin:{os.environ['PATH']}", "SLURM_CONF": "/none"}
    yield "through-ssh", Person(here, [sys.executable], node.settings, {**state, **path})
    python = program()
    if os.getuid() == 0 and python is not None:
        home = node.folder / "home/project"
        home.mkdir()
        shutil.chown(home, node.user, node.user)
        us = [f"--reuid={node.user}", f"--regid={node.user}", "--clear-groups"]
        packages = str(python[1] or "")
        settings = [f"slurm.python={python[0]}", f"env.PYTHONPATH={packages}"]
        words = [word for setting in settings for word in ("--set", setting)]
        own = {"HOME": str(home), "DEPLOYKIT_HOME": f"{home}/state"}
        own["PYTHONPATH"] = f"{TOP}:{packages}"
        own["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # of py-spy
        yield "ordinary-user", Person(home, ["setpriv", *us, python[0]], words, own)


def figure(person: Person, run: str) -> dict[str, float]:
    """Wall and CPU seconds of `dump` when all ranks stand where they will wait."""
    (person.folder / "train.py").write_text(STANDING)
    (person.folder / "job.yaml").write_text(JOB)
    done = person.run("submit", "--run", run, *person.settings)
    if done.returncode:
        sys.exit(done.stderr)
    walls: list[float] = []
    cpus: list[float] = []
    end = time.monotonic() + PATIENCE
    while len(walls) < REPEATS:
        if time.monotonic() > end:
            sys.exit(f"{run}: not all ranks stand where they should: {done.stdout}{done.stderr}")
        began, used = time.perf_counter(), children_cpu()
        done = person.run("dump", run, "--json")
        wall, cpu = time.perf_counter() - began, children_cpu() - used
        if _is_whole(done):
            walls.append(wall)
            cpus.append(cpu)
        else:
            time.sleep(1)
    person.run("cancel", run)
    person.run("wait", run)
    return {
        "wall_s": statistics.median(walls),
        "longest_s": max(walls),
        "cpu_s": sum(cpus) / REPEATS,
    }


def _is_whole(done: subprocess.CompletedProcess[str]) -> bool:
    """Whether a dump has all ranks where they will wait, each read by py-spy."""
    if done.returncode:
        return False
    found = json.loads(done.stdout)
    tools = {one["tool"] for one in found["ranks"]}
    return tools == {"py-spy"} and [one["ranks"] for one in found["groups"]] == ODD


if __name__ == "__main__":
    sys.exit(main())
