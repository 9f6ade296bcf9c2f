"""A sweep in a few lines of text, for `sweep status`, `watch` and their like."""

from __future__ import annotations

from collections.abc import Iterator

from deploykit.sweep.summary import SweepSummary, TrialSummary


def lines(sweep: SweepSummary) -> Iterator[str]:
    """The state of a sweep: its trials, its cost, the best of it."""
    counts = ", ".join(f"{count} {state}" for state, count in sorted(sweep.counts.items()))
    yield f"{sweep.record.id}: {sweep.state}"
    yield f"  trials  {len(sweep.trials)} of {sweep.total}{f': {counts}' if counts else ''}"
    if sweep.cost is not None:
        cap = sweep.record.sweep.max_cost
        yield f"  cost    {sweep.cost}{f' of {cap}' if cap else ''}"
    if sweep.best is not None:
        metric, best = sweep.record.sweep.objective.metric, sweep.best
        yield f"  best    trial {best.number}: {metric} {best.value:.6g} ({settings(best)})"
        yield from spread(sweep)


def settings(one: TrialSummary) -> str:
    """The values of a trial: ``lr=0.1 layers=2``."""
    return " ".join(f"{name}={value}" for name, value in one.values.items())


def spread(sweep: SweepSummary) -> Iterator[str]:
    """How sure the best of repeated trials is."""
    best = sweep.best
    if best is None or best.spread is None:
        return
    yield f"          {best.spread}"
    if others := sweep.not_clearly_worse:
        numbers = ", ".join(map(str, others))
        yield f"          not clearly worse, since the intervals overlap: {numbers}"
