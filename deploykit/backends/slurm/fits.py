"""What a site would reject of a job, or never start, by its profile."""

from __future__ import annotations

import re
from collections.abc import Iterator

from deploykit.backends.slurm.options import Options
from deploykit.backends.slurm.site import Partition, Shape, Site
from deploykit.decode import did_you_mean
from deploykit.model import JobSpec, Problem

_MIB = 1024**2


def check(job: JobSpec, options: Options, site: Site) -> Iterator[Problem]:
    """Every problem, with the site in its message. Pure."""
    partition = site.of(options.partition)
    if partition is None:
        yield _no_partition(options, site)
        return
    yield from _limits(job, options, site, partition)
    yield from _styles(job, options, site)
    yield from _nodes(job, options, site, partition)


def known(site: Site) -> str:
    """The profile, as messages name it."""
    return f"the profile of {site.cluster} ({site.asked[:10]})"


def _no_partition(options: Options, site: Site) -> Problem:
    names = [partition.name for partition in site.partitions]
    hint = did_you_mean(options.partition or "", names) or f"one of {', '.join(names)}"
    what = f"no partition {options.partition!r}" if options.partition else "no default partition"
    return Problem("slurm.partition", f"{known(site)} has {what}", hint)


def _limits(job: JobSpec, options: Options, site: Site, partition: Partition) -> Iterator[Problem]:
    wanted, name = job.resources, f"{known(site)}: partition {partition.name}"
    if partition.state != "UP":
        message, hint = f"{name} is {partition.state}", "another partition, or wait"
        waits = partition.state == "DOWN"
        yield Problem("slurm.partition", message, hint, None, "warning" if waits else "error")
    if partition.seconds is not None and wanted.time_limit > partition.seconds:
        most = partition.seconds
        yield Problem(
            "resources.time_limit", f"{name} lets a job run for {most} s", f"at most {most}s"
        )
    if partition.most_nodes is not None and wanted.nodes > partition.most_nodes:
        most = partition.most_nodes
        yield Problem("resources.nodes", f"{name} gives a job {most} nodes", f"at most {most}")
    if wanted.nodes < partition.least_nodes:
        least = partition.least_nodes
        yield Problem("resources.nodes", f"{name} takes jobs of {least} nodes on", str(least))
    for key, chosen, allowed in (
        ("account", options.account, partition.accounts),
        ("qos", options.qos, partition.qos),
    ):
        if chosen is not None and allowed is not None and chosen not in allowed:
            message = f"{name} is not open to {key} {chosen!r}"
            yield Problem(f"slurm.{key}", message, f"one of {', '.join(allowed)}")


def _styles(job: JobSpec, options: Options, site: Site) -> Iterator[Problem]:
    if (
        job.resources.gpus_per_node
        and options.gres_style == "gpus-per-node"
        and site.gpu_style == "gres"
    ):
        yield Problem(
            "slurm.gres_style", f"{known(site)}: it does not know --gpus-per-node", "gres"
        )
    if options.array is not None and options.array >= site.array:
        message = f"{known(site)}: its arrays have {site.array - 1} tasks at most"
        yield Problem("slurm.array", message, "send several")
    if options.container is not None and options.container.runtime == "pyxis" and not site.pyxis:
        message = f"{known(site)}: its srun knows no --container-image, so it has no Pyxis"
        yield Problem("slurm.container.runtime", message, "apptainer, if the nodes have it")
    if job.resources.memory is not None and not site.memory:
        yield Problem(
            "resources.memory",
            f"{known(site)}: its nodes do not say how much they have, so jobs may not ask",
            "leave it out",
        )


def _nodes(job: JobSpec, options: Options, site: Site, partition: Partition) -> Iterator[Problem]:
    """Whether enough nodes of the partition have all that is asked for at once."""
    shapes = site.nodes(partition.name)
    wanted = job.resources
    found = False
    for key, asked, unit in _asked(job, site):
        most = max((_has(shape, key) for shape in shapes), default=0)
        if asked > most:
            found = True
            message = f"{known(site)}: no node of partition {partition.name} has {asked} {unit}"
            hint = f"at most {most}" if most else "another partition"
            yield Problem(f"resources.{key}", message, hint)
    features = {name for shape in shapes for name in shape.features}
    if absent := _features(options) - features:
        found = True
        message = f"{known(site)}: no node of partition {partition.name} has {', '.join(absent)}"
        hint = f"there are {', '.join(sorted(features))}" if features else "leave it out"
        yield Problem("slurm.constraint", message, hint)
    if found:
        return
    enough = [shape for shape in shapes if _fits(shape, job, options, site)]
    total, usable = sum(s.count for s in enough), sum(s.usable for s in enough)
    if total < wanted.nodes:
        message = f"{known(site)}: partition {partition.name} has {total} nodes that fit this job"
        yield Problem("resources.nodes", message, f"at most {total}" if total else "ask for less")
    elif usable < wanted.nodes:
        message = (
            f"{known(site)}: only {usable} of the {total} nodes that fit were usable; "
            "the job waits for the others"
        )
        yield Problem("resources.nodes", message, severity="warning")


def _asked(job: JobSpec, site: Site) -> Iterator[tuple[str, int, str]]:
    wanted = job.resources
    if wanted.gpus_per_node:
        yield "gpus_per_node", wanted.gpus_per_node, "GPUs"
    if wanted.cpus_per_node:
        yield "cpus_per_node", wanted.cpus_per_node, "CPUs"
    if wanted.memory and site.memory:
        yield "memory", -(-wanted.memory // _MIB), "MiB of memory"


def _has(shape: Shape, key: str) -> int:
    return {
        "gpus_per_node": shape.gpus,
        "cpus_per_node": shape.cpus,
        "memory": shape.memory,
    }[key]


def _fits(shape: Shape, job: JobSpec, options: Options, site: Site) -> bool:
    plenty = all(_has(shape, key) >= asked for key, asked, _ in _asked(job, site))
    return plenty and _features(options) <= set(shape.features)


def _features(options: Options) -> set[str]:
    """Plain features joined by &; what | and counts mean is Slurm's business."""
    simple = re.fullmatch(r"[\w.-]+(&[\w.-]+)*", options.constraint or "")
    return set(simple[0].split("&")) if simple else set()
