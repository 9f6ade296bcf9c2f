"""Progress bars in a line of a log: those of tqdm, fastprogress, Lightning and Keras.

Checked against tqdm 4.70, fastai 2.8, Lightning 2.6 and Keras 3.15.
"""

from __future__ import annotations

import re

from deploykit.observe.metrics.points import count, number
from deploykit.observe.metrics.reading import Reading, seconds
from deploykit.observe.metrics.text import COUNTS, EPOCH, pairs

_SIZES = {"k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_TQDM = re.compile(
    r"\d{1,3}%\|[^|]{0,500}\| {0,20}([\d.]{1,15})([kKMGT]?)/([\d.]{1,15})([kKMGT]?) "
    r"\[([\d:]{4,15})<([\d:]{4,15}|\?), {0,5}([\d.]{1,15}|\?)([kKMGT]?)([^\],\s]{1,30})"
    r"([^\]]{0,2000})\]"
)
_FASTPROGRESS = re.compile(
    r"\|[^|]{1,500}\| [\d.]{1,7}% \[(\d{1,12})/(\d{1,12}) ([\d:]{4,15})<([\d:]{4,15})"
)
_KERAS = re.compile(r"^\s*(\d{1,12})/(\d{1,12}) (?:[━╸╺ ]{1,100}|\[[=>.]{1,100}\]|-) ?(.{0,2000})$")
_RICH = re.compile(
    r"Epoch (\d{1,9})/(\d{1,9}) {1,3}[━╸╺ ]{1,400} (\d{1,12})/(\d{1,12}) ([\d:]{7,15}) • +"
    r"(?:[\d:]{7,15} +)?([\d.]{1,15})it/s(.{0,2000})"
)
"""Of Lightning's RichProgressBar, whose epochs begin with 0; a log has only its last state."""
_KERAS_STEP = re.compile(r"(\d{1,12})(us|ms|s)/(?:step|epoch)\b")
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def read(line: str) -> Reading | None:
    """The state of a bar; None where the line has none."""
    if "%|" in line:
        return _tqdm(line)
    if "% [" in line:
        return _fastprogress(line)
    if "•" in line:
        return _rich(line)
    return _keras(line) if "/" in line else None


def _tqdm(line: str) -> Reading | None:
    match = _TQDM.search(line)
    if match is None:
        return None
    done, done_size, total, total_size, elapsed, left, rate, rate_size, unit, rest = match.groups()
    title = line[: match.start()].strip().removesuffix(":")
    epoch = EPOCH.search(title)
    speed = _scaled(rate, rate_size)
    if speed and unit.startswith("s/"):
        speed = 1 / speed
    return Reading(
        "tqdm",
        _results(rest),
        count(_scaled(done, done_size)),
        count(_scaled(total, total_size)),
        epoch is not None,
        number(epoch[1]) if epoch else None,
        count(number(epoch[2] or "")) if epoch else None,
        speed or None,
        seconds(elapsed),
        seconds(left),
        title,
    )


def _scaled(text: str, size: str) -> float | None:
    """``1.5`` and ``k`` as 1500; None for ``?``."""
    value = number(text)
    return None if value is None else round(value * _SIZES.get(size, 1), 6)


def _fastprogress(line: str) -> Reading | None:
    match = _FASTPROGRESS.search(line)
    if match is None:
        return None
    done, total, elapsed, left = match.groups()
    title = line[: match.start()].strip(" :")
    epoch = EPOCH.search(title)
    spent = seconds(elapsed)
    return Reading(
        "fastprogress",
        {},
        int(done),
        int(total),
        epoch is not None,
        number(epoch[1]) if epoch else None,
        count(number(epoch[2] or "")) if epoch else None,
        int(done) / spent if spent else None,
        spent,
        seconds(left),
        title,
    )


def _rich(line: str) -> Reading | None:
    match = _RICH.search(line)
    if match is None:
        return None
    epoch, last, done, total, elapsed, rate, rest = match.groups()
    return Reading(
        "Lightning",
        _results(rest),
        int(done),
        int(total),
        in_epoch=True,
        epoch=int(epoch) + 1,
        epochs=int(last) + 1,
        rate=number(rate),
        elapsed=seconds(elapsed),
        title=f"Epoch {epoch}/{last}",
    )


def _results(text: str) -> dict[str, float]:
    return {name: value for name, value in pairs(text) if not COUNTS.fullmatch(name)}


def _keras(line: str) -> Reading | None:
    """A bar, or the line that ends an epoch where Keras draws none."""
    match = _KERAS.match(line)
    if match is None:
        return None
    done, total, rest = match.groups()
    pace = _KERAS_STEP.search(rest)
    values = dict(pairs(rest))
    if pace is None and not values:
        return None
    each = int(pace[1]) * _UNITS[pace[2]] if pace else 0
    return Reading(
        "Keras", values, int(done), int(total), in_epoch=True, rate=1 / each if each else None
    )
