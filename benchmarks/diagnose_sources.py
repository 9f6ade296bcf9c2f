"""How often the first finding of `deploykit diagnose` is right, on logs split by their source.

The argument is a folder as tests/diagnose/test_diagnosis_runs.py reads it: logs that other
people posted, each with its source (a repository or a thread), which stay outside the project.
All logs of a source are in the same one of ten parts, so the spread over the parts is that over
sources, not over logs that look alike.
`right` counts a label that is acceptable, `exact` the first label only,
`alarms` healthy logs with a cause.

Rules that were written with these logs at hand fit them. `held out` is the lower bound: a part is
read without the patterns that match in no other part, as if its sources had never been seen. Only
logs collected after the rules were frozen show more.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
import tomllib
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from deploykit.diagnose import cause_rules, log_prefixes, scan
from deploykit.diagnose.cause_rules import CauseRule, RuleSet
from deploykit.diagnose.ranking import Diagnosis
from tests.diagnose.test_diagnosis_runs import ONCE

PARTS = 10
HEALTHY = "none"
_REPOSITORY = re.compile(r"\b[\w.-]+/[\w.-]+")


class Log(NamedTuple):
    """A log, and what is right as its first finding, the exact label first."""

    source: str
    text: bytes
    labels: tuple[str, ...]

    @property
    def part(self) -> int:
        """The part of its source, always the same."""
        return zlib.crc32(self.source.encode()) % PARTS

    @property
    def healthy(self) -> bool:
        """Whether no cause may be found."""
        return self.labels[0] == HEALTHY

    def allows(self, label: str) -> bool:
        """Whether a label is right as its first finding."""
        return not {label, ONCE.get(label)}.isdisjoint(self.labels)


class Finding(NamedTuple):
    """The first finding in a log, by all rules and by those that others than its part support."""

    log: Log
    label: str
    held_out: str


class Score(NamedTuple):
    """What came of the logs of a part."""

    sources: int
    failed: int
    right: int
    exact: int
    healthy: int
    alarms: int
    held_out: int


def logs(folder: Path) -> Iterator[Log]:
    """The logs of a corpus that have a source."""
    cases = folder / "cases.jsonl"
    for row in map(json.loads, cases.read_text().splitlines() if cases.exists() else ()):
        text = (folder / "cases" / f"{row['id']}.log").read_bytes()
        yield Log(_source(row["source"]), text, (row["cause"], *row["also_ok"]))
    for path in sorted(folder.glob("threads/*.toml")):
        for log in tomllib.loads(path.read_text(encoding="utf-8"))["log"]:
            if source := log.get("from"):
                labels = (log.get("cause", HEALTHY), *log.get("also", ()))
                yield Log(_source(source), log["text"].encode(), labels)


def _source(text: str) -> str:
    """The repository of a source, or all of it."""
    match = _REPOSITORY.search(text)
    return match[0].lower() if match else text


def first_finding(text: bytes, rules: RuleSet) -> str:
    """The label of the first cause."""
    diagnosis = Diagnosis(rules)
    diagnosis.read("a.log", scan.lines(text.splitlines(keepends=True), rules.literals))
    return next((cause.rule.label for cause in diagnosis.causes()), HEALTHY)


def parts_of_patterns(known: Sequence[Log], rules: RuleSet) -> Mapping[str, set[int]]:
    """The parts in whose logs each pattern of a cause matches a line."""
    parts: dict[str, set[int]] = defaultdict(set)
    patterns = {one.regex.pattern: one for rule in rules.causes for one in rule.match}
    for log in known:
        text = "\n".join(
            log_prefixes.bare(line) for line in log.text.decode(errors="replace").split("\n")
        )
        for name, pattern in patterns.items():
            if log.part in parts[name] or not any(literal in text for literal in pattern.literals):
                continue
            if any(pattern.regex.search(line) for line in text.split("\n")):
                parts[name].add(log.part)
    return parts


def without(rules: RuleSet, part: int, parts: Mapping[str, set[int]]) -> RuleSet:
    """The rules without the patterns that match in one part only."""

    def kept(rule: CauseRule) -> CauseRule:
        match = tuple(one for one in rule.match if parts[one.regex.pattern] != {part})
        return dataclasses.replace(rule, match=match)

    return dataclasses.replace(rules, causes=tuple(map(kept, rules.causes)))


def score(part: Sequence[Finding]) -> Score:
    """Count what is right among the findings of a part."""
    failed = [one for one in part if not one.log.healthy]
    healthy = [one for one in part if one.log.healthy]
    return Score(
        len({one.log.source for one in part}),
        len(failed),
        sum(one.log.allows(one.label) for one in failed),
        sum(one.log.labels[0] in {one.label, ONCE.get(one.label)} for one in failed),
        len(healthy),
        sum(one.label != HEALTHY for one in healthy),
        sum(one.log.allows(one.held_out) for one in failed),
    )


def table(found: Sequence[Finding]) -> Iterator[str]:
    """The lines to print: each part, and all."""
    yield "| part | sources | failures | right | exact | held out | healthy | alarms |"
    yield "|---|---:|---:|---:|---:|---:|---:|---:|"
    for part in range(PARTS):
        yield _row(str(part + 1), score([one for one in found if one.log.part == part]))
    yield _row("all", score(found))


def _row(name: str, one: Score) -> str:
    counts = (one.right, one.exact, one.held_out)
    shares = [f"{count} ({count / max(one.failed, 1):.1%})" for count in counts]
    numbers = (name, one.sources, one.failed, *shares, one.healthy, one.alarms)
    return f"| {' | '.join(map(str, numbers))} |"


def findings(known: Sequence[Log], rules: RuleSet) -> list[Finding]:
    """The first finding in each log."""
    parts = parts_of_patterns(known, rules)
    fewer = [without(rules, part, parts) for part in range(PARTS)]
    return [
        Finding(log, first_finding(log.text, rules), first_finding(log.text, fewer[log.part]))
        for log in known
    ]


def main() -> int:
    """Print the table; with --wrong also the findings that are wrong."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--wrong", action="store_true", help="name the sources of wrong findings")
    args = parser.parse_args()
    known = list(logs(args.folder))
    if not known:
        parser.error(f"{args.folder} has neither cases.jsonl nor threads/*.toml with sources")
    found = findings(known, cause_rules.load())
    print(*table(found), sep="\n")
    for log, label, _ in found if args.wrong else ():
        if not log.allows(label):
            print(f"{log.source}: expected {' or '.join(log.labels)}, found {label}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
