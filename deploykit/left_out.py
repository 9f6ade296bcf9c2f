"""Nodes that are left out of new jobs, since one failed its check, or has failed jobs twice.

By target: a node of one cluster says nothing about another's. An entry expires, as nodes get
repaired; `deploykit nodes` lists and clears them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from deploykit import backend, paths
from deploykit.decode import from_json
from deploykit.model import Plan, Problem
from deploykit.registry import Run

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
    """Seconds since 1970."""

    @property
    def is_left_out(self) -> bool:
        """Whether new jobs are kept off it now."""
        return (self.failed_check or len(self.runs) >= _TIMES) and time.time() < self.until


def every() -> list[Node]:
    """All nodes that have failed lately, by target and name."""
    try:
        data = from_json(paths.read_regular(paths.left_out(), _LONGEST))
    except (OSError, ValueError):
        return []
    items = data if isinstance(data, list) else []
    nodes = [node for node in map(_node, items) if node and time.time() < node.until]
    return sorted(nodes, key=lambda node: (node.target, node.node))


def learn(rows: Iterable[Run]) -> None:
    """Take in what the nodes of runs that have ended recorded about each other."""
    nodes = {(node.target, node.node): node for node in every()}
    known = dict(nodes)
    for row in rows:
        for node in _recorded(row):
            earlier = nodes.get((node.target, node.node))
            nodes[node.target, node.node] = _merged(earlier, node) if earlier else node
    if nodes != known:
        _write(nodes.values())


def clear(nodes: Sequence[Node]) -> None:
    """Use these nodes again."""
    _write(node for node in every() if node not in nodes)


def applied(plan: Plan) -> tuple[Plan, list[Problem]]:
    """The plan without the nodes that are left out on its target, and what to tell the user.

    The same plan for a backend that cannot leave out nodes, or a job that names its nodes.
    """
    target, options = f"{plan.backend}://{plan.target}", plan.options
    nodes = [node for node in every() if node.target == target and node.is_left_out]
    if not nodes or not hasattr(options, "exclude") or getattr(options, "nodelist", None):
        return plan, []
    names = dict.fromkeys((*(options.exclude or "").split(","), *(node.node for node in nodes)))
    options = replace(options, exclude=",".join(filter(None, names)))
    engine = backend.find(plan.backend)
    return engine.plan(plan.job, options, run=plan.run, bundle=plan.bundle), [
        Problem(
            f"{plan.backend}.exclude",
            f"{node.node} is excluded: {node.reason}",
            f"once it is repaired: deploykit nodes --clear {node.node}",
            severity="warning",
        )
        for node in nodes
    ]


def _recorded(row: Run) -> Iterator[Node]:
    for path in sorted(Path(row.folder).glob("exit_records/unhealthy-*.json")):
        with contextlib.suppress(OSError, ValueError):
            match from_json(paths.read_regular(path, _LONGEST)):
                case {"attempt": int(attempt), "hosts": {**hosts}, "failed_check": bool(checked)}:
                    target, until = f"{row.backend}://{row.target}", time.time() + DAYS * _DAY
                    run = f"{row.run}.{attempt}"
                    for name, reason in hosts.items():
                        if _NODE.fullmatch(str(name)):
                            text = str(reason)[:_REASON]
                            yield Node(target, str(name), text, checked, (run,), until)


def _merged(earlier: Node, node: Node) -> Node:
    if set(node.runs) <= set(earlier.runs):
        return earlier  # it is known, and perhaps about to expire
    return replace(
        node,
        failed_check=earlier.failed_check or node.failed_check,
        runs=(*earlier.runs, *node.runs),
    )


def _node(item: Any) -> Node | None:
    match item:
        case {
            "target": str(target),
            "node": str(name),
            "reason": str(reason),
            "failed_check": bool(checked),
            "runs": [*runs],
            "until": float(until),
        } if _NODE.fullmatch(name):
            return Node(target, name, reason, checked, tuple(map(str, runs)), until)
    return None


def _write(nodes: Iterable[Node]) -> None:
    file = paths.left_out()
    paths.private_folder(file.parent)
    scratch = file.with_name(f".{file.name}.{os.getpid()}")
    paths.write(scratch, json.dumps([asdict(node) for node in nodes], indent=1) + "\n")
    scratch.replace(file)
