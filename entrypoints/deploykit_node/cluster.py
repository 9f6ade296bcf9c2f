"""Which node of which cluster, or which rank of which job, this process is.

Each launcher is one dictionary from a neutral name to an environment variable. No other file of the
node plane reads these variables.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

Environ = Mapping[str, str]
"""Environment variables that a function only reads."""

RANKS = {
    "torchrun": {
        "rank": "RANK",
        "local_rank": "LOCAL_RANK",
        "world_size": "WORLD_SIZE",
        "local_world_size": "LOCAL_WORLD_SIZE",
    },
    "mpirun": {
        "rank": "OMPI_COMM_WORLD_RANK",
        "local_rank": "OMPI_COMM_WORLD_LOCAL_RANK",
        "world_size": "OMPI_COMM_WORLD_SIZE",
        "local_world_size": "OMPI_COMM_WORLD_LOCAL_SIZE",
    },
}
"""Launchers that start one process for each rank."""

NODES = {
    "emulated": {"node": "DEPLOYKIT_NODE_RANK", "count": "DEPLOYKIT_NODES"},
    "slurm": {
        "job": "SLURM_JOB_ID",
        "node": "SLURM_NODEID",
        "step": "SLURM_STEP_ID",
        "hosts": "SLURM_STEP_NODELIST",
        "job_hosts": "SLURM_JOB_NODELIST",
        "tasks": "SLURM_STEP_NUM_TASKS",
    },
    "sagemaker": {"host": "SM_CURRENT_HOST", "hosts": "SM_HOSTS"},
    "alone": {},
}
"""Launchers that start one process on each node. The first whose first variable is set wins."""

_MOST = 1 << 16
"""Most nodes that a job may have; a longer list would fill the memory."""


class LaunchError(Exception):
    """An error that a user can correct. The message says what is wrong and what to do."""

    exit_code = 70


class BadCommand(LaunchError):
    """The command line is wrong, or the program does not exist."""

    exit_code = 64


class BadEnvironment(LaunchError):
    """The job cannot run in this environment."""

    exit_code = 78


@dataclass(frozen=True)
class Rank:
    """One process of the job, as the launcher above has numbered it."""

    launcher: str
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int

    def variables(self) -> dict[str, str]:
        """The variables that a trainer reads, under torchrun's names."""
        return {variable: str(getattr(self, name)) for name, variable in RANKS["torchrun"].items()}


@dataclass(frozen=True)
class Cluster:
    """The nodes of the job. `hosts` are their names or addresses, in the order of node ranks."""

    launcher: str
    node: int
    hosts: tuple[str, ...]
    numbers: tuple[int, ...] = ()
    """The nodes' numbers in the job, where only some of them train; empty if all do."""

    @property
    def number(self) -> int:
        """The number of this node in the job, whoever else trains."""
        return self.numbers[self.node] if self.numbers else self.node

    @property
    def peer(self) -> str | None:
        """Another node of the job: node 0, or node 1 on node 0 itself. None on a single node."""
        others = [host for number, host in enumerate(self.hosts) if number != self.node]
        return others[0] if others else None


def rank(env: Environ) -> Rank | None:
    """The rank of this process, or None if it is a node's launcher.

    Raises BadEnvironment if a launcher has set only some of its variables.
    """
    for launcher, names in RANKS.items():
        if names["rank"] in env:
            numbers = {name: _number(env, variable) for name, variable in names.items()}
            return Rank(launcher, **numbers)
    return None


def find(env: Environ) -> Cluster:
    """The cluster of this node's launcher. Raises BadEnvironment if its variables are wrong."""
    readers = {"emulated": _emulated, "slurm": _slurm, "sagemaker": _sagemaker}
    launcher = _launcher(env)
    return readers[launcher](env) if launcher in readers else Cluster("alone", 0, ("localhost",))


def node_number(env: Environ) -> int:
    """The node's number for messages, also after `find` has failed; 0 if it is unknown."""
    for variable in ("DEPLOYKIT_NODE_RANK", "DEPLOYKIT_STEP_NODE", "SLURM_NODEID", "GROUP_RANK"):
        if re.fullmatch(r"[0-9]{1,18}", env.get(variable, "")):
            return int(env[variable])
    return 0


def host_name(env: Environ) -> str:
    """The name of this node, which no other node of the job has; Slurm's name for it on Slurm."""
    slurm = env.get("DEPLOYKIT_BACKEND") == "slurm"
    return (slurm and env.get("SLURMD_NODENAME")) or os.uname().nodename


def sagemaker_hosts(env: Environ) -> tuple[str, ...]:
    """The names of SageMaker's hosts, in the same order on each of them.

    Raises BadEnvironment if SM_HOSTS is not a list of names.
    """
    try:
        return tuple(sorted(json.loads(env["SM_HOSTS"])))
    except (KeyError, ValueError, TypeError):
        raise BadEnvironment(
            f"SM_HOSTS must be a JSON list of host names, but is {env.get('SM_HOSTS')!r}. "
            "SageMaker's training toolkit sets this variable: start the job with the toolkit."
        ) from None


