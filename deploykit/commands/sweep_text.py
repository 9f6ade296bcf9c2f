"""A sweep in a few lines of text, for `sweep status`, `watch` and their like."""

from __future__ import annotations

from collections.abc import Iterator

from deploykit.sweep.summary import SweepSummary, TrialSummary


def lines(found: SweepSummary) -> Iterator[str]:
    """The state of a sweep: its trials, its cost, the best of it."""
    counts = ", ".join(f"{count} {state}" for state, count in sorted(found.counts.items()))
    yield f"{found.record.id}: {found.state}"
    yield f"  trials  {len(found.trials)} of {found.total}{f': {counts}' if counts else ''}"
    if found.cost is not None:
        cap = found.record.sweep.max_cost
        yield f"  cost    {found.cost}{f' of {cap}' if cap else ''}"
    if found.best is not None:
        metric, best = found.record.sweep.objective.metric, found.best
        yield f"  best    trial {best.number}: {metric} {best.value:.6g} ({settings(best)})"
        yield from spread(found)


def settings(one: TrialSummary) -> str:
    """The values of a trial: ``lr=0.1 layers=2``."""
    return " ".join(f"{name}={value}" for name, value in one.values.items())


def spread(found: SweepSummary) -> Iterator[str]:
    """How sure the best of repeated trials is."""
    best = found.best
    if best is None or best.spread is None:
        return
    yield f"          {best.spread}"
    if others := found.not_clearly_worse:
        numbers = ", ".join(map(str, others))
        yield f"          not clearly worse, since the intervals overlap: {numbers}"
