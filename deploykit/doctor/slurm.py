"""A Slurm cluster, by its site profile: what it would reject, and what is worth knowing."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from deploykit.doctor.finding import Finding, Fix
from deploykit.model import Problem

if TYPE_CHECKING:
    from deploykit.backends.slurm.site import Partition, Site

_SHARED = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "fuse", "glusterfs", "wekafs", "panfs", "9p")


@dataclass(frozen=True)
class Folder:
    """The folder of the runs, and the file system that it lies on."""

    path: str
    kind: str
    one_machine: bool
    """Whether all nodes of the cluster are this machine."""

    @property
    def shared(self) -> bool:
        return self.one_machine or self.kind.startswith(_SHARED)


def folder(path: Path, hosts: Iterable[str]) -> Folder:
    """The file system of `path`, for a cluster whose nodes run on `hosts`."""
    here = os.uname().nodename.split(".")[0]
    mounts = Path("/proc/self/mounts").read_text(encoding="utf-8")
    return Folder(str(path), kind_of(path, mounts), set(hosts) <= {here})


def kind_of(path: Path, mounts: str) -> str:
    """The type of the file system that holds `path`, by the longest mount point above it."""
    real = os.path.realpath(path)
    found = ("", "")
    for line in mounts.splitlines():
        _, point, kind, *_ = line.split(" ")
        point = point.replace("\\040", " ")
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(found[0]):
            found = (point, kind)
    return found[1]


def check(
    site: Site, partition: Partition | None, problems: Iterable[Problem], home: Folder | None
) -> Iterator[Finding]:
    """What the backend's own check says of the job, and what the site is like. Pure."""
    for problem in problems:
        yield _of_problem(site, partition, problem)
    if home is not None and not home.shared:
        yield _not_shared(home)
    yield from _notes(site, partition)


def _of_problem(site: Site, partition: Partition | None, problem: Problem) -> Finding:
    return Finding(
        "site_rejects" if problem.severity == "error" else "site_waits",
        problem.severity,
        f"{problem.path}: {problem.message}",
        tuple(_shown(site, partition)),
        Fix(problem.hint or "change it in the job file"),
    )


def _shown(site: Site, partition: Partition | None) -> Iterator[str]:
    if partition is None:
        yield f"partitions of {site.cluster}: {', '.join(one.name for one in site.partitions)}"
        return
    limit = (
        "no time limit" if partition.max_seconds is None else f"at most {partition.max_seconds} s"
    )
    yield f"partition {partition.name}: {limit}"
    for group in site.nodes(partition.name):
        yield (
            f"{group.usable} of {group.count} nodes usable, each {group.cpus} CPUs, "
            f"{group.memory} MiB, {group.gpus} GPUs"
        )


def _not_shared(home: Folder) -> Finding:
    return Finding(
        "folder_local",
        "warning",
        "the nodes may not see the folder of the runs: it lies on a disk of this machine",
        (f"{home.path}: {home.kind}",),
        Fix(
            "choose a folder that all nodes see",
            cli="export DEPLOYKIT_HOME=/a/folder/that/all/nodes/see\n",
        ),
    )


def _notes(site: Site, partition: Partition | None) -> Iterator[Finding]:
    preempts = not site.preemption.startswith("preempt/none")
    if preempts and partition is not None and partition.preemption not in {"OFF", ""}:
        yield Finding(
            "preemption",
            "note",
            f"jobs in partition {partition.name} may be preempted ({partition.preemption})",
            (site.preemption,),
            Fix("name a folder with `checkpoints`, and resume from it"),
        )
    if not site.accounting:
        yield Finding(
            "no_accounting",
            "note",
            "the site keeps no accounts: sacct knows nothing, and deploykit does without it",
            ("AccountingStorageType: none",),
            Fix("nothing to do"),
        )
