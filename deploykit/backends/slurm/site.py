"""A site profile: what a Slurm cluster has and allows, asked once and usable off-cluster.

`read` asks scontrol and srun, and changes nothing. The file is JSON, named by the cluster.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from deploykit import parsing, paths
from deploykit.backends.slurm import watching
from deploykit.decode import decode, whole
from deploykit.errors import BackendUnavailable, NotFound

_UNUSABLE = ("DOWN", "DRAIN", "FAIL", "INVAL", "NOT_RESPONDING", "FUTURE", "UNKNOWN", "POWER")
_NO_LIMIT = frozenset({"UNLIMITED", "INFINITE", "NONE", "(null)", "N/A", "ALL", ""})


@dataclass(frozen=True)
class Shape:
    """Nodes that are alike."""

    partitions: tuple[str, ...]
    count: int
    usable: int
    """Those of them that are neither down nor drained."""
    cpus: int
    memory: int
    """MiB; 1 where the site does not say."""
    gpus: int
    features: tuple[str, ...]


@dataclass(frozen=True)
class Partition:
    """A partition and its limits; None where there is none."""

    name: str
    default: bool
    state: str
    """UP; jobs wait in one that is DOWN, and cannot be sent to one that is INACTIVE or DRAIN."""
    nodes: int
    seconds: int | None
    most_nodes: int | None
    least_nodes: int
    accounts: tuple[str, ...] | None
    qos: tuple[str, ...] | None
    preemption: str


@dataclass(frozen=True)
class Site:
    """A cluster, as it was when it was asked."""

    cluster: str
    version: str
    asked: str
    """When, in UTC, ISO 8601."""
    accounting: bool
    gpu_style: Literal["gpus-per-node", "gres", "none"]
    memory: bool
    """Whether nodes say how much they have, so that jobs can ask for it."""
    pyxis: bool
    requeue: bool
    preemption: str
    """PreemptType and PreemptMode."""
    array: int
    """Largest array, plus one."""
    partitions: tuple[Partition, ...]
    shapes: tuple[Shape, ...]

    def of(self, name: str | None) -> Partition | None:
        """The partition `name`, or the default one."""
        found = (
            one for one in self.partitions if (one.default if name is None else one.name == name)
        )
        return next(found, None)

    def nodes(self, partition: str) -> list[Shape]:
        return [shape for shape in self.shapes if partition in shape.partitions]


def read(host: str | None = None) -> Site:
    """Ask the cluster that the commands here, or on `host`, talk to. Raises BackendUnavailable."""
    config = watching.asked(["scontrol", "show", "config"], host)
    partitions = watching.asked(["scontrol", "show", "partition", "--oneliner"], host)
    nodes = watching.asked(["scontrol", "show", "node", "--oneliner"], host)
    try:
        helped = watching.asked(["srun", "--help"], host)
    except BackendUnavailable:
        helped = ""
    return parse(config, partitions, nodes, helped, datetime.now(UTC).isoformat(timespec="seconds"))


def hosts() -> set[str]:
    """The machines that the nodes run on. Raises BackendUnavailable."""
    nodes = watching.asked(["scontrol", "show", "node", "--oneliner"])
    return {_fields(line).get("NodeHostName", "").split(".")[0] for line in _lines(nodes)}


def save(site: Site, path: Path | None = None) -> Path:
    """Write the profile, by default where `load` finds it by the cluster's name."""
    text = json.dumps(dataclasses.asdict(site), indent=1) + "\n"
    if path is None:
        path = place(site.cluster)
        paths.private_folder(path.parent)
        paths.write(path, text)
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def load(name: str) -> Site:
    """The profile of a cluster, by its name or by a path. Raises NotFound."""
    path = place(name)
    hint = "on the cluster, `deploykit backends slurm --probe` writes it; copy it here"
    try:
        data = parsing.json_of(path)
    except (OSError, ValueError) as error:
        raise NotFound(f"no site profile in {path}", hint=hint) from error
    site, problems = decode(Site, data)
    if site is None:
        problem = problems[0]
        raise NotFound(f"{path}: {problem.path} {problem.message}", hint=hint)
    return site


def place(name: str) -> Path:
    """Where the profile `name` is: a path as it stands, a cluster's name in the state folder."""
    if "/" in name or name.endswith(".json"):
        return Path(name).expanduser()
    return paths.state() / "sites" / f"{name}.json"


