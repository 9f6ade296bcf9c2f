"""How far a run is: step, total, loss, pace and time left, each with where it was read."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from deploykit.observe.metrics.log_reader import LogReader, Seen
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
    """How far a run is. What is not known is None."""

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
    step: int | None
    total: int | None
    epoch: float | None
    epochs: int | None
    time: float
    source: str
    rate: float | None = None
    left: float | None = None
    complete: bool = False
    pace: Pace | None = None


def of(collection: Collection, log: LogReader, known: Length, now: float | None = None) -> Progress:
    """The progress of a run from all that was read of it.

    `now`, in seconds since 1970, is that of a run that goes on; without it the time left is that
    from the last step.
    """
    positions = list(_positions(collection, log))
    best = _best(positions)
    if best is not None and best.epoch is None and log.epoch is not None:
        best = best._replace(epoch=log.epoch.reading.epoch)
    sources: dict[str, str] = {}
    loss = _training_loss(collection.series.values())
    curve = _curve(loss)
    if best is None:
        value = None if loss is None else loss.last.value
        sources |= {} if loss is None else {"loss": loss.source}
        speed = _throughput(collection, sources)
        return Progress(loss=value, sources=sources, curve=curve, throughput=speed)
    total, epochs = _lengths(best, log, known, collection, sources)
    rate = _rate(best, collection, sources)
    left = _left(best, total, _epochs(best, total, epochs), rate)
    left = None if left is None or left > _MAX_SECONDS else max(0.0, left - _age(best, now))
    for name in ("step", "epoch"):
        if getattr(best, name) is not None:
            sources[name] = best.source
    if left is not None:
        sources["left"] = sources.get("rate", best.source)
    if loss is not None:
        sources["loss"] = loss.source
    return Progress(
        step=best.step,
        total=total,
        epoch=best.epoch,
        epochs=epochs,
        loss=None if loss is None else loss.last.value,
        rate=rate,
        left=left,
        sources=sources,
        curve=curve,
        throughput=_throughput(collection, sources),
    )


def _positions(collection: Collection, log: LogReader) -> Iterator[_Position]:
    if bars := list(log.bars.values()):
        yield _of_log(max(bars, key=lambda one: one.longest))
    if log.step is not None:
        yield _of_log(log.step)
    if log.epoch is not None:
        one = _of_log(log.epoch)
        yield one._replace(step=None, total=None, rate=None, left=None)
    newest: dict[str, Series] = {}
    for series in collection.series.values():
        if not series.source.startswith("log ("):
            other = newest.get(series.source)
            if other is None or (series.last.step or 0) > (other.last.step or 0):
                newest[series.source] = series
    for source, series in newest.items():
        last = series.last
        if last.step is not None or last.epoch is not None:
            yield _Position(
                step=last.step,
                total=None,
                epoch=last.epoch,
                epochs=None,
                time=last.time or 0.0,
                source=source,
                pace=collection.paces.get(source),
            )


def _of_log(seen: Seen) -> _Position:
    reading = seen.reading
    is_bar = reading.title is not None
    return _Position(
        step=reading.step,
        total=reading.total,
        epoch=reading.epoch,
        epochs=reading.epochs,
        time=seen.time or 0.0,
        source=f"log ({reading.format})",
        rate=reading.rate,
        left=reading.left,
        complete=is_bar and reading.total is not None and reading.step == reading.total,
        pace=seen.pace,
    )


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
    best: _Position,
    log: LogReader,
    known: Length,
    collection: Collection,
    sources: dict[str, str],
) -> tuple[int | None, int | None]:
    """The last step and the last epoch, from the first of the sources that tells."""
    metrics = {one.name: one for one in collection.series.values() if one.name in _TOTAL_METRICS}
    inferred = best.total and best.epochs and not log.epochs  # by the arguments
    source = f"{best.source}, {known.epochs_source}" if inferred else best.source
    totals: list[tuple[int | None, str]] = [(best.total, source), (log.total, "log")]
    totals += [(int(one.last.value), one.source) for one in metrics.values() if _counts(one)]
    totals += [(known.total, known.total_source)]
    epochs = [(log.epochs, "log"), (known.epochs, known.epochs_source)]
    lengths = []
    for name, candidates in (("total", totals), ("epochs", epochs)):
        value, source = next((one for one in candidates if one[0]), (None, ""))
        if value is not None:
            sources[name] = source
        lengths.append(value)
    total = lengths[0]
    if total is not None and best.step is not None and best.step > total:
        total = None  # counted in another unit
        del sources["total"]
    return total, lengths[1]


def _counts(series: Series) -> bool:
    return math.isfinite(series.last.value) and series.last.value >= 1


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
    marks = best.pace.marks() if best.pace else []
    exact = by_epochs(marks, total, total / epochs) if total and epochs else None
    return max(0.0, (total - best.step) / rate if exact is None else exact)


def _epochs(best: _Position, total: int | None, epochs: int | None) -> int | None:
    """The number of epochs; where none is told, by the fraction of them that the log names."""
    if epochs is not None or not (total and best.step and best.epoch and best.epoch % 1):
        return epochs
    return round(total * best.epoch / best.step) or None


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
    losses = [one for one in series if _LOSS.fullmatch(one.name)]
    return max(losses, key=_is_training_loss, default=None)


def _is_training_loss(one: Series) -> tuple[bool, bool, int]:
    name = one.name.lower()
    plain = name in {"loss", "train_loss", "train/loss", "training_loss", "loss/train"}
    return not _NOT_TRAINING.fullmatch(name), plain, one.count


def _curve(loss: Series | None) -> tuple[float, ...]:
    return () if loss is None else tuple(value for _, value in loss.curve.pairs())
