"""What the end of a job costs on the folder that all nodes share, and what the preflight costs.

    python benchmarks/scale_nodes.py

The nodes are simulated: one process plays all of them with the node plane's own code, on a clock of
its own. The ranks of all nodes end within five seconds of a signal; then each node waits for the
others, leaves its record, and waits for the one that decides what follows. Of the preflight it
counts the transfers and the bytes of the reports, and judges them. An exponent is the slope over
the nodes on logarithmic axes.
"""

from __future__ import annotations

import heapq
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

sys.path.append(str(Path(__file__).resolve().parent.parent / "entrypoints"))

from deploykit_node import records
from deploykit_node.cluster import Cluster
from deploykit_node.network import gathering
from deploykit_node.preflight import findings, links
from deploykit_node.preflight.peers import Peers
from deploykit_node.records import STOPPED, NodeExit

_TICK = 0.2
_SPREAD = 5.0
"""Seconds within which the ranks of all nodes end."""
_DECIDING = 1.0
"""Seconds that the deciding node takes to ask Slurm."""
Node = Generator[float, None, None]
"""Yields the seconds until the node goes on."""


class End(NamedTuple):
    """What the end of a job took."""

    operations: int
    """File operations of all nodes."""
    most_in_a_second: int
    """The most of one node."""
    late: float
    """Seconds between the end of the last rank and the moment when the last node knows."""


class _Folder:
    """A shared folder that counts what the node that plays does, by second."""

    OPERATIONS = frozenset(
        {"open", "os.listdir", "os.scandir", "os.mkdir", "os.rename", "os.remove", "os.link"}
    )

    def __init__(self) -> None:
        self.playing: int | None = None
        self.now = 0.0
        self.counts: Counter[tuple[int, int]] = Counter()

    def count(self, *_: object) -> None:
        if self.playing is not None:
            self.counts[self.playing, int(self.now)] += 1

    def audit(self, event: str, _: object) -> None:
        if event in self.OPERATIONS:
            self.count()


_folder = _Folder()
sys.addaudithook(_folder.audit)


