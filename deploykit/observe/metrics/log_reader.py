"""The numbers in a run's log: of the lowest rank that prints some, attempt by attempt.

First what one line tells: progress bars, tables, text, and patterns of the user's own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from deploykit.job.checks import pattern_problem
from deploykit.job.model import LogLine
from deploykit.observe.metrics.points import (
    LONGEST_LINE,
    LONGEST_NAME,
    STEPS,
    Point,
    Reading,
    count,
    number,
    seconds,
)
from deploykit.observe.metrics.series import Pace

_SIZES = {"k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_TQDM = re.compile(
    r"\d{1,3}%\|[^|]{0,500}\| {0,20}(?P<step>[\d.]{1,15}[kKMGT]?)/(?P<total>[\d.]{1,15}[kKMGT]?) "
    r"\[(?P<elapsed>[\d:]{4,15})<(?P<left>[\d:]{4,15}|\?), {0,5}"
    r"(?P<rate>[\d.]{1,15}[kKMGT]?|\?)(?P<unit>[^\],\s]{1,30})(?P<rest>[^\]]{0,2000})\]"
)
_FASTPROGRESS = re.compile(
    r"\|[^|]{1,500}\| [\d.]{1,7}% "
    r"\[(?P<step>\d{1,12})/(?P<total>\d{1,12}) (?P<elapsed>[\d:]{4,15})<(?P<left>[\d:]{4,15})"
)
_RICH = re.compile(
    r"Epoch (?P<epoch>\d{1,9})/(?P<epochs>\d{1,9}) {1,3}[━╸╺ ]{1,400} "
    r"(?P<step>\d{1,12})/(?P<total>\d{1,12}) (?P<elapsed>[\d:]{7,15}) • +"
    r"(?:[\d:]{7,15} +)?(?P<rate>[\d.]{1,15})it/s(?P<rest>.{0,2000})"
)
"""Of Lightning's RichProgressBar, whose epochs begin with 0; a log has only its last state."""
_BARS = (("%|", "tqdm", _TQDM), ("% [", "fastprogress", _FASTPROGRESS), ("•", "Lightning", _RICH))
"""Text that every line with such a bar holds, what prints it, and the bar."""
_KERAS = re.compile(r"^\s*(\d{1,12})/(\d{1,12}) (?:[━╸╺ ]{1,100}|\[[=>.]{1,100}\]|-) ?(.{0,2000})$")
_KERAS_STEP = re.compile(r"(\d{1,12})(us|ms|s)/(?:step|epoch)\b")
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def read_bar(line: str) -> Reading | None:
    """The state of a bar; None where the line has none."""
    for mark, form, pattern in _BARS:
        if mark in line:
            match = pattern.search(line)
            return _bar(form, line[: match.start()], match.groupdict("")) if match else None
    return _keras(line) if "/" in line else None


def _bar(form: str, before: str, parts: dict[str, str]) -> Reading:
    """A bar with the text before it and its parts by name, which are those of a `Reading`."""
    title, step, elapsed = before.strip(" :"), _scaled(parts["step"]), seconds(parts["elapsed"])
    epoch: float | None = None
    epochs: int | None = None
    if form == "Lightning":
        title = f"Epoch {parts['epoch']}/{parts['epochs']}"
        epoch, epochs = int(parts["epoch"]) + 1, int(parts["epochs"]) + 1
    elif match := EPOCH.search(title):
        epoch, epochs = number(match[1]), count(number(match[2] or ""))
    rate = _scaled(parts["rate"]) if "rate" in parts else step and elapsed and step / elapsed
    if rate and parts.get("unit", "").startswith("s/"):
        rate = 1 / rate
    values = dict(pairs(parts.get("rest", "")))
    return Reading(
        form,
        {name: value for name, value in values.items() if not COUNTS.fullmatch(name)},
        step=count(step),
        total=count(_scaled(parts["total"])),
        in_epoch=epoch is not None,
        epoch=epoch,
        epochs=epochs,
        rate=rate or None,
        elapsed=elapsed,
        left=seconds(parts.get("left", "")),
        title=title,
    )


