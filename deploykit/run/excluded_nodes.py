"""Nodes that are left out of new jobs, since one failed its check, or has failed jobs twice.

By target: a node of one cluster says nothing about another's. An entry expires, as nodes get
repaired; `deploykit nodes` lists and clears them. `node_lists` keeps them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from deploykit.backends import base as backend
from deploykit.job.decode import from_json
from deploykit.job.model import Plan, Problem
from deploykit.lib import paths
from deploykit.lib.errors import UsageError
from deploykit.run import node_lists
from deploykit.run.node_lists import Node
from deploykit.run.registry import Run

_LONGEST = 1 << 20


def every() -> list[Node]:
    """All nodes that have failed lately, by target and name.

    Raises UsageError where those that other users found cannot be read.
    """
    return _combined([*node_lists.own(), *node_lists.others()])


def learn(rows: Iterable[Run]) -> None:
    """Take in what the nodes of runs that have ended recorded about each other."""
    known = node_lists.own()
    others: list[Node] = []
    with contextlib.suppress(UsageError):
        others = [node for node in node_lists.others() if not node.runs]
    recorded = (node for row in rows for node in _recorded(row))
    nodes = [node for node in _by_name([*known, *others, *recorded]).values() if not node.user]
    if nodes != known:
        node_lists.write(nodes)


def clear(nodes: Sequence[Node]) -> None:
    """Use these nodes again."""
    cleared = [node_lists.entry(node.target, node.node, "cleared", False, ()) for node in nodes]
    node_lists.write(_by_name([*node_lists.own(), *cleared]).values())


def applied(plan: Plan) -> tuple[Plan, list[Problem]]:
    """The plan without the nodes that are left out on its target, and what to tell the user.

    The same plan for a backend that cannot leave out nodes, or a job that names its nodes.
    """
    target, options = f"{plan.backend}://{plan.target}", plan.options
    if not hasattr(options, "exclude") or getattr(options, "nodelist", None):
        return plan, []
    known, problems = _known()
    nodes = [node for node in known if node.target == target and node.is_left_out]
    if not nodes:
        return plan, problems
    names = dict.fromkeys((*(options.exclude or "").split(","), *(node.node for node in nodes)))
    options = replace(options, exclude=",".join(filter(None, names)))
    engine = backend.find(plan.backend)
    excluded = [_notice(plan, node) for node in nodes]
    plan = engine.plan(plan.job, options, run=plan.run, bundle=plan.bundle)
    return plan, [*problems, *excluded]


def _known() -> tuple[list[Node], list[Problem]]:
    """All nodes, or this user's alone with a warning that says why."""
    try:
        return every(), []
    except UsageError as error:
        hint = "nodes that failed the jobs of others are not excluded"
        warning = Problem("DEPLOYKIT_SHARED_NODES", error.message, hint, severity="warning")
        return _combined(node_lists.own()), [warning]


def _notice(plan: Plan, node: Node) -> Problem:
    return Problem(
        f"{plan.backend}.exclude",
        f"{node.node} is excluded: {node.why}",
        f"once it is repaired: deploykit nodes --clear {node.node}",
        severity="warning",
    )


def _recorded(row: Run) -> Iterator[Node]:
    target = f"{row.backend}://{row.target}"
    for path in sorted(Path(row.folder).glob("exit_records/unhealthy-*.json")):
        with contextlib.suppress(OSError, ValueError):
            match from_json(paths.read_regular(path, _LONGEST)):
                case {"attempt": int(attempt), "hosts": {**hosts}, "failed_check": bool(checked)}:
                    for name, reason in hosts.items():
                        text, runs = str(reason), (f"{row.run}.{attempt}",)
                        if node_lists.is_name(name):
                            yield node_lists.entry(target, name, text, checked, runs)


def _combined(entries: Iterable[Node]) -> list[Node]:
    """The nodes that have failed since they were cleared, by target and name."""
    nodes = _by_name(entries).values()
    failed = [node for node in nodes if node.runs]
    return sorted(failed, key=lambda node: (node.target, node.node))


def _by_name(entries: Iterable[Node]) -> dict[tuple[str, str], Node]:
    """One entry for each node: a clear, or all failures since."""
    nodes: dict[tuple[str, str], Node] = {}
    for node in sorted(entries, key=lambda node: node.until):
        name = node.target, node.node
        nodes[name] = _merged(nodes[name], node) if name in nodes else node
    return nodes


def _merged(earlier: Node, node: Node) -> Node:
    if not (earlier.runs and node.runs):
        return node  # a clear, or the first failure since
    if set(node.runs) <= set(earlier.runs):
        return earlier  # it is known, and perhaps about to expire
    return replace(
        node,
        failed_check=earlier.failed_check or node.failed_check,
        runs=(*earlier.runs, *node.runs),
    )
