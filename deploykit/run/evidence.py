"""What is known of how a run ended beside its logs, and which of the causes in them it refutes.

docs/how-to/diagnose.md lists the rules of judgement.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from deploykit.diagnose import cause_rules
from deploykit.diagnose.ranking import Cause
from deploykit.job.model import State
from deploykit.observe import exit_records, stacks
from deploykit.observe.exit_records import ExitRecord
from deploykit.run.registry import Run

_BY_SIGNAL = 128
"""An exit code above it is that of a signal."""
_AFTER_AN_EXIT = {"slurm_cancelled", "remote_peer_died", cause_rules.UNKNOWN}
"""Causes that follow where a rank has exited by itself, and are none then."""
_FROM_OUTSIDE = frozenset({"slurm_preempted", "slurm_time_limit", "slurm_node_fail"})
"""Causes that end an attempt although all its ranks are well."""
_DESPITE_SUCCESS = {"nan_loss", "efa_not_used"}
"""Causes that a program does not notice: it ends well all the same."""
_TOLD = " after a signal to stop"
"""In what a record says of a rank that did not fail by itself."""
_CODE = re.compile(r" \(exit code \d+\)")
"""What a record says of a signal twice."""


@dataclass(frozen=True)
class Evidence:
    """What a run's backend and its launchers recorded."""

    texts: Mapping[str, Sequence[str]]
    """Lines for the rules of diagnose, by where they are from."""
    first: ExitRecord | None = None
    """The record of what failed first."""
    succeeded: bool = False

    @property
    def first_rank(self) -> int | None:
        """The rank that failed first; None also where it was told to stop."""
        if self.first is None or _TOLD in self.first.reason:
            return None
        return self.first.rank

    @property
    def overcome(self) -> frozenset[str]:
        """Labels of causes that can only have ended an earlier attempt, of which the logs tell.

        In the last one a rank exited by itself.
        """
        first = self.first
        if first is None or not first.attempt or self.first_rank is None:
            return frozenset()
        return _FROM_OUTSIDE if 0 < first.exit_code < _BY_SIGNAL else frozenset()

    @property
    def ended(self) -> str | None:
        """Who ended first and with what."""
        if self.first is None:
            return None
        who = "a launcher" if self.first.rank is None else f"rank {self.first.rank}"
        return f"{who} ended first, with exit code {self.first.exit_code}: {self.first.reason}"

    def judged(self, causes: Sequence[Cause]) -> Sequence[Cause]:
        """The causes without those that the records refute.

        A run that succeeded overcame what its logs tell. Where a rank exited by itself, srun
        cancels the step of the others, and those lose their connections: that only follows.
        """
        if self.succeeded:
            return [cause for cause in causes if cause.rule.label in _DESPITE_SUCCESS]
        first = self.first
        if first is None or first.rank is None or not 0 < first.exit_code < _BY_SIGNAL:
            return causes
        return [cause for cause in causes if cause.rule.label not in _AFTER_AN_EXIT]


def of(row: Run, folders: Sequence[Path]) -> Evidence:
    """What is known of a run; `folders` are its own, or those of the tasks that failed."""
    state = State(row.state)
    texts: dict[str, Sequence[str]] = {}
    if state in {State.FAILED, State.BLOCKED}:
        texts[f"status of {row.run}"] = [f"State={row.native}", row.reason]
    elif state is State.RUNNING:
        texts[f"status of {row.run}"] = [stacks.stall_reason(Path(row.folder))]
    first = _first_failure(folders) if state is State.FAILED else None
    if first is not None:
        texts[f"exit records of {row.run}"] = [_sentence(first)]
        texts[f"preflight of {row.run}"] = list(_failed_checks(folders, first.attempt))
    return Evidence(texts, first, state is State.SUCCEEDED)


def _first_failure(folders: Sequence[Path]) -> ExitRecord | None:
    records = (record for folder in folders for record in exit_records.read(folder))
    failed = (record for record in records if record.exit_code)
    return min(failed, key=lambda record: record.finished, default=None)


def _sentence(record: ExitRecord) -> str:
    """As a line of a log. What a launcher stopped itself died of no signal of its own."""
    rank = "" if record.rank is None else f"[rank {record.rank}] "
    return f"{_time(record.finished)} {rank}{_CODE.sub('', record.reason)}"


def _time(moment: datetime) -> str:
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _failed_checks(folders: Sequence[Path], attempt: int) -> Iterator[str]:
    """Nodes that failed the check before the start of the last attempt."""
    for folder in folders:
        for host, why in exit_records.failed_checks(folder, attempt):
            yield f"preflight: FAILED: {why} ({host})"