def _scaled(text: str) -> float | None:
    """``1.5k`` as 1500; None for ``?``."""
    size = _SIZES.get(text[-1:], 1)
    value = number(text if size == 1 else text[:-1])
    return None if value is None else round(value * size, 6)


def _keras(line: str) -> Reading | None:
    """A bar, or the line that ends an epoch where Keras draws none."""
    match = _KERAS.match(line)
    if match is None:
        return None
    done, total, rest = match.groups()
    pace, values = _KERAS_STEP.search(rest), dict(pairs(rest))
    if pace is None and not values:
        return None
    each = int(pace[1]) * _UNITS[pace[2]] if pace else 0
    rate = 1 / each if each else None
    return Reading("Keras", values, int(done), int(total), in_epoch=True, rate=rate)


_HEADING = re.compile(r"epoch +train_loss +(?:[\w.@-]{1,60} +){0,30}time *")
_ROW = re.compile(r"\d{1,9}(?: +[\d.a-z+-]{1,30}){1,30} +\d{1,4}(?::\d\d){1,2} *")
_LIST = re.compile(r"\[\d{1,9}(?:, [\d.a-z+-]{1,30}){1,30}, '\d{1,4}(?::\d\d){1,2}'\]")
_FIRST = ("epoch", "train_loss", "valid_loss")
"""The columns that every such table of fastai begins with."""


class Table:
    """The rows of one table, and the names of its columns."""

    def __init__(self) -> None:
        self._names: Sequence[str] = ()

    def read(self, line: str) -> Reading | None:
        """The numbers of a row; None for any other line."""
        if line.startswith("[") and _LIST.fullmatch(line):
            return _row_reading(_FIRST, line[1:-1].replace("'", "").split(", "))
        if line.startswith("epoch") and _HEADING.fullmatch(line):
            self._names = line.split()
        elif self._names and _ROW.fullmatch(line):
            cells = line.split()
            return _row_reading(self._names, cells) if len(cells) == len(self._names) else None
        return None


def _row_reading(names: Sequence[str], cells: Sequence[str]) -> Reading:
    """A row, which ends with its time; a column without a name is called by its number."""
    more = [f"metric_{column}" for column in range(1, len(cells))]
    named = dict(zip([*names, *more], cells[:-1], strict=False))
    numbers = {name[:LONGEST_NAME]: number(cell) for name, cell in named.items()}
    epoch = numbers.pop("epoch", None)
    values = {name: value for name, value in numbers.items() if value is not None}
    return Reading("fastai", values, epoch=None if epoch is None else epoch + 1)


