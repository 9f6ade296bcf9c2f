"""Whose turn it is: the place in the queue of jobs that wait for nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from deploykit.backends.slurm.states import Row
from deploykit.decode import whole

_IN_LINE = {"Resources", "Priority"}
_FORMAT = "%i|%P|%Q"


@dataclass(frozen=True)
class Waiting:
    """A job in the queue, anybody's; a whole array that waits is one."""

    id: str
    partitions: frozenset[str]
    priority: int


def argv() -> list[str]:
    """What waits, of all users, as far as the site lets you see it."""
    return ["squeue", "--noheader", "--states=PENDING", f"--format={_FORMAT}"]


def parse(text: str) -> Iterator[Waiting]:
    for line in text.splitlines():
        job, *rest = line.split("|")
        priority = whole(rest[-1]) if len(rest) == _FORMAT.count("|") else None
        if priority is not None:
            yield Waiting(job, frozenset(rest[0].split(",")), priority)


def in_line(row: Row) -> bool:
    """Whether the job waits for its turn alone."""
    return row.native == "PENDING" and row.reason in _IN_LINE


def words(row: Row, queue: Iterable[Waiting]) -> str:
    """``waits for 2 nodes of partition gpu; 14 jobs ahead; Slurm expects to start it at ...``."""
    first = _ahead(row, queue)
    said = [
        f"waits for {row.nodes} node{'' if row.nodes == '1' else 's'} of partition {row.partition}",
        f"{first or 'no'} job{'' if first == 1 else 's'} ahead",
    ]
    if row.started is not None:
        said.append(f"Slurm expects to start it at {row.started:%Y-%m-%d %H:%M} UTC")
    return "; ".join(said)


def _ahead(row: Row, queue: Iterable[Waiting]) -> int:
    """How many go first in a partition of the job's: of higher priority, or older."""
    own, mine = frozenset(row.partition.split(",")), (-row.priority, _number(row.id))
    return sum(
        not own.isdisjoint(other.partitions) and (-other.priority, _number(other.id)) < mine
        for other in queue
    )


def _number(job: str) -> int:
    """The number of a job, or of the array that it belongs to."""
    match = re.match(r"[0-9]+", job)
    return (whole(match[0]) or 0) if match else 0
