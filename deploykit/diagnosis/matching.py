"""Many regular expressions against a line: only those are tried whose fixed text it holds."""

from __future__ import annotations

import importlib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

SHORTEST = 3
"""Characters of the shortest fixed text by which a line may be found."""
_MOST = 40
"""Texts for one part of a pattern, at most."""
_ENOUGH = 12
"""Beyond so many characters a text tells no more."""
_COMMON = re.compile(
    r"[\d .:=_-]*|.?errors?|ERROR|Errors?|fail(ed|ure)?|found|not|ranks?|same|nodes?|[Ss]tate|to|"
    r"for|read|write|send|recv|.?exit|abort|index|table|reach(ed)?|down|disk|taken|wall|CUDA|peers?|"
    r"fatal|.?nable|NCCL|GPU|[Tt]ime|.?ime|No|find|load|init|used|two|full|ort|ode|addr|efa|EFA|"
    r"P2P|p2p|fi_|hit|multiple|several|subnet|vpc|VPC|GSP|memory|time|training|instance|"
    r"Failure|Exception|Interrupt|driver|device|version|model|checkpoint|workers?|file|path|nan|"
    r"directory|folder|dataset|config|barrier|broadcast|collective|all_?(reduce|gather)|BARRIER|"
    r"reduce_scatter|loss|grad|norm|gradients?|parameters?"
)
"""Words of healthy logs too: to be looked for only where a pattern offers nothing better."""

_FREQUENT = frozenset("etaoinsrldc 0123456789")

_Item = tuple[Any, Any]
Owner = TypeVar("Owner")


@dataclass(frozen=True)
class Pattern:
    """A regular expression, and fixed texts of which a matching line holds one."""

    needs: tuple[str, ...]
    regex: re.Pattern[str]


class Index(Generic[Owner]):
    """Patterns and whose they are, found by three characters of their fixed texts."""

    def __init__(self, owned: Sequence[tuple[Owner, Pattern]]) -> None:
        self._owned = owned
        self._places: dict[str, list[int]] = defaultdict(list)
        for place, (_, pattern) in enumerate(owned):
            for text in pattern.needs:
                self._places[text].append(place)
        self._texts: dict[str, list[str]] = defaultdict(list)
        for text in self._places:
            self._texts[min(_grams(text), key=_frequency)].append(text)

    def places(self, line: str) -> list[int]:
        """Which patterns may match: those of which the line holds a fixed text."""
        held = self._texts.keys() & _grams(line)
        texts = (text for gram in held for text in self._texts[gram] if text in line)
        return sorted({place for text in texts for place in self._places[text]})

    def find(self, line: str, places: Iterable[int]) -> dict[Owner, dict[str, str]]:
        """What the named groups caught, of each owner with a match."""
        found: dict[Owner, dict[str, str]] = {}
        for place in places:
            owner, pattern = self._owned[place]
            if owner in found and not pattern.regex.groupindex:
                continue
            if match := pattern.regex.search(line):
                caught = {name: text for name, text in match.groupdict().items() if text}
                found[owner] = caught | found.get(owner, {})
        return found


def _frequency(gram: str) -> tuple[int, str]:
    """Sorts first what few lines hold."""
    return sum(char in _FREQUENT for char in gram), gram


def _grams(text: str) -> set[str]:
    return {text[place : place + SHORTEST] for place in range(len(text) - SHORTEST + 1)}


def fixed_texts(pattern: str) -> set[str]:
    """Texts of which every match of `pattern` holds at least one; empty when it has none."""
    parser = importlib.import_module("re._parser")  # the one that compiles it, by no public name
    return _best(_required(parser.parse(pattern)))


def _required(tree: Iterable[_Item]) -> Iterator[set[str]]:
    """For each part that must be there: the texts of which it holds one."""
    run = {""}
    for item in tree:
        exact = _exact(item)
        if exact and len(exact) * len(run) <= _MOST:
            run = {before + text for before in run for text in exact}
            continue
        yield run
        run = {""}
        yield from _inside(item)
    yield run


def _exact(item: _Item) -> set[str] | None:
    """All texts that a part can match, where they are few."""
    operation, argument = item
    texts: set[str] | None = None
    match str(operation):
        case "LITERAL":
            texts = {chr(argument)}
        case "AT" | "ASSERT" | "ASSERT_NOT":
            texts = {""}
        case "IN" if all(str(name) == "LITERAL" for name, _ in argument):
            texts = {chr(code) for _, code in argument}
        case "SUBPATTERN":
            texts = _sequence(argument[3])
        case "BRANCH":
            branches = [_sequence(branch) or set() for branch in argument[1]]
            texts = set().union(*branches) if all(branches) else None
        case "MAX_REPEAT" if argument[:2] == (0, 1) and (inner := _sequence(argument[2])):
            texts = {"", *inner}
    return texts


def _sequence(tree: Iterable[_Item]) -> set[str] | None:
    """All texts that parts in a row can match, where they are few."""
    run = {""}
    for item in tree:
        exact = _exact(item)
        if not exact or len(exact) * len(run) > _MOST:
            return None
        run = {before + text for before in run for text in exact}
    return run


def _inside(item: _Item) -> Iterator[set[str]]:
    operation, argument = item
    match str(operation):
        case "SUBPATTERN":
            yield from _required(argument[3])
        case "BRANCH":
            found = [_best(_required(branch)) for branch in argument[1]]
            yield set().union(*found) if all(found) else set()
        case "MAX_REPEAT" | "MIN_REPEAT" if argument[0] > 0:
            yield from _required(argument[2])


def _best(candidates: Iterable[set[str]]) -> set[str]:
    """The candidate whose least telling text tells most, of those that are long enough."""
    usable = [texts for texts in candidates if min(map(len, texts), default=0) >= SHORTEST]
    return max(usable, key=lambda texts: min(map(_telling, texts)), default=set())


def _telling(text: str) -> int:
    return 1 if _COMMON.fullmatch(text.strip()) else min(len(text), _ENOUGH)
