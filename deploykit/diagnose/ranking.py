"""From lines to causes: assigning lines to rules, and ranking the causes that they prove."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from deploykit.diagnose import log_names, log_prefixes, packages, placeholders, scan
from deploykit.diagnose.cause_rules import KINDS, CauseRule, RuleKey, RuleSet
from deploykit.diagnose.scan import Line, RawLine
from deploykit.diagnose.tracebacks import Tracebacks

SHOWN = 3
"""Maximum number of lines shown as evidence of a cause."""
_WIDTH, _BEFORE = 240, 60
"""Characters of a line that are shown, and those before the text that proves the cause."""
_JOINED = 2
"""Lines after a hit that are joined with it: messages span several lines."""
_AFTER = 400
"""Number of lines for which the `after` of a rule holds."""
_MILD = ("mild", 0)
_ENOUGH = 100
"""Lines of a kind after which the next ones are skipped."""
_MAX_KINDS = 1000
_ZEROS = bytes.maketrans(b"123456789", b"0" * 9)
_MAX_IDLE = 20_000
"""Lines that prove nothing that are remembered of all logs."""
_DIGITS = re.compile(r"\d+")
_DIGITS_MATTER = re.compile(r"rror|code|status|ignal|Xid|rrno|Traceback|File|Caught|after")
"""In such lines the digits matter, or the lines before them do."""
_NOT_IDLE = {"after", "success", "cause"}
"""Parts of the rules whose lines count in each log anew, or after other lines."""

_Hits = Mapping[RuleKey, dict[str, str]]


@dataclass(frozen=True)
class Evidence:
    """A line of a log that proves a cause."""

    file: str
    line: int
    text: str
    rank: int | None
    host: str | None
    time: str = ""
    at: str = ""
    """``train.py:9: loss = model(x)``: the user's line that led to an exception."""


@dataclass
class Cause:
    """A cause that the logs prove.

    `order`: time, number of the log and of the line of its first evidence. `last`: log and line of
    its last one. `also`: labels of other causes. `values`: what fills the placeholders of the fix.
    """

    rule: CauseRule
    evidence: list[Evidence] = field(default_factory=list)
    order: tuple[str, int, int] = ("", 0, 0)
    last: tuple[str, int] = ("", 0)
    also: list[str] = field(default_factory=list)
    first_rank: int | None = None
    firm: set[int] = field(default_factory=set)
    """Numbers of the logs with a line that is not [[mild]], or whose rule is firm."""
    values: dict[str, str] = field(default_factory=dict)
    traits: frozenset[str] = frozenset()
    """What fits the run: see `placeholders.fitting`."""

    @property
    def fix(self) -> str:
        """What to do, one step per line, with this run's values."""
        return placeholders.render(placeholders.fitting(self.rule.fix, self.traits), self.values)


class _Pending(NamedTuple):
    """A line without a root cause so far, joined with the lines after it, and its candidates."""

    line: Line
    text: str
    candidates: list[int]

    def joined(self, line: Line) -> _Pending:
        if line.number > self.line.number + _JOINED:
            return self
        text = scan.start(line.text)
        return self._replace(text=f"{self.text} {log_prefixes.bare(text)}")