def _node(env: dict[str, str], here: Cluster, ended: float, known: list[float]) -> Node:
    """One node after a signal: its ranks end, then those of all; records; the decision."""
    yield ended
    all_ended = gathering.gathering(env, "ranks_ended", here)
    decision = Path(env["DEPLOYKIT_RUN_DIR"], "exit_records", "decision-0")
    done = gathering.gathering(env, "ended", here, decision)
    assert all_ended is not None  # noqa: S101 - there is a run folder
    assert done is not None  # noqa: S101 - as above
    all_ended.arrive()
    while not all_ended.complete():
        yield _TICK
    known.append(_folder.now)
    records.record_node(env, here.node, NodeExit(STOPPED, "stopped", 0))
    done.arrive()
    while not done.complete():
        yield _TICK
    if done.flagged:
        return
    try:
        os.close(os.open(decision, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        pause = gathering.Pause.of(len(here.hosts))
        while not pause.over() or not gathering.is_written(decision):
            yield _TICK
    else:
        yield _DECIDING
        decision.write_text("requeued\n")


def end_of_job(folder: Path, count: int, chance: random.Random) -> End:
    """Play the end of a job of `count` nodes in an empty folder."""
    _folder.counts.clear()
    env, hosts = {"DEPLOYKIT_RUN_DIR": str(folder)}, tuple(map(str, range(count)))
    ends, known = [chance.uniform(0, _SPREAD) for _ in hosts], list[float]()
    (folder / "exit_records").mkdir()
    nodes = [_node(env, Cluster("slurm", at, hosts), ends[at], known) for at in range(count)]
    clock = SimpleNamespace(monotonic=lambda: _folder.now)
    stat = Path.stat

    def counted(path: Path, **how: Any) -> os.stat_result:
        _folder.count()
        return stat(path, **how)

    with (
        mock.patch.object(gathering, "time", clock),
        mock.patch.object(gathering, "random", chance),
        mock.patch.object(Path, "stat", counted),
    ):
        _play(nodes)
    each = Counter[int]()
    for (_, second), number in _folder.counts.items():
        each[second] += number
    return End(each.total(), max(_folder.counts.values()), max(known) - max(ends))


def _play(nodes: list[Node]) -> None:
    """Let each node go on when its time has come, until all have ended."""
    due = [(0.0, at) for at in range(len(nodes))]
    while due:
        _folder.now, at = heapq.heappop(due)
        _folder.playing = at
        seconds = next(nodes[at], None)
        _folder.playing = None
        if seconds is not None:
            heapq.heappush(due, (_folder.now + seconds, at))


class Preflight(NamedTuple):
    """What the tests of the links of healthy nodes take."""

    transfers: int
    sent: float
    """MB that a node sends."""
    told: float
    """MB of reports that node 0 is sent."""
    seconds: float
    """CPU seconds to judge them."""


def preflight(count: int) -> Preflight:
    """Let each of `count` nodes find all its links well, and judge what they report."""
    hosts = tuple(f"n{number}" for number in range(count))
    addresses = tuple(f"10.0.{number // 250}.{number % 250}" for number in range(count))
    peers = [Peers(node, hosts, addresses, 20000, b"k") for node in range(count)]
    reports = {each.node: _report(each) for each in peers}
    transfers = sum("rate" in link for one in reports.values() for link in one["links"].values())
    began = time.process_time()
    if found := findings.judge("pairs", peers[0], reports):
        raise RuntimeError(found)
    seconds = time.process_time() - began
    told = sum(len(json.dumps(report)) for report in reports.values())
    return Preflight(transfers, transfers / count * links.BULK / 1e6, told / 1e6, seconds)


def _report(peers: Peers) -> dict[str, Any]:
    """The report of a healthy node."""
    usual = {"state": "ok", "clock": 0.00012, "seconds": 0.00123, "port": 20000, "bulk": 41234}
    rate = {"rate": 1234567890.12}
    row = {str(n): usual | (rate if n != peers.only_greeted else {}) for n in peers.tested}
    address = peers.addresses[peers.node]
    return {
        "interface": "eth0",
        "address": address,
        "mtu": 1500,
        "line_rate": 12.5e9,
        "own": 2e9,
        "versions": {"driver": "570.86.15", "torch": "2.9.0", "NCCL": "2.27.5"},
        "shm": 8 << 30,
        "disks": {"/out": 90 << 30, "/tmp": 90 << 30},  # noqa: S108 - a name
        "health": {"faults": [], "counts": {"GPUs": 8}, "skipped": []},
        "links": row,
    }


def exponent(counts: Sequence[int], values: Sequence[float]) -> float:
    """The slope of the values over the counts on logarithmic axes."""
    logs = [math.log(max(value, 1e-6)) for value in values]
    return statistics.linear_regression([math.log(count) for count in counts], logs).slope


def _table(names: Sequence[str], rows: Sequence[Sequence[float]]) -> None:
    """Print a row for each number of nodes, which comes first, and the exponents of the others."""
    line = "{:>9}" + "{:>18}" * (len(names) - 1)
    print(line.format(*names))
    for row in rows:
        print(line.format(*(f"{it:,}" if isinstance(it, int) else f"{it:.4g}" for it in row)))
    counts, *columns = zip(*rows, strict=True)
    slopes = (f"{exponent([int(n) for n in counts], column):.2f}" for column in columns)
    print(line.format("exponent", *slopes))


def main() -> None:
    """Print two tables."""
    ends = []
    for count in (10, 100, 1000):
        with tempfile.TemporaryDirectory() as folder:
            ends.append((count, *end_of_job(Path(folder), count, random.Random(0))))
    _table(("nodes", "file operations", "most in a second", "known after (s)"), ends)
    print()
    tests = [(count, *preflight(count)) for count in (64, 250, 1000)]
    _table(("nodes", "transfers", "MB that each sends", "MB for node 0", "judged in CPU s"), tests)


if __name__ == "__main__":
    main()
