"""What a Slurm cluster has and allows: collected for `doctor`, and for `backends slurm --probe`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from deploykit import paths
from deploykit.backends.slurm import site, site_checks, site_findings
from deploykit.backends.slurm.options import Options
from deploykit.backends.slurm.site import Partition, Site
from deploykit.finding import Finding
from deploykit.model import JobSpec, Profile

_FACTS = "site.json"


def examine(
    job: JobSpec, options: Options, saved: Path | None, save: Path | None
) -> Iterator[Finding]:
    """Findings about the cluster of this machine, or about a saved profile of one."""
    if saved:
        profile, runs = site.load(str(saved / _FACTS)), None
    else:
        profile, runs = site.read(), site_findings.runs_folder(paths.state(), site.hosts())
    if save:
        site.save(profile, save / _FACTS)
    problems = site_checks.problems(job, options, profile)
    yield from site_findings.findings(profile, profile.partition(options.partition), problems, runs)


def probe(host: str | None) -> Profile:
    """Query the cluster, from `host` over ssh where it is given, and store its site profile."""
    profile = site.read(host)
    lines = [f"{profile.cluster}, Slurm {profile.version}"]
    lines += [_line(profile, partition) for partition in profile.partitions]
    return Profile(site.save(profile), dataclasses.asdict(profile), tuple(lines))


def _line(profile: Site, partition: Partition) -> str:
    """One partition, its time limit and its nodes."""
    mark = " (default)" if partition.default else ""
    nodes = site.describe(profile.nodes(partition.name))
    return f"{partition.name}{mark}: {partition.time_limit}; {nodes}"
