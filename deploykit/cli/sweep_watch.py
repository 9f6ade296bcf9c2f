"""The page of `sweep watch`: the sweep, the runs of its open trials, and the newest results."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from deploykit.cli import describe, output
from deploykit.job.model import State
from deploykit.lib import terminal, units
from deploykit.observe.metrics.progress import Progress
from deploykit.run.metrics import RunMetrics, logs_are_here
from deploykit.run.registry import Run
from deploykit.run.watch import LOGS_AGAIN
from deploykit.sweep import summary
from deploykit.sweep.folder import SweepRecord
from deploykit.sweep.summary import SweepSummary, TrialSummary

_MOST = 1 << 20
"""Bytes at the end of each log that are read at first."""
_CURVE = 12
"""Columns of the curve of the loss."""
_NEWEST = 8
"""Trials that have ended which are shown."""
_HEADINGS = ("trial", "run", "state", "at", "left", "loss", "", "parameters")
_FOOTER = "Ctrl-C closes this page; the sweep continues"


@dataclass(frozen=True)
class _Going:
    """A run of an open trial, and how far it is."""

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
    """Looks at a sweep again and again; of each log only what is new is read."""

    def __init__(self, record: SweepRecord) -> None:
        self._record = record
        self._readers: dict[str, RunMetrics] = {}
        self._fetched: dict[str, float] = {}

    def look(self, *, whole: bool) -> _View:
        """The sweep now. Of logs on another machine one is read in each look, or all (`whole`)."""
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
            _Going(trial, row, self._progress(row, row.run in due)) for trial, row in open_runs
        ]
        return _View(sweep, going)

    def _due(self, rows: list[Run]) -> set[str]:
        """The run whose log on another machine was read longest ago, after a while."""
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


def show(record: SweepRecord, interval: float | None, *, as_json: bool) -> int:
    """Show a sweep once, or with an `interval` in seconds until it has ended."""
    watch = _Watch(record)
    view = watch.look(whole=interval is None)
    if as_json:
        output.emit(_data(view))
        return 0
    if interval is not None and not view.over:
        view = _live(watch, view, interval)
    output.say(*_lines(view))
    return 0


def _live(watch: _Watch, view: _View, interval: float) -> _View:
    """Draw the page until the sweep has ended; the last view, to be printed."""
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    console = Console()

    def page() -> Group:
        lines = [terminal.line(line) for line in _lines(view)]
        shown = lines[: max(1, console.height - 2)]
        texts = [Text(line, no_wrap=True, overflow="ellipsis") for line in shown]
        return Group(*texts, Text(""), Text(_FOOTER, style="dim"))

    with Live(page(), console=console, screen=True, auto_refresh=False) as live:
        while not view.over:
            live.update(page(), refresh=True)
            time.sleep(interval)
            view = watch.look(whole=False)
    return view


def _lines(view: _View) -> Iterator[str]:
    yield from lines(view.sweep)
    if view.going:
        yield ""
        yield from describe.columns([_HEADINGS, *map(_cells, view.going)])
    ended = [one for one in view.sweep.trials if one.state != "running"][-_NEWEST:]
    if ended:
        yield ""
        metric = view.sweep.record.sweep.objective.metric
        rows = [("ended", "state", metric, "parameters"), *map(_ended, reversed(ended))]
        yield from describe.columns(rows)


def _cells(one: _Going) -> tuple[str, ...]:
    far = one.progress
    return (
        str(one.trial.number),
        one.row.run,
        one.row.state,
        (describe.position(far) or ["-"])[0],
        "-" if far.left is None else units.span(far.left),
        "-" if far.loss is None else f"{far.loss:.4g}",
        describe.sparkline(far.curve, _CURVE),
        settings(one.trial),
    )


def _ended(one: TrialSummary) -> tuple[str, ...]:
    value = "-" if one.value is None else f"{one.value:.6g}"
    return (str(one.number), one.state, value, settings(one))


def _data(view: _View) -> dict[str, Any]:
    """What `sweep status --json` has, and how far the runs of open trials are."""
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
