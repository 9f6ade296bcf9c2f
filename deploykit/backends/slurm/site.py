"""Site profiles: the partitions, nodes and limits of a Slurm cluster, and what they mean for a job.

`read` queries scontrol and srun, and changes nothing. A profile is a JSON file with the name of the
cluster. Slurm has no prices: the job file or the user's defaults set what the site charges for an
hour (`slurm.price`), and for which resource. Billing units are a job's resources by the weights
that a site gives them: https://slurm.schedmd.com/slurm.conf.html#OPT_TRESBillingWeights
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Literal

from deploykit.backends.base import Profile
from deploykit.backends.slurm import commands
from deploykit.backends.slurm.options import Options
from deploykit.cost import money
from deploykit.cost.estimate import Charge, Estimate, Seconds
from deploykit.job.decode import decode, read_json, whole
from deploykit.job.model import JobSpec, Problem, Resources
from deploykit.job.spelling import did_you_mean, nearest
from deploykit.lib import paths, units
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
        """``3 of 4 nodes usable, each with 8 CPUs, 8000 MiB, 2 GPUs``."""
        resources = f"{self.cpus} CPUs, {self.memory} MiB, {self.gpus} GPUs"
        return f"{self.usable} of {self.count} nodes usable, each with {resources}"

    @property
    def amounts(self) -> dict[str, int]:
        """What each node has, by the key of `resources` in a job file; memory in MiB."""
        return {"gpus_per_node": self.gpus, "cpus_per_node": self.cpus, "memory": self.memory}


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
        matching = (p for p in self.partitions if (p.default if name is None else p.name == name))
        return next(matching, None)

    def nodes(self, partition: str) -> list[NodeGroup]:
        return [group for group in self.node_groups if partition in group.partitions]


def probe(target: str | None) -> Profile:
    """Query a cluster, over ssh if `target` is a login node, and store its site profile."""
    site = read(target)
    lines = [f"{site.cluster}, Slurm {site.version}"]
    for partition in site.partitions:
        mark = " (default)" if partition.default else ""
        nodes = "; ".join(group.description for group in site.nodes(partition.name))
        lines.append(f"{partition.name}{mark}: {partition.time_limit}; {nodes}")
    return Profile(save(site), dataclasses.asdict(site), tuple(lines))


def read(host: str | None = None) -> Site:
    """Query the cluster that commands on this machine, or on the login node `host`, talk to.

    Raises BackendUnavailable when it does not answer.
    """
    config = commands.output(["scontrol", "show", "config"], host)
    partitions = commands.output(["scontrol", "show", "partition", "--oneliner"], host)
    nodes = commands.output(["scontrol", "show", "node", "--oneliner"], host)
    try:
        srun_help = commands.output(["srun", "--help"], host)
    except BackendUnavailable:
        srun_help = ""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return parse(config, partitions, nodes, srun_help, now)


def hosts(host: str | None = None) -> set[str]:
    """The host names of the nodes. Raises BackendUnavailable when the cluster does not answer."""
    nodes = commands.output(["scontrol", "show", "node", "--oneliner"], host)
    return {_fields(line).get("NodeHostName", "").split(".")[0] for line in _lines(nodes)}


def save(site: Site, path: Path | None = None) -> Path:
    """Write the profile, by default where `load` finds it by name, and return its path."""
    text = json.dumps(dataclasses.asdict(site), indent=1) + "\n"
    if path is None:
        path = path_of(site.cluster)
        paths.private_folder(path.parent)
        paths.write(path, text)
    else:  # others may read what a user saves
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
        raise NotFound(f"{path} cannot be read or is not a site profile", hint=hint) from error
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
    pairs = (line.partition("=") for line in config.splitlines())
    settings = {name.strip(): value.strip() for name, _, value in pairs}
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


def _node_groups(nodes: Iterable[Mapping[str, str]]) -> Iterator[NodeGroup]:
    """Group the nodes by what a job can request; even large sites have few groups."""
    total: Counter[NodeGroup] = Counter()
    usable: Counter[NodeGroup] = Counter()
    for fields in nodes:
        group = NodeGroup(
            partitions=_names(fields.get("Partitions", "")) or (),
            count=0,
            usable=0,
            cpus=whole(fields.get("CPUTot", "")) or 0,
            memory=whole(fields.get("RealMemory", "")) or 1,
            gpus=gpus(fields.get("Gres", "")),
            features=_names(fields.get("AvailableFeatures", "")) or (),
        )
        total[group] += 1
        usable[group] += not any(state in fields.get("State", "") for state in _UNUSABLE)
    for group, count in total.items():
        yield dataclasses.replace(group, count=count, usable=usable[group])


def gpus(gres: str) -> int:
    """The number of GPUs in a node's ``Gres``: ``gpu:a100:4(S:0-1),nvme:1`` has 4."""
    counts = re.findall(r"(?:^|,)gpu(?::[^:,()]+)*?:(\d{1,9})(?=[(,]|$)", gres)
    return sum(map(int, counts))


