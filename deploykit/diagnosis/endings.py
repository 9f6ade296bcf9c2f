"""How logs end: what they show after an error, and the last lines where they tell no cause."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from deploykit.diagnosis import log_forms, log_prefixes
from deploykit.diagnosis.cause_rules import RuleSet
from deploykit.diagnosis.ranking import Cause
from deploykit.diagnosis.tracebacks import BEGIN, Tracebacks
from deploykit.errors import NotFound

_END = 1 << 16
"""Bytes at the end of a log that are read."""
_FILES = 1000
"""Logs that are read at most."""
_OF_A_RANK = 2
_WIDEST = 4000
_KINDS = 8
_LONGEST = 160
_VARIES = re.compile(r"0x[0-9a-f]+|[\d.:,]*\d")
_IDLE = re.compile(r"[\s=*~^-]*$|exitcode |error_file|traceback ?:|time  |host  ")
"""Rules and the details of torchrun's summary, which `ended` tells."""
_SEVERE = re.compile(
    r"(?:[\w./-]{1,80}(?:: | - )|\[[^\]]{1,40}\] |<)?\W{0,2}"
    r"(?:(?:ERROR|FATAL|CRITICAL)\b[\]>: ]|(?:[Ff]atal|[Ee]rror|panic)\b(?:[\]>:]|\s+\(?\d+\)?:))"
    r"|.{0,200}\blevel=(?:error|fatal|panic)\b"
)
"""A line that its program calls an error: the mark of a severity, not the word in a sentence."""

_STEP = re.compile(
    rb"(?i)\b(?:step|epoch|ep|iter|iteration|update|batch|it|fold)\b(?:\(\w+\))?\W{0,6}\d.*\d\.\d"
    rb"|\bepoch\W{1,4}\d+\b.*\d|^\s*\d+(?:\s+\d+\.\d+){2,}\s*$"
    rb"|(?:loss|accuracy|\bacc|auc|f1|precision|recall|dice|\bm?iou|m?ap|top-?1|bleu|[wc]er|ppl|psnr|fid"
    rb"|reward|r2|rmse|mae)(?:[-@_ ]?\w{1,8})?(?: \(\w{1,12}\))?\W{1,6}\d+\.\d"
)
"""A line that a training prints now and then: its place in it, a measured value, or both."""
_NO_STEP = re.compile(rb"(?i)^wandb: |(?<!100)%\||\bjob step\b|\bnan\b(?! iteration)")
"""Summaries, which wandb and Slurm print after failures too; bars, drawn again at an early end."""
_DONE = re.compile(
    rb"(?i)\b(?:training|finetuning|evaluation|testing|run|job)\b.{0,12} (?:done|finished|completed?|ended)\b"
    rb"|^\W*(?:done|finished|completed)\b|\b(?:saved|saving|written) .{0,80}(?:model|checkpoint|weights|results)"
    rb"|\b(?:models?|checkpoints?|weights|results) (?:is |was |were )?(?:saved|written)\b|\bsaved? to \S"
    rb"|\bexit(?:ed|ing)? (?:(?:status|code):? ?0\b|normally)|\bbest \w.{0,40}\d\.\d|successfully finished"
)
"""A line that a program prints when all its steps are done."""
_STEPS = 2
"""Steps, or one and a sign that all are done, after which an error is overcome."""


class Ending(StrEnum):
    """What a diagnosis comes to."""

    CAUSE = "cause"
    """The logs show why the run failed."""
    UNKNOWN = "unknown"
    """The run failed, and the logs do not show why."""
    HEALTHY = "healthy"
    """The logs show no failure."""
    UNREAD = "unread"
    """No failure in what could be read, but not all could be."""


@dataclass
class LastLine:
    """A line near the end of logs, `count` of which end with one like it."""

    file: str
    rank: int | None
    text: str
    count: int = 1

    def __str__(self) -> str:
        rank = "" if self.rank is None else f", rank {self.rank}"
        alike = f" (and {self.count - 1} more like it)" if self.count > 1 else ""
        return f"{self.file}{rank}: {self.text}{alike}"


