"""The rules of diagnose, from TOML; causes/00-harmless.toml documents every key."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from deploykit.diagnose import log_prefixes, placeholders
from deploykit.diagnose.pattern_index import SHORTEST, LinePattern, PatternIndex, fixed_text
from deploykit.job import file as jobfile
from deploykit.job.decode import Malformed
from deploykit.lib.errors import NotFound, UsageError

SHIPPED = Path(__file__).parent / "causes"
"""Its files, by number and from top to bottom, list the most probable cause first."""
KINDS = ("root", "late", "symptom")
TRANSIENT = "transient"
RETRY = (TRANSIENT, "deterministic", "unknown")
UNKNOWN = "unknown"
"""Label of a failure of which the logs give no cause, or one that has no other label."""
UNCAUGHT = "user_code_error"
_TOLD = 0.5
"""Least confidence of a rule with that label that tells a cause."""
_TELLING = 8
"""Least number of characters of a fixed text that makes `literals` unnecessary."""
_KEYS = {
    "cause": {
        *("label", "retry", "kind", "match", "literals", "after", "unless", "confidence"),
        *("also", "means", "not", "fix", "firm", "yields", "raised_in", "least", "until"),
        *("steps", "startup", "warned_by"),
    },
    "messages": {"label", "means", "match", "literals"},
    "harmless": {"match", "literals", "spans"},
    "mild": {"match", "literals"},
    "success": {"match", "literals"},
}
Patterns = tuple[LinePattern, ...]


@dataclass(frozen=True)
class CauseRule:
    """A rule that assigns lines to a cause. Its fields are the keys of ``[[cause]]``."""

    label: str
    means: str
    fix: str
    match: Patterns
    kind: str = "root"
    retry: str = "unknown"
    probably_not: str = ""
    after: Patterns = ()
    unless: Patterns = ()
    confidence: float = 0.9
    also: tuple[str, ...] = ()
    firm: bool = False
    steps: int = 2
    yields: tuple[str, ...] = ()
    warned_by: tuple[str, ...] = ()
    raised_in: re.Pattern[str] | None = None
    least: int = 1
    until: re.Pattern[str] | None = None
    startup: int = 0

    @property
    def is_a_cause(self) -> bool:
        """Whether it says more than that something failed."""
        return self.label != UNKNOWN or self.confidence >= _TOLD

    def is_taken_back_by(self, text: str) -> bool:
        """Whether a line right after a proof shows that what it told has passed."""
        if self.until is None or not self.until.search(text):
            return False
        return not any(pattern.regex.search(text) for pattern in self.match)


@dataclass(frozen=True)
class HarmlessRule:
    """Lines that look like failures and are not; `spans` lines after one are skipped too."""

    match: Patterns
    spans: int = 0


Messages = tuple[str, str, Patterns]
"""A label, what it means there, and more patterns of the rule that has both."""
RuleKey = tuple[str, int]
"""A part of the rules (cause, after, unless, harmless, mild or success), and the rule's number."""


@dataclass(frozen=True)
class RuleSet:
    """All rules in order of precedence, and an index of their patterns."""

    causes: tuple[CauseRule, ...] = ()
    harmless: tuple[HarmlessRule, ...] = ()
    mild: Patterns = ()
    success: Patterns = ()
    messages: tuple[Messages, ...] = ()

    @cached_property
    def index(self) -> PatternIndex[RuleKey]:
        """The patterns of all rules."""
        return PatternIndex(list(self.patterns()))

    @cached_property
    def uncaught(self) -> int | None:
        """The number of the rule for exceptions that no other rule knows."""
        rules = enumerate(self.causes)
        return next((n for n, rule in rules if rule.label == UNCAUGHT and rule.after), None)

    @cached_property
    def labels(self) -> frozenset[str]:
        """The names of the causes."""
        return frozenset(rule.label for rule in self.causes)

    @cached_property
    def literals(self) -> list[str]:
        """Literals that occur in every line worth a look; none contains another."""
        relevant = {"cause", "after", "unless", "success"}
        texts = {
            text
            for (part, number), pattern in self.patterns()
            if part in relevant or (part == "harmless" and self.harmless[number].spans)
            for text in pattern.literals
        }
        return _without_longer(texts | {log_prefixes.SUMMARY})

    def is_excused(self, text: str) -> bool:
        """Whether a line is harmless or mild."""
        return any(part in ("harmless", "mild") for part, _ in self.index.find(text)[1])

    def patterns(self) -> Iterator[tuple[RuleKey, LinePattern]]:
        """Yield every pattern with the key of its rule."""
        for number, cause in enumerate(self.causes):
            yield from ((("cause", number), pattern) for pattern in cause.match)
            yield from ((("after", number), pattern) for pattern in cause.after)
            yield from ((("unless", number), pattern) for pattern in cause.unless)
        for number, entry in enumerate(self.harmless):
            yield from ((("harmless", number), pattern) for pattern in entry.match)
        yield from ((("mild", 0), pattern) for pattern in self.mild)
        yield from ((("success", 0), pattern) for pattern in self.success)


