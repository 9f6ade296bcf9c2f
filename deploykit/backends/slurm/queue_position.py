"""The position in the queue of jobs that wait only for nodes or for jobs of higher priority."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from deploykit.backends.slurm.states import Row
from deploykit.job.decode import whole

_REASONS = {"Resources", "Priority"}
_FORMAT = "%i|%P|%Q"


@dataclass(frozen=True)
class PendingJob:
    """A pending job of any user; a pending job array counts as one job."""

    id: str
    partitions: frozenset[str]
    priority: int


def pending_argv() -> list[str]:
    """The command that lists the pending jobs of all users, as far as the site shows them."""
    return ["squeue", "--noheader", "--states=PENDING", f"--format={_FORMAT}"]


def parse_pending(text: str) -> Iterator[PendingJob]:
    """The jobs in the output of `pending_argv`; lines of another form are skipped."""
    for line in text.splitlines():
        job, *rest = line.split("|")
        priority = whole(rest[-1]) if len(rest) == _FORMAT.count("|") else None
        if priority is not None:
            yield PendingJob(job, frozenset(rest[0].split(",")), priority)


def has_position(row: Row) -> bool:
    """Whether the job waits for nodes or for jobs of higher priority, and for nothing else.

    A row of another command than squeue has no nodes and no partition to count jobs in.
    """
    return row.native == "PENDING" and row.reason in _REASONS and row.nodes != ""


class Queue:
    """The pending jobs of a cluster in their order: asked for each of many jobs, sorted once."""

    def __init__(self, pending: Iterable[PendingJob]) -> None:
        self._jobs = [(job.partitions, (-job.priority, _number(job.id))) for job in pending]
        self._orders: dict[frozenset[str], list[tuple[int, int]]] = {}

    def ahead(self, row: Row) -> int:
        """How many jobs of its partitions have a higher priority, or the same and a lower id."""
        partitions = frozenset(row.partition.split(","))
        if partitions not in self._orders:
            shared = (rank for own, rank in self._jobs if not partitions.isdisjoint(own))
            self._orders[partitions] = sorted(shared)
        return bisect_left(self._orders[partitions], (-row.priority, _number(row.id)))


def describe(row: Row, queue: Queue) -> str:
    """``waiting for 2 nodes in partition gpu; 14 jobs ahead; expected to start at ...``."""
    ahead = queue.ahead(row)
    nodes = f"{row.nodes} node{'' if row.nodes == '1' else 's'}"
    parts = [
        f"waiting for {nodes} in partition {row.partition}",
        f"{ahead or 'no'} job{'' if ahead == 1 else 's'} ahead",
    ]
    if row.started is not None:
        parts.append(f"expected to start at {row.started:%Y-%m-%d %H:%M} UTC")
    return "; ".join(parts)


def _number(job: str) -> int:
    """The number of a job, or of the array that it belongs to."""
    match = re.match(r"[0-9]+", job)
    return (whole(match[0]) or 0) if match else 0
