"""Print the metrics of a run, from its files, its log, and the service that ran it.

Reads metrics.jsonl, metrics.csv and the like, TensorBoard event files, and the log lines that most
libraries print; for other formats, define patterns under `metrics` in the job file. A repeated step
counts once.

deploykit metrics                          the newest run: its progress, and each metric
deploykit metrics exp-1 --name '*loss*'
deploykit metrics exp-1 --csv              every value
deploykit metrics exp-1 -q progress.loss
"""

from __future__ import annotations

import argparse
import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from deploykit.cli import describe, output, query
from deploykit.lib import units
from deploykit.lib.errors import UsageError
from deploykit.observe.metrics.points import Point
from deploykit.observe.metrics.progress import Progress
from deploykit.observe.metrics.series import Series, is_chosen
from deploykit.run import registry
from deploykit.run import state as run_state
from deploykit.run.metrics import RunMetrics
from deploykit.run.registry import Run

SHARED = ("run", "metric", "query")
_COLUMNS = ("run", "attempt", "step", "epoch", "time", "name", "value", "source")
_AT_ONCE = 1000
"""Rows that are printed at once."""
_FIELDS = ("step", "total", "epoch", "epochs", "loss", "rate", "left")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--csv", action="store_true", help="print every value, as CSV")
    parser.add_argument(
        "--task", type=int, metavar="N", help="print only metrics of this task of a job array"
    )


def run(args: argparse.Namespace) -> int:
    if args.csv and query.is_data(args):
        raise UsageError("--csv cannot be used together with --json, --query or --format")
    (row,) = run_state.refresh([registry.get(args.run)])
    read = RunMetrics(row, task=args.task)
    if args.csv:
        for text in _csv(row, read.whole(args.name)):
            output.block(text)
    elif query.is_data(args):
        points = [_point(one) for one in read.whole(args.name)]
        records = [{"run": row.run, **point} for point in points]
        query.emit(args, {**_data(row, read.progress()), "points": points}, records)
    else:
        read.refresh()
        read.final()
    output.note(*(f"could not read {problem}" for problem in read.problems))
    if not (args.csv or query.is_data(args)):
        series = [one for one in read.collection.series.values() if is_chosen(one.name, args.name)]
        _show(row, read.progress(), series)
    return 0


def _csv(row: Run, points: Iterator[Point]) -> Iterator[str]:
    """The points as CSV, with a heading; what is not known is empty."""
    rows: list[Sequence[object]] = [_COLUMNS]
    while rows:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(rows)
        yield text.getvalue()
        rows = [_cells(row, one) for one in islice(points, _AT_ONCE)]


def _cells(row: Run, one: Point) -> Sequence[object]:
    time = None if one.time is None else f"{one.time:.3f}"
    position = (row.run, one.attempt, one.step, one.epoch, time)
    return [*position, one.name, repr(one.value), one.source]


def _point(one: Point) -> dict[str, Any]:
    return {**one._asdict(), "value": describe.number(one.value)}


def _data(row: Run, progress: Progress) -> dict[str, Any]:
    return {"run": row.run, "state": row.state, "progress": describe.data(progress)}


def _show(row: Run, progress: Progress, series: Iterable[Series]) -> None:
    """The position with its sources, then a line for each metric."""
    output.run_line(row)
    values = dict(zip(_FIELDS, _texts(progress), strict=True))
    for name, text in values.items():
        if text:
            output.say(f"  {name:<7} {text:<16} {progress.sources.get(name, '')}".rstrip())
    rows = [_row(one) for one in series]
    if not rows:
        output.note("no metrics found in the files or the log of this run")
        output.note("  for other log formats, define patterns under `metrics` in the job file")
        return
    output.say("")
    headings = ["name", "values", "step", "last", "min", "max", "source"]
    output.table(headings, rows, headings_in_pipe=True)


def _texts(one: Progress) -> tuple[str, ...]:
    """The fields of a progress as text, in the order of `_FIELDS`."""
    left = "" if one.left is None else units.span(one.left)
    rate, loss = describe.rate(one), "" if one.loss is None else f"{one.loss:.6g}"
    counts = (one.step, one.total, one.epoch, one.epochs)
    step, total, epoch, epochs = ("" if value is None else f"{value:.10g}" for value in counts)
    return step, total, epoch, epochs, loss, rate, left


def _row(one: Series) -> list[str]:
    step = "" if one.last.step is None else str(one.last.step)
    values = (one.last.value, one.least, one.greatest)
    return [one.name, str(one.count), step, *(f"{value:.6g}" for value in values), one.source]