class Diagnosis:
    """The diagnosis of a run: `read` each of its logs, then call `causes`.

    `values` are those of the run (placeholders.OF_RUN), and `traits` what it is, for the fixes.
    """

    def __init__(
        self,
        rules: RuleSet,
        values: Mapping[str, str] | None = None,
        traits: Collection[str] = (),
    ) -> None:
        self._rules = rules
        self._values = dict(values or {})
        self._traits = frozenset(traits)
        self._causes: dict[int, Cause] = {}
        self._ruled_out: set[int] = set()
        self.literals = rules.literals
        self._files = 0
        self._idle: set[int] = set()
        """Hashes of lines that prove nothing, of all logs; they are joined with others once."""
        self.last: dict[str, int] = {}
        """The last line of each log that speaks of a failure, whether it counts or not."""
        uncaught = rules.uncaught
        self._uncaught: _Hits = {} if uncaught is None else {("cause", uncaught): {}}
        self._root: int | None = None
        self.first: int | None = None
        """The rank that failed first, where it is known from elsewhere."""
        self.ended: str | None = None
        """With what the rank that failed first ended, from torchrun's summary."""
        self.unread: list[str] = []
        """What could not be read, in sentences."""
        self.modules: dict[str, str] = {}
        """The modules of the source, with the folder where they are."""

    def read(self, name: str, lines: Iterable[RawLine], rank: int | None = None) -> None:
        """Read the lines of one log, written by `rank` if that is known."""
        self._files += 1
        log = _Log(name, self._files, rank)
        pending: list[_Pending] = []
        for raw in lines:
            if not pending and log.repeats(raw):
                self.last[log.name] = raw.number
                log.time = log_prefixes.time(raw.raw[:80].decode(errors="replace")) or log.time
                continue
            line = raw.decoded()
            concludes = log.tracebacks.read(scan.start(line.text))
            log.exception = line.number if concludes else log.exception
            if log.watched:
                self._withdraw(log, line)
            if not line.hit or log.tracebacks.in_code:
                if concludes and line.number > log.skip_until:
                    self._record(log, line, line.text, self._uncaught)
                pending = [each.joined(line) for each in pending]
                continue
            self._settle(log, pending)
            self._note_summary(log, scan.start(line.text))
            pending = list(self._assign(log, line))
            if log.proved == line.number:
                log.count(raw)
        self._settle(log, pending)

    def _assign(self, log: _Log, line: Line) -> Iterator[_Pending]:
        """Assign a line to causes; yield it, to be joined with the next lines, without a root."""
        skipped = line.number <= log.skip_until
        for piece in scan.pieces(line.text):
            text = log.tracebacks.without_number(log_prefixes.bare(piece))
            key = hash(text if _DIGITS_MATTER.search(text) else _DIGITS.sub("0", text))
            if key in self._idle:
                continue
            candidates, hits = self._rules.index.find(text)
            harmless = [self._rules.harmless[n] for part, n in hits if part == "harmless"]
            for rule in harmless:
                log.skip_until = max(log.skip_until, line.number + rule.spans)
            if harmless or skipped:
                continue
            kinds = self._record(log, line, piece, hits)
            if not kinds and line.number == log.exception:
                kinds = self._record(log, line, line.text, self._uncaught)
            if len(self._idle) < _MAX_IDLE and _NOT_IDLE.isdisjoint(part for part, _ in hits):
                self._idle.add(key)
            if "root" in kinds and self._proves_by_itself(hits):
                log.proved = line.number
            if "root" not in kinds and not log.tracebacks.in_frame:
                yield _Pending(line, text, candidates)

    def _proves_by_itself(self, hits: _Hits) -> bool:
        """Whether a line proves the first rule that it matches, whatever lines are around it."""
        if not hits or any(part != "cause" for part, _ in hits):
            return False
        rule = self._rules.causes[min(number for _, number in hits)]
        return rule.least <= 1 and not (rule.after or rule.unless or rule.raised_in or rule.until)

    def _settle(self, log: _Log, pending: Iterable[_Pending]) -> None:
        for line, text, candidates in pending:
            hits = self._rules.index.match(text, candidates)
            self._record(log, line, scan.start(line.text), hits)

    def _record(self, log: _Log, line: Line, raw: str, hits: _Hits) -> set[str]:
        """Record the line as evidence of the causes that it proves; return their kinds."""
        for part, number in hits:
            if part == "after":
                log.after[number] = line.number
            elif part == "unless":
                self._ruled_out.add(number)
            elif part == "success":  # earlier failures of the log no longer count
                for cause in self._causes.values():
                    cause.firm.discard(log.number)
                log.kinds.clear()
        matched = list(self._matching_rules(log, line, raw, hits))
        for number in matched:
            rule = self._rules.causes[number]
            mild = _MILD in hits and line.number != log.exception
            firm = (not mild or rule.firm) and log.counts(number, rule, line)
            self._add_evidence(number, log, line, raw, firm=firm)
            if groups := hits["cause", number]:
                cause = self._causes[number]
                cause.values = groups | cause.values
        return {self._rules.causes[number].kind for number in matched}

    def _withdraw(self, log: _Log, line: Line) -> None:
        """Forget causes that a line right after their proof takes back: a NaN that passed."""
        text = scan.start(line.text)
        for number, proved in list(log.watched.items()):
            rule = self._rules.causes[number]
            if line.number > proved + _JOINED:
                del log.watched[number]
            elif line.number > proved and rule.is_taken_back_by(text):
                self._causes[number].firm.discard(log.number)
                del log.watched[number]
                log.counted.pop(number, None)

    def _matching_rules(self, log: _Log, line: Line, raw: str, hits: _Hits) -> Iterator[int]:
        """The first rule that matches, and the next ones while `unless` may rule it out.

        On a line that is mild, those for which it is proof all the same go first.
        """
        rules = self._rules.causes
        mild = _MILD in hits
        numbers = (number for part, number in hits if part == "cause")
        for number in sorted(numbers, key=lambda one: (mild and not rules[one].firm, one)):
            rule = rules[number]
            last = log.after.get(number, -_AFTER - 1)
            if rule.after and line.number - last > _AFTER:
                continue
            if rule.raised_in and not rule.raised_in.search(log.tracebacks.frame(raw)):
                continue
            yield number
            if not rule.unless:
                return

    def _add_evidence(self, index: int, log: _Log, line: Line, raw: str, *, firm: bool) -> None:
        """Add a line to the evidence of a cause; the first firm line replaces all others."""
        log.time = log_prefixes.time(raw) or log.time
        order = (log.time, log.number, line.number)
        cause = self._causes.get(index)
        if cause is None:
            cause = self._causes[index] = Cause(self._rules.causes[index], order=order)
        cause.last = (log.name, line.number)
        self.last[log.name] = line.number
        if firm and not cause.firm:
            cause.evidence.clear()
            cause.order = order
        elif cause.firm and not firm:
            return
        if order < cause.order:
            cause.order = order
            cause.evidence.insert(0, self._evidence(cause.rule, log, line, raw))
        elif len(cause.evidence) < SHOWN:
            evidence = self._evidence(cause.rule, log, line, raw)
            known = {(proof.file, proof.line, proof.text) for proof in cause.evidence}
            # a line is read again with the next ones
            if (evidence.file, evidence.line, evidence.text) not in known:
                cause.evidence.append(evidence)
        del cause.evidence[SHOWN:]
        if firm:
            cause.firm.add(log.number)

    def _evidence(self, rule: CauseRule, log: _Log, line: Line, raw: str) -> Evidence:
        rank = log.summary_rank if log_prefixes.continues_summary(raw) else log_prefixes.rank(raw)
        rank = log.rank if rank is None else rank
        host = log_prefixes.host(raw) or log.host
        at = log.tracebacks.place(raw) if line.number == log.exception else ""
        return Evidence(log.name, line.number, _shown(rule, raw), rank, host, log.time, at)

    def _note_summary(self, log: _Log, text: str) -> None:
        if "exitcode" not in text and log_prefixes.SUMMARY not in text:
            return
        rank = log_prefixes.summary_rank(text)
        if rank is not None:
            log.summary_rank = self._root = rank
        elif log_prefixes.stopped_in_summary(text):
            self._root = None
        elif log.summary_rank is not None and (end := log_prefixes.end_in_summary(text)):
            self.ended = f"rank {log.summary_rank} ended first, with {end}"

    def rule_out(self, labels: Collection[str]) -> None:
        """Take these causes for none, whatever the logs say."""
        rules = enumerate(self._rules.causes)
        self._ruled_out.update(number for number, rule in rules if rule.label in labels)

    def causes(self, is_overcome: Callable[[Cause], bool] = lambda _: False) -> list[Cause]:
        """The causes, the most probable first; symptoms only if there is nothing else."""
        kept: dict[int, Cause] = {}
        proved: set[tuple[str, int]] = set()
        for index, cause in sorted(self._causes.items()):
            first = (cause.evidence[0].file, cause.evidence[0].line)
            if index not in self._ruled_out and first not in proved and not is_overcome(cause):
                kept[index] = cause
                proved.add(first)
        for kind in KINDS:
            chosen = [one for one in kept.values() if one.firm and one.rule.kind == kind]
            if chosen:
                chosen = _with_precursors(chosen, kept.values())
                rest = [cause for cause in kept.values() if cause not in chosen]
                by_label: dict[str, Cause] = {}
                for cause in chosen:
                    by_label.setdefault(cause.rule.label, cause)
                return [self._finish(cause, rest) for cause in by_label.values()]
        return []

    def _finish(self, cause: Cause, rest: Iterable[Cause]) -> Cause:
        """Add the other possible causes, and the rank that failed first."""
        labels = dict.fromkeys([*cause.rule.also, *(other.rule.label for other in rest)])
        cause.also = [label for label in labels if label != cause.rule.label]
        cause.first_rank = self._first_rank(cause)
        first = cause.evidence[0]
        line = {"file": first.file, "host": first.host, "rank": cause.first_rank}
        cause.values |= {name: str(value) for name, value in line.items() if value is not None}
        cause.values |= self._values
        if module := cause.values.get("module"):
            cause.values |= packages.about(module, self.modules)
        cause.traits = self._traits
        return cause

    def _first_rank(self, cause: Cause) -> int | None:
        """The rank seen to end first if it gave proof, or for a symptom; else the proof's."""
        ranks = [evidence.rank for evidence in cause.evidence]
        seen = self._root if self.first is None else self.first
        first = cause.rule.kind == "symptom" or seen in ranks
        candidates = [seen, *ranks] if first else [*ranks, seen]
        return next((rank for rank in candidates if rank is not None), None)


