"""How many file operations the end of a job costs on the folder that all nodes share.

    python benchmarks/scale_nodes.py

The nodes are simulated: one process plays all of them with the node plane's own code, on a clock of
its own. The ranks of all nodes end within five seconds of a signal; then each node waits for the
others, leaves its record, and waits for the one that decides what follows.
"""

from __future__ import annotations

import heapq
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

sys.path.append(str(Path(__file__).resolve().parent.parent / "entrypoints"))

from deploykit_node import exit_records, gathering
from deploykit_node.cluster import Cluster
from deploykit_node.exit_records import STOPPED, NodeExit

_TICK = 0.2
_SPREAD = 5.0
"""Seconds within which the ranks of all nodes end."""
_DECIDING = 1.0
"""Seconds that the deciding node takes to ask Slurm."""
_OPERATIONS = ("open", "os.listdir", "os.scandir", "os.mkdir", "os.rename", "os.remove", "os.link")
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

    def __init__(self) -> None:
        self.playing: int | None = None
        self.now = 0.0
        self.counts: Counter[tuple[int, int]] = Counter()

    def count(self, *_: object) -> None:
        if self.playing is not None:
            self.counts[self.playing, int(self.now)] += 1

    def audit(self, event: str, _: object) -> None:
        if event in _OPERATIONS:
            self.count()


_folder = _Folder()
sys.addaudithook(_folder.audit)


def _node(env: dict[str, str], here: Cluster, ended: float, known: list[float]) -> Node:
    """One node after a signal: its ranks end, then those of all; records; the decision."""
    yield ended
    well = exit_records.gathering(env, "well", here)
    decision = Path(env["DEPLOYKIT_RUN_DIR"], "exit_records", "decision-0")
    done = exit_records.gathering(env, "ended", here, decision)
    assert well is not None  # noqa: S101 - there is a run folder
    assert done is not None  # noqa: S101 - as above
    well.arrive()
    while not well.complete():
        yield _TICK
    known.append(_folder.now)
    exit_records.record_node(env, here.node, NodeExit(STOPPED, "stopped", 0))
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


def main() -> None:
    """Print a table."""
    row = "{:>6}{:>13}{:>16}{:>18}{:>8}".format
    print(row("nodes", "operations", "for each node", "most in a second", "late"))
    for count in (10, 100, 1000):
        with tempfile.TemporaryDirectory() as folder:
            end = end_of_job(Path(folder), count, random.Random(0))
        per = f"{end.operations / count:.1f}"
        print(row(count, end.operations, per, end.most_in_a_second, f"{end.late:.1f}"))


if __name__ == "__main__":
    main()