# --- checks of a job with a profile

_MIB = 1024**2


def problems(job: JobSpec, options: Options, site: Site) -> Iterator[Problem]:
    """Yield what the site would reject, or never start, and name its profile. Pure."""
    profile = f"site profile of {site.cluster} ({site.created[:10]})"
    for problem in rejections(job, options, site):
        yield problem._replace(message=f"{profile}: {problem.message}")


def rejections(job: JobSpec, options: Options, site: Site) -> Iterator[Problem]:
    """The same, for a profile that was made just now and needs no mention."""
    partition = site.partition(options.partition)
    if partition is None:
        names = [partition.name for partition in site.partitions]
        hint = did_you_mean(options.partition or "", names) or f"use one of {', '.join(names)}"
        chosen = "the cluster has no default partition"
        if options.partition:
            chosen = f"partition {options.partition!r} does not exist"
        yield Problem("slurm.partition", chosen, hint)
        # the other problems depend on the partition that was meant
        partition = site.partition(nearest(options.partition or "", names))
    if partition is None:
        return
    yield from _check_partition(job, options, partition)
    yield from _check_features_of_site(job, options, site)
    yield from _check_nodes(job, options, site, partition)


def _check_partition(job: JobSpec, options: Options, partition: Partition) -> Iterator[Problem]:
    """The limits of the partition, and who may use it."""
    resources, name = job.resources, f"partition {partition.name}"
    if partition.state != "UP":
        message, hint = f"{name} is {partition.state}", "choose another partition, or wait"
        is_down = partition.state == "DOWN"
        yield Problem("slurm.partition", message, hint, None, "warning" if is_down else "error")
    longest, most = partition.max_seconds, partition.max_nodes
    if longest is not None and resources.time_limit > longest:
        message = f"{name} has a time limit of {longest} s"
        yield Problem("resources.time_limit", message, f"use at most {longest}s")
    if most is not None and resources.nodes > most:
        message = f"{name} allows at most {most} nodes per job"
        yield Problem("resources.nodes", message, f"use at most {most}")
    if resources.nodes < partition.min_nodes:
        message = f"{name} requires at least {partition.min_nodes} nodes per job"
        yield Problem("resources.nodes", message, f"use at least {partition.min_nodes}")
    for key, chosen, allowed in (
        ("account", options.account, partition.accounts),
        ("qos", options.qos, partition.qos),
    ):
        if chosen is not None and allowed is not None and chosen not in allowed:
            message = f"{name} does not allow the {key} {chosen!r}"
            yield Problem(f"slurm.{key}", message, f"use one of {', '.join(allowed)}")


def _check_features_of_site(job: JobSpec, options: Options, site: Site) -> Iterator[Problem]:
    """What the site's version and configuration of Slurm support."""
    wants_gpus, style = job.resources.gpus_per_node, options.gres_style
    if wants_gpus and style == "gpus-per-node" and site.gpu_style == "gres":
        message = "the site does not support --gpus-per-node"
        yield Problem("slurm.gres_style", message, "set it to gres")
    if options.array is not None and options.array > site.max_array_size:
        message = f"an array can have at most {site.max_array_size} tasks"
        yield Problem("slurm.array", message, "submit several smaller arrays")
    if options.container is not None and options.container.runtime == "pyxis" and not site.pyxis:
        message = "Pyxis is not installed: srun has no --container-image option"
        yield Problem("slurm.container.runtime", message, "use apptainer, if it is installed")
    if job.resources.memory is not None and not site.has_memory:
        message = "slurm.conf does not configure the nodes' memory, so jobs cannot request it"
        yield Problem("resources.memory", message, "remove it")