def _without_longer(texts: Iterable[str]) -> list[str]:
    """The texts that contain no other, sorted. Each has `SHORTEST` characters or more."""
    kept: list[str] = []
    by_start: dict[str, list[str]] = {}
    for text in sorted(texts, key=len):
        starts = ((at, text[at : at + SHORTEST]) for at in range(len(text)))
        if not any(text.startswith(one, at) for at, key in starts for one in by_start.get(key, ())):
            by_start.setdefault(text[:SHORTEST], []).append(text)
            kept.append(text)
    return sorted(kept)


def load(extra: Sequence[Path] = ()) -> RuleSet:
    """Read the rules of the files `extra`, which take precedence, and the shipped ones.

    Raises NotFound for a missing file, UsageError for malformed rules.
    """
    if not extra:
        return _shipped()
    return _merged([*(_read(path) for path in extra), _shipped()])


def _merged(rule_sets: Sequence[RuleSet]) -> RuleSet:
    """All rules, and the patterns of [[messages]] with the first rule of their label and meaning.

    Raises UsageError if there is no such rule.
    """
    causes = [cause for part in rule_sets for cause in part.causes]
    numbers: dict[tuple[str, str], int] = {}
    for number, cause in enumerate(causes):
        numbers.setdefault((cause.label, cause.means), number)
    for label, means, patterns in (message for part in rule_sets for message in part.messages):
        if (label, means) not in numbers:
            known = [cause.means for cause in causes if cause.label == label]
            hint = f"meanings of {label!r}: {'; '.join(known)}" if known else None
            raise UsageError(
                f"[[messages]]: no cause {label!r} has the meaning {means!r}", hint=hint
            )
        number = numbers[label, means]
        causes[number] = replace(causes[number], match=causes[number].match + patterns)
    return RuleSet(
        tuple(causes),
        tuple(entry for part in rule_sets for entry in part.harmless),
        tuple(pattern for part in rule_sets for pattern in part.mild),
        tuple(pattern for part in rule_sets for pattern in part.success),
    )


@cache
def _shipped() -> RuleSet:
    return _merged([_read(path) for path in sorted(SHIPPED.glob("*.toml"))])


def _read(path: Path) -> RuleSet:
    try:
        tree = jobfile.toml(jobfile.read_text(path))
    except OSError as error:
        raise NotFound(f"cannot read the rules {path}: {error.strerror}") from error
    except Malformed as error:
        raise UsageError(f"malformed rules {path}: {error}") from error
    tables = {name: _tables(tree, name, path) for name in _KEYS}
    mild, success = (
        tuple(pattern for entry in tables[name] for pattern in _patterns(entry, "match", path))
        for name in ("mild", "success")
    )
    return RuleSet(
        tuple(_cause(entry, path) for entry in tables["cause"]),
        tuple(
            HarmlessRule(_patterns(entry, "match", path), int(entry.get("spans", 0)))
            for entry in tables["harmless"]
        ),
        mild,
        success,
        tuple(_messages(tables["messages"], path)),
    )


def _messages(tables: list[dict[str, Any]], path: Path) -> Iterator[Messages]:
    for entry in tables:
        _require(entry, ("label", "means", "match"), path)
        yield entry["label"], entry["means"], _patterns(entry, "match", path)


