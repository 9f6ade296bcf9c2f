"""Site profiles: the partitions, nodes and limits of a Slurm cluster, for checks elsewhere.

`read` queries scontrol and srun, and changes nothing. A profile is a JSON file with the name of the
cluster.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from deploykit.backends.base import Profile
from deploykit.backends.slurm import client
from deploykit.job.decode import decode, read_json, whole
from deploykit.lib import paths
from deploykit.lib.errors import BackendUnavailable, NotFound

_UNUSABLE = ("DOWN", "DRAIN", "FAIL", "INVAL", "NOT_RESPONDING", "FUTURE", "UNKNOWN", "POWER")
_NO_LIMIT = frozenset({"UNLIMITED", "INFINITE", "NONE", "(null)", "N/A", "ALL", ""})


@dataclass(frozen=True)
class NodeGroup:
    """Nodes of the same partitions with the same resources."""

    partitions: tuple[str, ...]
    count: int
    usable: int
    """How many of them are neither down nor drained."""
    cpus: int
    """CPUs of each node."""
    memory: int
    """MiB of each node; 1 where the site does not configure it."""
    gpus: int
    """GPUs of each node."""
    features: tuple[str, ...]

    @property
    def description(self) -> str:
        """``3 of 4 nodes usable, each 8 CPUs, 8000 MiB, 2 GPUs``."""
        each = f"{self.cpus} CPUs, {self.memory} MiB, {self.gpus} GPUs"
        return f"{self.usable} of {self.count} nodes usable, each {each}"


@dataclass(frozen=True)
class Partition:
    """A partition and its limits; None for no limit."""

    name: str
    default: bool
    state: str
    """UP; DOWN, where jobs stay pending; INACTIVE or DRAIN, which accept no jobs."""
    nodes: int
    max_seconds: int | None
    max_nodes: int | None
    min_nodes: int
    accounts: tuple[str, ...] | None
    qos: tuple[str, ...] | None
    preemption: str
    billing_weights: str = ""
    """TRESBillingWeights, such as ``CPU=1.0,Mem=0.25G,GRES/gpu=2.0``; empty where not set."""

    @property
    def time_limit(self) -> str:
        """The longest time that a job may take, for people."""
        return "no time limit" if self.max_seconds is None else f"at most {self.max_seconds} s"


@dataclass(frozen=True)
class Site:
    """The profile of a cluster."""

    cluster: str
    version: str
    created: str
    """The time of the query, in UTC, ISO 8601."""
    accounting: bool
    gpu_style: Literal["gpus-per-node", "gres", "none"]
    has_memory: bool
    """Whether the site configures the memory of nodes, so that jobs can request it."""
    pyxis: bool
    requeue: bool
    preemption: str
    """PreemptType and PreemptMode."""
    max_array_size: int
    """MaxArraySize, one more than the largest index: the most tasks of a job array."""
    partitions: tuple[Partition, ...]
    node_groups: tuple[NodeGroup, ...]
    max_tres: bool = False
    """Whether only the largest of a node's weighted resources is billed (PriorityFlags)."""

    def partition(self, name: str | None) -> Partition | None:
        """The partition `name`, or for None the default partition; None if it does not exist."""
        return next(
            (
                partition
                for partition in self.partitions
                if (partition.default if name is None else partition.name == name)
            ),
            None,
        )

    def nodes(self, partition: str) -> list[NodeGroup]:
        """The nodes of a partition."""
        return [group for group in self.node_groups if partition in group.partitions]


def probe(host: str | None) -> Profile:
    """Query the cluster, from `host` over ssh where it is given, and store its site profile."""
    site = read(host)
    lines = [f"{site.cluster}, Slurm {site.version}"]
    lines += [_line(site, partition) for partition in site.partitions]
    return Profile(save(site), dataclasses.asdict(site), tuple(lines))


def _line(site: Site, partition: Partition) -> str:
    """One partition, its time limit and its nodes."""
    mark = " (default)" if partition.default else ""
    nodes = "; ".join(group.description for group in site.nodes(partition.name))
    return f"{partition.name}{mark}: {partition.time_limit}; {nodes}"


def read(host: str | None = None) -> Site:
    """Query the cluster that commands on this machine, or on the login node `host`, talk to.

    Raises BackendUnavailable when it does not answer.
    """
    config = client.output(["scontrol", "show", "config"], host)
    partitions = client.output(["scontrol", "show", "partition", "--oneliner"], host)
    nodes = client.output(["scontrol", "show", "node", "--oneliner"], host)
    try:
        srun_help = client.output(["srun", "--help"], host)
    except BackendUnavailable:
        srun_help = ""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return parse(config, partitions, nodes, srun_help, now)


def hosts(host: str | None = None) -> set[str]:
    """The host names of the nodes. Raises BackendUnavailable when the cluster does not answer."""
    nodes = client.output(["scontrol", "show", "node", "--oneliner"], host)
    return {_fields(line).get("NodeHostName", "").split(".")[0] for line in _lines(nodes)}


def save(site: Site, path: Path | None = None) -> Path:
    """Write the profile, by default where `load` finds it by name, and return its path."""
    text = json.dumps(dataclasses.asdict(site), indent=1) + "\n"
    if path is None:
        path = path_of(site.cluster)
        paths.private_folder(path.parent)
        paths.write(path, text)
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def load(name: str) -> Site:
    """Read a profile, given the cluster's name or a path. Raises NotFound when it is not usable."""
    path = path_of(name)
    hint = "run `deploykit backends slurm --probe` on the cluster, and copy the profile here"
    try:
        data = read_json(path)
    except (OSError, ValueError) as error:
        raise NotFound(f"{path} is not a site profile, or cannot be read", hint=hint) from error
    site, problems = decode(Site, data)
    if site is None:
        problem = problems[0]
        raise NotFound(f"{path}: {problem.path} {problem.message}", hint=hint)
    return site


