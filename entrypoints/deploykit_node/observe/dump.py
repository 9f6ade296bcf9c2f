"""The stacks of all ranks of this node, written into the run folder.

    launch.py --dump-stacks RUN_FOLDER FOLDER [--native] [--py-spy PATH]

`FOLDER` is a folder in ``stacks/`` of the run folder; the file there has this node's name. Each
process is read by py-spy where there is one and it may, else it writes its stacks itself.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from deploykit_node import cluster, records
from deploykit_node.cluster import Environ
from deploykit_node.log import now
from deploykit_node.observe import faults, processes, spy, stacks
from deploykit_node.observe.stacks import (
    NodeStacks,
    NoStacks,
    ProcessStacks,
    RankStacks,
    Thread,
)
from deploykit_node.records import ProcessRecord

_AT_ONCE = 8
"""Ranks whose stacks are taken at the same time."""


@dataclass(frozen=True)
class Options:
    """How to take stacks: py-spy's path (None: without it), and whether native calls are shown."""

    spy: str | None
    native: bool = False


def main(argv: Sequence[str]) -> None:
    """Write the dump of this node."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("run_folder")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--native", action="store_true")
    parser.add_argument("--py-spy", default="")
    values = parser.parse_args(argv)
    env = {**os.environ, "DEPLOYKIT_RUN_DIR": values.run_folder}
    write(env, values.folder, Options(spy.program(values.py_spy), values.native))


def write(env: Environ, folder: Path, options: Options) -> None:
    """Take the stacks of this node's ranks, and write them into `folder`."""
    host = cluster.host_name(env)
    ranks = processes.here(env)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        taken = pool.map(partial(_of_rank, options), ranks, ranks.values())
        dump: NodeStacks = {
            "host": host,
            "time": now(),
            "world_size": max((record["world_size"] for record in ranks.values()), default=0),
            "ranks": list(taken),
        }
    records.write(folder / f"{host}.json", dump)


def _of_rank(options: Options, rank: int, record: ProcessRecord) -> RankStacks:
    """The stacks of a rank by the first way that works; `problem` says why another one did not."""
    process = _process(record["pid"])
    result = RankStacks(rank=rank, tool="", problem="", process=process, children=[])
    problems = []
    ways = {
        "py-spy": partial(_spied, options, process),
        "faulthandler": partial(faults.take, process["pid"], Path(record["stacks"])),
    }
    for tool, take in ways.items():
        try:
            process["threads"], result["tool"] = stacks.with_sources(take()), tool
            break
        except (NoStacks, OSError) as error:
            problems.append(str(error))
    if result["tool"] == "py-spy":
        result["children"] = [
            _child(options, child) for child in processes.children(process["pid"])
        ]
    result["problem"] = "; ".join(problems)
    return result


def _spied(options: Options, process: ProcessStacks) -> list[Thread]:
    if options.spy is None:
        raise NoStacks("py-spy is not installed on the node")
    return spy.take(options.spy, process["pid"], process["state"], native=options.native)


def _process(pid: int) -> ProcessStacks:
    stat = processes.stat(pid)
    name, state = (stat.name, stat.state) if stat else ("", "")
    return ProcessStacks(pid=pid, name=name, state=state, threads=[])


def _child(options: Options, pid: int) -> ProcessStacks:
    """A process that a rank has started: a worker of its data loader, or any other program."""
    process = _process(pid)
    with contextlib.suppress(NoStacks):  # it runs no Python, or has ended
        process["threads"] = stacks.with_sources(_spied(replace(options, native=False), process))
    return process
