"""Steps, epochs and metrics in a line of text: ``step 10/100 loss=0.5``, a printed dict, and so on.

These patterns hold what most libraries print, so few need one of their own. None of them can take
more than linear time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

from deploykit.observe.metrics.points import LONGEST_NAME, STEPS, count, number
from deploykit.observe.metrics.reading import Reading

_NUMBER = r"[+-]?(?:\d{1,30}(?:\.\d{0,40})?|\.\d{1,40})(?:[eE][+-]?\d{1,4})?|[+-]?(?i:nan|inf)"
_END = r"(?![\w:/]|[.,-]\d)"
"""After a number that is not part of a time, a version, a fraction or a size."""
_PAIR = re.compile(
    r"(?:(?<![\w./@-])(?P<word>[A-Za-z][\w@/.-]{0,80}(?:[ ][A-Za-z][\w@]{0,30})?)"
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
_HINT = re.compile(r"loss|acc|epoch|step|iter|batch|train|perplexity|ppl|eval|rate|lr")
"""What every line with numbers has, in lower case."""
_KNOWN_END = re.compile(rf"(?:{_RESULT}|lr|rate|norm)(?:@\d)?\s{{1,6}}[+.\dni-]")
"""What every line with a match of `_KNOWN` has, in lower case: much faster to look for."""
_COLOR = re.compile(r"\x1b\[[0-9;:]{0,30}[A-Za-z]")
COUNTS = re.compile(
    r"(?i)(?:.*[\W_])?(?:epochs?|steps?|iter(?:ation)?s?|batch(?:_?size)?|eta|v_num)"
)
"""Names that say where a line stands, and no result."""


def plain(line: str) -> str:
    """A line without colors."""
    return _COLOR.sub("", line) if "\x1b" in line else line


def read(line: str) -> Reading | None:
    """The numbers of a line; None where it names no step, no epoch and no result."""
    low = line.lower()
    if _HINT.search(low) is None:
        return None
    other = _is_of_other_step(line, low)
    step, total, in_epoch = (None, None, False) if other else _step(line, low)
    epoch = EPOCH.search(line) if "epoch" in low else None
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
        step,
        total,
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


def _is_of_other_step(line: str, low: str) -> bool:
    """Whether it tells a step of a loop that is not training; `low` is the line in lower case."""
    may_be = "val" in low or "test" in low or "predict" in low
    return may_be and _OTHER_STEP.search(line) is not None


def _step(line: str, low: str) -> tuple[int | None, int | None, bool]:
    """The step, the last one, and whether both count within the epoch."""
    if "[" in line and (match := _IN_EPOCH.search(line)):
        return int(match[1]), int(match[2]), True
    if ("step" in low or "iter" in low) and (match := _STEP.search(line)):
        total = int(match[3]) if match[3] else None
        return int(match[2]), total, False
    if ("batch" in low or "update" in low) and (match := _BATCH.search(line)):
        return int(match[1]), int(match[2]), True
    return None, None, False


def _format(line: str) -> str:
    """What prints such a line, where that is known."""
    if line.startswith("{'") and ("'epoch'" in line or "'train_runtime'" in line):
        return "Hugging Face Trainer"
    if "[Rank 0] step=" in line or "RunningAvgSamplesPerSec" in line:
        return "DeepSpeed"
    return "text"