_NUMBER = r"[+-]?(?:\d{1,30}(?:\.\d{0,40})?|\.\d{1,40})(?:[eE][+-]?\d{1,4})?|[+-]?(?i:nan|inf)"
_END = r"(?![\w:/]|[.,-]\d)"
"""After a number that is not part of a time, a version, a fraction or a size."""
_PAIR = re.compile(
    r"(?:(?<![\w./@-])(?![\w./-]{1,80}\.py:\d|(?<=:)\w{1,80}:\d+ - )"  # a line of the source
    r"(?P<word>[A-Za-z][\w@/.-]{0,80}(?:[ ][A-Za-z][\w@]{0,30})?)"
    r"|'(?P<single>[^'=:]{1,80})'|\"(?P<double>[^\"=:]{1,80})\")"
    rf"\s{{0,3}}[=:]\s{{0,6}}(?:'|\"|\[|\()?(?P<value>{_NUMBER}){_END}"
)
_RESULT = r"loss|acc|accuracy|ppl|perplexity|f1|auc|bleu|iou|reward|error|mfu"
"""Names of results: they are metrics even where a line names no step."""
_KNOWN = re.compile(
    r"(?<![\w./@-])((?:(?:train(?:ing)?|val(?:id(?:ation)?)?|test|eval(?:uation)?|average|avg|mean"
    rf"|lm)[ _/-])?(?:{_RESULT}|lr|learning[ _]rate|grad[ _]?norm|gradient[ _]norm)(?:@\d)?)"
    rf"\s{{1,6}}({_NUMBER}){_END}",
    re.IGNORECASE,
)
_IS_RESULT = re.compile(rf"(?:.*[\W_])?(?:{_RESULT})(?:@\d)?", re.IGNORECASE)
_BETWEEN = r"[ =:#\[(|]{1,14}"
_STEP = re.compile(
    rf"(?i)(?<![\w-])(global[ _-]?)?(?:step|iter(?:ation)?){_BETWEEN}(\d{{1,12}})"
    r"(?:\s{0,6}/\s{0,6}(\d{1,12}))?(?![\d.])"
)
_OTHER_STEP = re.compile(
    r"(?i)\b(?:eval\w{0,7}|val\w{0,7}|test\w{0,3}|predict\w{0,4})[ :_-]{1,3}(?:step|iter|batch)"
)
"""Of a loop that is not training."""
_BATCH = re.compile(
    rf"(?i)(?<![\w-])(?:mini-?)?(?:batch|update){_BETWEEN}(\d{{1,12}})\s{{0,6}}/\s{{0,6}}(\d{{1,12}})"
)
EPOCH = re.compile(
    r"(?i)(?<![\w-])epoch(?:\(train\))?[ =:#\[(]{1,14}(\d{1,9}(?:\.\d{1,9})?)"
    r"(?:\s{0,6}/\s{0,6}(\d{1,9}))?(?![\d])"
)
_IN_EPOCH = re.compile(
    r"(?i)(?:epoch|train(?:ing)?)(?:\(train\))?[ :\[]{1,8}\d{1,9}[\] :]{1,8}"
    r"\[\s{0,12}(\d{1,12})\s{0,3}/\s{0,12}(\d{1,12})\b"
)
"""Of PyTorch's own examples: ``Epoch: [0][  10/1251]``, ``Train Epoch: 1 [640/60000 (1%)]``."""
_DCGAN = re.compile(r"\[(\d{1,9})/(\d{1,9})\] ?\[(\d{1,12})/(\d{1,12})\]")
"""Epoch and step of PyTorch's example of two networks: ``[0/25][50/1583] Loss_D: 0.5``."""
_EPISODE = re.compile(
    rf"(?i)(?<![\w-])episode{_BETWEEN}(\d{{1,12}})(?:\s{{0,6}}/\s{{0,6}}(\d{{1,12}}))?(?![\d.])"
)
_HINT = re.compile(r"loss|acc|epoch|episode|step|iter|batch|train|perplexity|ppl|eval|rate|lr")
"""What every line with numbers has, in lower case."""
_KNOWN_END = re.compile(rf"(?:{_RESULT}|lr|rate|norm)(?:@\d)?\s{{1,6}}[+.\dni-]")
"""What every line with a match of `_KNOWN` has, in lower case: much faster to look for."""
_COLOR = re.compile(r"\x1b\[[0-9;:]{0,30}[A-Za-z]")
COUNTS = re.compile(
    r"(?i)(?:.*[\W_])?(?:epochs?|episodes?|steps?|iter(?:ation)?s?|batch(?:_?size)?|eta|v_num)"
)
"""Names that say where a line stands, and no result."""


def plain(line: str) -> str:
    """A line without colors."""
    return _COLOR.sub("", line) if "\x1b" in line else line


def read_text(line: str) -> Reading | None:
    """The numbers of a line; None where it names no step, no epoch and no result."""
    low = line.lower()
    if _HINT.search(low) is None:
        return None
    may_be_other = "val" in low or "test" in low or "predict" in low
    other = may_be_other and _OTHER_STEP.search(line) is not None
    step, total, in_epoch = (None, None, False) if other else _step(line, low)
    epoch = EPOCH.search(line) if "epoch" in low else None
    if epoch is None and "][" in line:
        epoch = _DCGAN.search(line)
    numbers = dict(pairs(line))
    if step is None and not other:
        step = next((count(numbers[name]) for name in STEPS if name in numbers), None)
    epoch_number = number(epoch[1]) if epoch else numbers.get("epoch")
    values = {name: value for name, value in numbers.items() if not _is_count(name)}
    if step is None and epoch_number is None:
        values = {name: value for name, value in values.items() if _IS_RESULT.fullmatch(name)}
        if not values:
            return None
    return Reading(
        _format(line),
        values,
        step=step,
        total=total,
        in_epoch=in_epoch or (epoch is not None and total is not None),
        epoch=epoch_number,
        epochs=count(number(epoch[2] or "")) if epoch else None,
    )


