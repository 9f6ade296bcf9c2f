"""How logs end: in an error or not, and their last lines where they tell no cause."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from deploykit.diagnose import log_forms, log_prefixes
from deploykit.diagnose.cause_rules import RuleSet
from deploykit.diagnose.tracebacks import BEGIN, Tracebacks
from deploykit.lib.errors import NotFound

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


class Ending(StrEnum):
    """What a diagnosis comes to."""

    CAUSE = "cause"
    """The logs show why the run failed."""
    UNKNOWN = "unknown"
    """The run failed, and the logs do not show why."""
    HEALTHY = "healthy"
    """The logs show no failure."""
    UNFINISHED = "unfinished"
    """The run has not ended, and its logs show no failure so far."""
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
    if last.startswith("│") and any("❱" in line for line in lines):
        return True  # the box that rich draws around a traceback does not close
    if _ends_in_traceback(lines):
        return True
    return _SEVERE.match(last) is not None and not rules.is_excused(last)


def _ends_in_traceback(lines: Sequence[str]) -> bool:
    """Whether the exception of the last traceback is missing, or all of it but its first line."""
    starts = [number for number, line in enumerate(lines) if BEGIN in line]
    if starts and starts[-1] == len(lines) - 1:
        return True
    tracebacks = Tracebacks()
    for line in lines[starts[-1] :] if starts else ():
        tracebacks.read(line)
    return tracebacks.unfinished


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
