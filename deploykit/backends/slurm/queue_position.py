"""The position in the queue of jobs that wait only for nodes or for jobs of higher priority."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from deploykit.backends.slurm.states import Row
from deploykit.decode import whole

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


def describe(row: Row, pending: Iterable[PendingJob]) -> str:
    """``waiting for 2 nodes in partition gpu; 14 jobs ahead; expected to start at ...``."""
    ahead = _count_ahead(row, pending)
    nodes = f"{row.nodes} node{'' if row.nodes == '1' else 's'}"
    parts = [
        f"waiting for {nodes} in partition {row.partition}",
        f"{ahead or 'no'} job{'' if ahead == 1 else 's'} ahead",
    ]
    if row.started is not None:
        parts.append(f"expected to start at {row.started:%Y-%m-%d %H:%M} UTC")
    return "; ".join(parts)


def _count_ahead(row: Row, pending: Iterable[PendingJob]) -> int:
    """How many jobs of the same partitions have a higher priority, or the same and a lower id."""
    partitions, rank = frozenset(row.partition.split(",")), (-row.priority, _number(row.id))
    return sum(
        not partitions.isdisjoint(other.partitions) and (-other.priority, _number(other.id)) < rank
        for other in pending
    )


def _number(job: str) -> int:
    """The number of a job, or of the array that it belongs to."""
    match = re.match(r"[0-9]+", job)
    return (whole(match[0]) or 0) if match else 0
