"""The data of a sweep's report besides its trials: importance, history, curves, coordinates.

Imports Optuna.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from deploykit.observe.charts import (
    COLORS,
    Axis,
    Chart,
    Curve,
    Polyline,
    Scale,
    is_wide,
    short,
    thin,
    ticks,
)
from deploykit.observe.metrics.points import Point
from deploykit.observe.metrics.series import Series
from deploykit.run.metrics import RunMetrics
from deploykit.sweep import folder, space, summary, trials
from deploykit.sweep.folder import SweepRecord
from deploykit.sweep.model import Parameter, Sweep
from deploykit.sweep.summary import SweepSummary, TrialSummary

LEAST = 10
"""Minimum number of successful trials for a meaningful importance."""
_TOP, _TOP_TRIALS = 0.1, 5
"""Which trials count as the best for importance: this share, but at least this many."""
_MOST_AXES = 9
_MOST_LINES, _MOST_DOTS = 400, 200
_MAX_LABEL = 160
"""Maximum length of a trial's text in a chart, in characters."""
_MOST_POINTS = 300
_GOOD = 0.25


@dataclass(frozen=True)
class SweepReport:
    summary: SweepSummary
    importance: Mapping[str, float]
    """Importance of each parameter, greatest first; the sum is 1. Empty if unknown."""
    charts: Sequence[Chart]
    axes: Sequence[Axis]
    """The parameters, most important first, then the objective."""
    lines: Sequence[Polyline]
    """The successful trials, best first."""


def of(record: SweepRecord) -> SweepReport:
    """Collect the data of a sweep's report. Reads the logs of its best trials."""
    sweep = summary.of(record)
    ranked = sweep.ranked
    importance = _importance(record, len(ranked))
    names = [*importance, *(name for name in record.sweep.parameters if name not in importance)]
    shown = {name: record.sweep.parameters[name] for name in names[: _MOST_AXES - 1]}
    values = [one.value for one in ranked if one.value is not None]
    slices = [_slice(sweep, name, one) for name, one in shown.items()] if values else []
    known = (_history(sweep), *slices, _curves(sweep))
    charts = [chart for chart in known if chart is not None]
    if not values:
        return SweepReport(sweep, importance, charts, [], [])
    low, high = min(values), max(values)
    scale = Scale(low, high, 0.0, 1.0, is_wide(low, high))
    metric = record.sweep.objective.metric
    axes = [*(_axis(name, one) for name, one in shown.items()), Axis(metric, _height_marks(scale))]
    lines = _lines(sweep, shown, scale)
    return SweepReport(sweep, importance, charts, axes, lines)


def _importance(record: SweepRecord, trials: int) -> dict[str, float]:
    """How strongly each parameter affects whether a trial is among the best."""
    study = folder.open_study(record)
    if study is None or trials < LEAST or len(record.sweep.parameters) < 2:  # noqa: PLR2004
        return {}
    import optuna

    share = max(_TOP, _TOP_TRIALS / trials)
    evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=min(share, 0.5))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            shares = optuna.importance.get_param_importances(study, evaluator=evaluator)
        except (RuntimeError, ValueError):  # where all values are alike
            return {}
    known = {name: value for name, value in shares.items() if name in record.sweep.parameters}
    return known if all(map(math.isfinite, known.values())) else {}


def _history(sweep: SweepSummary) -> Chart | None:
    """Chart of the value of each trial and the best value so far."""
    objective = sweep.record.sweep.objective
    better = min if objective.direction == "minimize" else max
    trials = sorted((one.number, one.value) for one in sweep.ranked if one.value is not None)
    if not trials:
        return None
    values = itertools.accumulate((value for _, value in trials), better)
    best = [(float(number), value) for (number, _), value in zip(trials, values, strict=True)]
    dots = _dots(sweep, sweep.ranked, lambda one: float(one.number))
    curves = [dots, Curve("best so far", thin(best, _MOST_POINTS), "steps")]
    return Chart(f"{objective.metric} by trial", "trial", curves)


def _dots(
    sweep: SweepSummary, ranked: Sequence[TrialSummary], x: Callable[[TrialSummary], float]
) -> Curve:
    """The objective of each trial at its `x`."""
    shown = ranked[:_MOST_DOTS]
    points = [(x(one), one.value or 0.0) for one in shown]
    label = "trials" if len(shown) == len(ranked) else f"the best {_MOST_DOTS} trials"
    return Curve(label, points, "dots", [_label(one, sweep.record.sweep) for one in shown])


