"""What is known of a run for `compare` and `report`: its settings, its source, its numbers."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from deploykit.backends import base as backend
from deploykit.cost import prices
from deploykit.cost.prices import Spent
from deploykit.job.decode import from_json
from deploykit.job.model import LogLine, State
from deploykit.lib import paths, units
from deploykit.observe import exit_records
from deploykit.observe.metrics.progress import Progress
from deploykit.observe.metrics.series import Series, is_chosen
from deploykit.run.log_selection import SLOW_RANK
from deploykit.run.metrics import RunMetrics
from deploykit.run.registry import Run, now

Better = Literal["less", "more"]

_LARGEST = 1 << 22
"""Bytes of a file of the run folder that is read."""
_UNTOLD = {"name", "source", "backend", "max_bundle", "log_limit"}
"""Keys of a job that say nothing of its result, or are told otherwise."""
_LESS = {"loss", "error", "err", "perplexity", "ppl", "mse", "rmse", "mae", "wer", "cer", "nll"}
_LESS |= {"fid"}
_COSTS = {"seconds", "time", "memory"}
_MORE = {"accuracy", "acc", "f1", "precision", "recall", "auc", "auroc", "bleu", "rouge", "map"}
_MORE |= {"r2", "psnr", "ssim", "reward", "iou", "dice"}
"""Words in the name of a metric that say which of two values is better."""
_RATE = re.compile(
    r"(?:.*[\W_])?(?:per_|/)s(?:ec|econd)?(?:[\W_].*)?|.*\w/s(?:/.*)?|mfu", re.DOTALL
)
_MOST_LINES = 20_000
_WORDS = re.compile(r"[^a-z0-9]+")


@dataclass(frozen=True)
class Metric:
    """One metric of a run, from the source that has most of its values."""

    name: str
    last: float
    best: float | None
    """The least or greatest; None where the name does not say which is better, and for speed."""
    source: str


@dataclass(frozen=True)
class SourceFacts:
    """The source that a run sent."""

    bundle: str
    commit: str | None
    changed: int | None
    """Bytes of the changes that were not committed; None where that is not known."""

    @property
    def changes(self) -> str | None:
        """The same as text."""
        if self.changed is None:
            return None
        return units.size(self.changed) if self.changed else "none"


@dataclass(frozen=True)
class RunFacts:
    """What is known of a run at one moment."""

    row: Run
    settings: dict[str, str]
    """Each key of the job and each argument, as text; without those that are not set."""
    source: SourceFacts
    seconds: float | None
    cost: Spent | None
    restarts: int
    metrics: dict[str, Metric]
    curves: dict[str, Series] = field(repr=False)
    """Of each metric, in that source."""
    attempts: dict[int, int]
    """The first step of each attempt but the first."""
    remarks: list[LogLine] = field(repr=False)
    """Lines of the launchers, and those of the trainer about slow ranks."""
    progress: Progress
    problems: list[str]
    """What could not be read."""


def of(row: Run, names: Sequence[str] = ()) -> RunFacts:
    """The facts of a run; `names` are patterns of the metrics that are wanted."""
    folder = Path(row.folder)
    read = RunMetrics(row)
    remarks: list[LogLine] = []

    def hear(line: LogLine) -> None:
        if len(remarks) < _MOST_LINES and (line.rank is None or SLOW_RANK.match(line.text)):
            remarks.append(line)

    read.refresh(heard=hear)
    read.final()
    curves = _curves(one for one in read.collection.series.values() if is_chosen(one.name, names))
    return RunFacts(
        row,
        dict(settings(job_data(folder))),
        _source(row, folder),
        row.seconds(now()),
        _spent(row),
        exit_records.attempt(folder) or 0,
        {name: _metric(one) for name, one in curves.items()},
        curves,
        read.collection.restarts,
        remarks,
        read.progress(),
        list(read.problems),
    )


def better(name: str) -> Better | None:
    """Which of two values of a metric is better, by its name; None where that does not tell."""
    words = _words(name)
    if _RATE.fullmatch(name.lower()) or words & _MORE:
        return "more"
    return "less" if words & (_LESS | _COSTS) or name.lower().endswith("loss") else None


def _words(name: str) -> set[str]:
    return set(_WORDS.split(name.lower()))


def _is_speed(name: str) -> bool:
    """Whether a metric is about time or memory, of which single values are noise."""
    return bool(_words(name) & _COSTS or _RATE.fullmatch(name.lower()))


def argument_pairs(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The arguments of a program by name: ``--lr 0.1`` is ``("--lr", "0.1")``.

    Words that follow no option have their place as name: ``argument 1``.
    """
    option, position = "", 0
    for word in words:
        if word.startswith("--") and word != "--":
            if option:
                yield option, "yes"
            option, equals, value = word.partition("=")
            if equals:
                yield option, value
                option = ""
        elif option:
            yield option, word
            option = ""
        else:
            position += 1
            yield f"argument {position}", word
    if option:
        yield option, "yes"


def settings(job: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Each key of a job and each argument, as text; without those that are not set."""
    entry = job.get("entrypoint")
    words = entry.pop("args", None) if isinstance(entry, dict) else None
    for key, value in job.items():
        if key not in _UNTOLD:
            yield from _flat(key, value)
    named: dict[str, list[str]] = {}
    for name, value in argument_pairs([w for w in words or () if isinstance(w, str)]):
        named.setdefault(name, []).append(value)
    yield from ((name, " ".join(values)) for name, values in named.items())


def _flat(path: str, value: Any) -> Iterator[tuple[str, str]]:
    """The values of nested data as text, each with its path; empty ones are left out."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(f"{path}.{key}", inner)
    elif isinstance(value, list):
        if value:
            yield path, ", ".join(map(str, value))
    elif isinstance(value, bool):
        yield path, "yes" if value else "no"
    elif value is not None:
        yield path, str(value)


def _source(row: Run, folder: Path) -> SourceFacts:
    changed: int | None = None
    if row.revision is not None:
        with contextlib.suppress(OSError):
            changed = (folder / "uncommitted.diff").stat().st_size
    return SourceFacts(row.bundle, row.revision, changed)


def _spent(row: Run) -> Spent | None:
    """What a run has cost, so far or in all; None where nothing is billed or known."""
    path = Path(row.folder, backend.PRICE)
    seconds = row.billed if State(row.state).final else row.seconds(now())
    return prices.spent(path, seconds) if path.exists() else None


def _curves(series: Iterable[Series]) -> dict[str, Series]:
    """By name the series with most values; of equal ones the first, as files come after logs."""
    chosen: dict[str, Series] = {}
    for one in series:
        other = chosen.get(one.name)
        if other is None or one.count > other.count:
            chosen[one.name] = one
    return chosen


def _metric(one: Series) -> Metric:
    side = None if _is_speed(one.name) else better(one.name)
    best = None if side is None else one.least if side == "less" else one.greatest
    return Metric(one.name, one.last.value, best, one.source)


def job_data(folder: Path) -> dict[str, Any]:
    """The job as it was submitted; empty where it was not kept."""
    try:
        data = from_json(paths.read_below(folder, backend.JOB, _LARGEST) or b"{}")
    except ValueError:
        return {}
    return data if isinstance(data, dict) else {}