def pairs(line: str) -> Iterator[tuple[str, float]]:
    """Names and their numbers: ``loss=0.5``, ``'loss': '0.5'``, ``Loss 0.5``."""
    if _KNOWN_END.search(line.lower()):
        for match in _KNOWN.finditer(line):
            yield _named(match[1]), float(match[2])
    if "=" not in line and ":" not in line:
        return
    for match in _PAIR.finditer(line):
        name = match["word"] or match["single"] or match["double"]
        yield _named(name), float(match["value"])


@lru_cache(1000)
def _is_count(name: str) -> bool:
    return COUNTS.fullmatch(name) is not None


@lru_cache(1000)
def _named(name: str) -> str:
    return name.strip().replace(" ", "_")[:LONGEST_NAME]


def _step(line: str, low: str) -> tuple[int | None, int | None, bool]:
    """The step, the last one, and whether both count within the epoch."""
    if "[" in line and (match := _IN_EPOCH.search(line)):
        return int(match[1]), int(match[2]), True
    if ("step" in low or "iter" in low) and (match := _STEP.search(line)):
        total = int(match[3]) if match[3] else None
        return int(match[2]), total, False
    if ("batch" in low or "update" in low) and (match := _BATCH.search(line)):
        return int(match[1]), int(match[2]), True
    if "][" in line and (match := _DCGAN.search(line)):
        return int(match[3]), int(match[4]), True
    if "episode" in low and (match := _EPISODE.search(line)):
        return int(match[1]), int(match[2]) if match[2] else None, False
    return None, None, False


def _format(line: str) -> str:
    """What prints such a line, where that is known."""
    if line.startswith("{'") and ("'epoch'" in line or "'train_runtime'" in line):
        return "Hugging Face Trainer"
    if "[Rank 0] step=" in line or "RunningAvgSamplesPerSec" in line:
        return "DeepSpeed"
    return "text"


POSITIONS = ("step", "total", "epoch", "epochs")
"""Names that say where a run is, and no metric."""


def compiled(patterns: Mapping[str, str]) -> dict[str, re.Pattern[str]]:
    """The patterns that are valid: one regular expression with a group for each name."""
    return {
        name: re.compile(regex) for name, regex in patterns.items() if not pattern_problem(regex)
    }