def non_training_group(env: Environ) -> str | None:
    """The SageMaker instance group of this machine if that group does not train; else None."""
    group = env.get("SM_CURRENT_INSTANCE_GROUP")
    training = json.loads(env.get("SM_DISTRIBUTION_INSTANCE_GROUPS") or "[]")
    return group if group and training and group not in training else None


def expand(hostlist: str) -> list[str]:
    """Slurm's ``n[1-3,07],x`` expanded in its order, as ``scontrol show hostnames`` does.

    Raises BadEnvironment for a list with a wrong range or too many names.
    """
    names: list[str] = []
    for item in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", hostlist):
        pieces = re.split(r"\[([^\]]*)\]", item)
        choices = [_range(piece) if odd % 2 else [piece] for odd, piece in enumerate(pieces)]
        if len(names) + math.prod(map(len, choices)) > _MOST:
            raise BadEnvironment(f"Slurm's node list {hostlist[:60]}... has too many names.")
        names += ["".join(choice) for choice in itertools.product(*choices)]
    return names


def _launcher(env: Environ) -> str:
    """The launcher above. The planned backend decides: a local job may run inside a Slurm job."""
    backend = env.get("DEPLOYKIT_BACKEND", "")
    if "DEPLOYKIT_NODE_RANK" in env:
        return "emulated"
    if backend == "local":
        return "alone"
    wanted = [backend] if backend in NODES else list(NODES)
    for name in wanted:
        first = next(iter(NODES[name].values()), None)
        if first is None or first in env:
            return name
    raise BadEnvironment(
        f"The job was planned for {backend}, but {next(iter(NODES[backend].values()))} is not set "
        f"here. Start the job through {backend}, or submit it again with --backend local."
    )


def _emulated(env: Environ) -> Cluster:
    names = NODES["emulated"]
    count = _number(env, names["count"])
    return Cluster("emulated", _number(env, names["node"]), ("127.0.0.1",) * count)


def _slurm(env: Environ) -> Cluster:
    names = NODES["slurm"]
    if "DEPLOYKIT_NODE_LIST" in env:
        return _one_step(env)
    hosts = expand(env.get(names["hosts"]) or env.get(names["job_hosts"], ""))
    tasks = _number(env, names["tasks"]) if env.get(names["tasks"]) else len(hosts)
    if len(hosts) > 1 and names["step"] not in env:
        raise BadEnvironment(
            f"The Slurm job has {len(hosts)} nodes, but its batch script started launch.py on only "
            "one of them. Start launch.py with srun --ntasks-per-node=1."
        )
    if tasks != len(hosts):
        raise BadEnvironment(
            f"Slurm started {tasks} launchers on {len(hosts)} nodes instead of one per node. Each "
            "launcher starts all ranks on its node: use srun --ntasks-per-node=1."
        )
    return Cluster("slurm", _number(env, names["node"]), tuple(hosts))


def _one_step(env: Environ) -> Cluster:
    """A node with a step of its own, which does not end the others where it is lost."""
    hosts, node = expand(env["DEPLOYKIT_NODE_LIST"]), _number(env, "DEPLOYKIT_STEP_NODE")
    if node >= len(hosts):
        raise BadEnvironment(f"DEPLOYKIT_STEP_NODE is {node}, but the job has {len(hosts)} nodes.")
    return Cluster("slurm", node, tuple(hosts))


def _sagemaker(env: Environ) -> Cluster:
    hosts = sagemaker_hosts(env)
    here = env[NODES["sagemaker"]["host"]]
    if here not in hosts:
        raise BadEnvironment(f"SM_CURRENT_HOST is {here}, which is not in SM_HOSTS {list(hosts)}.")
    return Cluster("sagemaker", hosts.index(here), hosts)


def _number(env: Environ, variable: str) -> int:
    text = env.get(variable)
    if text is None or not re.fullmatch(r"[0-9]{1,18}", text):
        state = "is not set" if text is None else f"is {text[:60]!r}"
        raise BadEnvironment(
            f"The launcher's environment is incomplete: {variable} {state}; it must be a number. "
            "Set it, or unset the launcher's other variables."
        )
    return int(text)


def _range(text: str) -> list[str]:
    """``1-3,07`` as 1, 2, 3, 07. Leading zeros give the width."""
    numbers: list[str] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", part)
        span = range(int(match[1]), int(match[2] or match[1]) + 1) if match else range(0)
        if not match or len(numbers) + len(span) > _MOST:
            raise BadEnvironment(f"[{text[:60]}] in the node list is not a range of numbers.")
        numbers += [f"{number:0{len(match[1])}d}" for number in span]
    return numbers
