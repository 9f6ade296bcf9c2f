"""Why a run failed: its logs and dumps read, and the causes as text and as data."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploykit import backend, exit_records
from deploykit.diagnosis import cause_rules, dumps, flight, placeholders, scan
from deploykit.diagnosis.cause_rules import RuleSet
from deploykit.diagnosis.dumps import Dump
from deploykit.diagnosis.ranking import Cause, Diagnosis, Evidence
from deploykit.errors import BackendUnavailable, DeploykitError, NotFound
from deploykit.model import LogLine, State
from deploykit.registry import Run

_BRIEFLY = 20
"""Tasks of a job array whose logs are read for the cause in one line."""
_PYTHON = re.compile(r"(/[\w./+-]+) \.deploykit/launch\.py")
_RANKS = re.compile(r"--(?:nnodes|nproc-per-node)=(\d{1,6})\b")


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
    diagnosis = Diagnosis(rules or cause_rules.load(), *_about(row))
    _read_run(diagnosis, row, _files(row))
    warnings = []
    for folder in _folders(row):
        recorded, unreadable = dumps_in(folder)
        warnings += unreadable + read_dumps(diagnosis, recorded)
    return RunDiagnosis(tuple(diagnosis.causes()), tuple(warnings))


def brief(row: Run) -> str | None:
    """Cause and evidence of a failed run in one line; None where its logs are not here."""
    files = _files(row, _BRIEFLY) if State(row.state) is State.FAILED else []
    if not files:
        return None
    diagnosis = Diagnosis(cause_rules.load(), *_about(row))
    try:
        _read_run(diagnosis, row, files)
    except (DeploykitError, OSError):  # the status is complete without it
        return None
    causes = diagnosis.causes()
    if not causes:
        return None
    rule, proof = causes[0].rule, causes[0].evidence[0]
    return f"{rule.label}, {rule.means}: {_source(proof)}: {proof.text[:160]}"


def _folders(row: Run) -> list[Path]:
    """The run folder, or those of the tasks of a job array that did not succeed."""
    tasks = sorted(Path(row.folder).glob("tasks/*"), key=lambda path: (len(path.name), path.name))
    return [task for task in tasks if not _succeeded(task)] or [Path(row.folder)]


def _succeeded(task: Path) -> bool:
    records = exit_records.read(task)
    return bool(records) and all(record.exit_code == 0 for record in records)


def _files(row: Run, most: int | None = None) -> list[Path]:
    """The logs of a run; of a job array those of its tasks that failed, at most `most` tasks."""
    files = []
    for folder in _folders(row)[:most]:
        if folder != Path(row.folder):
            files += sorted(Path(row.folder, "logs").glob(f"*-{folder.name}.log"))
        files += sorted((folder / "logs").glob("*.log"))
    return files


def _read_run(diagnosis: Diagnosis, row: Run, files: Sequence[Path]) -> None:
    """Read the logs of the run, from `files` or else from its backend, and its status."""
    for path, found in scan.files(files, diagnosis.literals):
        diagnosis.read(str(path), found)
    if not files and State(row.state) is not State.BLOCKED:
        if row.handle is None:
            raise NotFound(f"{row.run} has no logs: it is {row.state}", hint=row.reason or None)
        lines = backend.find(row.backend).logs(row.handle, follow=False)
        diagnosis.read(row.run, scan.lines(_raw(lines), diagnosis.literals))
    _read_status(diagnosis, row)


def _read_status(diagnosis: Diagnosis, row: Run) -> None:
    """Read the state and reason of a run that failed or cannot start: often no log has them."""
    if State(row.state) in {State.FAILED, State.BLOCKED}:
        told = [f"State={row.native}", row.reason]
        raw = [f"{line}\n".encode(errors="replace") for line in told]
        diagnosis.read(f"status of {row.run}", scan.lines(raw, diagnosis.literals))


def _about(row: Run) -> tuple[dict[str, str], set[str]]:
    """The values of a run for the text of a fix, and what it is (see `placeholders`)."""
    values = {"backend": row.backend, "job": row.id or "", "name": row.name}
    values |= {"target": row.target, "run": row.run}
    if Path(row.folder, backend.JOB).is_file():
        values[placeholders.AGAIN] = f"rerun {row.run}"
    plan = _plan(row)
    if python := _PYTHON.search(plan):
        values["python"] = python[1]
    ranks = math.prod(int(number) for number in _RANKS.findall(plan))
    return values, {row.backend, *([placeholders.SEVERAL] if ranks > 1 else [])}


def _plan(row: Run) -> str:
    """The text of what was submitted; empty where it is not here."""
    for path in Path(row.folder).glob("plan.*"):
        with contextlib.suppress(OSError):
            return path.read_text(encoding="utf-8", errors="replace")
    return ""


def dumps_in(folder: Path) -> tuple[list[Dump], list[str]]:
    """The dumps in a folder, and a warning for each that is truncated."""
    readable, warnings = [], []
    for path in sorted((folder / "debug").glob(f"{dumps.PREFIX}*")):
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
