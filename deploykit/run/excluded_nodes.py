"""Nodes that are excluded from new jobs, since one failed its check, or has failed jobs twice.

By target: a node of one cluster says nothing about another's. An entry expires, as nodes get
repaired; `deploykit nodes` lists and clears them, and prints a page for those who repair one.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from deploykit.backends import base as backend
from deploykit.job.decode import read_json
from deploykit.job.model import Plan, Problem
from deploykit.lib import paths, shell
from deploykit.lib.errors import BackendUnavailable, DeploykitError
from deploykit.run import registry
from deploykit.run.registry import Run

DAYS = 7
_NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
"""A node's name becomes part of a directive."""
_MAX_REASON = 300
_MIN_FAILURES = 2
"""Failures of jobs, without a failed check, after which a node is excluded."""
_MAX_LINES = 12
"""Log lines of a run in the page of a node, and its runs."""
_LINES_SEARCHED = 20_000
"""Lines of a run's log that are searched; the preflight is at their beginning."""
_MAX_SLURM_REASON = 60
"""Characters of the reason in the state of a Slurm node, which its lists cut off anyway."""
_LOOK_AT = {
    "GPU": "nvidia-smi -q -d ECC,ROW_REMAPPER,PERFORMANCE,TEMPERATURE; dcgmi diag -r 3",
    "DCGM": "dcgmi diag -r 3",
    "Infini": "ibstat; perfquery",
    "EFA": "fi_info -p efa; rdma -p statistic show",
    "write into": "df -h; mount; dmesg --level=err,crit",
    "cannot be reached": "ping the node, and compare its firewall, routes and cables with those of "
    "its neighbors",
    "is slow": "ethtool, tc qdisc show, and the node's load",
}


class Node(NamedTuple):
    target: str
    """``slurm://localhost``."""
    node: str
    reason: str
    failed_check: bool
    runs: tuple[str, ...]
    """The attempts in which it failed, ``exp-1.0``."""
    until: float
    """Seconds since 1970, `DAYS` after the last failure."""

    @property
    def is_left_out(self) -> bool:
        return self.failed_check or len(self.runs) >= _MIN_FAILURES


def every() -> list[Node]:
    """All nodes that have failed in the last `DAYS` days, by target and name."""
    try:
        items = read_json(paths.left_out())
        nodes = [Node(**{**item, "runs": tuple(item["runs"])}) for item in items]
    except (OSError, ValueError, TypeError, KeyError):  # there is no list, or it is damaged
        return []
    return [node for node in nodes if time.time() < node.until]


def learn(rows: Iterable[Run]) -> None:
    """Add what the nodes of runs that have ended recorded about each other."""
    known = every()
    nodes = {(node.target, node.node): node for node in known}
    for node in (node for row in rows for node in _recorded(row)):
        name = node.target, node.node
        earlier = nodes.get(name, node)
        if set(node.runs) <= set(earlier.runs):
            nodes[name] = earlier  # it is known, and perhaps about to expire
        else:
            checked = earlier.failed_check or node.failed_check
            nodes[name] = node._replace(failed_check=checked, runs=(*earlier.runs, *node.runs))
    if list(nodes.values()) != known:
        _write(nodes.values())


def _recorded(row: Run) -> Iterator[Node]:
    target, until = f"{row.backend}://{row.target}", time.time() + DAYS * 86_400
    for path in sorted(Path(row.folder).glob("exit_records/unhealthy-*.json")):
        with contextlib.suppress(OSError, ValueError):
            match read_json(path):
                case {"attempt": int(attempt), "hosts": {**hosts}, "failed_check": bool(checked)}:
                    runs = (f"{row.run}.{attempt}",)
                    for name, reason in hosts.items():
                        text = str(reason)[:_MAX_REASON]
                        if isinstance(name, str) and _NODE_NAME.fullmatch(name):
                            yield Node(target, name, text, checked, runs, until)


def clear(nodes: Sequence[Node]) -> None:
    _write(node for node in every() if node not in nodes)


def _write(nodes: Iterable[Node]) -> None:
    ordered = sorted(nodes, key=lambda node: (node.target, node.node))
    file = paths.left_out()
    paths.private_folder(file.parent)
    scratch = file.with_name(f".{file.name}.{time.monotonic_ns()}")
    paths.write(scratch, json.dumps([node._asdict() for node in ordered], indent=1) + "\n")
    scratch.replace(file)