def last_lines(logs: Sequence[tuple[str, Path, int | None]]) -> list[LastLine]:
    """The last lines of the ranks in logs, given with their names and ranks; each kind once."""
    kinds: dict[str, LastLine] = {}
    for name, path, of_file in logs[:_FILES]:
        for rank, text in _of_ranks(_end(path)):
            kind = _VARIES.sub("0", text)
            if kind in kinds:
                kinds[kind].count += 1
            else:
                kinds[kind] = LastLine(name, of_file if rank is None else rank, text[:_LONGEST])
    return list(kinds.values())[:_KINDS]


def ends_in_error(path: Path, rules: RuleSet) -> bool:
    """Whether a log ends within a traceback, or with a line that its program calls an error."""
    raw = (line.rpartition("\r")[2] for line in _end(path))
    lines = [line for line in raw if not _IDLE.match(log_prefixes.bare(line))]
    last = log_prefixes.bare(lines[-1])[:_WIDEST] if lines else ""
    if _ends_in_traceback(lines) or _ends_in_box(last, lines):
        return True
    return _SEVERE.match(last) is not None and not rules.is_excused(last)


def is_overcome(cause: Cause, last: Mapping[str, int], paths: Mapping[str, Path]) -> bool:
    """Whether the log goes on after an error: for long, where the script made it; or in training.

    `last` is the last line of each log that speaks of a failure, and `paths` are the logs, by the
    names that evidence has.
    """
    name, line = cause.last
    if name not in paths:
        return False
    after = cause.rule.startup
    if after and any(piece.endswith(b"\n") for piece in _after(paths[name], line + after)):
        return True
    return not cause.rule.lasting and trains_on(paths[name], last[name], cause.rule.until)


def trains_on(path: Path, line: int, until: re.Pattern[str] | None = None) -> bool:
    """Whether a training prints steps in a log after a line, in which `until` matches."""
    seen: set[bytes] = set()
    for text in _after(path, line):
        if _NO_STEP.search(text):
            continue
        if (seen and _DONE.search(text)) or (_STEP.search(text) and _shows(text, until)):
            seen.add(text)
            if len(seen) == _STEPS:
                return True
    return False


def _shows(text: bytes, until: re.Pattern[str] | None) -> bool:
    return until is None or until.search(text.decode(errors="replace")) is not None


def _after(path: Path, line: int) -> Iterator[bytes]:
    """The lines of a log in any form after one of them, long lines in pieces."""
    number = 0
    try:
        with path.open("rb") as source:
            text = log_forms.opened(source, lambda _: None)
            for piece in iter(lambda: text.readline(_WIDEST), b""):
                if number >= line:
                    yield piece
                number += piece.endswith(b"\n")
    except (OSError, NotFound):
        return


def _ends_in_traceback(lines: Sequence[str]) -> bool:
    """Whether the exception of the last traceback is missing."""
    starts = [number for number, line in enumerate(lines) if BEGIN in line]
    tracebacks = Tracebacks()
    for line in lines[starts[-1] :] if starts else ():
        tracebacks.read(line)
    return tracebacks.unfinished


def _ends_in_box(last: str, lines: Sequence[str]) -> bool:
    """Whether the box that rich draws around a traceback, before the exception, does not close."""
    return last.startswith("│") and any("❱" in line for line in lines)


def _of_ranks(lines: Iterable[str]) -> Iterator[tuple[int | None, str]]:
    """The last lines of each rank, in their order."""
    kept: dict[int | None, list[str]] = {}
    for line in lines:
        text = log_prefixes.bare(line.rpartition("\r")[2])
        if not _IDLE.match(text):
            kept.setdefault(log_prefixes.rank(line), []).append(text)
    for rank, texts in kept.items():
        for text in texts[-_OF_A_RANK:]:
            yield rank, text


def _end(path: Path) -> list[str]:
    """The lines at the end of a log in any form; empty where it cannot be read."""
    try:
        with path.open("rb") as source:
            text = log_forms.opened(source, lambda _: None)
            end = b""
            if text is source:
                source.seek(max(0, path.stat().st_size - _END))
            while chunk := text.read(_END):
                end = (end + chunk)[-_END:]
    except (OSError, NotFound):
        return []
    return end.decode(errors="replace").splitlines()