def _slice(sweep: SweepSummary, name: str, limits: Parameter) -> Chart:
    """Chart of the objective against one parameter, with the best trial as its own curve."""
    have = [one for one in sweep.ranked if name in one.values]

    def place(one: TrialSummary) -> float:
        value = one.values[name]
        if limits.choice is None:
            return float(value)
        return float(limits.choice.index(value)) if value in limits.choice else math.nan

    others, best = _dots(sweep, have[1:], place), _dots(sweep, have[:1], place)
    title = f"{sweep.record.sweep.objective.metric} by {name}"
    curves = [others, replace(best, label="best trial")]
    return Chart(title, name, curves, names=limits.choice or (), logarithmic=limits.log)


def _label(one: TrialSummary, sweep: Sweep) -> str:
    values = (
        f"{name} {space.brief(sweep.parameters[name], it)}" for name, it in one.values.items()
    )
    text = f"trial {one.number}: {sweep.objective.metric} {one.value or 0.0:.6g}"
    return ", ".join([text, *values])[:_MAX_LABEL]


def _curves(sweep: SweepSummary) -> Chart | None:
    """Chart of the objective by step, for the best trials and for those stopped early."""
    objective = sweep.record.sweep.objective
    curves, axes = [], set[str]()
    for one in [*sweep.ranked, *sweep.pruned][:COLORS]:
        if one.runs:
            points = list(RunMetrics(one.runs[-1]).new())
            series = Series(objective.metric, "", Point(objective.metric, math.nan))
            for point in trials.of_objective(points, objective):
                series.add(point)
            axes |= {series.axis} if series.count else set()
            label = f"trial {one.number}{', stopped' if one.state == 'pruned' else ''}"
            curves.append(Curve(label, sorted(series.curve.pairs())))
    known = [curve for curve in curves if len(curve.points) > 1]
    title = f"{objective.metric} of the best trials"
    return Chart(title, " or ".join(sorted(axes)), _thinned(known)) if known else None


def _thinned(curves: Sequence[Curve]) -> list[Curve]:
    return [Curve(one.label, thin(one.points, _MOST_POINTS)) for one in curves]


def _height(scale: Scale, value: float) -> float:
    return min(max(scale(value), 0.0), 1.0)


def _height_marks(scale: Scale) -> list[tuple[float, str]]:
    """The ends of the range, and round values not too close to them."""
    if not scale.high > scale.low:
        return [(0.5, short(scale.low, 3))]
    values = ticks(scale.low, scale.high, logarithmic=scale.logarithmic)
    between = ((_height(scale, value), short(value, 3)) for value in values)
    ends = [(0.0, short(scale.low, 3)), (1.0, short(scale.high, 3))]
    return [*ends, *(mark for mark in between if 0.08 < mark[0] < 0.92)]  # noqa: PLR2004


def _axis(name: str, one: Parameter) -> Axis:
    if one.choice is None:
        return Axis(name, _height_marks(_range(one)))
    return Axis(name, [(_of_choice(one.choice, value), value) for value in one.choice[:40]])


def _range(one: Parameter) -> Scale:
    low, high = (float(end) for end in one.range or ("0", "1"))
    return Scale(low, high, 0.0, 1.0, one.log)


def _of_choice(choice: Sequence[str], value: str) -> float:
    return choice.index(value) / (len(choice) - 1) if len(choice) > 1 else 0.5


def _lines(sweep: SweepSummary, shown: Mapping[str, Parameter], scale: Scale) -> list[Polyline]:
    ranked = sweep.ranked[:_MOST_LINES]
    good = max(1, round(len(ranked) * _GOOD))
    lines = []
    for rank, one in enumerate(ranked):
        kind = "best" if rank == 0 else "good" if rank < good else "other"
        heights = [*_heights(one.values, shown), _height(scale, one.value or 0.0)]
        lines.append(Polyline(_label(one, sweep.record.sweep), heights, kind))
    return lines


def _heights(values: space.Values, shown: Mapping[str, Parameter]) -> Iterator[float | None]:
    for name, one in shown.items():
        value = values.get(name)
        if value is None:
            yield None
        elif one.choice is None:
            yield _height(_range(one), float(value))
        else:
            yield _of_choice(one.choice, value) if value in one.choice else None
