"""What a report says of a sweep beside its trials: importance, history, curves, coordinates.

Imports Optuna.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from deploykit.observe.metrics.points import Point
from deploykit.observe.metrics.series import without_repeats
from deploykit.observe.report.chart import COLORS, Chart, Curve, short, thin, ticks
from deploykit.observe.report.coordinates import Axis, Path
from deploykit.run.metrics import RunMetrics
from deploykit.sweep import folder, space, summary, trials
from deploykit.sweep.folder import SweepRecord
from deploykit.sweep.model import Parameter
from deploykit.sweep.summary import SweepSummary, TrialSummary

LEAST = 10
"""Trials that must have succeeded before importance means anything."""
_TOP, _TOP_TRIALS = 0.1, 5
"""The best trials that importance asks for: this share, but no fewer than that many."""
_MOST_AXES = 9
_MOST_LINES = 400
_MOST_POINTS = 300
_DECADES = 1000
"""From this ratio on, the axis of the objective is logarithmic."""
_GOOD = 0.25
"""The share of trials that are drawn as good."""


@dataclass(frozen=True)
class SweepReport:
    """A sweep as a report shows it."""

    summary: SweepSummary
    importance: Mapping[str, float]
    """Of the parameters, 1 in all, the greatest first; none where it is not known."""
    charts: Sequence[Chart]
    axes: Sequence[Axis]
    """The parameters, the most important first, and the objective last."""
    lines: Sequence[Path]
    """The trials that succeeded, the best first."""


def of(record: SweepRecord) -> SweepReport:
    """Everything that is known of a sweep. Reads the logs of its best trials."""
    sweep = summary.of(record)
    ranked = sweep.ranked
    importance = _importance(record, len(ranked))
    names = [*importance, *(name for name in record.sweep.parameters if name not in importance)]
    shown = {name: record.sweep.parameters[name] for name in names[: _MOST_AXES - 1]}
    values = [one.value for one in ranked if one.value is not None]
    scale = _Scale.of(values) if values else None
    charts = [chart for chart in (_history(sweep), _curves(sweep)) if chart is not None]
    if scale is None:
        return SweepReport(sweep, importance, charts, [], [])
    metric = record.sweep.objective.metric
    axes = [*(_axis(name, one) for name, one in shown.items()), Axis(metric, scale.marks())]
    lines = _lines(ranked[:_MOST_LINES], shown, scale, metric)
    return SweepReport(sweep, importance, charts, axes, lines)


def _importance(record: SweepRecord, trials: int) -> dict[str, float]:
    """How much each parameter decides whether a trial is among the best."""
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
    """The value of each trial, and the best so far."""
    objective = sweep.record.sweep.objective
    better = min if objective.direction == "minimize" else max
    each: list[tuple[float, float]] = []
    best: list[tuple[float, float]] = []
    for one in sweep.trials:
        if one.state == "succeeded" and one.value is not None:
            each.append((float(one.number), one.value))
            best.append(
                (float(one.number), better([one.value, *(value for _, value in best[-1:])]))
            )
    if not each:
        return None
    curves = [Curve("best so far", best), Curve("each trial", each)]
    return Chart(f"{objective.metric} by trial", "trial", _thinned(curves))


def _curves(sweep: SweepSummary) -> Chart | None:
    """The objective of the best trials, step by step; then of those that were stopped early."""
    objective = sweep.record.sweep.objective
    curves = []
    for one in [*sweep.ranked, *sweep.pruned][:COLORS]:
        if one.runs:
            every = (point for row in one.runs for point in RunMetrics(row).new())
            own = without_repeats(point for point in every if point.name == objective.metric)
            points = trials.of_objective(list(own), objective)
            label = f"trial {one.number}{', stopped' if one.state == 'pruned' else ''}"
            curves.append(Curve(label, _pairs(points)))
    known = [curve for curve in curves if len(curve.points) > 1]
    return (
        Chart(f"{objective.metric} of the best trials", "step", _thinned(known)) if known else None
    )


def _pairs(points: Sequence[Point]) -> list[tuple[float, float]]:
    pairs = (
        (number if point.step is None else point.step, point.value)
        for number, point in enumerate(points)
    )
    return sorted((float(step), value) for step, value in pairs)


def _thinned(curves: Sequence[Curve]) -> list[Curve]:
    return [Curve(one.label, thin(one.points, _MOST_POINTS)) for one in curves]


@dataclass(frozen=True)
class _Scale:
    """Maps numbers to heights from 0 to 1."""

    low: float
    high: float
    log: bool = False

    @classmethod
    def of(cls, values: Sequence[float]) -> _Scale:
        low, high = min(values), max(values)
        return cls(low, high, low > 0 and high / low >= _DECADES)

    def height(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return min(max((value - low) / (high - low), 0.0), 1.0) if high > low else 0.5

    def marks(self) -> list[tuple[float, str]]:
        """The ends, and round values that are not close to them."""
        ends = {0.0: short(self.low, 3), 1.0: short(self.high, 3)}
        if not self.high > self.low:
            return [(0.5, short(self.low, 3))]
        between = (
            (self.height(it), short(it, 3))
            for it in ticks(self.low, self.high, logarithmic=self.log)
        )
        return [*ends.items(), *(one for one in between if 0.08 < one[0] < 0.92)]  # noqa: PLR2004


def _axis(name: str, one: Parameter) -> Axis:
    if one.choice is None:
        return Axis(name, _range(one).marks())
    return Axis(name, [(_of_choice(one.choice, value), value) for value in one.choice[:40]])


def _range(one: Parameter) -> _Scale:
    low, high = (float(end) for end in one.range or ("0", "1"))
    return _Scale(low, high, one.log)


def _of_choice(choice: Sequence[str], value: str) -> float:
    return choice.index(value) / (len(choice) - 1) if len(choice) > 1 else 0.5


def _lines(
    ranked: Sequence[TrialSummary], shown: Mapping[str, Parameter], scale: _Scale, metric: str
) -> list[Path]:
    good = max(1, round(len(ranked) * _GOOD))
    lines = []
    for rank, one in enumerate(ranked):
        kind = "best" if rank == 0 else "good" if rank < good else "other"
        value = one.value or 0.0
        label = f"trial {one.number}: {metric} {value:.6g}"
        lines.append(Path(label, [*_heights(one.values, shown), scale.height(value)], kind))
    return lines


def _heights(values: space.Values, shown: Mapping[str, Parameter]) -> Iterator[float | None]:
    for name, one in shown.items():
        value = values.get(name)
        if value is None:
            yield None
        elif one.choice is None:
            yield _range(one).height(float(value))
        else:
            yield _of_choice(one.choice, value) if value in one.choice else None