def _check_nodes(
    job: JobSpec, options: Options, site: Site, partition: Partition
) -> Iterator[Problem]:
    """Whether enough nodes of the partition have everything that the job requests."""
    groups, resources = site.nodes(partition.name), job.resources
    cores = max((group.cpus for group in groups), default=0)
    if groups and not resources.gpus_per_node and resources.processes > cores:
        message = f"{resources.processes} ranks per node would share {cores} CPUs"
        path = "resources.processes_per_node"
        yield Problem(path, message, f"use at most {cores}", severity="warning")
    requests = _requests(job, site)
    # Slurm itself checks a constraint with other operators than &
    conjunction = re.fullmatch(r"[\w.-]+(&[\w.-]+)*", options.constraint or "")
    features = set(conjunction[0].split("&")) if conjunction else set()
    missing = list(_missing(requests, features, partition, groups))
    yield from missing
    fitting = [group for group in groups if missing or _fits(group, requests, features)]
    total, usable = sum(group.count for group in fitting), sum(group.usable for group in fitting)
    name = f"partition {partition.name}"
    if total < resources.nodes:
        what = "nodes" if missing else "nodes with the requested resources"
        hint = f"use at most {total}" if total else "request fewer resources"
        yield Problem("resources.nodes", f"{name} has only {total} {what}", hint)
    elif usable < resources.nodes:
        message = f"only {usable} of {total} suitable nodes are usable now, so the job may wait"
        yield Problem("resources.nodes", message, severity="warning")


def _missing(
    requests: Mapping[str, int],
    features: set[str],
    partition: Partition,
    groups: Iterable[NodeGroup],
) -> Iterator[Problem]:
    """Resources and features that no node of the partition has."""
    nowhere = f"no node in partition {partition.name} has"
    names = {"gpus_per_node": "GPUs", "cpus_per_node": "CPUs", "memory": "MiB of memory"}
    for key, amount in requests.items():
        most = max((group.amounts[key] for group in groups), default=0)
        if amount > most:
            hint = f"use at most {most}" if most else "choose another partition"
            yield Problem(f"resources.{key}", f"{nowhere} {amount} {names[key]}", hint)
    available = {name for group in groups for name in group.features}
    if absent := features - available:
        hint = f"use one of {', '.join(sorted(available))}" if available else "remove it"
        yield Problem("slurm.constraint", f"{nowhere} {', '.join(sorted(absent))}", hint)


