"""The rules: causes, and lines that are none, from TOML (causes/ says what each key means)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from deploykit import parsing
from deploykit.diagnosis import fixes, marks
from deploykit.diagnosis.matching import SHORTEST, Index, Pattern, fixed_texts
from deploykit.errors import NotFound, UsageError

SHIPPED = Path(__file__).parent / "causes"
"""In its files, by their numbers and from top to bottom, the most probable cause comes first."""
KINDS = ("root", "late", "symptom")
UNKNOWN = "unknown"
"""Label of a failure of which the logs say no more than that it happened."""
_KEYS = {
    "cause": {
        *("label", "kind", "match", "needs", "after", "unless", "confidence"),
        *("also", "means", "not", "fix", "firm", "yields"),
    },
    "harmless": {"match", "needs", "spans"},
    "mild": {"match", "needs"},
    "success": {"match", "needs"},
}
Patterns = tuple[Pattern, ...]


@dataclass(frozen=True)
class Cause:
    label: str
    means: str
    fix: str
    match: Patterns
    kind: str = "root"
    probably_not: str = ""
    after: Patterns = ()
    unless: Patterns = ()
    confidence: float = 0.9
    also: tuple[str, ...] = ()
    firm: bool = False
    yields: tuple[str, ...] = ()


@dataclass(frozen=True)
class Harmless:
    match: Patterns
    spans: int = 0


Owner = tuple[str, int]
"""A part of the rules (cause, after, unless, harmless, mild or success), and its number."""


@dataclass(frozen=True)
class Rules:
    causes: tuple[Cause, ...] = ()
    harmless: tuple[Harmless, ...] = ()
    mild: Patterns = ()
    success: Patterns = ()

    @cached_property
    def index(self) -> Index[Owner]:
        return Index(list(self._owned()))

    @cached_property
    def literals(self) -> list[str]:
        """Fixed texts that find every line that tells something, none inside another."""
        looked_for = {"cause", "after", "unless", "success"}
        texts = {
            text
            for (part, number), pattern in self._owned()
            if part in looked_for or (part == "harmless" and self.harmless[number].spans)
            for text in pattern.needs
        }
        kept: list[str] = []
        for text in sorted(texts | {marks.SUMMARY}, key=len):
            if not any(shorter in text for shorter in kept):
                kept.append(text)
        return sorted(kept)

    def _owned(self) -> Iterator[tuple[Owner, Pattern]]:
        for number, cause in enumerate(self.causes):
            yield from ((("cause", number), pattern) for pattern in cause.match)
            yield from ((("after", number), pattern) for pattern in cause.after)
            yield from ((("unless", number), pattern) for pattern in cause.unless)
        for number, entry in enumerate(self.harmless):
            yield from ((("harmless", number), pattern) for pattern in entry.match)
        yield from ((("mild", 0), pattern) for pattern in self.mild)
        yield from ((("success", 0), pattern) for pattern in self.success)


def load(extra: Sequence[Path] = ()) -> Rules:
    """The rules of the user's files, which come first, then the shipped ones."""
    if not extra:
        return _shipped()
    return _together([*(_read(path) for path in extra), _shipped()])


def _together(rules: Sequence[Rules]) -> Rules:
    return Rules(
        tuple(cause for part in rules for cause in part.causes),
        tuple(entry for part in rules for entry in part.harmless),
        tuple(pattern for part in rules for pattern in part.mild),
        tuple(pattern for part in rules for pattern in part.success),
    )


@cache
def _shipped() -> Rules:
    return _together([_read(path) for path in sorted(SHIPPED.glob("*.toml"))])


def _read(path: Path) -> Rules:
    try:
        tree = parsing.toml(parsing.text_of(path))
    except OSError as error:
        raise NotFound(f"the rules {path} cannot be read: {error.strerror}") from error
    except parsing.Malformed as error:
        raise UsageError(f"the rules {path}: {error}") from error
    harmless = [
        Harmless(_patterns(entry, "match", path), int(entry.get("spans", 0)))
        for entry in _tables(tree, "harmless", path)
    ]
    return Rules(
        tuple(_cause(entry, path) for entry in _tables(tree, "cause", path)),
        tuple(harmless),
        tuple(_lines(tree, "mild", path)),
        tuple(_lines(tree, "success", path)),
    )


def _lines(tree: dict[str, Any], name: str, path: Path) -> Iterator[Pattern]:
    """The patterns of all [[name]] tables."""
    for entry in _tables(tree, name, path):
        yield from _patterns(entry, "match", path)


def _tables(tree: dict[str, Any], name: str, path: Path) -> list[dict[str, Any]]:
    """The [[name]] tables, with every key known."""
    tables = tree.get(name, [])
    unknown = [key for key in tree if key not in _KEYS]
    if not isinstance(tables, list) or unknown:
        known = ", ".join(f"[[{name}]]" for name in _KEYS)
        raise UsageError(f"{path}: rules stand in the tables {known}")
    for table in tables:
        for key in table:
            if key not in _KEYS[name]:
                known = ", ".join(sorted(_KEYS[name]))
                raise UsageError(f"{path}: [[{name}]] has no key {key!r}", hint=f"it has {known}")
    return tables


def _cause(entry: dict[str, Any], path: Path) -> Cause:
    missing = [key for key in ("label", "means", "fix", "match") if not entry.get(key)]
    kind = entry.get("kind", "root")
    if missing or kind not in KINDS:
        name = entry.get("label", "a [[cause]]")
        what = f"lacks {', '.join(missing)}" if missing else f"has the kind {kind!r}"
        raise UsageError(f"{path}: {name} {what}", hint=f"a kind is one of {', '.join(KINDS)}")
    cause = Cause(
        label=entry["label"],
        means=entry["means"],
        fix=entry["fix"],
        match=_patterns(entry, "match", path),
        kind=kind,
        probably_not=entry.get("not", ""),
        after=_patterns(entry, "after", path),
        unless=_patterns(entry, "unless", path),
        confidence=float(entry.get("confidence", 0.9)),
        also=tuple(entry.get("also", ())),
        firm=bool(entry.get("firm", False)),
        yields=tuple(entry.get("yields", ())),
    )
    _check_fix(cause, path)
    return cause


def _check_fix(cause: Cause, path: Path) -> None:
    """A fix may ask for named groups of its patterns, and for what runs and lines have."""
    known = {name for pattern in cause.match for name in pattern.regex.groupindex}
    known |= {*fixes.OF_RUN, *fixes.OF_LINE}
    if unknown := sorted(fixes.names(cause.fix) - known):
        hint = f"no group of its patterns has that name; known: {', '.join(sorted(known))}"
        raise UsageError(f"{path}: the fix of {cause.label} asks for {unknown[0]!r}", hint=hint)


def _patterns(entry: dict[str, Any], key: str, path: Path) -> Patterns:
    value = entry.get(key, ())
    texts = [value] if isinstance(value, str) else list(value)
    needs = tuple(entry.get("needs", ())) if key == "match" else ()
    return tuple(_pattern(text, needs, path) for text in texts)


def _pattern(text: str, needs: tuple[str, ...], path: Path) -> Pattern:
    try:
        compiled = re.compile(text)
    except re.error as error:
        raise UsageError(f"{path}: {text!r} is no regular expression: {error}") from error
    needs = needs or tuple(sorted(fixed_texts(text)))
    if min(map(len, needs), default=0) < SHORTEST:
        hint = f"write {SHORTEST} fixed characters into each of its branches, or give `needs`"
        raise UsageError(f"{path}: {text!r} holds no fixed text by which to find it", hint=hint)
    return Pattern(needs, compiled)
