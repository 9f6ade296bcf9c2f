"""The numbers in a run's log: of the lowest rank that prints some, attempt by attempt."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from deploykit.job.model import LogLine
from deploykit.observe.metrics import lines as log_lines
from deploykit.observe.metrics.points import LONGEST_LINE, Point, Reading
from deploykit.observe.metrics.series import Pace

_AGAIN = re.compile(r"restart (\d{1,9})\b")
"""What a node's launcher logs before all attempts but the first."""
_NO_RANK = 1 << 40
"""The rank of lines without one, which count where no rank prints numbers."""
_TOTAL = re.compile(
    r"(?:Total optimization steps\s{0,3}= ?|global batch \d{1,9}, strategy \w{1,20}, )([\d,]{1,20})"
)
"""What the Hugging Face Trainer logs first, at level INFO, and deploykit's own trainer."""
_EPOCHS = re.compile(r"(?:Num Epochs\s{0,3}= ?|`max_epochs=)([\d,]{1,20})")
"""The same of the Hugging Face Trainer; what Lightning logs at its end."""
_OTHER_WORK = re.compile(
    r"(?i)\b(?:map|filter|sav|writ|push|upload|download|fetch|load|generat|tokeniz|eval|val|test"
    r"|sanity|predict|check|prepar|process|compil|convert|extract|cach|read|shard)"
)
"""In the title of a bar that is not about training."""
_MAX_BARS = 64


class Seen(NamedTuple):
    """A state of the run as the log tells it: a reading with steps of the whole run, and when."""

    reading: Reading
    time: float | None
    pace: Pace
    """Of its steps; of its epochs where it has no steps."""
    longest: float = 0.0
    """Seconds that all of a bar takes, at most: that of the training takes longest."""


class LogReader:
    """Reads lines in their order. Every rank may print; the numbers of one are taken."""

    def __init__(
        self, own: Mapping[str, str] | None = None, epochs: int | None = None, attempt: int = 0
    ) -> None:
        """`own` are patterns by name; `epochs` are those that the arguments tell."""
        self._own = log_lines.compiled(own or {})
        self._known = epochs
        self._rank = _NO_RANK + 1
        self._attempt = attempt
        self._table = log_lines.Table()
        self._counter = _Counter(self._known)
        self.bars: dict[str, Seen] = {}
        """The last state of each bar, by its title and total."""
        self.step: Seen | None = None
        self.epoch: Seen | None = None
        """The last line with a step that is no bar, and the last one with an epoch."""
        self._paces: dict[str, Pace] = {}
        self.total: int | None = None
        self.epochs: int | None = None
        """What the log says of the length of the run, apart from its steps."""

    def feed(self, lines: Iterable[LogLine]) -> Iterator[Point]:
        """The points in further lines."""
        for line in lines:
            if line.rank is None and (again := _AGAIN.match(line.text)):
                self._begin(int(again[1]))
            rank = _NO_RANK if line.rank is None else line.rank
            if rank > self._rank:
                continue
            reading = self._read(log_lines.plain(line.text[:LONGEST_LINE]))
            if reading is not None and not (line.bar and self._is_late(line)):
                if rank < self._rank:
                    self._rank = rank
                    self._begin(self._attempt)
                yield from self._points(reading, line.time.timestamp() if line.time else None)

    def _is_late(self, bar: LogLine) -> bool:
        """Whether the log has a later state of the bar: its file is up to half a second behind."""
        times = [seen.time or 0.0 for seen in (*self.bars.values(), self.step) if seen]
        return bar.time is not None and bar.time.timestamp() < max(times, default=0.0)

    def _begin(self, attempt: int) -> None:
        """Forget what the attempt before, or another rank, has shown."""
        self._attempt = attempt
        self._counter = _Counter(self._known)
        self.bars.clear()
        self._paces.clear()
        self.step = self.epoch = None

    def _read(self, line: str) -> Reading | None:
        if match := _TOTAL.search(line):
            self.total = int(match[1].replace(",", "") or 0) or None
        if match := _EPOCHS.search(line):
            self.epochs = int(match[1].replace(",", "") or 0) or None
        last = line.rpartition("\r")[2]
        reading = log_lines.read_bar(last) or self._table.read(last) or log_lines.read_text(last)
        own = log_lines.read_patterns(line, self._own)
        return reading if own is None else _completed(own, reading)

    def _points(self, reading: Reading, time: float | None) -> Iterator[Point]:
        if reading.title is not None and _OTHER_WORK.search(reading.title):
            return
        placed = self._counter.placed(reading)
        self.epochs = reading.epochs or self.epochs
        self._note(reading, placed, time)
        source = f"log ({placed.format})"
        for name, value in placed.values.items():
            yield Point(name, value, placed.step, placed.epoch, time, self._attempt, source)

    def _note(self, reading: Reading, placed: Reading, time: float | None) -> None:
        """Keep the position that a line tells, and how fast it moves."""
        if reading.title is not None:
            key = _key(reading)
            if key in self.bars or len(self.bars) < _MAX_BARS:
                whole = (reading.elapsed or 0.0) + (reading.left or 0.0)
                before = self.bars[key].longest if key in self.bars else 0.0
                seen = self._seen(key, placed, placed.step, time)
                self.bars[key] = seen._replace(longest=max(whole, before))
        elif placed.step is not None:
            self.step = self._seen("step", placed, placed.step, time)
        if reading.epoch is not None:
            self.epoch = self._seen("epoch", placed, placed.epoch, time)

    def _seen(self, key: str, placed: Reading, at: float | None, time: float | None) -> Seen:
        pace = self._paces.setdefault(key, Pace())
        if at is not None and time is not None:
            pace.add(time, at)
        return Seen(placed, time, pace)


