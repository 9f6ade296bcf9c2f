"""How far a run is: step, total, loss, pace and time left, each with where it was read."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from deploykit.observe.metrics.log_reader import LogReader
from deploykit.observe.metrics.series import Collection, Pace, Series, by_epochs, longest_gap

_TOTAL_OPTIONS = (
    *("max_steps", "max_train_steps", "total_steps", "num_steps", "steps", "train_steps"),
    *("num_train_steps", "max_iters", "num_iters", "train_iters", "iterations", "max_iterations"),
)
_EPOCH_OPTIONS = (
    *("epochs", "num_epochs", "max_epochs", "num_train_epochs", "n_epochs", "train_epochs"),
)


class Length(NamedTuple):
    """How long a run will be, as its arguments tell: steps and epochs, each with its source."""

    total: int | None = None
    total_source: str = ""
    epochs: int | None = None
    epochs_source: str = ""


def length_of(arguments: Sequence[str]) -> Length:
    """What the arguments of a trainer say: ``--max-steps 500``, ``--trainer.max_epochs=3``."""
    by_option: dict[str, tuple[int, str]] = {}
    for word, after in zip(arguments, [*arguments[1:], ""], strict=False):
        option, equals, value = word.partition("=")
        name = option.lstrip("-+").rpartition(".")[2].replace("-", "_").lower()
        text = value if equals else after
        if (equals or option.startswith("-")) and re.fullmatch(r"[1-9][0-9]{0,14}", text):
            by_option[name] = int(text), f"argument {option}"
    total = next((by_option[name] for name in _TOTAL_OPTIONS if name in by_option), (None, ""))
    epochs = next((by_option[name] for name in _EPOCH_OPTIONS if name in by_option), (None, ""))
    return Length(*total, *epochs)


_TOTAL_METRICS = ("total_steps", "max_steps")
"""Metrics that are the number of steps."""
_MAX_SECONDS = 10.0**9
"""Seconds, some 30 years: more is no estimate."""
_NOT_TRAINING = re.compile(
    r"(?i)(?:.*[\W_])?(?:val|valid|validation|eval|evaluation|test)(?:[\W_].*)?"
)
_LOSS = re.compile(r"(?i)(?:.*[\W_])?loss")
_THROUGHPUT = re.compile(
    r"(?i).*(?:example|image|sample|sequence|token)s?[\W_]*(?:per[\W_]*s(?:ec(?:ond)?)?|/s(?:ec)?)"
)
_EVERY = {"step_seconds": -1, "step_time": -1, "steps_per_second": 1, "it_per_second": 1}
"""Metrics that are the time of a step, or steps in a second."""


@dataclass(frozen=True)
class Progress:
    """The progress of a run. Unknown values are None."""

    step: int | None = None
    total: int | None = None
    epoch: float | None = None
    epochs: int | None = None
    loss: float | None = None
    rate: float | None = None
    """Steps a second."""
    left: float | None = None
    """Seconds until `total`, and the evaluation after it where each epoch ends with one."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """By field: where it was read."""
    curve: tuple[float, ...] = ()
    """The values of the loss so far, evenly thinned."""
    throughput: tuple[str, float] | None = None
    """A metric of samples or tokens a second: its name and last value."""

    def __bool__(self) -> bool:
        return any(one is not None for one in (self.step, self.epoch, self.loss))


class _Position(NamedTuple):
    """Where a run is as one source tells it."""

    source: str
    time: float
    pace: Pace | None
    step: int | None = None
    total: int | None = None
    epoch: float | None = None
    epochs: int | None = None
    rate: float | None = None
    left: float | None = None
    complete: bool = False
    """Whether it is that of a bar whose last step was reached."""


def of(collection: Collection, log: LogReader, known: Length, now: float | None = None) -> Progress:
    """The progress of a run from all that was read of it.

    `now`, in seconds since 1970, is that of a run that goes on; without it the time left is that
    from the last step.
    """
    sources: dict[str, str] = {}
    progress = Progress(sources=sources, throughput=_throughput(collection, sources))
    if loss := _training_loss(collection.series.values()):
        sources["loss"] = loss.source
        curve = tuple(value for _, value in loss.curve.pairs())
        progress = replace(progress, loss=loss.last.value, curve=curve)
    best = _best(list(_positions(collection, log)))
    if best is None:
        return progress
    if best.epoch is None and log.epoch is not None:
        best = best._replace(epoch=log.epoch.reading.epoch)
    sources |= {name: best.source for name in ("step", "epoch") if getattr(best, name) is not None}
    total, epochs = _lengths(best, log, known, collection, sources)
    rate = _rate(best, collection, sources)
    left = _left(best, total, epochs, rate)
    if left is not None and left <= _MAX_SECONDS:
        left = max(0.0, left - _age(best, now))
        sources["left"] = sources.get("rate", best.source)
    else:
        left = None
    return replace(
        progress, step=best.step, total=total, epoch=best.epoch, epochs=epochs, rate=rate, left=left
    )


def _positions(collection: Collection, log: LogReader) -> Iterator[_Position]:
    bars = list(log.bars.values())
    for seen in (max(bars, key=lambda one: one.longest, default=None), log.step, log.epoch):
        if seen is not None:
            line = seen.reading
            place = line.step, line.total, line.epoch, line.epochs, line.rate, line.left
            is_whole = line.title is not None and line.total is not None and line.step == line.total
            source = f"log ({line.format})"
            position = _Position(source, seen.time or 0.0, seen.pace, *place, complete=is_whole)
            if seen is log.epoch:
                position = position._replace(step=None, total=None, rate=None, left=None)
            yield position
    newest: dict[str, Series] = {}
    for series in collection.series.values():
        if not series.source.startswith("log ("):
            other = newest.get(series.source)
            if other is None or (series.last.step or 0) > (other.last.step or 0):
                newest[series.source] = series
    for source, series in newest.items():
        last, pace = series.last, collection.paces.get(source)
        if last.step is not None or last.epoch is not None:
            yield _Position(source, last.time or 0.0, pace, step=last.step, epoch=last.epoch)


def _best(positions: Sequence[_Position]) -> _Position | None:
    """The position that tells most: with a total, then the finer one, then the newer one."""
    newest = max((one.time for one in positions if one.step is not None), default=0.0)
    current = [
        one
        for one in positions
        if not one.complete
        or one.time >= newest
        or all(other.step in {None, one.step} for other in positions)
    ]
    key = lambda one: (one.step is not None, one.total or 0, one.step or 0, one.time)  # noqa: E731
    return max(current, key=key, default=None)


def _lengths(
    best: _Position, log: LogReader, known: Length, collection: Collection, sources: dict[str, str]
) -> tuple[int | None, int | None]:
    """The last step and the last epoch, from the first of the sources that tells."""
    inferred = best.total and best.epochs and not log.epochs  # by the arguments
    source = f"{best.source}, {known.epochs_source}" if inferred else best.source
    totals: list[tuple[int | None, str]] = [(best.total, source), (log.total, "log")]
    totals += [
        (int(one.last.value), one.source)
        for one in collection.series.values()
        if one.name in _TOTAL_METRICS and math.isfinite(one.last.value) and one.last.value >= 1
    ]
    totals.append((known.total, known.total_source))
    total, total_source = next((one for one in totals if one[0]), (None, ""))
    if total is not None and (best.step is None or best.step <= total):  # else of another unit
        sources["total"] = total_source
    else:
        total = None
    of_epochs = [(log.epochs, "log"), (known.epochs, known.epochs_source)]
    epochs, epochs_source = next((one for one in of_epochs if one[0]), (None, ""))
    if epochs is not None:
        sources["epochs"] = epochs_source
    return total, epochs


def _rate(best: _Position, collection: Collection, sources: dict[str, str]) -> float | None:
    """Steps a second: over the last half of the time, else as a bar or a metric tells it."""
    if best.step is None:
        return None
    pace = best.pace.rate() if best.pace else None
    candidates = [(pace, best.source), (best.rate, best.source)]
    for series in collection.series.values():
        power = _EVERY.get(series.name)
        if power and series.last.value > 0:
            value = series.last.value
            candidates.append((value if power > 0 else 1 / value, series.source))
    known = (one for one in candidates if one[0] and math.isfinite(one[0]))
    rate, source = next(known, (None, ""))
    if rate is not None:
        sources["rate"] = source
    return rate


def _left(
    best: _Position, total: int | None, epochs: int | None, rate: float | None
) -> float | None:
    """Seconds until the last step, or where steps are not known until the last epoch."""
    if best.step is None:
        pace = best.pace.rate() if best.pace else None
        if best.epoch is None or not epochs or not pace:
            return None
        return max(0.0, (epochs - best.epoch) / pace)
    if total is None or not rate:
        return best.left
    if epochs is None and best.step and best.epoch and best.epoch % 1:  # a fraction of all
        epochs = round(total * best.epoch / best.step)
    marks = best.pace.marks() if best.pace else []
    exact = by_epochs(marks, total, total / epochs) if epochs else None
    return max(0.0, (total - best.step) / rate if exact is None else exact)


def _age(best: _Position, now: float | None) -> float:
    """Seconds since the last step was told; at most the longest time between two of them so far."""
    if now is None or not best.time or best.pace is None:
        return 0.0
    return min(max(0.0, now - best.time), longest_gap(best.pace.marks()))


def _throughput(collection: Collection, sources: dict[str, str]) -> tuple[str, float] | None:
    """The metric of the training that is samples or tokens a second; of several, the first."""
    for one in collection.series.values():
        if _THROUGHPUT.fullmatch(one.name) and not _NOT_TRAINING.fullmatch(one.name):
            sources["throughput"] = one.source
            return one.name, one.last.value
    return None


def _training_loss(series: Iterable[Series]) -> Series | None:
    """The series of the training loss; where there is none, one of another loss."""
    usual = {"loss", "train_loss", "train/loss", "training_loss", "loss/train"}

    def likelihood(one: Series) -> tuple[bool, bool, int]:
        name = one.name.lower()
        return not _NOT_TRAINING.fullmatch(name), name in usual, one.count

    return max((one for one in series if _LOSS.fullmatch(one.name)), key=likelihood, default=None)