def parse(config: str, partitions: str, nodes: str, helped: str, asked: str) -> Site:
    """The profile from what Slurm's commands print."""
    settings = dict(_setting(line) for line in _lines(config))
    shapes = tuple(_shapes(map(_fields, _lines(nodes))))
    return Site(
        cluster=settings.get("ClusterName", ""),
        version=settings.get("SLURM_VERSION", ""),
        asked=asked,
        accounting=not settings.get("AccountingStorageType", "").endswith("/none"),
        gpu_style=_gpu_style(settings),
        memory=any(shape.memory > 1 for shape in shapes),
        pyxis="--container-image" in helped,
        requeue=settings.get("JobRequeue") == "1",
        preemption=f"{settings.get('PreemptType', '')} {settings.get('PreemptMode', '')}".strip(),
        array=whole(settings.get("MaxArraySize", "")) or 0,
        partitions=tuple(
            _partition(fields)
            for fields in map(_fields, _lines(partitions))
            if "PartitionName" in fields
        ),
        shapes=shapes,
    )


def _lines(text: str) -> Iterator[str]:
    return (line for line in text.splitlines() if "=" in line)


def _setting(line: str) -> tuple[str, str]:
    """``Name  = value``."""
    name, _, value = line.partition("=")
    return name.strip(), value.strip()


def _fields(line: str) -> dict[str, str]:
    """``Name=value`` pairs; a value may hold blanks (``OS=Linux 6.1``), a name may not."""
    found: dict[str, str] = {}
    last = ""
    for word in line.split():
        name, mark, value = word.partition("=")
        if mark and re.fullmatch(r"\w+", name):
            last = name
            found[last] = value
        elif last:
            found[last] += f" {word}"
    return found


def _gpu_style(settings: Mapping[str, str]) -> Literal["gpus-per-node", "gres", "none"]:
    """--gpus-per-node is known to select/cons_tres only: https://slurm.schedmd.com/gres.html."""
    if "gpu" not in settings.get("GresTypes", "").split(","):
        return "none"
    return "gpus-per-node" if "cons_tres" in settings.get("SelectType", "") else "gres"


def _partition(fields: Mapping[str, str]) -> Partition:
    return Partition(
        name=fields["PartitionName"],
        default=fields.get("Default") == "YES",
        state=fields.get("State", "UP"),
        nodes=whole(fields.get("TotalNodes", "")) or 0,
        seconds=seconds(fields.get("MaxTime", "")),
        most_nodes=whole(fields.get("MaxNodes", "")),
        least_nodes=whole(fields.get("MinNodes", "")) or 0,
        accounts=_names(fields.get("AllowAccounts", "")),
        qos=_names(fields.get("AllowQos", "")),
        preemption=fields.get("PreemptMode", ""),
    )


def _names(text: str) -> tuple[str, ...] | None:
    return None if text in _NO_LIMIT else tuple(text.split(","))


def seconds(text: str) -> int | None:
    """Slurm's time (``1-12:00:00``, ``12:00:00``, ``30:00``) in seconds; None without a limit."""
    match = re.fullmatch(r"(?:(\d{1,6})-)?(?:(?:(\d{1,6}):)?(\d{1,6}):)?(\d{1,9})", text)
    if match is None:
        return None
    days, hours, minutes, rest = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + rest


def _shapes(nodes: Iterable[Mapping[str, str]]) -> Iterator[Shape]:
    """Nodes grouped by what a job can ask for: a large site has few kinds."""
    total: Counter[tuple[tuple[str, ...], int, int, int, tuple[str, ...]]] = Counter()
    usable: Counter[tuple[tuple[str, ...], int, int, int, tuple[str, ...]]] = Counter()
    for fields in nodes:
        key = (
            _names(fields.get("Partitions", "")) or (),
            whole(fields.get("CPUTot", "")) or 0,
            whole(fields.get("RealMemory", "")) or 1,
            gpus(fields.get("Gres", "")),
            _names(fields.get("AvailableFeatures", "")) or (),
        )
        total[key] += 1
        usable[key] += not any(word in fields.get("State", "") for word in _UNUSABLE)
    for key, count in total.items():
        partitions, cpus, memory, cards, features = key
        yield Shape(partitions, count, usable[key], cpus, memory, cards, features)


def gpus(gres: str) -> int:
    """The GPUs in a node's ``Gres``: ``gpu:a100:4(S:0-1),nvme:1`` has 4."""
    found = re.findall(r"(?:^|,)gpu(?::[^:,()]+)*?:(\d{1,9})(?=[(,]|$)", gres)
    return sum(map(int, found))


def names(shapes: Sequence[Shape]) -> str:
    """Nodes in words, for evidence."""
    return "; ".join(
        f"{shape.usable} of {shape.count} nodes usable, each {shape.cpus} CPUs, "
        f"{shape.memory} MiB, {shape.gpus} GPUs"
        for shape in shapes
    )
