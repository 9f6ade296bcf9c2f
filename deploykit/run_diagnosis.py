"""Why a run failed: its logs and dumps read, and the causes as text and as data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploykit import backend
from deploykit.diagnosis import cause_rules, dumps, flight, scan
from deploykit.diagnosis.cause_rules import RuleSet
from deploykit.diagnosis.dumps import Dump
from deploykit.diagnosis.ranking import Cause, Diagnosis, Evidence
from deploykit.errors import BackendUnavailable, DeploykitError, NotFound
from deploykit.model import LogLine, State
from deploykit.registry import Run


@dataclass(frozen=True)
class RunDiagnosis:
    """Why a run failed: `causes`, the most probable first; as text what `diagnose` prints.

    A cause has `rule.label`, `rule.means`, `evidence` (with `file`, `line`, `text` and `rank`),
    `first_rank` and `fix`.
    """

    causes: tuple[Cause, ...]
    warnings: tuple[str, ...] = ()
    """What could not be read."""

    def __str__(self) -> str:
        return "\n".join(lines(self.causes))

    def _repr_html_(self) -> str:
        from deploykit import display  # for notebooks

        return display.notes(self.warnings) + display.block(str(self))


def of_run(row: Run, rules: RuleSet | None = None) -> RunDiagnosis:
    """The diagnosis of a run from its logs and its dumps. Raises NotFound where it has no logs."""
    diagnosis = Diagnosis(rules or cause_rules.load(), _values(row))
    _read_run(diagnosis, row)
    recorded, warnings = _dumps(row)
    warnings += read_dumps(diagnosis, recorded)
    return RunDiagnosis(tuple(diagnosis.causes()), tuple(warnings))


def brief(row: Run) -> str | None:
    """Cause and evidence of a failed run in one line; None where its logs are not here."""
    if State(row.state) is not State.FAILED or not _files(row):
        return None
    diagnosis = Diagnosis(cause_rules.load(), _values(row))
    try:
        _read_run(diagnosis, row)
    except (DeploykitError, OSError):  # the status is complete without it
        return None
    causes = diagnosis.causes()
    if not causes:
        return None
    rule, proof = causes[0].rule, causes[0].evidence[0]
    return f"{rule.label}, {rule.means}: {_source(proof)}: {proof.text[:160]}"


def _files(row: Run) -> list[Path]:
    return sorted((Path(row.folder) / "logs").glob("*.log"))


def _read_run(diagnosis: Diagnosis, row: Run) -> None:
    if files := _files(row):
        for path in files:
            diagnosis.read(str(path), scan.file(path, diagnosis.literals))
        return
    if row.handle is None:
        raise NotFound(f"{row.run} has no logs: it is {row.state}", hint=row.reason or None)
    lines = backend.find(row.backend).logs(row.handle, follow=False)
    diagnosis.read(row.run, scan.lines(_raw(lines), diagnosis.literals))


def _values(row: Run) -> dict[str, str]:
    """The values of a run that the text of a fix may contain (placeholders.OF_RUN)."""
    known = {"backend": row.backend, "job": row.id or "", "name": row.name}
    return known | {"target": row.target, "run": row.run}


def _dumps(row: Run) -> tuple[list[Dump], list[str]]:
    """The dumps in the run folder, and a warning for each that is truncated."""
    readable, warnings = [], []
    for path in sorted(Path(row.folder, "debug").glob(f"{dumps.PREFIX}*")):
        try:
            readable.append(dumps.read(path))
        except dumps.NotADump as error:
            warnings.append(str(error))
    return readable, warnings


def read_dumps(diagnosis: Diagnosis, recorded: Sequence[Dump]) -> list[str]:
    """Add what PyTorch's analyzer finds. Without it a warning: the logs alone are used."""
    if not recorded:
        return []
    try:
        divergences = flight.divergences(recorded)
    except BackendUnavailable as error:
        return [f"{error.message}\n  {error.hint}"]
    for divergence in divergences:
        diagnosis.read(str(divergence.path), [divergence.line])
    return []


def _raw(lines: Iterator[LogLine]) -> Iterator[bytes]:
    for line in lines:
        mark = f"[rank {line.rank}] " if line.rank is not None else ""
        yield f"{mark}{line.text}\n".encode(errors="surrogateescape")


def data(cause: Cause) -> dict[str, Any]:
    """A cause as JSON."""
    return {
        "cause": cause.rule.label,
        "also": cause.also,
        "confidence": cause.rule.confidence,
        "evidence": [
            {"file": proof.file, "line": proof.line, "text": proof.text, "rank": proof.rank}
            for proof in cause.evidence
        ],
        "first_rank": cause.first_rank,
        "fix": cause.fix,
    }


def lines(causes: Sequence[Cause]) -> Iterator[str]:
    """The causes in the order in which they occurred, the most probable one marked."""
    if not causes:
        yield "no known cause: these logs show no failure, or one that no rule matches"
        yield "  next    see the first error of any rank: deploykit logs RUN --first-error"
    for cause in sorted(causes, key=lambda cause: cause.order):
        mark = " (the most probable)" if cause is causes[0] and len(causes) > 1 else ""
        yield f"{cause.rule.label}: {cause.rule.means}{mark}"
        for proof in cause.evidence:
            yield from (f"  proof   {_source(proof)}", f"          {proof.text}")
        for name, value in _facts(cause):
            for number, text in enumerate(value.split("\n") if value else ()):
                yield f"  {'' if number else name:<7} {text}"


def _facts(cause: Cause) -> Iterator[tuple[str, str]]:
    """What else is known of a cause, by its label."""
    rank = cause.first_rank
    yield "first", "" if rank is None else f"rank {rank} failed first"
    yield "not", cause.rule.probably_not
    others = ", ".join(label for label in cause.also if label != cause_rules.UNKNOWN)
    yield "also", f"perhaps {others}" if others else ""
    yield "fix", cause.fix


def _source(proof: Evidence) -> str:
    rank = "" if proof.rank is None else f", rank {proof.rank}"
    host = f", {proof.host}" if proof.host else ""
    return f"{proof.file}:{proof.line}{rank}{host}"
