"""Many regular expressions against a line: only those whose fixed text the line holds are tried."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

SHORTEST = 3
"""Characters of the shortest fixed text: the index finds texts by three of their characters."""
_FREQUENT = frozenset("etaoinsrldc 0123456789")
_DIGITS = re.compile(r"\d+")
_MOST_KNOWN = 5000
"""Lines without their numbers that are remembered."""
_SPECIAL = re.compile(r"[\\.*+?()\[\]{}|^$]")

Owner = TypeVar("Owner")


@dataclass(frozen=True)
class LinePattern:
    """A regular expression, and fixed texts of which every matching line holds at least one."""

    literals: tuple[str, ...]
    regex: re.Pattern[str]


class PatternIndex(Generic[Owner]):
    """Patterns with their owners, looked up by the literals that a line holds."""

    def __init__(self, owned: Sequence[tuple[Owner, LinePattern]]) -> None:
        self._owned = owned
        self._numbers: dict[str, list[int]] = defaultdict(list)
        for number, (_, pattern) in enumerate(owned):
            for literal in pattern.literals:
                self._numbers[literal].append(number)
        self._by_trigram: dict[str, list[str]] = defaultdict(list)
        self._with_digits = [text for text in self._numbers if _DIGITS.search(text)]
        for literal in self._numbers.keys() - set(self._with_digits):
            self._by_trigram[min(_trigrams(literal), key=_frequency)].append(literal)
        self._known: dict[str, tuple[str, ...]] = {}

    def candidates(self, line: str) -> list[int]:
        """The numbers of the patterns that may match: the line holds one of their literals.

        Lines that differ in their numbers only are common, and hold the same literals without one.
        """
        alike = _DIGITS.sub("0", line)
        held = self._known.get(alike)
        if held is None:
            trigrams = self._by_trigram.keys() & _trigrams(line)
            texts = (text for each in trigrams for text in self._by_trigram[each])
            held = tuple(text for text in texts if text in line)
            if len(self._known) < _MOST_KNOWN:
                self._known[alike] = held
        numbered = (text for text in self._with_digits if text in line)
        return sorted({number for text in (*held, *numbered) for number in self._numbers[text]})

    def match(self, line: str, candidates: Iterable[int]) -> dict[Owner, dict[str, str]]:
        """The owners of the candidates that match, each with the text of its named groups."""
        groups_by_owner: dict[Owner, dict[str, str]] = {}
        for number in candidates:
            owner, pattern = self._owned[number]
            if owner in groups_by_owner and not pattern.regex.groupindex:
                continue
            if match := pattern.regex.search(line):
                groups = {name: text for name, text in match.groupdict().items() if text}
                groups_by_owner[owner] = groups | groups_by_owner.get(owner, {})
        return groups_by_owner


def is_plain(pattern: str) -> bool:
    """Whether a regular expression matches only itself, so that it is its own literal."""
    return _SPECIAL.search(pattern) is None


def _frequency(trigram: str) -> tuple[int, str]:
    """A sort key: trigrams that few lines hold come first."""
    return sum(char in _FREQUENT for char in trigram), trigram


def _trigrams(text: str) -> set[str]:
    return {text[start : start + SHORTEST] for start in range(len(text) - SHORTEST + 1)}