def applied(plan: Plan, *, ask: bool) -> tuple[Plan, list[Problem]]:
    """The plan without the nodes that are excluded on its target, and a warning for each.

    With `ask`, nodes that the target does not know are cleared: Slurm refuses a job that names one.
    The plan is unchanged for a backend that cannot exclude nodes, or a job that names its nodes.
    """
    target, options = f"{plan.backend}://{plan.target}", plan.options
    if not hasattr(options, "exclude") or getattr(options, "nodelist", None):
        return plan, []
    nodes = [node for node in every() if node.target == target and node.is_left_out]
    engine = backend.find(plan.backend)
    if ask and nodes and backend.offers(engine, "node_names"):
        with contextlib.suppress(BackendUnavailable):  # without an answer, all are excluded
            names = engine.node_names(options)
            if unknown := [node for node in nodes if names and node.node not in names]:
                clear(unknown)
                nodes = [node for node in nodes if node not in unknown]
    if not nodes:
        return plan, []
    excluded = dict.fromkeys((*(options.exclude or "").split(","), *(node.node for node in nodes)))
    options = replace(options, exclude=",".join(filter(None, excluded)))
    plan = engine.plan(plan.job, options, run=plan.run, bundle=plan.bundle)
    warnings = [
        Problem(
            f"{plan.backend}.exclude",
            f"{node.node} is excluded: {node.reason}",
            f"after the repair, run `deploykit nodes --clear {node.node}`",
            severity="warning",
        )
        for node in nodes
    ]
    return plan, warnings


def page(node: Node) -> Iterator[str]:
    """One page for those who repair a node: when it failed, what was seen, what to do.

    Logs that are gone are left out.
    """
    until = f"{_utc(node.until):%Y-%m-%d}"
    state = f"excluded until {until}" if node.is_left_out else "still in use; failed once"
    yield f"{node.node} on {node.target}: {state}"
    yield ""
    yield f"Reason: {node.reason}"
    for attempt in node.runs[-_MAX_LINES:]:
        run, _, number = attempt.rpartition(".")
        row = registry.lookup(run).get(run)
        if row is not None:
            yield ""
            yield f"Run {run}, attempt {number}, submitted {_utc(row.created):%Y-%m-%d %H:%M UTC}:"
            yield from (f"  {text}" for text in _observed(row, node.node))
    yield ""
    yield "To do:"
    yield from (f"  {number}. {step}" for number, step in enumerate(_steps(node), 1))


def _observed(row: Run, host: str) -> list[str]:
    """What the preflight of a run says of a node; else where its record is."""
    from deploykit.run.log_selection import Selection, of_run  # readers of logs slow each submit

    try:
        log = islice(of_run(row, Selection(node=0), follow=False), _LINES_SEARCHED)
        texts = [line.text for line in log if line.text.startswith("preflight: ")]
    except (DeploykitError, OSError):
        texts = []
    about = dict.fromkeys(text for text in texts if host in re.split(r"[\s(),]+", text))
    nothing = f"the log has no details; see the records in {Path(row.folder, 'exit_records')}"
    return list(about)[:_MAX_LINES] or [nothing]


def _steps(node: Node) -> Iterator[str]:
    is_slurm, name = node.target.startswith("slurm://"), f"NodeName={node.node}"
    if is_slurm:
        why = f"Reason={node.reason[:_MAX_SLURM_REASON]}"
        drain = shell.command("scontrol", "update", name, "State=DRAIN", why)
        yield f"Drain the node: {drain}"
    matching = (what for part, what in _LOOK_AT.items() if part in node.reason)
    yield f"On the node, check: {next(matching, 'dmesg -T, the load, the disks')}"
    if is_slurm:
        resume = shell.command("scontrol", "update", name, "State=RESUME")
        yield f"After the repair, resume it: {resume}"
    yield f"Let deploykit use it again: {shell.command('deploykit', 'nodes', '--clear', node.node)}"


def _utc(seconds: float) -> dt.datetime:
    return dt.datetime.fromtimestamp(seconds, dt.UTC)
