"""Print what the ranks of a run printed, oldest first."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import TextIO

from deploykit import backend, lifecycle, runs
from deploykit.commands import arguments, output
from deploykit.errors import NotFound
from deploykit.model import LogLine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.one_run(parser)
    parser.add_argument("-f", "--follow", action="store_true", help="go on until the run has ended")
    parser.add_argument("--rank", type=int, metavar="N", help="only this global rank")
    parser.add_argument("--node", type=int, metavar="N", help="only this node, from 0")
    parser.add_argument(
        "--since",
        type=arguments.moment,
        metavar="WHEN",
        help="only lines after this: 10m ago as 10m, or a time such as 2026-11-21T01:46 (UTC)",
    )


def run(args: argparse.Namespace) -> int:
    row = lifecycle.refresh([runs.get(args.run)])[0]
    if row.handle is None:
        raise NotFound(f"{row.run} has no logs: it is {row.state}", hint=row.reason or None)
    lines: Iterable[LogLine] = backend.find(row.backend).logs(row.handle, follow=args.follow)
    if args.rank is not None:
        lines = (line for line in lines if line.rank == args.rank)
    if args.node is not None:
        lines = (line for line in lines if line.node == args.node)
    if args.since is not None:
        lines = _since(lines, args.since)
    lines = _noting_silence(lines, args.rank)
    if args.json:
        for line in lines:
            output.say(json.dumps(vars(line), default=str, ensure_ascii=False))
    else:
        print_lines(lines, sys.stdout)
    return 0


def _since(lines: Iterable[LogLine], moment: datetime) -> Iterator[LogLine]:
    """Lines from `moment` on. A line without a time has that of the one before on its node."""
    reached: set[int | None] = set()
    for line in lines:
        if line.time is not None and line.time >= moment:
            reached.add(line.node)
        if line.node in reached:
            yield line


def _noting_silence(lines: Iterable[LogLine], rank: int | None) -> Iterator[LogLine]:
    """The lines; where there is none, say so."""
    line = None
    for line in lines:
        yield line
    if line is None:
        output.note("no line yet" if rank is None else f"no line of rank {rank}")


def print_lines(lines: Iterable[LogLine] | Iterator[LogLine], out: TextIO) -> None:
    """Lines with the rank, or the node where no rank wrote them, in front."""
    for line in lines:
        place = f"[rank {line.rank}] " if line.rank is not None else _node(line)
        out.write(f"{place}{line.text}\n")
        out.flush()


def _node(line: LogLine) -> str:
    return f"[node {line.node}] " if line.node is not None else ""
