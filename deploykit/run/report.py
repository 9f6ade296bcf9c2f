"""What a report says of a run beside its numbers: timeline, nodes, cause, stacks, files."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploykit.backends import base as backend
from deploykit.diagnose.ranking import Cause
from deploykit.job.model import State
from deploykit.lib.errors import DeploykitError
from deploykit.observe import exit_records, stacks, traces, usage
from deploykit.observe.traces import RankProfile
from deploykit.observe.usage import Sample
from deploykit.run import diagnosis as run_diagnosis
from deploykit.run import facts as run_facts
from deploykit.run import timeline as run_timeline
from deploykit.run.facts import RunFacts
from deploykit.run.registry import Run
from deploykit.run.timeline import Event, Span

_NETWORK = re.compile(r"network: (.{1,500})")
_NODE = re.compile(r"node (\d{1,9}) of (\d{1,9}) \((.{1,60})\): rendezvous at (.{1,100})")
_PREFLIGHT = "preflight: "
_MOST_NODES = 64
_MOST_LINES = 200
"""Lines of a preflight, and of stacks."""
_MOST_PROFILES, _LARGEST_PROFILE = 16, 1 << 22
"""Traces that are read, and bytes of each; `deploykit profile` reads all."""
_LOGS = 32
_FILES = ("job.json", "plan.sh", "plan.json", "uncommitted.diff", "source.json")


@dataclass(frozen=True)
class RunReport:
    """A run as a report shows it."""

    facts: RunFacts
    job: dict[str, Any]
    """As it was submitted."""
    starts: list[float]
    """When each attempt began, in seconds since the epoch."""
    events: list[Event]
    spans: list[Span]
    nodes: list[tuple[str, str]]
    """The number of each node, its host, where it met the others; by which network and why."""
    preflight: list[str]
    slow: list[str]
    """Lines of the trainer about slow ranks."""
    causes: tuple[Cause, ...]
    stacks: list[str]
    """Where the ranks stood when they were last looked at."""
    usage: list[Sample]
    """What each rank used over time."""
    profile: list[RankProfile]
    """Of the ranks whose steps were profiled, as far as they are read quickly."""
    software: list[tuple[str, str]]
    """Versions on node 0, and its GPUs."""
    files: list[Path]
    """Those in the run folder that exist."""
    problems: list[str]


def of(row: Run) -> RunReport:
    """Everything that is known of a run. Asks its backend only where its logs are not here."""
    facts, folder = run_facts.of(row), Path(row.folder)
    job, starts = run_facts.job_data(folder), run_timeline.attempt_starts(facts)
    causes, problems = _causes(row)
    return RunReport(
        facts,
        job,
        list(starts.values()),
        run_timeline.events(facts, starts),
        run_timeline.spans(facts, starts),
        list(_nodes(facts, _hosts(folder, job))),
        _preflight(facts),
        [line.text for line in facts.remarks if line.rank is not None][-5:],
        causes,
        _stacks(folder),
        usage.history(folder),
        list(_profile(folder)),
        usage.software(folder),
        list(_files(folder)),
        [*facts.problems, *problems],
    )


def _causes(row: Run) -> tuple[tuple[Cause, ...], list[str]]:
    if State(row.state) not in {State.FAILED, State.BLOCKED}:
        return (), []
    try:
        diagnosis = run_diagnosis.of_run(row)
    except (DeploykitError, OSError) as error:
        return (), [f"the cause: {error}"]
    return diagnosis.causes, list(diagnosis.warnings)


def _hosts(folder: Path, job: dict[str, Any]) -> dict[int, str]:
    """The host of each node of the last attempt, where its ranks have recorded it."""
    match job.get("resources"):
        case {"processes_per_node": int(ranks)} if ranks > 0:
            return {rank // ranks: host for rank, host in exit_records.hosts(folder).items()}
    return {}


def _nodes(facts: RunFacts, hosts: dict[int, str]) -> Iterator[tuple[str, str]]:
    """Of the last attempt, of each node: how it is called, and its network with the reason."""
    networks: dict[int, str] = {}
    meetings: dict[int, tuple[str, str]] = {}
    for line in facts.remarks:
        if line.node is None:
            continue
        if met := _NETWORK.match(line.text):
            networks[line.node] = met[1]
        elif met := _NODE.match(line.text):
            meetings[line.node] = f" of {met[2]}, {met[3]}", f"; rendezvous at {met[4]}"
    for node in sorted({*hosts, *meetings, *networks})[:_MOST_NODES]:
        of_how_many, meeting = meetings.get(node, ("", ""))
        host = f", on {hosts[node]}" if node in hosts else ""
        yield f"node {node}{of_how_many}{host}{meeting}", networks.get(node, "")


def _preflight(facts: RunFacts) -> list[str]:
    """What node 0 says of the last one."""
    lines: list[str] = []
    for line in facts.remarks:
        if line.node in {0, None}:
            if line.text.startswith("restart "):
                lines = []
            elif line.text.startswith(_PREFLIGHT):
                lines.append(line.text.removeprefix(_PREFLIGHT))
    return lines[-_MOST_LINES:]


def _stacks(folder: Path) -> list[str]:
    newest = stacks.newest(folder)
    if newest is None:
        return []
    with contextlib.suppress(OSError, ValueError):
        return list(stacks.lines(stacks.read(newest)))[:_MOST_LINES]
    return []


def _profile(folder: Path) -> Iterator[RankProfile]:
    for path in traces.files(folder / traces.FOLDER)[:_MOST_PROFILES]:
        if path.stat().st_size <= _LARGEST_PROFILE:
            with contextlib.suppress(DeploykitError, OSError):
                yield traces.read(path)


def _files(folder: Path) -> Iterator[Path]:
    """The plan and the like, the first logs, and the folders of results."""
    logs = sorted(folder.glob("logs/*.log"))[:_LOGS]
    named = [*(folder / name for name in _FILES), *logs]
    yield from (path for path in named if path.is_file() and path.stat().st_size)
    for name in (*backend.FOLDERS, stacks.FOLDER):
        path = folder / name
        if path.is_dir() and any(path.iterdir()):
            yield path
