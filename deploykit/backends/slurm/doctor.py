"""What doctor reports about a Slurm cluster: collected, and judged from its site profile."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from deploykit.backends.slurm import login_node, site_checks
from deploykit.backends.slurm import site as sites
from deploykit.backends.slurm.login_node import LoginNode
from deploykit.backends.slurm.options import Options
from deploykit.backends.slurm.site import Partition, Site
from deploykit.job.model import JobSpec, Problem
from deploykit.lib import paths
from deploykit.lib.finding import Finding, Fix

_FACTS = "site.json"
_SHARED = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "fuse", "glusterfs", "wekafs", "panfs", "9p")


@dataclass(frozen=True)
class RunsFolder:
    """The folder of all runs and the type of its file system."""

    path: str
    filesystem: str
    single_host: bool
    """Whether all nodes of the cluster run on the host of the folder."""
    host: str | None = None
    """The login node that has the folder; None for this machine."""

    @property
    def shared(self) -> bool:
        """Whether every node can read the folder."""
        return self.single_host or self.filesystem.startswith(_SHARED)


def examine(
    job: JobSpec, options: Options, saved: Path | None, save: Path | None
) -> Iterator[Finding]:
    """Findings about the cluster of this machine or of a login node, or a saved profile of one."""
    runs = None
    if saved:
        site = sites.load(str(saved / _FACTS))
    elif options.host is None:
        site, runs = sites.read(), runs_folder(paths.state(), sites.hosts())
    else:
        node = login_node.inspect(options)
        yield from login_node.findings(node, job, options)
        if "scontrol" in node.missing:
            return
        site, runs = sites.read(options.host), _runs_folder_there(node, sites.hosts(options.host))
    if save:
        sites.save(site, save / _FACTS)
    problems = site_checks.problems(job, options, site)
    yield from findings(site, site.partition(options.partition), problems, runs)


def runs_folder(path: Path, hosts: Iterable[str]) -> RunsFolder:
    """Look up the file system of `path`, for a cluster whose nodes run on `hosts`."""
    this_host = os.uname().nodename.split(".")[0]
    mounts = Path("/proc/self/mounts").read_text(encoding="utf-8")
    return RunsFolder(str(path), filesystem_of(path, mounts), set(hosts) <= {this_host})


def _runs_folder_there(node: LoginNode, hosts: Iterable[str]) -> RunsFolder:
    """The folder for runs on a login node, for a cluster whose nodes run on `hosts`."""
    single_host = set(hosts) <= {node.name.split(".")[0]}
    return RunsFolder(node.folder, _filesystem(node.folder, node.mounts), single_host, node.host)


def filesystem_of(path: Path, mounts: str) -> str:
    """The type of the file system that holds `path`; `mounts` is the text of /proc/self/mounts."""
    return _filesystem(os.path.realpath(path), mounts)


def _filesystem(real: str, mounts: str) -> str:
    """The type of the longest mount point above a path without links."""
    longest = ("", "")
    for line in mounts.splitlines():
        _, point, filesystem, *_ = line.split(" ")
        point = point.replace("\\040", " ")
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(longest[0]):
            longest = (point, filesystem)
    return longest[1]


def findings(
    site: Site, partition: Partition | None, problems: Iterable[Problem], folder: RunsFolder | None
) -> Iterator[Finding]:
    """Turn the backend's own `problems` into findings, and add what the site itself implies. Pure.

    `partition` is None if the cluster has no such partition, `folder` if the profile was saved.
    """
    for problem in problems:
        yield _rejected(site, partition, problem)
    if folder is not None and not folder.shared:
        yield _not_shared(folder)
    yield from _notes(site, partition)


def _rejected(site: Site, partition: Partition | None, problem: Problem) -> Finding:
    return Finding(
        "site_rejects" if problem.severity == "error" else "site_waits",
        problem.severity,
        f"{problem.path}: {problem.message}",
        tuple(_evidence(site, partition)),
        Fix(problem.hint or "change it in the job file"),
    )


def _evidence(site: Site, partition: Partition | None) -> Iterator[str]:
    if partition is None:
        yield f"partitions of {site.cluster}: {', '.join(one.name for one in site.partitions)}"
        return
    yield f"partition {partition.name}: {partition.time_limit}"
    yield from (group.description for group in site.nodes(partition.name))


def _not_shared(folder: RunsFolder) -> Finding:
    return Finding(
        "folder_local",
        "warning",
        "the nodes may not be able to read the folder of the runs: it is on a local disk of "
        f"{folder.host or 'this host'}",
        (f"{folder.path}: {folder.filesystem}",),
        Fix(
            "choose a folder that every node can read",
            settings={"slurm.folder": "/a/shared/folder"} if folder.host else {},
            cli="" if folder.host else "export DEPLOYKIT_HOME=/a/shared/folder\n",
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
            Fix("set `checkpoints` to a folder, and resume from it"),
        )
    if not site.accounting:
        yield Finding(
            "no_accounting",
            "note",
            "the cluster has no accounting database: sacct returns nothing; deploykit does not "
            "need it",
            ("AccountingStorageType: none",),
            Fix("nothing to do"),
        )
