"""What a report says of a run beside its numbers: timeline, nodes, cause, stacks, files."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploykit import backend, exit_records, run_diagnosis, run_facts
from deploykit.diagnosis.ranking import Cause
from deploykit.errors import DeploykitError
from deploykit.inspect import report as stack_lines
from deploykit.inspect import stacks, usage
from deploykit.model import State
from deploykit.registry import Run, now
from deploykit.run_facts import RunFacts

_EVENT = re.compile(
    r"no progress for |there is progress again|on_stall: |the cost cap is near|"
    r"SIG[A-Z0-9]{1,8} arrived|the ranks did not exit in time|preflight: (?:passed|stopped|FAILED)"
)
"""What of the launchers' lines belongs into the timeline."""
_NETWORK = re.compile(r"network: (.{1,500})")
_NODE = re.compile(r"node (\d{1,9}) of (\d{1,9}) \((.{1,60})\): rendezvous at (.{1,100})")
_PREFLIGHT = "preflight: "
_MOST_EVENTS = 60
_MOST_NODES = 64
_MOST_LINES = 200
"""Lines of a preflight, and of stacks."""
_LOGS = 32
_FILES = ("job.json", "plan.sh", "plan.json", "uncommitted.diff", "source.json")


@dataclass(frozen=True)
class Event:
    """Something that happened to a run, in seconds since the epoch."""

    time: float
    text: str


@dataclass(frozen=True)
class Span:
    """A part of a run's time: it waited (attempt None), or an attempt ran."""

    begin: float
    end: float
    attempt: int | None


@dataclass(frozen=True)
class RunReport:
    """A run as a report shows it."""

    facts: RunFacts
    job: dict[str, Any]
    """As it was submitted."""
    events: list[Event]
    spans: list[Span]
    nodes: list[tuple[str, str]]
    """The number of each node, with where it met the others, and by which network and why."""
    preflight: list[str]
    slow: list[str]
    """Lines of the trainer about slow ranks."""
    causes: tuple[Cause, ...]
    stacks: list[str]
    """Where the ranks stood when they were last looked at."""
    software: list[tuple[str, str]]
    """Versions on node 0, and its GPUs."""
    files: list[Path]
    """Those in the run folder that exist."""
    problems: list[str]


def of(row: Run) -> RunReport:
    """Everything that is known of a run. Asks its backend only where its logs are not here."""
    facts, folder = run_facts.of(row), Path(row.folder)
    causes, problems = _causes(row)
    return RunReport(
        facts,
        run_facts.job_data(folder),
        sorted(_events(facts), key=lambda one: one.time)[:_MOST_EVENTS],
        list(_spans(row)),
        list(_nodes(facts)),
        _preflight(facts),
        [line.text for line in facts.remarks if line.rank is not None][-5:],
        causes,
        _stacks(folder),
        usage.software(folder),
        list(_files(folder)),
        [*facts.problems, *problems],
    )


def _causes(row: Run) -> tuple[tuple[Cause, ...], list[str]]:
    if State(row.state) not in {State.FAILED, State.BLOCKED}:
        return (), []
    try:
        found = run_diagnosis.of_run(row)
    except (DeploykitError, OSError) as error:
        return (), [f"the cause: {error}"]
    return found.causes, list(found.warnings)


def _events(facts: RunFacts) -> Iterator[Event]:
    row = facts.row
    yield Event(row.created, "submitted")
    if row.started is not None:
        yield Event(row.started, "started")
    for number, why, time in exit_records.restart_times(Path(row.folder)):
        yield Event(time.timestamp(), f"restart {number}: {why.replace('_', ' ')}")
    for line in facts.remarks:
        if line.rank is None and line.time is not None and _EVENT.match(line.text):
            yield Event(line.time.timestamp(), f"{line.origin}{line.text}")
    if row.finished is not None:
        yield Event(row.finished, f"{row.state}{f': {row.reason}' if row.reason else ''}")


def _spans(row: Run) -> Iterator[Span]:
    """How long it waited, and each attempt, as far as their times are known."""
    end = row.finished or now()
    begin = end if row.started is None else max(row.created, min(row.started, end))
    yield Span(row.created, begin, None)
    if row.started is None:
        return
    attempt = 0
    for number, _, time in exit_records.restart_times(Path(row.folder)):
        moment = time.timestamp()
        if begin < moment < end:
            yield Span(begin, moment, attempt)
            begin, attempt = moment, number
    yield Span(begin, end, attempt)


def _nodes(facts: RunFacts) -> Iterator[tuple[str, str]]:
    """Of the last attempt, of each node: how it is called, and its network with the reason."""
    networks: dict[int, str] = {}
    names: dict[int, str] = {}
    for line in facts.remarks:
        if line.node is None:
            continue
        if met := _NETWORK.match(line.text):
            networks[line.node] = met[1]
        elif met := _NODE.match(line.text):
            names[line.node] = f"node {met[1]} of {met[2]}, {met[3]}; rendezvous at {met[4]}"
    for node in sorted({*names, *networks})[:_MOST_NODES]:
        yield names.get(node, f"node {node}"), networks.get(node, "")


def _preflight(facts: RunFacts) -> list[str]:
    said = [line for line in facts.remarks if line.text.startswith(_PREFLIGHT)]
    first = [line.text.removeprefix(_PREFLIGHT) for line in said if line.node in {0, None}]
    return first[-_MOST_LINES:]


def _stacks(folder: Path) -> list[str]:
    newest = stacks.newest(folder)
    if newest is None:
        return []
    with contextlib.suppress(OSError, ValueError):
        return list(stack_lines.lines(stacks.read(newest)))[:_MOST_LINES]
    return []


def _files(folder: Path) -> Iterator[Path]:
    """The plan and the like, the first logs, and the folders of results."""
    logs = sorted(folder.glob("logs/*.log"))[:_LOGS]
    named = [*(folder / name for name in _FILES), *logs]
    yield from (path for path in named if path.is_file() and path.stat().st_size)
    for name in (*backend.FOLDERS, stacks.FOLDER):
        path = folder / name
        if path.is_dir() and any(path.iterdir()):
            yield path
