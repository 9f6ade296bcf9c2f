"""From lines to causes: which rule a line belongs to, and which of several causes came first."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from deploykit.diagnosis import fixes, marks, reading
from deploykit.diagnosis.reading import Line
from deploykit.diagnosis.rules import KINDS, Cause, Owner, Rules

SHOWN = 3
"""Lines that prove a cause, at most."""
_AFTER = 400
"""Lines for which the `after` of a rule holds."""
_REMEMBERED = 20_000
"""Hashes of lines that say nothing, digits aside: logs repeat them again and again."""
_DIGITS = re.compile(r"\d+")
_TELLING = re.compile(r"rror|code|status|ignal|Xid|rrno|Traceback|File|Caught|after")
"""In such lines the digits tell, or what came before them."""
_MILD = ("mild", 0)

_Hits = Mapping[Owner, dict[str, str]]


@dataclass(frozen=True)
class Evidence:
    file: str
    line: int
    text: str
    rank: int | None
    host: str | None
    time: str = ""


@dataclass
class Finding:
    cause: Cause
    evidence: list[Evidence] = field(default_factory=list)
    order: tuple[str, int, int] = ("", 0, 0)
    also: list[str] = field(default_factory=list)
    first_rank: int | None = None
    firm: set[int] = field(default_factory=set)
    """Numbers of the logs with a line that no program carries on from."""
    values: dict[str, str] = field(default_factory=dict)

    @property
    def fix(self) -> str:
        return fixes.render(self.cause.fix, self.values)


class _Waiting(NamedTuple):
    """A line without a root cause so far, with those behind it, and the patterns that may match."""

    line: Line
    text: str
    places: list[int]

    def longer(self, text: str) -> _Waiting:
        return self._replace(text=f"{self.text} {marks.bare(text)}")


class Diagnosis:
    """Feed it the lines of each log, then ask for the findings.

    `values` are those of the run (fixes.OF_RUN), for the text of the fix.
    """

    def __init__(self, rules: Rules, values: Mapping[str, str] | None = None) -> None:
        self._rules = rules
        self._values = dict(values or {})
        self._found: dict[int, Finding] = {}
        self._ruled_out: set[int] = set()
        self.literals = rules.literals
        self._files = 0
        self._dull: set[int] = set()
        self._root: int | None = None

    def read(self, name: str, lines: Iterable[Line], node: int | None = None) -> None:
        """All lines of one log; `node` is where it was written, when that is known."""
        self._files += 1
        log = _Log(name, self._files, node)
        waiting: list[_Waiting] = []
        for line in lines:
            if not line.hit:
                waiting = [each.longer(reading.start(line.text)) for each in waiting]
                continue
            self._settle(log, waiting)
            self._note_summed(log, reading.start(line.text))
            waiting = list(self._open(log, line))
        self._settle(log, waiting)

    def _open(self, log: _Log, line: Line) -> Iterator[_Waiting]:
        """Judge a line; one without a root cause is tried again with the lines behind it."""
        if line.number <= log.muted:
            return
        for piece in reading.pieces(line.text):
            text = marks.bare(piece)
            dull = hash(text if _TELLING.search(text) else _DIGITS.sub("0", text))
            if dull in self._dull:
                continue
            places = self._rules.index.places(text)
            hits = self._rules.index.find(text, places)
            if (spans := self._harmless(hits)) is not None:
                log.muted = max(log.muted, line.number + spans)
                continue
            kinds = self._judge(log, line, piece, hits)
            if not kinds and len(self._dull) < _REMEMBERED:
                self._dull.add(dull)
            if "root" not in kinds:
                yield _Waiting(line, text, places)

    def _settle(self, log: _Log, waiting: Iterable[_Waiting]) -> None:
        for line, text, places in waiting:
            raw = reading.start(line.text)
            self._judge(log, line, raw, self._rules.index.find(text, places))

    def _harmless(self, hits: _Hits) -> int | None:
        return max(
            (self._rules.harmless[n].spans for part, n in hits if part == "harmless"), default=None
        )

    def _judge(self, log: _Log, line: Line, raw: str, hits: _Hits) -> set[str]:
        """Give the line to the first cause that matches it; the kinds of those that do."""
        for part, number in hits:
            if part == "after":
                log.after[number] = line.number
            elif part == "unless":
                self._ruled_out.add(number)
            elif part == "success":
                self._went_well(log)
        matched = list(self._match(log, line, hits))
        for number in matched:
            firm = _MILD not in hits or self._rules.causes[number].firm
            self._keep(number, log, line, raw, firm=firm)
            finding = self._found[number]
            finding.values = hits["cause", number] | finding.values
        return {self._rules.causes[number].kind for number in matched}

    def _went_well(self, log: _Log) -> None:
        """What this log complained of before was overcome."""
        for finding in self._found.values():
            finding.firm.discard(log.number)

    def _match(self, log: _Log, line: Line, hits: _Hits) -> Iterator[int]:
        """The first cause that matches; more as long as those before may yet be ruled out."""
        for number in sorted(number for part, number in hits if part == "cause"):
            cause = self._rules.causes[number]
            last = log.after.get(number, -_AFTER - 1)
            if cause.after and line.number - last > _AFTER:
                continue
            yield number
            if not cause.unless:
                return

    def _keep(self, index: int, log: _Log, line: Line, raw: str, *, firm: bool) -> None:
        """Note that a line proves a cause; one that is firm stands before all that are not."""
        log.time = marks.time(raw) or log.time
        order = (log.time, log.number, line.number)
        found = self._found.setdefault(index, Finding(self._rules.causes[index], order=order))
        if firm and not found.firm:
            found.evidence.clear()
            found.order = order
        elif found.firm and not firm:
            return
        proof = self._proof(log, line, raw)
        if order < found.order:
            found.order = order
            found.evidence.insert(0, proof)
        elif len(found.evidence) < SHOWN and [proof] != found.evidence[-1:]:
            found.evidence.append(proof)
        del found.evidence[SHOWN:]
        if firm:
            found.firm.add(log.number)

    def _proof(self, log: _Log, line: Line, raw: str) -> Evidence:
        shown = " ".join(marks.bare(raw).split())[:400]
        host = marks.host(raw) or (None if log.node is None else f"node {log.node}")
        rank = log.summed if marks.of_summed(raw) else marks.rank(raw)
        return Evidence(log.name, line.number, shown, rank, host, log.time)

    def _note_summed(self, log: _Log, text: str) -> None:
        rank = marks.summed(text)
        if rank is not None:
            log.summed = self._root = rank

    def findings(self) -> list[Finding]:
        """The causes, the most probable first; symptoms only where there is no cause."""
        kept: dict[int, Finding] = {}
        proved: set[tuple[str, int]] = set()
        for index, finding in sorted(self._found.items()):
            first = (finding.evidence[0].file, finding.evidence[0].line)
            if index not in self._ruled_out and first not in proved:
                kept[index] = finding
                proved.add(first)
        firm = [finding for finding in kept.values() if finding.firm]
        for kind in KINDS:
            chosen = [finding for finding in firm if finding.cause.kind == kind]
            if chosen:
                chosen = _in_turn(chosen, firm)
                rest = [f for f in kept.values() if f not in chosen]
                return [self._finish(f, rest) for f in _once(chosen)]
        return []

    def _finish(self, finding: Finding, rest: Iterable[Finding]) -> Finding:
        """Add what it may be besides, and the rank that failed first."""
        seen = [f.cause.label for f in rest]
        also = dict.fromkeys([*finding.cause.also, *seen])
        finding.also = [label for label in also if label != finding.cause.label]
        ranks = (proof.rank for proof in finding.evidence)
        finding.first_rank = next((rank for rank in ranks if rank is not None), self._root)
        first = finding.evidence[0]
        line = {"file": first.file, "host": first.host, "rank": finding.first_rank}
        finding.values |= {name: str(value) for name, value in line.items() if value is not None}
        finding.values |= self._values
        return finding


def _in_turn(chosen: list[Finding], firm: list[Finding]) -> list[Finding]:
    """As given, but what a cause yields to stands before it where it was seen earlier."""
    ahead = [
        first
        for first in firm
        if any(first.cause.label in f.cause.yields and first.order < f.order for f in chosen)
    ]
    return [*ahead, *(f for f in chosen if f not in ahead)]


def _once(findings: list[Finding]) -> list[Finding]:
    """One for each label."""
    labels: dict[str, Finding] = {}
    for finding in findings:
        labels.setdefault(finding.cause.label, finding)
    return list(labels.values())


@dataclass
class _Log:
    name: str
    number: int
    node: int | None
    muted: int = 0
    time: str = ""
    summed: int | None = None
    after: dict[int, int] = field(default_factory=dict)