def path_of(name: str) -> Path:
    """The file of a profile: `name` itself if it is a path, else in the state folder."""
    if "/" in name or name.endswith(".json"):
        return Path(paths.expanded(name))
    return paths.state() / "sites" / f"{name}.json"


def parse(config: str, partitions: str, nodes: str, srun_help: str, created: str) -> Site:
    """The profile from the output of Slurm's commands."""
    settings = dict(_setting(line) for line in _lines(config))
    node_groups = tuple(_node_groups(map(_fields, _lines(nodes))))
    return Site(
        cluster=settings.get("ClusterName", ""),
        version=settings.get("SLURM_VERSION", ""),
        created=created,
        accounting=not settings.get("AccountingStorageType", "").endswith("/none"),
        gpu_style=_gpu_style(settings),
        has_memory=any(group.memory > 1 for group in node_groups),
        pyxis="--container-image" in srun_help,
        requeue=settings.get("JobRequeue") == "1",
        preemption=f"{settings.get('PreemptType', '')} {settings.get('PreemptMode', '')}".strip(),
        max_array_size=whole(settings.get("MaxArraySize", "")) or 0,
        partitions=tuple(
            _partition(fields)
            for fields in map(_fields, _lines(partitions))
            if "PartitionName" in fields
        ),
        node_groups=node_groups,
        max_tres="MAX_TRES" in settings.get("PriorityFlags", "").split(","),
    )


def _lines(text: str) -> Iterator[str]:
    return (line for line in text.splitlines() if "=" in line)


def _setting(line: str) -> tuple[str, str]:
    """``Name  = value``."""
    name, _, value = line.partition("=")
    return name.strip(), value.strip()


def _fields(line: str) -> dict[str, str]:
    """``Name=value`` pairs; a value may contain blanks (``OS=Linux 6.1``), a name may not."""
    value_by_name: dict[str, str] = {}
    last = ""
    for word in line.split():
        name, mark, value = word.partition("=")
        if mark and re.fullmatch(r"\w+", name):
            last = name
            value_by_name[last] = value
        elif last:
            value_by_name[last] += f" {word}"
    return value_by_name


def _gpu_style(settings: Mapping[str, str]) -> Literal["gpus-per-node", "gres", "none"]:
    """--gpus-per-node requires select/cons_tres: https://slurm.schedmd.com/gres.html."""
    if "gpu" not in settings.get("GresTypes", "").split(","):
        return "none"
    return "gpus-per-node" if "cons_tres" in settings.get("SelectType", "") else "gres"


def _partition(fields: Mapping[str, str]) -> Partition:
    return Partition(
        name=fields["PartitionName"],
        default=fields.get("Default") == "YES",
        state=fields.get("State", "UP"),
        nodes=whole(fields.get("TotalNodes", "")) or 0,
        max_seconds=seconds(fields.get("MaxTime", "")),
        max_nodes=whole(fields.get("MaxNodes", "")),
        min_nodes=whole(fields.get("MinNodes", "")) or 0,
        accounts=_names(fields.get("AllowAccounts", "")),
        qos=_names(fields.get("AllowQos", "")),
        preemption=fields.get("PreemptMode", ""),
        billing_weights=fields.get("TRESBillingWeights", "").replace("(null)", ""),
    )


def _names(text: str) -> tuple[str, ...] | None:
    return None if text in _NO_LIMIT else tuple(text.split(","))


def seconds(text: str) -> int | None:
    """A time of Slurm's (``1-12:00:00``, ``12:00:00``, ``30:00``) in seconds; None for no limit."""
    match = re.fullmatch(r"(?:(\d{1,6})-)?(?:(?:(\d{1,6}):)?(\d{1,6}):)?(\d{1,9})", text)
    if match is None:
        return None
    days, hours, minutes, rest = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + rest


_Key = tuple[tuple[str, ...], int, int, int, tuple[str, ...]]
"""Partitions, CPUs, memory in MiB, GPUs, features."""


def _node_groups(nodes: Iterable[Mapping[str, str]]) -> Iterator[NodeGroup]:
    """Group the nodes by what a job can request; even large sites have few groups."""
    total: Counter[_Key] = Counter()
    usable: Counter[_Key] = Counter()
    for fields in nodes:
        key = (
            _names(fields.get("Partitions", "")) or (),
            whole(fields.get("CPUTot", "")) or 0,
            whole(fields.get("RealMemory", "")) or 1,
            gpus(fields.get("Gres", "")),
            _names(fields.get("AvailableFeatures", "")) or (),
        )
        total[key] += 1
        usable[key] += not any(state in fields.get("State", "") for state in _UNUSABLE)
    for key, count in total.items():
        partitions, cpus, memory, gpu_count, features = key
        yield NodeGroup(partitions, count, usable[key], cpus, memory, gpu_count, features)


def gpus(gres: str) -> int:
    """The number of GPUs in a node's ``Gres``: ``gpu:a100:4(S:0-1),nvme:1`` has 4."""
    counts = re.findall(r"(?:^|,)gpu(?::[^:,()]+)*?:(\d{1,9})(?=[(,]|$)", gres)
    return sum(map(int, counts))
