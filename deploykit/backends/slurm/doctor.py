"""What doctor reports about a Slurm cluster and its login node, collected and judged."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from deploykit.backends.slurm import remote, script
from deploykit.backends.slurm import site as sites
from deploykit.backends.slurm.options import Options
from deploykit.backends.slurm.site import Partition, Site
from deploykit.job.model import JobSpec, Problem
from deploykit.lib import paths
from deploykit.lib.errors import BackendUnavailable
from deploykit.lib.finding import Finding, Fix

_FACTS = "site.json"
_SHARED = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "fuse", "glusterfs", "wekafs", "panfs", "9p")
_PROGRAMS = ("sbatch", "squeue", "scontrol", "flock", "gzip", "tar")
"""Those that a submit and the queries after it run on a login node."""
_OLDEST_PYTHON = (3, 10)
"""Python of the node plane."""
_VERSION = "import sys; print(*sys.version_info[:2])"


class RunsFolder(NamedTuple):
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


class _LoginNode(NamedTuple):
    """Facts about a login node, one line each; the mounts are the remaining lines."""

    name: str
    """Its own host name."""
    folder: str
    """The folder for runs, without links."""
    writable: str
    """The folder, or the first one above that exists, if this user can write there; else empty."""
    missing: str
    """Programs that are not on PATH."""
    python: str
    """``3 11``; empty where the job's Python cannot be run there."""
    mounts: str
    """Its /proc/self/mounts."""


def examine(
    job: JobSpec, options: Options, *, saved: Path | None, save: Path | None
) -> Iterator[Finding]:
    """Findings about the cluster of this machine or of a login node, or a saved profile of one."""
    runs = None
    if saved:
        site = sites.load(str(saved / _FACTS))
    elif options.host is None:
        site = sites.read()
        mounts = Path("/proc/self/mounts").read_text(encoding="utf-8")
        filesystem = filesystem_of(paths.state(), mounts)
        alone = sites.hosts() <= {os.uname().nodename.split(".")[0]}
        runs = RunsFolder(str(paths.state()), filesystem, alone)
    else:
        node = _inspect_login_node(options.host, options)
        yield from _login_node_findings(node, job, options)
        if "scontrol" in node.missing:
            return
        site = sites.read(options.host)
        alone = sites.hosts(options.host) <= {node.name.split(".")[0]}
        filesystem = _filesystem(node.folder, node.mounts)
        runs = RunsFolder(node.folder, filesystem, alone, options.host)
    if save:
        sites.save(site, save / _FACTS)
    problems = sites.problems(job, options, site)
    yield from findings(site, site.partition(options.partition), problems, runs)


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
        yield Finding(
            "site_rejects" if problem.severity == "error" else "site_waits",
            problem.severity,
            f"{problem.path}: {problem.message}",
            tuple(_evidence(site, partition)),
            Fix(problem.hint or "change this key in the job file"),
        )
    if folder is not None and not folder.shared:
        yield Finding(
            "folder_local",
            "warning",
            "the nodes may be unable to read the run folders, which are on a local disk of "
            f"{folder.host or 'this host'}",
            (f"{folder.path}: {folder.filesystem}",),
            Fix(
                "use a folder that every node can read",
                settings={"slurm.folder": "/a/shared/folder"} if folder.host else {},
                cli="" if folder.host else "export DEPLOYKIT_HOME=/a/shared/folder\n",
            ),
        )
    yield from _notes(site, partition)


def _evidence(site: Site, partition: Partition | None) -> Iterator[str]:
    if partition is None:
        yield f"partitions of {site.cluster}: {', '.join(known.name for known in site.partitions)}"
        return
    yield f"partition {partition.name}: {partition.time_limit}"
    yield from (group.description for group in site.nodes(partition.name))


def _notes(site: Site, partition: Partition | None) -> Iterator[Finding]:
    preempts = not site.preemption.startswith("preempt/none")
    if preempts and partition is not None and partition.preemption not in {"OFF", ""}:
        yield Finding(
            "preemption",
            "note",
            f"jobs in partition {partition.name} can be preempted ({partition.preemption})",
            (site.preemption,),
            Fix("set `checkpoints` to a folder, and resume from it in your script"),
        )
    if not site.accounting:
        yield Finding(
            "no_accounting",
            "note",
            "the cluster has no accounting database, so sacct returns nothing; deploykit does not "
            "require it",
            ("AccountingStorageType: none",),
            Fix("no action is needed"),
        )


def _inspect_login_node(host: str, options: Options) -> _LoginNode:
    """Query the login node in one call; changes nothing there.

    Raises BackendUnavailable if it cannot be reached or does not answer as expected.
    """
    folder = shlex.quote(options.folder or "")
    python = script.default_python(options)
    questions = (
        f"uname -n; readlink -m {folder}; d={folder}; "
        'while [ ! -e "$d" ]; do d=$(dirname "$d"); done; [ ! -w "$d" ] || printf %s "$d"; echo; '
        f'for p in {" ".join(_PROGRAMS)}; do command -v $p >/dev/null || printf "%s " $p; done; '
        f"echo; {python} -c {shlex.quote(_VERSION)} 2>/dev/null || echo; cat /proc/self/mounts"
    )
    code, out, err = remote.run(host, questions)
    lines = out.decode(errors="replace").split("\n", 5)
    if code or len(lines) < len(_LoginNode._fields):
        raise BackendUnavailable(f"{host}: {err.strip() or 'unexpected output'}")
    return _LoginNode(*lines)


def _login_node_findings(node: _LoginNode, job: JobSpec, options: Options) -> Iterator[Finding]:
    """What would stop a submit there. Pure."""
    if programs := node.missing.split():
        yield Finding(
            "login_node_programs",
            "error",
            f"required programs are missing on {options.host}",
            (f"not on PATH: {', '.join(programs)}",),
            Fix("set another slurm.host, or load the programs in its shell start-up files"),
        )
    if not node.writable:
        yield Finding(
            "login_node_folder",
            "error",
            f"you cannot write to the folder for runs on {options.host}",
            (f"{options.folder} resolves to {node.folder}",),
            Fix(
                "choose a folder that you can write to",
                settings={"slurm.folder": "/a/shared/folder/of/yours"},
            ),
        )
    provided = job.environment or options.container or options.setup or options.modules
    version = tuple(int(part) for part in node.python.split() if part.isdecimal())
    if not provided and version < _OLDEST_PYTHON:
        python = options.python or "python3"
        state = f"is Python {'.'.join(map(str, version))}" if version else "cannot be run"
        yield Finding(
            "login_node_python",
            "warning",
            f"{python} {state} on {options.host}; nodes require Python 3.10 or later with PyTorch",
            (f"{python}: {node.python.strip() or 'no output'}",),
            Fix(
                "set the job's Python environment",
                settings={"slurm.python": "/shared/venv/bin/python"},
            ),
        )