def _tables(tree: dict[str, Any], name: str, path: Path) -> list[dict[str, Any]]:
    """The [[name]] tables. Raises UsageError for an unknown key."""
    tables = tree.get(name, [])
    unknown = [key for key in tree if key not in _KEYS]
    if not isinstance(tables, list) or unknown:
        known = ", ".join(f"[[{name}]]" for name in _KEYS)
        raise UsageError(f"{path}: expected only the tables {known}")
    for table in tables:
        for key in table:
            if key not in _KEYS[name]:
                known = ", ".join(sorted(_KEYS[name]))
                raise UsageError(
                    f"{path}: unknown key {key!r} in [[{name}]]", hint=f"known keys: {known}"
                )
    return tables


def _cause(entry: dict[str, Any], path: Path) -> CauseRule:
    _require(entry, ("label", "means", "fix", "match"), path)
    kind = _one_of(entry, "kind", KINDS, "root", path)
    rule = CauseRule(
        label=entry["label"],
        means=entry["means"],
        fix=entry["fix"],
        match=_patterns(entry, "match", path),
        kind=kind,
        retry=_one_of(entry, "retry", RETRY, "unknown", path),
        probably_not=entry.get("not", ""),
        after=_patterns(entry, "after", path),
        unless=_patterns(entry, "unless", path),
        confidence=float(entry.get("confidence", 0.9)),
        also=tuple(entry.get("also", ())),
        firm=bool(entry.get("firm", False)),
        steps=int(entry.get("steps", 2)),
        yields=tuple(entry.get("yields", ())),
        warned_by=tuple(entry.get("warned_by", ())),
        raised_in=_regex(entry["raised_in"], path) if "raised_in" in entry else None,
        least=int(entry.get("least", 1)),
        until=_regex(entry["until"], path) if "until" in entry else None,
        startup=int(entry.get("startup", 0)),
    )
    known = {name for pattern in rule.match for name in pattern.regex.groupindex}
    known |= {*placeholders.OF_RUN, *placeholders.OF_LINE}
    if unknown := sorted(placeholders.names(rule.fix) - known):
        raise UsageError(
            f"{path}: unknown placeholder {unknown[0]!r} in the fix of {rule.label}",
            hint=f"known placeholders: {', '.join(sorted(known))}",
        )
    return rule


def _one_of(entry: dict[str, Any], key: str, known: Sequence[str], default: str, path: Path) -> str:
    value: str = entry.get(key, default)
    if value not in known:
        raise UsageError(
            f"{path}: {entry['label']}: unknown {key} {value!r}",
            hint=f"known: {', '.join(known)}",
        )
    return value


def _require(entry: dict[str, Any], keys: Sequence[str], path: Path) -> None:
    if missing := [key for key in keys if not entry.get(key)]:
        name = entry.get("label", "a [[cause]]")
        raise UsageError(f"{path}: {name}: required keys are missing: {', '.join(missing)}")


def _patterns(entry: dict[str, Any], key: str, path: Path) -> Patterns:
    """Patterns, each of which is looked up by its own text, or else by the rule's literals."""
    value = entry.get(key, ())
    patterns = []
    for one in [value] if isinstance(value, str) else value:
        regex = one["match"] if isinstance(one, dict) else one
        literals = tuple((one if isinstance(one, dict) else entry).get("literals", ()))
        text = fixed_text(regex)
        if text == regex or (not literals and len(text) >= _TELLING):
            literals = (text,)
        if min(map(len, literals), default=0) < SHORTEST:
            hint = (
                f"add `literals`: fixed texts of at least {SHORTEST} characters; "
                "each matching line must contain one of them"
            )
            raise UsageError(f"{path}: {regex!r} has no fixed text to search for", hint=hint)
        patterns.append(LinePattern(literals, _regex(regex, path)))
    return tuple(patterns)


def _regex(regex: str, path: Path) -> re.Pattern[str]:
    try:
        return re.compile(regex)
    except re.error as error:
        raise UsageError(f"{path}: invalid regular expression {regex!r}: {error}") from error
