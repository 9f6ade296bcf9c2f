"""Lines that need no look at the rules: those that repeat what earlier ones proved, or nothing.

A loop may print a million lines that differ in their digits only. Once the first ones have given
all the evidence that is shown, or none three times, the others are skipped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from deploykit.diagnose import log_prefixes, tracebacks
from deploykit.diagnose.cause_rules import RuleKey, RuleSet
from deploykit.diagnose.pattern_index import zeroed

_MOST = 1000
"""Lines, but for their digits, that are remembered of a log."""
_ZEROS = bytes.maketrans(b"123456789", b"0" * 9)
_SAY_MORE = ('File "', tracebacks.BEGIN, "exitcode", log_prefixes.SUMMARY)
"""Texts of lines that say more than which rules they match."""


_MOST_IDLE = 20_000
"""Lines that prove nothing that are remembered of all logs."""
_OFTEN = 3
"""How often a line is looked at that proves nothing where it stands."""
_DIGITS = re.compile(r"\d+")
_DIGITS_MATTER = re.compile(r"rror|code|status|ignal|Xid|rrno|Traceback|File|Caught|after")
"""In such lines the digits matter, or the lines before them do."""
_COUNTS_AGAIN = frozenset({"after", "success", "cause"})
"""Parts whose lines count in each log anew, or after other lines."""


class Idle:
    """Lines of all logs that prove nothing: always, or unless they follow what a rule wants."""

    def __init__(self) -> None:
        self._always: set[int] = set()
        self._alone: dict[str, tuple[int, Sequence[re.Pattern[str]]]] = {}
        """How often each was looked at, and what may match another one, as the index says."""

    def has(self, text: str, *, follows: bool) -> bool:
        """Whether a line needs no look; `follows` says that it stands after such a line."""
        if _exactly(text) in self._always:
            return True
        if follows or not self._alone:
            return False
        times, unlike = self._alone.get(zeroed(text), (0, ()))
        return times >= _OFTEN and not any(regex.search(text) for regex in unlike)

    def add(
        self, text: str, hits: Mapping[RuleKey, dict[str, str]], rules: RuleSet, *, follows: bool
    ) -> None:
        """Note a line that proved nothing, with all that it matches."""
        if len(self) >= _MOST_IDLE:
            return
        parts = {part for part, _ in hits}
        if parts.isdisjoint(_COUNTS_AGAIN):
            self._always.add(_exactly(text))
        elif parts == {"cause"} and not follows:
            unlike = rules.index.unlike(text)
            if unlike is not None:
                times, _ = self._alone.get(key := zeroed(text), (0, ()))
                self._alone[key] = times + 1, unlike

    def __len__(self) -> int:
        return len(self._always) + len(self._alone)


def _exactly(text: str) -> int:
    """The hash of a line; without its digits, where they do not matter."""
    return hash(text if _DIGITS_MATTER.search(text) else _DIGITS.sub("0", text))


class Proved(Protocol):
    """A cause, as far as it is of interest here."""

    order: tuple[str, int, int]


class _Repeated(NamedTuple):
    """What is true of all lines that differ in their digits only."""

    cause: Proved
    """What they prove."""
    unlike: Sequence[re.Pattern[str]]
    """Patterns that may match one of them, which is then no repetition."""
    bare: slice
    """The part without prefixes."""
    is_timed: bool


class Repeats:
    """The lines of a log that need no further look, once `add` was told of one like them."""

    def __init__(self) -> None:
        self._known: dict[bytes, _Repeated] = {}

    def time(self, raw: bytes, before: str, number: int, line: int) -> str | None:
        """The time of a line that changes nothing but the time; None for any other line.

        `before` is the time of the lines before it, `number` that of the log, `line` the line's.
        """
        known = self._known.get(_key(raw)) if self._known else None
        if known is None:
            return None
        text = raw.decode()
        bare = text[known.bare]
        for regex in known.unlike:
            if regex.search(bare):
                return None
        time = (log_prefixes.time(text) if known.is_timed else "") or before
        return None if (time, number, line) < known.cause.order else time

    def add(
        self,
        text: str,
        bare: str,
        cause: Proved,
        unlike: Sequence[re.Pattern[str]] | None,
    ) -> None:
        """Note a line that `proves_by_itself`, and whose cause has all its evidence.

        `bare` is its text without prefixes, `unlike` that of the index.
        """
        start = text.find(bare)
        if unlike is None or start < 0 or any(more in text for more in _SAY_MORE):
            return
        if len(self._known) < _MOST:
            part, is_timed = slice(start, start + len(bare)), bool(log_prefixes.time(text))
            self._known[_key(text.encode())] = _Repeated(cause, unlike, part, is_timed)

    def clear(self) -> None:
        """Forget all lines, as a success has taken back what they proved."""
        self._known.clear()


def _key(raw: bytes) -> bytes:
    """A line without its end, with a zero for each digit."""
    return raw.rstrip(b"\r\n").translate(_ZEROS)


def proves_by_itself(rules: RuleSet, hits: Mapping[RuleKey, dict[str, str]]) -> bool:
    """Whether a line proves the first rule that it matches, whatever the lines around it are."""
    if any(part != "cause" for part, _ in hits):
        return False
    rule = rules.causes[min(number for _, number in hits)]
    depends = rule.after or rule.unless or rule.raised_in or rule.until
    return not depends and rule.least <= 1
