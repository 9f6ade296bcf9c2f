"""Problems of a job on a certain site, found with its profile."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from deploykit.backends.slurm.site import NodeGroup, Partition, Site
from deploykit.job.model import JobSpec, Problem
from deploykit.job.spelling import did_you_mean, nearest

if TYPE_CHECKING:
    from deploykit.backends.slurm.options import Options  # whose `check` calls `problems`

_MIB = 1024**2


def problems(job: JobSpec, options: Options, site: Site) -> Iterator[Problem]:
    """Yield what the site would reject, or never start. Pure."""
    partition = site.partition(options.partition)
    if partition is None:
        yield _no_partition(options, site)
        near = nearest(options.partition or "", [one.name for one in site.partitions])
        partition = site.partition(near)  # what else is wrong depends on the one that was meant
    if partition is None:
        return
    yield from _check_partition(job, options, site, partition)
    yield from _check_features_of_site(job, options, site)
    yield from _check_nodes(job, options, site, partition)


def _profile(site: Site) -> str:
    """The name of the profile in messages."""
    return f"the profile of {site.cluster} ({site.created[:10]})"


def _no_partition(options: Options, site: Site) -> Problem:
    names = [partition.name for partition in site.partitions]
    hint = did_you_mean(options.partition or "", names) or f"one of {', '.join(names)}"
    missing = f"no partition {options.partition!r}" if options.partition else "no default partition"
    return Problem("slurm.partition", f"{_profile(site)} has {missing}", hint)


def _check_partition(
    job: JobSpec, options: Options, site: Site, partition: Partition
) -> Iterator[Problem]:
    """The limits of the partition, and who may use it."""
    resources, name = job.resources, f"{_profile(site)}: partition {partition.name}"
    if partition.state != "UP":
        message, hint = f"{name} is {partition.state}", "choose another partition, or wait"
        is_down = partition.state == "DOWN"
        yield Problem("slurm.partition", message, hint, None, "warning" if is_down else "error")
    longest, most = partition.max_seconds, partition.max_nodes
    if longest is not None and resources.time_limit > longest:
        message = f"{name} has a time limit of {longest} s"
        yield Problem("resources.time_limit", message, f"at most {longest}s")
    if most is not None and resources.nodes > most:
        message = f"{name} allows at most {most} nodes for each job"
        yield Problem("resources.nodes", message, f"at most {most}")
    if resources.nodes < partition.min_nodes:
        message = f"{name} requires at least {partition.min_nodes} nodes for each job"
        yield Problem("resources.nodes", message, f"at least {partition.min_nodes}")
    for key, chosen, allowed in (
        ("account", options.account, partition.accounts),
        ("qos", options.qos, partition.qos),
    ):
        if chosen is not None and allowed is not None and chosen not in allowed:
            message = f"{name} does not allow the {key} {chosen!r}"
            yield Problem(f"slurm.{key}", message, f"one of {', '.join(allowed)}")


def _check_features_of_site(job: JobSpec, options: Options, site: Site) -> Iterator[Problem]:
    """What the site's version and configuration of Slurm support."""
    wants_gpus, style = job.resources.gpus_per_node, options.gres_style
    if wants_gpus and style == "gpus-per-node" and site.gpu_style == "gres":
        message = f"{_profile(site)}: the site does not support --gpus-per-node"
        yield Problem("slurm.gres_style", message, "set it to gres")
    if options.array is not None and options.array > site.max_array_size:
        message = f"{_profile(site)}: an array has at most {site.max_array_size} tasks"
        yield Problem("slurm.array", message, "submit several smaller arrays")
    if options.container is not None and options.container.runtime == "pyxis" and not site.pyxis:
        message = f"{_profile(site)}: Pyxis is not installed: srun has no --container-image"
        yield Problem("slurm.container.runtime", message, "apptainer, if the nodes have it")
    if job.resources.memory is not None and not site.has_memory:
        message = f"{_profile(site)}: slurm.conf gives nodes no memory, so none can be requested"
        yield Problem("resources.memory", message, "remove it")


def _check_nodes(
    job: JobSpec, options: Options, site: Site, partition: Partition
) -> Iterator[Problem]:
    """Whether enough nodes of the partition have everything that the job requests."""
    groups = site.nodes(partition.name)
    most, ranks = max((group.cpus for group in groups), default=0), job.resources.processes
    if groups and not job.resources.gpus_per_node and ranks > most:
        message = f"{_profile(site)}: {ranks} ranks would share the {most} CPUs of a node"
        path = "resources.processes_per_node"
        yield Problem(path, message, f"at most {most}", severity="warning")
    missing = list(_missing(job, options, site, partition, groups))
    yield from missing
    fitting = [group for group in groups if missing or _fits(group, job, options, site)]
    total, usable = sum(group.count for group in fitting), sum(group.usable for group in fitting)
    name = f"{_profile(site)}: partition {partition.name}"
    if total < job.resources.nodes:
        what = "nodes" if missing else "nodes with what this job requests"
        message = f"{name} has {total} {what}"
        hint = f"at most {total}" if total else "request less"
        yield Problem("resources.nodes", message, hint)
    elif usable < job.resources.nodes:
        message = f"{name}: {usable} of the {total} suitable nodes were usable; the job may wait"
        yield Problem("resources.nodes", message, severity="warning")


def _missing(
    job: JobSpec, options: Options, site: Site, partition: Partition, groups: list[NodeGroup]
) -> Iterator[Problem]:
    """Resources and features that no node of the partition has."""
    nowhere = f"{_profile(site)}: no node of partition {partition.name} has"
    for key, amount, unit in _requests(job, site):
        most = max((_amount(group, key) for group in groups), default=0)
        if amount > most:
            hint = f"at most {most}" if most else "choose another partition"
            yield Problem(f"resources.{key}", f"{nowhere} {amount} {unit}", hint)
    features = {name for group in groups for name in group.features}
    if absent := _features(options) - features:
        hint = f"one of {', '.join(sorted(features))}" if features else "remove it"
        yield Problem("slurm.constraint", f"{nowhere} {', '.join(sorted(absent))}", hint)


def _requests(job: JobSpec, site: Site) -> Iterator[tuple[str, int, str]]:
    """What the job requests of each node: key, amount, unit."""
    resources = job.resources
    if resources.gpus_per_node:
        yield "gpus_per_node", resources.gpus_per_node, "GPUs"
    if resources.cpus_per_node:
        yield "cpus_per_node", resources.cpus_per_node, "CPUs"
    if resources.memory and site.has_memory:
        yield "memory", -(-resources.memory // _MIB), "MiB of memory"


def _amount(group: NodeGroup, key: str) -> int:
    """What each node of a group has, in the unit of `_requests`."""
    return {
        "gpus_per_node": group.gpus,
        "cpus_per_node": group.cpus,
        "memory": group.memory,
    }[key]


def _fits(group: NodeGroup, job: JobSpec, options: Options, site: Site) -> bool:
    enough = all(_amount(group, key) >= amount for key, amount, _ in _requests(job, site))
    return enough and _features(options) <= set(group.features)


def _features(options: Options) -> set[str]:
    """Features joined by ``&``; empty for a constraint with other operators, which Slurm checks."""
    conjunction = re.fullmatch(r"[\w.-]+(&[\w.-]+)*", options.constraint or "")
    return set(conjunction[0].split("&")) if conjunction else set()