def _shown(rule: CauseRule, raw: str) -> str:
    """A line without its prefixes; of a long one the part around what proves the cause."""
    text = " ".join(log_prefixes.bare(raw).split())
    if len(text) <= _WIDTH:
        return text
    starts = (match.start() for each in rule.match if (match := each.regex.search(text)))
    start = max(0, min(starts, default=0) - _BEFORE)
    start = 0 if start < _BEFORE else start
    end = start + _WIDTH
    return f"{'...' if start else ''}{text[start:end]}{'...' if end < len(text) else ''}"


def _with_precursors(chosen: list[Cause], kept: Iterable[Cause]) -> list[Cause]:
    """The chosen causes, preceded by those that they yield to and that were seen earlier.

    Some yield to a warning, too.
    """
    ahead = []
    for early in kept:
        later = (late.rule for late in chosen if early.order < late.order)
        labels = (rule.warned_by + (rule.yields if early.firm else ()) for rule in later)
        if any(early.rule.label in each for each in labels):
            ahead.append(early)
    return [*ahead, *(cause for cause in chosen if cause not in ahead)]


def _kind(raw: RawLine) -> bytes:
    return raw.raw.rstrip(b"\r\n").translate(_ZEROS)


@dataclass
class _Log:
    """The state of one log while it is read."""

    name: str
    number: int
    rank: int | None
    skip_until: int = 0
    exception: int = 0
    """The last line of a traceback, which is never mild, whatever its words."""
    time: str = ""
    summary_rank: int | None = None
    after: dict[int, int] = field(default_factory=dict)
    tracebacks: Tracebacks = field(default_factory=Tracebacks)
    watched: dict[int, int] = field(default_factory=dict)
    """Rules with an `until`, and the line of their last proof."""
    counted: dict[int, int] = field(default_factory=dict)
    """How many lines prove each rule with a `least`."""
    proved: int = 0
    """The last line that proved a cause by itself."""
    kinds: dict[bytes, int] = field(default_factory=dict)
    """How many such lines there are of each kind: alike but for digits."""

    def repeats(self, raw: RawLine) -> bool:
        """Whether a line is one of a kind that has proved its cause often enough, as in a loop."""
        if not raw.hit or raw.number <= self.skip_until or self.watched or self.tracebacks.are_open:
            return False
        return bool(self.kinds) and self.kinds.get(_kind(raw), 0) >= _ENOUGH

    def count(self, raw: RawLine) -> None:
        """Count a line of its kind."""
        if (kind := _kind(raw)) in self.kinds or len(self.kinds) < _MAX_KINDS:
            self.kinds[kind] = self.kinds.get(kind, 0) + 1

    def counts(self, number: int, rule: CauseRule, line: Line) -> bool:
        """Note a line that proves a rule; whether there are as many as it takes."""
        if rule.until:
            self.watched[number] = line.number
        if rule.least > 1:
            self.counted[number] = self.counted.get(number, 0) + 1
        return rule.least <= self.counted.get(number, rule.least)

    @cached_property
    def host(self) -> str | None:
        """The machine that the name of the log tells."""
        return log_names.host(Path(self.name))
