"""Nodes that are left out of new jobs, since one failed its check, or has failed jobs twice.

By target: a node of one cluster says nothing about another's. An entry expires, as nodes get
repaired; `deploykit nodes` lists and clears them.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from deploykit.backends import base as backend
from deploykit.job.decode import from_json
from deploykit.job.model import Plan, Problem
from deploykit.lib import paths
from deploykit.lib.errors import BackendUnavailable
from deploykit.run.registry import Run

DAYS = 7
"""Days after which a node may be used again."""
_DAY = 86_400.0
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
"""A node's name, which becomes part of a directive."""
_LONGEST = 1 << 20
_REASON = 300
_TIMES = 2
"""Failures of jobs, for other reasons than a failed check, from which on a node is left out."""


@dataclass(frozen=True)
class Node:
    """A node of a target that failed, and why."""

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
        """Whether new jobs are kept off it now."""
        return self.failed_check or len(self.runs) >= _TIMES


def every() -> list[Node]:
    """All nodes that have failed in the last `DAYS` days, by target and name."""
    try:
        data: Any = from_json(paths.read_regular(paths.left_out(), _LONGEST))
    except (OSError, ValueError):
        return []
    nodes = map(_node, data if isinstance(data, list) else [])
    return [node for node in nodes if node is not None and time.time() < node.until]


def learn(rows: Iterable[Run]) -> None:
    """Take in what the nodes of runs that have ended recorded about each other."""
    known = every()
    nodes = {(node.target, node.node): node for node in known}
    for node in (node for row in rows for node in _recorded(row)):
        name = node.target, node.node
        nodes[name] = _merged(nodes[name], node) if name in nodes else node
    if list(nodes.values()) != known:
        _write(nodes.values())


def clear(nodes: Sequence[Node]) -> None:
    """Use these nodes again."""
    _write(node for node in every() if node not in nodes)


def applied(plan: Plan, *, ask: bool) -> tuple[Plan, list[Problem]]:
    """The plan without the nodes that are left out on its target, and what to tell the user.

    With `ask`, nodes that the target does not know are cleared: Slurm refuses a job that names one.
    The same plan for a backend that cannot leave out nodes, or a job that names its nodes.
    """
    target, options = f"{plan.backend}://{plan.target}", plan.options
    if not hasattr(options, "exclude") or getattr(options, "nodelist", None):
        return plan, []
    nodes = [node for node in every() if node.target == target and node.is_left_out]
    if ask and nodes:
        nodes = _existing(nodes, plan)
    if not nodes:
        return plan, []
    names = dict.fromkeys((*(options.exclude or "").split(","), *(node.node for node in nodes)))
    options = replace(options, exclude=",".join(filter(None, names)))
    plan = backend.find(plan.backend).plan(plan.job, options, run=plan.run, bundle=plan.bundle)
    return plan, [_notice(plan, node) for node in nodes]


def _existing(nodes: list[Node], plan: Plan) -> list[Node]:
    """The nodes that the target knows; the others are cleared. All where it does not answer."""
    engine = backend.find(plan.backend)
    if not backend.offers(engine, "node_names"):
        return nodes
    try:
        names = engine.node_names(plan.options)
    except BackendUnavailable:
        return nodes
    unknown = [node for node in nodes if names and node.node not in names]
    if unknown:
        clear(unknown)
    return [node for node in nodes if node not in unknown]


def _notice(plan: Plan, node: Node) -> Problem:
    return Problem(
        f"{plan.backend}.exclude",
        f"{node.node} is excluded: {node.reason}",
        f"once it is repaired: deploykit nodes --clear {node.node}",
        severity="warning",
    )


def _recorded(row: Run) -> Iterator[Node]:
    target, until = f"{row.backend}://{row.target}", time.time() + DAYS * _DAY
    for path in sorted(Path(row.folder).glob("exit_records/unhealthy-*.json")):
        with contextlib.suppress(OSError, ValueError):
            match from_json(paths.read_regular(path, _LONGEST)):
                case {"attempt": int(attempt), "hosts": {**hosts}, "failed_check": bool(checked)}:
                    runs = (f"{row.run}.{attempt}",)
                    for name, reason in hosts.items():
                        text = str(reason)[:_REASON]
                        if isinstance(name, str) and _NODE.fullmatch(name):
                            yield Node(target, name, text, checked, runs, until)


def _merged(earlier: Node, node: Node) -> Node:
    if set(node.runs) <= set(earlier.runs):
        return earlier  # it is known, and perhaps about to expire
    failed_check = earlier.failed_check or node.failed_check
    return replace(node, failed_check=failed_check, runs=(*earlier.runs, *node.runs))


def _write(nodes: Iterable[Node]) -> None:
    """Replace the list in one step."""
    ordered = sorted(nodes, key=lambda node: (node.target, node.node))
    file = paths.left_out()
    paths.private_folder(file.parent)
    scratch = file.with_name(f".{file.name}.{time.monotonic_ns()}")
    paths.write(scratch, json.dumps([asdict(node) for node in ordered], indent=1) + "\n")
    scratch.replace(file)


def _node(item: Any) -> Node | None:
    """An entry of the list; None where it is none."""
    match item:
        case {
            "target": str(target),
            "node": str(name),
            "reason": str(reason),
            "failed_check": bool(checked),
            "runs": [_, *_] as runs,
            "until": float(until),
        } if _NODE.fullmatch(name):
            return Node(target, name, reason[:_REASON], checked, tuple(map(str, runs)), until)
    return None
