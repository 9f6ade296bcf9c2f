"""The rules: causes and harmless lines, read from TOML (rules.toml says what each key means)."""

from __future__ import annotations

import importlib
import re
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from deploykit.errors import NotFound, UsageError

SHIPPED = Path(__file__).parent / "rules.toml"
KINDS = ("root", "late", "symptom")
UNKNOWN = "unknown"
"""Label of a failure of which the logs say no more than that it happened."""
_SHORTEST = 3
"""Characters of the shortest fixed text by which a line may be found."""
_COMMON = re.compile(
    r"error|rror|errors|ERROR|fail|failed|found|not|ranks|same|node|nodes|state|"
    r"State|to|for|read|write|send|recv|exit|xit|abort|index|table|reach|down|"
    r"disk|taken|wall|CUDA|peer|peers|fatal|nable|NCCL|GPU|time|No|find|load|"
    r"init|used|two|full|ort|ode|addr|efa|mlx|Error"
)
"""Words of healthy logs too: to be looked for only where a pattern offers nothing better."""
_KEYS = {
    "cause": {
        *("label", "kind", "match", "needs", "after", "unless", "confidence"),
        *("also", "means", "not", "fix"),
    },
    "harmless": {"match", "needs", "spans"},
}


_Part = tuple[tuple[str, ...], re.Pattern[str]]


@dataclass(frozen=True)
class Matcher:
    """Regular expressions, each with the fixed texts of which a matching line holds one."""

    parts: tuple[_Part, ...] = ()

    def find(self, text: str) -> bool:
        return any(
            pattern.search(text)
            for needs, pattern in self.parts
            if any(need in text for need in needs)
        )

    def literals(self) -> Iterator[str]:
        for needs, _ in self.parts:
            yield from needs


@dataclass(frozen=True)
class Cause:
    label: str
    means: str
    fix: str
    match: Matcher
    kind: str = "root"
    probably_not: str = ""
    after: Matcher = Matcher()
    unless: Matcher = Matcher()
    confidence: float = 0.9
    also: tuple[str, ...] = ()


@dataclass(frozen=True)
class Harmless:
    match: Matcher
    spans: int = 0


@dataclass(frozen=True)
class Rules:
    causes: tuple[Cause, ...]
    harmless: tuple[Harmless, ...]

    def literals(self) -> list[str]:
        """Fixed texts that find every line that some rule may match, none inside another."""
        matchers = [cause.match for cause in self.causes]
        matchers += [entry.match for entry in self.harmless if entry.spans]
        matchers += [matcher for cause in self.causes for matcher in (cause.after, cause.unless)]
        texts = {text for matcher in matchers for text in matcher.literals()}
        return sorted(text for text in texts if not any(o in text for o in texts if o != text))


def load(extra: Sequence[Path] = ()) -> Rules:
    """The rules of the user's files, which come first, then the shipped ones."""
    rules = [*(_read(path) for path in extra), _shipped()]
    causes = tuple(cause for part in rules for cause in part.causes)
    harmless = tuple(entry for part in rules for entry in part.harmless)
    return Rules(causes, harmless)


@cache
def _shipped() -> Rules:
    return _read(SHIPPED)


def _read(path: Path) -> Rules:
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise NotFound(f"the rules {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is no TOML: {error}") from error
    causes = [_cause(entry, path) for entry in _tables(tree, "cause", path)]
    harmless = [
        Harmless(_matcher(entry, "match", path), int(entry.get("spans", 0)))
        for entry in _tables(tree, "harmless", path)
    ]
    return Rules(tuple(causes), tuple(harmless))


def _tables(tree: dict[str, Any], name: str, path: Path) -> list[dict[str, Any]]:
    """The [[name]] tables, with every key known."""
    tables = tree.get(name, [])
    unknown = [key for key in tree if key not in _KEYS]
    if not isinstance(tables, list) or unknown:
        raise UsageError(f"{path}: rules stand in [[cause]] and [[harmless]] tables")
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
    return Cause(
        label=entry["label"],
        means=entry["means"],
        fix=entry["fix"],
        match=_matcher(entry, "match", path),
        kind=kind,
        probably_not=entry.get("not", ""),
        after=_matcher(entry, "after", path),
        unless=_matcher(entry, "unless", path),
        confidence=float(entry.get("confidence", 0.9)),
        also=tuple(entry.get("also", ())),
    )


def _matcher(entry: dict[str, Any], key: str, path: Path) -> Matcher:
    value = entry.get(key, ())
    patterns = [value] if isinstance(value, str) else list(value)
    needs = tuple(entry.get("needs", ())) if key == "match" else ()
    return Matcher(tuple(_part(pattern, needs, path) for pattern in patterns))


def _part(
    pattern: str, needs: tuple[str, ...], path: Path
) -> tuple[tuple[str, ...], re.Pattern[str]]:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise UsageError(f"{path}: {pattern!r} is no regular expression: {error}") from error
    needs = needs or tuple(sorted(fixed_texts(pattern)))
    if not needs or min(map(len, needs)) < _SHORTEST:
        hint = f"write {_SHORTEST} fixed characters into each of its branches, or give `needs`"
        raise UsageError(f"{path}: {pattern!r} holds no fixed text by which to find it", hint=hint)
    return needs, compiled


def fixed_texts(pattern: str) -> set[str]:
    """Texts of which every match of `pattern` holds at least one; empty when it has none."""
    parser = importlib.import_module("re._parser")  # the one that compiles it, by no public name
    return _best(_required(parser.parse(pattern)))


def _required(tree: Iterable[tuple[Any, Any]]) -> Iterator[set[str]]:
    """For each part that must be there: the texts of which it holds one."""
    run = ""
    for operation, argument in tree:
        name = str(operation)
        if name == "LITERAL":
            run += chr(argument)
            continue
        yield {run}
        run = ""
        if name == "SUBPATTERN":
            yield from _required(argument[3])
        elif name == "BRANCH":
            yield _either(argument[1])
        elif name in {"MAX_REPEAT", "MIN_REPEAT"} and argument[0] > 0:
            yield from _required(argument[2])
    yield {run}


def _either(branches: Iterable[Any]) -> set[str]:
    """One of the texts of each branch; nothing when a branch has none."""
    found = [_best(_required(branch)) for branch in branches]
    return {text for texts in found for text in texts} if all(found) else set()


def _best(candidates: Iterable[set[str]]) -> set[str]:
    """The candidate whose least telling text tells most."""
    usable = [texts for texts in candidates if texts and all(texts)]
    return max(usable, key=lambda texts: min(map(_telling, texts)), default=set())


def _telling(text: str) -> int:
    return 1 if _COMMON.fullmatch(text.strip()) else len(text)
