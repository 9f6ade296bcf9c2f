"""Runs side by side as rows of texts, for `compare` and `report`, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from deploykit.cli import output, progress_text
from deploykit.lib import units
from deploykit.run import report as run_report
from deploykit.run.report import Comparison, MetricRow, RunFacts

UNKNOWN = "-"
_HASH = 12
"""Characters of a commit or of a bundle's hash that are shown."""


class Line(NamedTuple):
    """A heading, a text for each run, and the places of the best ones."""

    name: str
    texts: list[str]
    best: frozenset[int] = frozenset()


def ends(one: Comparison) -> Iterator[Line]:
    """How the runs ended, whether or not that differs."""
    yield Line("state", [state(facts) for facts in one.facts])
    yield Line("duration", [units.span(run_report.seconds(facts)) for facts in one.facts])
    if any(facts.cost for facts in one.facts):
        yield Line("cost", [f.cost.total if f.cost else UNKNOWN for f in one.facts])
    if any(facts.restarts for facts in one.facts):
        yield Line("restarts", [str(facts.restarts) for facts in one.facts])


def settings(one: Comparison) -> Iterator[Line]:
    """Source, keys of the job and arguments that differ."""
    for row in one.settings:
        most = _HASH if row.name in {"commit", "bundle"} else None
        yield Line(row.name, [UNKNOWN if it is None else it[:most] for it in row.values])


def metrics(one: Comparison) -> Iterator[Line]:
    """Metrics that differ: the last value, and the best one where that is another."""
    for row in one.metrics:
        if row.differs:
            yield from _of_metric(row)


def _of_metric(row: MetricRow) -> Iterator[Line]:
    last = [_number(it.last if it else None) for it in row.values]
    yield Line(f"{row.name}, last", last, row.winners(lambda it: it.last))
    if row.has_best and any(it and it.best != it.last for it in row.values):
        best = [_number(it.best if it else None) for it in row.values]
        yield Line(f"{row.name}, best", best, row.winners(lambda it: it.best))


def state(facts: RunFacts) -> str:
    """``failed, exit code 3``."""
    code = facts.row.exit_code
    return f"{facts.row.state}, exit code {code}" if code else facts.row.state


def data(one: Comparison) -> dict[str, Any]:
    """The same as JSON: each value by its run."""
    names = [facts.row.run for facts in one.facts]
    return {
        "runs": [_run(facts) for facts in one.facts],
        "settings": [
            {"name": row.name, "values": dict(zip(names, row.values, strict=True))}
            for row in one.settings
        ],
        "same_settings": one.same,
        "metrics": [_metric(row, names) for row in one.metrics],
    }


def _run(facts: RunFacts) -> dict[str, Any]:
    own = {"restarts": facts.restarts, "problems": facts.problems}
    return {**output.run_data(facts.row), **own}


def _metric(row: MetricRow, names: list[str]) -> dict[str, Any]:
    winners = row.winners(lambda it: it.best if row.has_best else it.last)
    known = {name: one for name, one in zip(names, row.values, strict=True) if one is not None}
    return {
        "name": row.name,
        "better": row.better,
        "last": {name: progress_text.number(one.last) for name, one in known.items()},
        "best": {name: progress_text.number(one.best) for name, one in known.items()},
        "best_runs": [names[at] for at in sorted(winners)],
        "sources": {name: one.source for name, one in known.items()},
    }


def _number(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.6g}"