def _completed(own: Reading, other: Reading | None) -> Reading:
    """What the patterns of the user have found; the position of another reader where none has."""
    if other is None:
        return own
    names = ("step", "total", "epoch", "epochs")
    given = {name: getattr(own, name) for name in names if getattr(own, name) is not None}
    return other._replace(format=own.format, values=own.values, **given)


def _key(bar: Reading) -> str:
    return f"{re.sub('[0-9]+', '', bar.title or '')} {bar.total}"


class _Counter:
    """Turns steps within an epoch into steps of the run, in one attempt."""

    def __init__(self, epochs: int | None) -> None:
        self._epoch: float | None = None
        """As the program counts."""
        self._epochs = epochs
        self._first: float | None = None
        """The first epoch that was named: programs begin with 0 or 1."""
        self._last: dict[str, tuple[int, int]] = {}
        """The last step of each kind of line, and the steps before it began anew."""
        self._whole = False
        """Whether steps go on over the epochs although the line names both."""

    def placed(self, reading: Reading) -> Reading:
        """The reading with steps of the whole run, and the epoch that was named last."""
        before = self._epoch
        if reading.epoch is not None and math.isfinite(reading.epoch):
            self._epoch = float(reading.epoch)
            self._first = min(self._epoch, self._epoch if self._first is None else self._first)
        self._epochs = reading.epochs or self._epochs
        reading = reading._replace(epoch=self._counted(), epochs=self._epochs)
        if reading.step is None:
            return reading
        if reading.in_epoch and reading.total:
            return self._in_epoch(reading, before)
        return self._going_on(reading)

    def _counted(self) -> float | None:
        """The epoch, counted from 1; a fraction, as of the Hugging Face Trainer, as it is."""
        if self._epoch is None or not self._epoch.is_integer():
            return self._epoch
        return self._epoch + 1 if self._first == 0 else self._epoch

    def _in_epoch(self, reading: Reading, before: float | None) -> Reading:
        step, total = reading.step or 0, reading.total or 0
        last, _ = self._last.get(reading.format, (0, 0))
        self._last[reading.format] = step, 0
        if self._epoch is None:
            return reading
        done = int(self._epoch) - (1 if self._first else 0)
        if before is not None and self._epoch > before and reading.title is None:
            self._whole = self._whole or (last < step and self._is_due(step, total, done))
        if self._whole:
            return reading
        whole = total * self._epochs if self._epochs else None
        return reading._replace(step=done * total + step, total=whole, left=None)

    def _is_due(self, step: int, total: int, done: int) -> bool:
        """Whether a step of the whole run belongs into the epoch after `done` ones."""
        each = total / self._epochs if self._epochs else 0
        return done * each <= step <= (done + 1) * each + 1

    def _going_on(self, reading: Reading) -> Reading:
        """Steps that begin anew, as those of a bar for each epoch, are added up."""
        step, key = reading.step or 0, f"{reading.format} {_key(reading)}"
        last, base = self._last.get(key, (0, 0))
        if step < last:
            base += max(last, reading.total or 0)
        self._last[key] = step, base
        if not base:
            return reading
        total = reading.total * self._epochs if reading.total and self._epochs else None
        return reading._replace(step=base + step, total=total, left=None)
