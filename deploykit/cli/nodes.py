"""List the nodes excluded from new jobs, because they failed a check or jobs failed on them twice.

A run's preflight (`--preflight`) finds them. On Slurm, the next jobs on the same cluster are
submitted with these nodes in `--exclude`. After a week, or with --clear, they are used again.

deploykit nodes
deploykit nodes --report node07       a report for its administrator
deploykit nodes --clear node07
"""

from __future__ import annotations

import argparse

from deploykit.cli import output
from deploykit.lib.errors import NotFound
from deploykit.run import excluded_nodes as left_out
from deploykit.run.excluded_nodes import Node


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--report",
        metavar="NODE",
        help="print what was observed on this node, and what to do about it",
    )
    parser.add_argument(
        "--clear",
        action="append",
        default=[],
        metavar="NODE",
        help="use this node again (repeatable)",
    )


def run(args: argparse.Namespace) -> int:
    """Print a line for each node. Raises NotFound, and clears none, where one is not listed."""
    nodes = left_out.every()
    named = {*args.clear, *filter(None, [args.report])}
    unknown = sorted(named - {node.node for node in nodes})
    if unknown:
        raise NotFound(
            f"not excluded: {', '.join(unknown)}", hint="`deploykit nodes` lists the excluded nodes"
        )
    if args.report:
        return _report([node for node in nodes if node.node == args.report], as_json=args.json)
    cleared = [node for node in nodes if node.node in args.clear]
    if cleared:
        left_out.clear(cleared)
    shown = [node for node in nodes if node not in cleared]
    if args.json:
        output.emit([{**node._asdict(), "left_out": node.is_left_out} for node in shown])
    elif shown:
        output.table(["node", "target", "excluded until", "runs", "reason"], list(map(_row, shown)))
    elif not cleared:
        output.note("no nodes are excluded")
    return 0


def _report(nodes: list[Node], *, as_json: bool) -> int:
    """Print a page for a node, of each cluster that has one of that name."""
    pages = [list(left_out.page(node)) for node in nodes]
    if as_json:
        output.emit(
            [{**node._asdict(), "page": page} for node, page in zip(nodes, pages, strict=True)]
        )
    else:
        output.say(*(line for page in pages for line in page))
    return 0


def _row(node: Node) -> list[str]:
    until = output.when(node.until) if node.is_left_out else "failed once"
    return [node.node, node.target, until, " ".join(node.runs), node.reason]
