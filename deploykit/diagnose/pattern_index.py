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
_DIGIT = re.compile(r"[0-9]")
_ZEROS = str.maketrans("123456789", "0" * 9)
_MOST_KNOWN = 5000
"""Lines, but for their digits, that are remembered."""
_SPECIAL = re.compile(r"[\\.*+?()\[\]{}|^$]")
_ITEM = re.compile(
    r"(\\x[0-9a-f]{2}|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?[:=!<]*|.)([*+?]|\{[^}]*\})?", re.DOTALL
)
"""One item of a regular expression, and how often it may occur."""

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
        self._with_digits = {t: zeroed(t) for t in self._numbers if _DIGIT.search(t)}
        for literal in self._numbers.keys() - self._with_digits.keys():
            self._by_trigram[min(_trigrams(literal), key=_frequency)].append(literal)
        self._known: dict[str, tuple[list[int], list[str]]] = {}

    def find(self, line: str) -> tuple[list[int], dict[Owner, dict[str, str]]]:
        """The numbers of the patterns that may match, as the line holds one of their literals.

        And the owners of those that do, each with the text of its named groups.
        """
        alike = zeroed(line)
        known = self._known.get(alike)
        if known is None:
            known = self._held(alike, line)
            if len(self._known) < _MOST_KNOWN:
                self._known[alike] = known
        candidates, numbered = known
        if held := [text for text in numbered if text in line]:
            more = {number for text in held for number in self._numbers[text]}
            candidates = sorted({*candidates, *more})
        return candidates, self.match(line, candidates)

    def _held(self, alike: str, line: str) -> tuple[list[int], list[str]]:
        """What is true of all lines that differ in their digits only, as many lines of a log do.

        The patterns of which they hold a literal without digits, and the literals with digits that
        they may hold.
        """
        trigrams = self._by_trigram.keys() & _trigrams(line)
        texts = (text for each in trigrams for text in self._by_trigram[each])
        held = {number for text in texts if text in line for number in self._numbers[text]}
        numbered = [text for text, zeros in self._with_digits.items() if zeros in alike]
        return sorted(held), numbered

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


def fixed_text(regex: str) -> str:
    """The longest text that every match of a regular expression holds; empty if none is seen.

    Only what stands outside of its groups and classes is looked at.
    """
    runs, depth = [""], 0
    for item, repeated in _ITEM.findall(regex):
        depth += item.startswith("(") - (item == ")")
        if item == "|" and not depth:
            return ""
        literal = _literal(item)
        if depth or repeated or not literal:
            runs.append("")
        else:
            runs[-1] += literal
    return max(runs, key=len)


def _literal(item: str) -> str:
    """The only character that an item of a regular expression matches; empty if it has others."""
    if item.startswith(r"\x"):
        return bytes.fromhex(item[2:]).decode("latin-1")
    if item.startswith("\\"):
        return "" if item[1].isalnum() else item[1]
    return "" if _SPECIAL.match(item) else item


def zeroed(line: str) -> str:
    """The line with a zero for each digit."""
    return line.translate(_ZEROS)


def _frequency(trigram: str) -> tuple[int, str]:
    """A sort key: trigrams that few lines hold come first."""
    return sum(char in _FREQUENT for char in trigram), trigram


def _trigrams(text: str) -> set[str]:
    return {text[start : start + SHORTEST] for start in range(len(text) - SHORTEST + 1)}
