"""The page of `sweep watch`: the sweep, the runs of unfinished trials, and the newest results."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from deploykit.cli import describe, output, watch_lines
from deploykit.job.model import State
from deploykit.lib import units
from deploykit.observe.metrics.progress import Progress
from deploykit.run.metrics import RunMetrics, logs_are_here
from deploykit.run.registry import Run
from deploykit.run.watch import LOGS_AGAIN
from deploykit.sweep import space, summary
from deploykit.sweep.folder import SweepRecord
from deploykit.sweep.summary import SweepSummary, TrialSummary

_MOST = 1 << 20
"""Bytes at the end of each log that are read first."""
_CURVE, _GAUGE = 12, 40
"""Columns of the curve of the loss, and of the bar of the trials."""
_NEWEST = 8
"""Number of ended trials that are shown."""
_HEADINGS = ("trial", "state", "at", "left", "loss", "parameters", "")


@dataclass(frozen=True)
class _Going:
    """A run of an unfinished trial, and its progress."""

    sweep: SweepRecord
    trial: TrialSummary
    row: Run
    progress: Progress


@dataclass(frozen=True)
class _View:
    """A sweep at one moment."""

    sweep: SweepSummary
    going: list[_Going]

    @property
    def over(self) -> bool:
        """Whether nothing changes any more."""
        return not self.sweep.controlled and not self.going


class _Watch:
    """Queries a sweep again and again, and reads only the new lines of each log."""

    def __init__(self, record: SweepRecord) -> None:
        self._record = record
        self._readers: dict[str, RunMetrics] = {}
        self._fetched: dict[str, float] = {}

    def look(self, *, whole: bool) -> _View:
        """Return the sweep now. Reads one log on another machine each time, or all if `whole`."""
        sweep = summary.of(self._record)
        open_runs = [
            (trial, row)
            for trial in sweep.trials
            if trial.state == "running"
            for row in trial.runs
            if not State(row.state).final
        ]
        due = (
            {row.run for _, row in open_runs} if whole else self._due([row for _, row in open_runs])
        )
        going = [
            _Going(self._record, trial, row, self._progress(row, row.run in due))
            for trial, row in open_runs
        ]
        return _View(sweep, going)

    def _due(self, rows: list[Run]) -> set[str]:
        """The run whose log on another machine was read longest ago, if that was a while ago."""
        away = [row.run for row in rows if not logs_are_here(row)]
        oldest = min(away, key=lambda run: self._fetched.get(run, 0.0), default=None)
        if oldest is None or time.monotonic() < self._fetched.get(oldest, -LOGS_AGAIN) + LOGS_AGAIN:
            return set()
        self._fetched[oldest] = time.monotonic()
        return {oldest}

    def _progress(self, row: Run, fetch: bool) -> Progress:  # noqa: FBT001 - of one log
        reader = self._readers.setdefault(row.run, RunMetrics(row, most=_MOST))
        reader.row = row
        reader.refresh(fetch=fetch)
        return reader.progress()


class _Page:
    """What `watch_live` shows of a sweep."""

    afterwards = "the sweep continues"

    def __init__(self, watch: _Watch, view: _View) -> None:
        self._watch, self.view = watch, view

    @property
    def title(self) -> str:
        return f"sweep {self.view.sweep.record.id}"

    @property
    def rows(self) -> Sequence[Run]:
        return [one.row for one in self.view.going]

    @property
    def first(self) -> int:
        return len(list(_head(self.view))) + 2  # after a blank line and the headings

    @property
    def final(self) -> bool:
        return self.view.over

    def lines(self, width: int) -> list[str]:  # noqa: ARG002 - the page cuts long lines
        return list(_lines(self.view))

    def look(self) -> None:
        self.view = self._watch.look(whole=False)


def show(record: SweepRecord, interval: float | None, *, as_json: bool) -> int:
    """Show a sweep once, or with an `interval` in seconds until it has ended."""
    watch = _Watch(record)
    view = watch.look(whole=interval is None)
    if as_json:
        output.emit(_data(view))
        return 0
    if interval is not None and not view.over:
        from deploykit.cli import watch_live  # rich, only on a terminal

        page = _Page(watch, view)
        watch_live.show(page, interval)
        view = page.view
    output.say(*_lines(view))
    return 0


def _lines(view: _View) -> Iterator[str]:
    yield from _head(view)
    if view.going:
        yield ""
        yield from describe.columns([_HEADINGS, *map(_cells, view.going)])
    ended = [one for one in view.sweep.trials if one.state != "running"][-_NEWEST:]
    if ended:
        yield ""
        record = view.sweep.record
        metric = record.sweep.objective.metric
        rows = [
            ("ended", "state", metric, "parameters"),
            *(_ended(record, one) for one in reversed(ended)),
        ]
        yield from describe.columns(rows)


def _head(view: _View) -> Iterator[str]:
    state, *others = lines(view.sweep)
    ended = sum(one.state != "running" for one in view.sweep.trials) / max(1, view.sweep.total)
    yield state
    yield f"  done    {describe.gauge(ended, _GAUGE)} {ended:.0%}"
    yield from others


def _cells(one: _Going) -> tuple[str, ...]:
    progress = one.progress
    return (
        one.row.run.removeprefix(one.sweep.id).removeprefix("-"),
        one.row.state,
        watch_lines.far(progress),
        "-" if progress.left is None else units.span(progress.left),
        "-" if progress.loss is None else f"{progress.loss:.4g}",
        settings(one.sweep, one.trial),
        describe.sparkline(progress.curve, _CURVE),
    )


def _ended(record: SweepRecord, one: TrialSummary) -> tuple[str, ...]:
    value = "-" if one.value is None else f"{one.value:.6g}"
    return (str(one.number), one.state, value, settings(record, one))


def _data(view: _View) -> dict[str, Any]:
    """What `sweep status --json` prints, and the progress of the runs of unfinished trials."""
    going = [
        {
            "trial": one.trial.number,
            "run": one.row.run,
            "state": one.row.state,
            "progress": describe.data(one.progress),
        }
        for one in view.going
    ]
    return {**view.sweep.data(), "going": going}


def lines(sweep: SweepSummary) -> Iterator[str]:
    """The state of a sweep: its trials, its cost, the best trial."""
    counts = ", ".join(f"{count} {state}" for state, count in sorted(sweep.counts.items()))
    yield f"{sweep.record.id}: {sweep.state}"
    if sweep.halted:
        yield f"  reason  {sweep.halted}"
    yield f"  trials  {len(sweep.trials)} of {sweep.total}{f': {counts}' if counts else ''}"
    if sweep.cost is not None:
        cap = sweep.record.sweep.max_cost
        yield f"  cost    {sweep.cost}{f' of {cap}' if cap else ''}"
    if sweep.best is not None:
        metric, best = sweep.record.sweep.objective.metric, sweep.best
        values = settings(sweep.record, best)
        yield f"  best    trial {best.number}: {metric} {best.value:.6g} ({values})"
        yield from spread(sweep)


def settings(record: SweepRecord, one: TrialSummary) -> str:
    """The values of a trial, rounded: ``lr=0.1 layers=2``."""
    known = record.sweep.parameters
    return " ".join(f"{name}={space.brief(known[name], it)}" for name, it in one.values.items())


def spread(sweep: SweepSummary) -> Iterator[str]:
    """The confidence interval of the best trial, if trials are repeated."""
    best = sweep.best
    if best is None or best.spread is None:
        return
    yield f"          {best.spread}"
    if others := sweep.not_clearly_worse:
        numbers = ", ".join(map(str, others))
        yield f"          not clearly worse, because the intervals overlap: trials {numbers}"