def _requests(job: JobSpec, site: Site) -> dict[str, int]:
    """What the job requests of each node, in the units of `NodeGroup.amounts`."""
    memory = job.resources.memory if site.has_memory else None
    amounts = {
        "gpus_per_node": job.resources.gpus_per_node,
        "cpus_per_node": job.resources.cpus_per_node,
        "memory": memory and -(-memory // _MIB),
    }
    return {key: amount for key, amount in amounts.items() if amount}


def _fits(group: NodeGroup, requests: Mapping[str, int], features: set[str]) -> bool:
    enough = all(group.amounts[key] >= amount for key, amount in requests.items())
    return enough and features <= set(group.features)


# --- what a job may cost: https://slurm.schedmd.com/tres.html

_LATE = 60
"""Seconds that a job may exceed its limit: Slurm checks limits every 30 s, then KillWait passes.

https://slurm.schedmd.com/slurm.conf.html#OPT_KillWait
"""
_RESIZE = r"(cpus|gpus|mem|ntasks|tres)-per-\w+|gres|mincpus|cores-per-socket|core-spec"
"""Options of `slurm.extra` that change what a job gets."""
_WEIGHT = r"([A-Za-z]+(?:/[\w:.-]+)?)=([0-9]{1,9}(?:\.[0-9]{1,9})?)([KMGTP]?)"
_UNIT_NAMES = {"gpu": "GPU(s)", "cpu": "CPU core(s)", "node": "node(s)", "billing": "billing units"}


class _Unknown(Exception):
    """The resources of a job are unknown here; the text says why and what to do."""


def cost(job: JobSpec, options: Options) -> Estimate:
    """The possible cost of the job in its currency; see `base.Capabilities.cost`."""
    if options.price is None:
        return Estimate(free="slurm.price is not set")
    written, _, unit = options.price.partition("/")
    price, per = money.parse(written), unit.removesuffix("-hour").lower()
    try:
        count = _quantity(job, options, per) * (len(options.tasks) or options.array or 1)
    except _Unknown as error:
        return Estimate(unknown=(str(error),), currency=price.currency)
    starts = 1 + sum(dataclasses.astuple(options.allowed(job)))
    limit = job.resources.time_limit
    rounded = -(-limit // 60) * 60  # Slurm keeps it in whole minutes
    spans = f"{units.exact_span(rounded)} and {units.exact_span(_LATE)} to end"
    notes = ["low and likely: one attempt that uses its whole time limit"]
    if starts > 1:
        worst = "worst: every restart that slurm.restarts allows, each for its whole time limit"
        notes.append(worst)
    charge = Charge(
        what=f"{count.normalize():f} {_UNIT_NAMES[per]}",
        hourly=count * price.amount,
        seconds=Seconds(limit, limit, starts * (rounded + _LATE)),
        how=f"{units.plural(starts, 'attempt')} of {spans}",
    )
    return Estimate(
        charges=(charge,),
        currency=price.currency,
        source=f"slurm.price, {options.price}",
        notes=tuple(notes),
    )


def _quantity(job: JobSpec, options: Options, per: str) -> Decimal:
    """The GPUs, CPU cores, nodes or billing units of one task of the job. Raises _Unknown."""
    resources = job.resources
    if per == "node":
        return Decimal(resources.nodes)
    changed = [name for name in options.extra if re.fullmatch(_RESIZE, name)]
    if changed:
        raise _Unknown(
            f"slurm.extra sets {changed[0]}, which changes the number of {_UNIT_NAMES[per]}"
        )
    if options.exclusive:
        raise _Unknown(
            "with slurm.exclusive the job pays for whole nodes; set a price per node-hour"
        )
    if per == "gpu":
        return Decimal(resources.nodes * resources.gpus_per_node)
    if per == "billing":
        return _billing(job, options)
    if resources.cpus_per_node is None:
        raise _Unknown("resources.cpus_per_node is not set")
    return Decimal(resources.nodes * resources.cpus_per_node)


def _billing(job: JobSpec, options: Options) -> Decimal:
    """The billing units of the job, by the weights of its partition. Raises _Unknown."""
    if options.site is None:
        raise _Unknown(
            "the partition's billing weights are unknown; run `deploykit backends slurm --probe`, "
            "and set slurm.site"
        )
    try:
        profile = load(options.site)
    except NotFound as error:
        raise _Unknown(str(error)) from error
    partition = profile.partition(options.partition)
    if partition is None or not partition.billing_weights:
        name = options.partition or "the default partition"
        raise _Unknown(f"the site profile has no billing weights for {name}")
    try:
        weights = billing_weights(partition.billing_weights)
        return billing_units(weights, job.resources, largest=profile.max_tres)
    except ValueError as error:
        raise _Unknown(str(error)) from error


def billing_weights(text: str) -> dict[str, Decimal]:
    """The weights by resource in lower case; that of memory per MiB. Raises ValueError."""
    weight_by_name: dict[str, Decimal] = {}
    for part in text.split(","):
        match = re.fullmatch(_WEIGHT, part.strip())
        if match is None:
            raise ValueError(f"invalid billing weight {part[:40]!r}")
        name, number, unit = match[1].lower(), Decimal(match[2]), match[3]
        size = Decimal(1024) ** ("KMGTP".index(unit) - 1) if unit else Decimal(1)
        weight_by_name[name] = number / size
    return weight_by_name


def billing_units(
    weight_by_name: Mapping[str, Decimal], resources: Resources, *, largest: bool
) -> Decimal:
    """The billing units of a job. With `largest`, only each node's largest product counts.

    Raises ValueError where the job file does not set the amount of a resource with a weight.
    """
    amounts = {
        "cpu": resources.cpus_per_node,
        "mem": None if resources.memory is None else -(-resources.memory // 1024**2),
        "gres/gpu": resources.gpus_per_node,
        "node": 1,
    }
    products = [Decimal(0)]
    for name, weight in weight_by_name.items():
        if not weight:
            continue
        if name not in amounts:
            raise ValueError(f"the partition charges for {name}, which a job file cannot set")
        amount = amounts[name]
        if amount is None:
            key = "cpus_per_node" if name == "cpu" else "memory"
            raise ValueError(f"the site charges for resources.{key}, which is not set")
        products.append(weight * amount)
    return (max(products) if largest else sum(products, Decimal(0))) * resources.nodes
