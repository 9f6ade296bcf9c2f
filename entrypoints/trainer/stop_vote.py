"""Agreement between the ranks on when to stop early."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import distributed

INTERVAL = 0.5
"""Seconds between two votes if steps are shorter than that."""
MAX_STEPS = 100
"""Maximum number of steps between two votes."""


class StopVote:
    """Tells all ranks at the same step that one of them has received a stop signal.

    A vote starts before a step and its result is read after it. It runs over gloo in a process
    group of its own, so it overlaps with the step, never waits for a GPU and does not interfere
    with other collectives. The vote also carries the step time of the slowest rank, from which all
    ranks derive the step of the next vote. The step time is unknown in the first vote, so a second
    vote follows at the next step.
    """

    def __init__(self, stop_signals: Sequence[int]) -> None:
        self._stop_signals = stop_signals
        self._group = distributed.new_group(backend="gloo")
        self._ballot = torch.zeros(2, dtype=torch.float64)
        """(stop requested, seconds per step); reduced to the maximum over the ranks."""
        self._work: distributed.Work | None = None
        self._interval = self._steps_left = 1
        self._started: float | None = None

    def start(self) -> None:
        """Start a vote if one is due. Every rank calls this once before each step."""
        self._steps_left -= 1
        if self._steps_left:
            return
        now = time.monotonic()
        step_seconds = INTERVAL
        if self._started is not None:
            step_seconds = (now - self._started) / self._interval
        requested = float(bool(self._stop_signals))
        self._ballot.copy_(torch.tensor([requested, step_seconds], dtype=torch.float64))
        self._started = now
        self._work = distributed.all_reduce(
            self._ballot, distributed.ReduceOp.MAX, group=self._group, async_op=True
        )

    def result(self) -> bool | None:
        """Whether to stop, or None without a vote before this step; the same on every rank."""
        if self._work is None:
            return None
        self._work.wait()
        self._work = None
        requested, step_seconds = self._ballot.tolist()
        shortest = INTERVAL / MAX_STEPS
        self._interval = self._steps_left = max(1, int(INTERVAL / max(step_seconds, shortest)))
        return bool(requested)
