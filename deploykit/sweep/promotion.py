"""Successive halving with promotions: which trials pause at a rung, and which of them go on.

This is ASHA as Li et al. describe it (https://arxiv.org/abs/1810.05934, algorithm 2), which
Optuna's pruner shortens: a trial that is not among the best of its rung when it gets there pauses,
and goes on once it is among the best of all that have got there. Everything follows from the
journal. Imports Optuna.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from deploykit.sweep.model import Sweep

RUNG, PAUSED = "rung", "paused"
"""Attributes of a trial: the rung that it may train to, and the one at which it paused last."""


def rung(attributes: Mapping[str, Any]) -> int | None:
    """The rung that a trial may train to, from 0; None: to its end."""
    known = attributes.get(RUNG, 0)
    return known if isinstance(known, int) else None


def is_paused(attributes: Mapping[str, Any]) -> bool:
    """Whether a trial waits at its rung, or its run is being stopped there."""
    return bool(attributes.get(PAUSED, -1) == rung(attributes))


def _height(attributes: Mapping[str, Any]) -> int:
    """The highest rung that a trial has reached; -1: none."""
    paused, may = int(attributes.get(PAUSED, -1)), rung(attributes)
    return paused if may is None else max(paused, may - 1)


class _Place(NamedTuple):
    """A trial at a rung; the best comes first when they are sorted."""

    score: float
    number: int


class Ladder:
    """The rungs of a sweep: `min_steps` times a power of `reduction`."""

    def __init__(self, sweep: Sweep, study: Study) -> None:
        self._sweep, self._study = sweep, study
        self._scores: dict[tuple[int, int], float] = {}
        """By trial and rung; they never change."""

    def steps(self, rung: int) -> int:
        """The steps of a rung, as the metric counts them."""
        return self._sweep.min_steps * int(self._sweep.reduction**rung)

    def is_among_the_best(self, number: int, rung: int) -> bool:
        """Whether a trial that has reached a rung may go on to the next one."""
        return number in self._best(self._reached(rung, number), rung)

    def next(self) -> int | None:
        """The paused trial to go on, of the highest rung where one may; None: none may."""
        paused = self._paused()
        for rung in sorted(set(paused.values()), reverse=True):
            for number in self._best(self._reached(rung), rung):
                if paused.get(number) == rung:
                    return number
        return None

    def finalist(self) -> int | None:
        """The best paused trial of the highest rung; None where one has got to its end."""
        paused = self._paused()
        if self.has_ended or not paused:
            return None
        top = max(paused.values())
        at_top = [one for one in self._trials() if paused.get(one.number) == top]
        return min(self._places(at_top, top)).number

    @property
    def has_ended(self) -> bool:
        """Whether a trial has succeeded."""
        return any(one.state is TrialState.COMPLETE for one in self._trials())

    def _trials(self) -> Sequence[FrozenTrial]:
        return self._study.get_trials(deepcopy=False)

    def _paused(self) -> dict[int, int]:
        """The rung of each paused trial."""
        going = [one for one in self._trials() if one.state is TrialState.RUNNING]
        return {one.number: _height(one.user_attrs) for one in going if is_paused(one.user_attrs)}

    def _reached(self, rung: int, also: int = -1) -> list[FrozenTrial]:
        """The trials that have reached a rung and not failed; `also` is one that has just now."""
        return [
            one
            for one in self._trials()
            if one.state is not TrialState.FAIL
            and (one.number == also or _height(one.user_attrs) >= rung)
        ]

    def _best(self, reached: Sequence[FrozenTrial], rung: int) -> list[int]:
        """The numbers of those that may go on from a rung, the best first."""
        best = sorted(self._places(reached, rung))[: len(reached) // self._sweep.reduction]
        return [place.number for place in best if math.isfinite(place.score)]

    def _places(self, reached: Sequence[FrozenTrial], rung: int) -> list[_Place]:
        return [_Place(self._score(one, rung), one.number) for one in reached]

    def _score(self, trial: FrozenTrial, rung: int) -> float:
        """The first value of a trial at or after a rung, so that less is better; no number: inf."""
        key = (trial.number, rung)
        if key not in self._scores:
            values, least = trial.intermediate_values, self.steps(rung)
            step = min((one for one in values if one >= least), default=None)
            value = math.nan if step is None else values[step]
            sign = 1 if self._sweep.objective.direction == "minimize" else -1
            self._scores[key] = math.inf if math.isnan(value) else sign * value
        return self._scores[key]
