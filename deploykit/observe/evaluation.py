"""`evaluation.json`, which an evaluation writes: its numbers, and the tables of a report.

Each number at the top is a metric. The reference trainer's ``evaluate.py`` also writes the keys of
`_TABLES`, and so may a script of one's own; what else is in the file is not shown. The file may
come from elsewhere: a key that is not as expected is a problem, and the others are shown.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deploykit.job.decode import from_json
from deploykit.lib import paths
from deploykit.observe import charts
from deploykit.observe.charts import Chart, Curve

NAME = "evaluation.json"
_MAX_BYTES = 16 << 20
_MAX_NUMBERS = 200
_MAX_ROWS = 100
_MAX_TEXT = 200
_NOT_METRICS = {"step", "evaluated", "targets"}


@dataclass(frozen=True)
class Table:
    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass
class Evaluation:
    """What a report shows of an evaluation."""

    numbers: dict[str, float] = field(default_factory=dict)
    facts: list[tuple[str, str]] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    charts: list[Chart] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def read(path: Path) -> Evaluation:
    """Read the file. Raises OSError, and ValueError if it is not a JSON object."""
    data = from_json(paths.read_regular(path, _MAX_BYTES))
    if not isinstance(data, dict):
        raise ValueError(f"{NAME}: expected a JSON object")  # noqa: TRY004 - of a file
    return of(data)


def of(data: Mapping[str, Any]) -> Evaluation:
    """What the content of the file shows."""
    result = Evaluation()
    for name, value in list(data.items())[:_MAX_NUMBERS]:
        if name in _NOT_METRICS or isinstance(value, str):
            if name in {"step", "split", "evaluated", "unit"}:
                result.facts.append((name, _text(value)))
        elif _is_number(value):
            result.numbers[name[:_MAX_TEXT]] = float(value)
    for name, show in _TABLES.items():
        if data.get(name) is None:
            continue
        try:
            for shown in show(data[name], data):
                (result.charts if isinstance(shown, Chart) else result.tables).append(shown)  # type: ignore[arg-type]
            if name == "calibration":
                result.numbers["ece"] = float(data[name]["ece"])
        except (TypeError, ValueError, LookupError, AttributeError, OverflowError) as error:
            result.problems.append(
                f"{NAME}: {name} has an unexpected format ({type(error).__name__})"
            )
    return result


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= sys.float_info.max  # an integer may be larger; NaN is not


def _text(value: Any) -> str:
    """A value in a cell of a table."""
    if isinstance(value, bool) or value is None:
        return "" if value is None else str(value)
    if _is_number(value):
        return charts.short(value, 6)
    if isinstance(value, list):
        return ", ".join(map(_text, value))[:_MAX_TEXT]
    return str(value)[:_MAX_TEXT]


def _classes(classes: Mapping[str, Mapping[str, Any]], _data: object) -> Iterator[Table]:
    """Precision, recall and F1 of each class."""
    columns = list(dict.fromkeys(key for one in classes.values() for key in one))
    rows = [
        [_text(name), *(_text(one.get(key)) for key in columns)] for name, one in classes.items()
    ]
    yield Table("Classes", ["class", *columns], rows[:_MAX_ROWS])


def _confusion(matrix: Sequence[Sequence[int]], data: Mapping[str, Any]) -> Iterator[Table]:
    """Rows are true classes, columns are predictions."""
    labels = [_text(label) for label in data.get("labels") or range(len(matrix))]
    if len(matrix) > _MAX_ROWS:
        return
    rows = [[label, *map(_text, row)] for label, row in zip(labels, matrix, strict=True)]
    yield Table("Confusion matrix", ["expected / predicted", *labels], rows)


def _confused(pairs: Sequence[Mapping[str, Any]], _data: object) -> Iterator[Table]:
    rows = [[_text(one[key]) for key in ("expected", "predicted", "times")] for one in pairs]
    yield Table("Most frequent confusions", ["expected", "predicted", "times"], rows[:_MAX_ROWS])


def _calibration(calibration: Mapping[str, Any], _data: object) -> Iterator[Table | Chart]:
    """Accuracy by confidence; both are equal in a calibrated model."""
    used = [one for one in calibration["bins"] if one["count"]]
    points = [(float(one["confidence"]), float(one["accuracy"])) for one in used]
    ideal = Curve("calibrated", [(0.0, 0.0), (1.0, 1.0)])
    yield Chart(
        "Reliability: accuracy by confidence", "confidence", [Curve("model", points), ideal]
    )
    keys = ("count", "confidence", "accuracy")
    rows = [
        [f"{_text(one['from'])} to {_text(one['to'])}", *(_text(one[key]) for key in keys)]
        for one in used
    ]
    yield Table("Calibration", ["confidence", "predictions", "mean", "accuracy"], rows[:_MAX_ROWS])


def _slices(slices: Mapping[str, Any], _data: object) -> Iterator[Table]:
    values = slices["values"][:_MAX_ROWS]
    keys = [key for key in dict.fromkeys(key for one in values for key in one) if key != "value"]
    rows = [[_text(one["value"]), *(_text(one.get(key)) for key in keys)] for one in values]
    column = _text(slices["column"])
    yield Table(f"Slices by {column}", [column, *keys], rows)


def _worst(samples: Sequence[Mapping[str, Any]], _data: object) -> Iterator[Table]:
    keys = list(dict.fromkeys(key for one in samples[:_MAX_ROWS] for key in one))
    rows = [[_text(one.get(key)) for key in keys] for one in samples[:_MAX_ROWS]]
    yield Table("Worst samples", keys, rows)


def _samples(texts: Sequence[str], _data: object) -> Iterator[Table]:
    rows = [[str(number), _text(text)] for number, text in enumerate(texts[:_MAX_ROWS], 1)]
    yield Table("Generated samples", ["", "text"], rows)


_TABLES: Mapping[str, Callable[[Any, Mapping[str, Any]], Iterator[Table | Chart]]] = {
    "classes": _classes,
    "confusion": _confusion,
    "confused": _confused,
    "calibration": _calibration,
    "slices": _slices,
    "worst": _worst,
    "samples": _samples,
}
"""The keys that are shown as tables or charts."""