def read_patterns(line: str, patterns: Mapping[str, re.Pattern[str]]) -> Reading | None:
    """The numbers that the patterns find in a line; None where they find none."""
    numbers = {}
    for name, pattern in patterns.items():
        match = pattern.search(line)
        value = number(match[1] or "") if match else None
        if value is not None:
            numbers[name] = value
    if not numbers:
        return None
    values = {name: value for name, value in numbers.items() if name not in POSITIONS}
    return Reading(
        "metrics in the job file",
        values,
        step=count(numbers.get("step")),
        total=count(numbers.get("total")),
        epoch=numbers.get("epoch"),
        epochs=count(numbers.get("epochs")),
    )


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
        self._own = compiled(own or {})
        self._known = epochs
        self._rank = _NO_RANK + 1
        self._attempt = attempt
        self._table = Table()
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
            reading = self._read(plain(line.text[:LONGEST_LINE]))
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
        self._counter = _Counter(self._known, self._counter.first)
        self.bars.clear()
        self._paces.clear()
        self.step = self.epoch = None

    def _read(self, line: str) -> Reading | None:
        if match := _TOTAL.search(line):
            self.total = int(match[1].replace(",", "") or 0) or None
        if match := _EPOCHS.search(line):
            self.epochs = int(match[1].replace(",", "") or 0) or None
        last = line.rpartition("\r")[2]
        reading = read_bar(last) or self._table.read(last) or read_text(last)
        own = read_patterns(line, self._own)
        return reading if own is None else _completed(own, reading)

    def _points(self, reading: Reading, time: float | None) -> Iterator[Point]:
        if reading.title is not None and _OTHER_WORK.search(reading.title):
            return
        placed = self._counter.placed(reading)
        self.epochs = reading.epochs or self.epochs
        self._note(reading, placed, time)
        source = f"log ({placed.format})"
        rank = None if self._rank == _NO_RANK else self._rank
        for name, value in placed.values.items():
            place = placed.step, placed.epoch, time, self._attempt, source, rank
            yield Point(name, value, *place)

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

    def __init__(self, epochs: int | None, first: float | None = None) -> None:
        self._epoch: float | None = None
        """As the program counts."""
        self._epochs = epochs
        self.first = first
        """The first epoch that was named, by any attempt: programs begin with 0 or 1."""
        self._last: dict[str, tuple[int, int]] = {}
        """The last step of each kind of line, and the steps before it began anew."""
        self._whole = False
        """Whether steps go on over the epochs although the line names both."""
        self._in = 0.0, 0
        """The epoch and the step of the whole run of the last line with a step in its epoch."""
        self._ended = 0
        """The step where the last titled bar ended; a bar with another title continues there."""
        self._base = 0
        """The steps of earlier loops over epochs."""

    def placed(self, reading: Reading) -> Reading:
        """The reading with steps of the whole run, and the epoch that was named last."""
        before, named = self._epoch, reading.epoch
        if reading.epoch is not None and math.isfinite(reading.epoch):
            self._epoch = float(reading.epoch)
            self.first = min(self._epoch, self._epoch if self.first is None else self.first)
        self._epochs = reading.epochs or self._epochs
        reading = reading._replace(epoch=self._counted(), epochs=self._epochs)
        if reading.step is None:
            return reading
        if reading.in_epoch and reading.total:
            if named is not None and named < self._in[0]:  # another loop, as of the next fold
                self._base = self._in[1]
            return self._in_epoch(reading, before)
        return self._going_on(reading)

    def _counted(self) -> float | None:
        """The epoch, counted from 1; a fraction, as of the Hugging Face Trainer, as it is."""
        if self._epoch is None or not self._epoch.is_integer():
            return self._epoch
        return self._epoch + 1 if self.first == 0 else self._epoch

    def _in_epoch(self, reading: Reading, before: float | None) -> Reading:
        step, total = reading.step or 0, reading.total or 0
        last, _ = self._last.get(reading.format, (0, 0))
        self._last[reading.format] = step, 0
        if self._epoch is None:
            return reading
        done = int(self._epoch) - (1 if self.first else 0)
        if before is not None and self._epoch > before and reading.title is None:
            self._whole = self._whole or (last < step and self._is_due(step, total, done))
        if self._whole:
            return reading
        whole = total * self._epochs if self._epochs and not self._base else None
        self._in = self._epoch, self._base + done * total + step
        return reading._replace(step=self._in[1], total=whole, left=None)

    def _is_due(self, step: int, total: int, done: int) -> bool:
        """Whether a step of the whole run belongs into the epoch after `done` ones."""
        each = total / self._epochs if self._epochs else 0
        return done * each <= step <= (done + 1) * each + 1

    def _going_on(self, reading: Reading) -> Reading:
        """Steps that begin anew, as those of a bar for each epoch, are added up."""
        step, key = reading.step or 0, f"{reading.format} {_key(reading)}"
        last, base = self._last.get(key, (0, self._ended if reading.title else 0))
        if step < last:
            base += max(last, reading.total or 0)
        self._last[key] = step, base
        if reading.title and step == reading.total:
            self._ended = base + step
        if not base:
            return reading
        total = reading.total * self._epochs if reading.total and self._epochs else None
        return reading._replace(step=base + step, total=total, left=None)
