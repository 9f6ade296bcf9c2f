"""Errors that a log overcomes: the log goes on for long, or a training prints steps."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path

from deploykit.diagnose import log_forms
from deploykit.diagnose.cause_rules import CauseRule
from deploykit.diagnose.ranking import Cause
from deploykit.lib.errors import NotFound

_WIDEST = 4000
"""Bytes of a line that are searched at once."""
_STEP = re.compile(
    rb"""(?x)
    \b(?:step|epoch|ep|iters?|iteration|update|batch|it|fold)\b(?:\(\w+\))?\W{0,6}\d.*\d\.\d
    |\bepoch\W{1,4}\d+\b.*\d
    |^\s*\d+(?:\s+\d+\.\d+){2,}\s*$
    |(?:loss|accuracy|(?:\b|_)acc|(?:success|win)[_\ ]rate|auc|f1|precision|recall
        |dice|\bm?iou|m?ap|top-?1|bleu|[wc]er|ppl|perplexity|psnr|fid|reward|r2|rmse|mae
        )(?:[-@_\ ]?\w{1,8})?(?:\ \(\w{1,12}\))?\W{1,6}\d+\.\d
    """
)
"""A line that a training prints now and then, in lower case: its place in it, a measured value, or
both. (Without regard to case the search takes twice as long.)"""
_COLOR = re.compile(rb"\x1b\[[\d;]{0,20}m")
_MAY_BE_STEP = re.compile(rb"\d\.\d|poch|POCH")
"""What every such line holds, and others seldom: it is found twenty times as fast."""
_NO_STEP = re.compile(rb"(?i)^.{0,20}\bwandb: |(?<!100)%\||\bjob step\b|\bnan\b(?! iteration)")
"""Summaries, which wandb and Slurm print after failures too; bars, drawn again at an early end."""
_BAR = re.compile(rb"\d%\|[^|\r\n]{0,400}\| +(\d+)/(\d+) \[")
"""A progress bar, and how much of what is done: the program that the script was to start runs."""
_RAISED = re.compile(
    rb"(?!Conda|(?:Import|ModuleNotFound|FileNotFound|Syntax)Error)[A-Za-z][\w.]*"
    rb"(?:Error|Exception)(?:: |$)"
)
"""It ran, and raised an exception that is not about what the script failed to provide."""
_DONE = re.compile(
    rb"""(?ix)
    \b(?:training|finetuning|evaluation|testing|run|job)\b.{0,12}
        \ (?:done|finished|completed?|ended)\b
    |^\W*(?:done|finished|completed)\b
    |\b(?:saved|saving|written)\ .{0,80}(?:model|checkpoint|weights|results)
    |\b(?:models?|checkpoints?|weights|results)\ (?:is\ |was\ |were\ )?(?:saved|written)\b
    |\bsaved?\ to\ \S
    |\bexit(?:ed|ing)?\ (?:(?:status|code):?\ ?0\b|normally)
    |\bbest\ \w.{0,40}\d\.\d
    |successfully\ finished
    |\b(?:total|execution)\ (?:\w+\ )?time\W{1,4}\d
    """
)
"""A line that a program prints when all its steps are done."""
_BEGINNING = 3
"""Lines at the beginning of a log by which the beginning of another run is recognized."""
_FAILURE = re.compile(rb"(?i)error|warn|fail|exception|exit|unexpected|killed|conflict|\bfile \"")
"""Words of failures: lines with them may come again without another run, which they do not show."""
_MOVES = 4
"""Moves of a progress bar that are as good as a step: at an early end it is drawn again."""
_MANY = 1000
"""Progress bars that are told apart; a log with more is no training."""
_KINDS = 150
"""Lines that differ in more than numbers and speak of no failure, that overcome an error."""
_SOON = 20_000
"""Lines after the error within which they must be."""
_INDENTED = re.compile(rb"(?:\S+ \[(?:rank|node) \d+\] )?\s")
"""A line of a stack, a table or a list, also with the prefix of the launcher."""
_HEX = b"0123456789abcdefABCDEF"


def is_overcome(cause: Cause, last: Mapping[str, int], paths: Mapping[str, Path]) -> bool:
    """Whether the log goes on after an error: in another run, in training, or for long.

    `last` is the last line of each log that speaks of a failure, and `paths` are the logs, by the
    names that evidence has.
    """
    name, line = cause.last
    if name not in paths:
        return False
    if _begins_again(paths[name], line):
        return True
    after = cause.rule.startup
    rest = enumerate(_after(paths[name], line)) if after else ()
    for number, piece in rest:
        if number >= after or _BAR.search(piece) or _RAISED.match(piece):
            return True
    return cause.rule.steps > 0 and _goes_on(paths[name], last[name], cause.rule)


def _begins_again(path: Path, line: int) -> bool:
    """Whether a log begins once more after a line: another run was appended to it.

    The beginning is that of the log with any numbers, unless that does not tell a run's beginning.
    """
    lines = list(islice(_texts(path, 0), _BEGINNING))
    if len(set(lines)) < _BEGINNING or any(map(_FAILURE.search, lines)):
        return False
    beginning = [re.compile(re.sub(rb"\d+", rb"\\d+", re.escape(text))) for text in lines]
    seen = 0
    for text in _texts(path, line):
        if not beginning[seen].fullmatch(text):
            seen = 0
        seen += bool(beginning[seen].fullmatch(text))
        if seen == len(beginning):
            return True
    return False


def _texts(path: Path, line: int) -> Iterator[bytes]:
    return filter(None, map(bytes.strip, _after(path, line)))


def _goes_on(path: Path, line: int, rule: CauseRule) -> bool:
    """Whether a training prints steps in a log after a line, or one and a sign that all are done.

    As good are a progress bar that moves on and, soon, lines of many kinds, unless `until` must
    match. Lines are of a kind if they differ in numbers only, or belong to the line before.
    """
    seen: set[bytes] = set()
    kinds: set[bytes] = set()
    bars: dict[bytes, tuple[int, int]] = {}
    for number, text in enumerate(_after(path, line)):
        if rule.until is None:
            if b"%|" in text and _advances(bars, text, rule.steps * _MOVES):
                return True
            if number < _SOON:
                kind = text.translate(None, _HEX)
                if kind not in kinds and _FAILURE.search(text):
                    kinds.clear()
                elif not _INDENTED.match(text):
                    kinds.add(kind)
                if len(kinds) == _KINDS:
                    return True
        says_so = _is_step(text, rule.until) or (seen and _DONE.search(text))
        if says_so and not _NO_STEP.search(text):
            seen.add(text)
            if len(seen) == rule.steps:
                return True
    return False


def _advances(bars: dict[bytes, tuple[int, int]], text: bytes, enough: int) -> bool:
    """Whether a progress bar has moved on often enough, with those of a line.

    `bars`: by what is to do in all, how much is done and how often that was more than before.
    """
    for reached, total in _BAR.findall(text):
        if len(bars) > _MANY:
            bars.clear()
        now = int(reached)
        before, moves = bars.get(total, (now, 0))
        bars[total] = now, moves + (now > before)
        if bars[total][1] >= enough:
            return True
    return False


def _is_step(text: bytes, until: re.Pattern[str] | None) -> bool:
    if not (_MAY_BE_STEP.search(text) and _STEP.search(text.lower())):
        return False
    return until is None or until.search(text.decode(errors="replace")) is not None


def _after(path: Path, line: int) -> Iterator[bytes]:
    """The lines of a log in any form after one of them, without colors, long lines in pieces."""
    number = 0
    try:
        with path.open("rb") as source:
            text = log_forms.opened(source, lambda _: None)
            for piece in iter(lambda: text.readline(_WIDEST), b""):
                if number >= line:
                    yield _COLOR.sub(b"", piece) if b"\x1b" in piece else piece
                number += piece.endswith(b"\n")
    except (OSError, NotFound):
        return
