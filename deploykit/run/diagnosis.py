"""Why a run failed: its logs, dumps and exit records are read; the causes as text and as data.

docs/how-to/diagnose.md has the main rules by which exit records refute causes.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deploykit.backends import base as backend
from deploykit.diagnose import (
    cause_rules,
    dumps,
    endings,
    flight,
    log_names,
    placeholders,
    ras,
    recovery,
    scan,
)
from deploykit.diagnose.cause_rules import RuleSet
from deploykit.diagnose.dumps import Dump
from deploykit.diagnose.endings import Ending
from deploykit.diagnose.ranking import Cause, Diagnosis, Evidence
from deploykit.job.model import LogLine, State
from deploykit.lib import render
from deploykit.lib.errors import DeploykitError, NotFound
from deploykit.observe import exit_records, stacks
from deploykit.observe.exit_records import ExitRecord
from deploykit.run.registry import Run

_MAX_TASKS_BRIEFLY = 20
"""Tasks of a job array whose logs are read for the cause in one line."""
_MAX_RANKS = 8
"""Ranks that a sentence names."""
_PYTHON = re.compile(r"(/[\w./+-]+) \.deploykit/launch\.py")
_RANKS = re.compile(r"--(?:nnodes|nproc-per-node)=(\d{1,6})\b")
_SIGNAL_CODES = 128
"""An exit code above it means a signal."""
_AFTER_AN_EXIT = {"slurm_cancelled", "remote_peer_died", cause_rules.UNKNOWN}
"""Symptoms that only follow if a rank has exited by itself."""
_FROM_OUTSIDE = frozenset({"slurm_preempted", "slurm_time_limit", "slurm_node_fail"})
"""Causes that end an attempt although all its ranks are well."""
_ENDS_A_HANG = frozenset({"time_limit", "slurm_time_limit", "slurm_cancelled"})
"""Causes that only say who stopped a run that made no progress."""
_DESPITE_SUCCESS = {"nan_loss", "efa_not_used"}
"""Causes despite which a program can succeed."""
_STOPPED = " after a signal to stop"
"""In the reason of a rank that did not fail by itself."""
_CODE = re.compile(r" \(exit code \d+\)")
"""Repeats the signal in a reason."""


@dataclass(frozen=True)
class RunDiagnosis:
    """Why a run failed: `causes`, most probable first. ``str()`` is what `diagnose` prints.

    A cause has `rule.label`, `rule.means`, `evidence` (with `file`, `line`, `text` and `rank`),
    `first_rank` and `fix`.
    """

    causes: tuple[Cause, ...]
    warnings: tuple[str, ...] = ()
    ending: str = Ending.HEALTHY
    """``cause``, ``unknown`` (it failed, and no log says why), ``unfinished``, ``healthy`` or
    ``unread``."""
    ended: str | None = None
    """Who ended first, and how, if the cause is unknown."""
    last: tuple[str, ...] = ()
    """The last lines of the ranks, each kind once, if the cause is unknown."""
    run: str = "RUN"

    def __str__(self) -> str:
        return "\n".join(report(self))

    def _repr_html_(self) -> str:
        return render.notes(self.warnings) + render.block(str(self))


def of_run(row: Run, rules: RuleSet | None = None) -> RunDiagnosis:
    """The diagnosis of a run from its logs and its dumps. Raises NotFound if it has no logs."""
    diagnosis = Diagnosis(rules or cause_rules.load(), *_about(row))
    source = Path(row.job_data().get("source") or Path(row.folder, "source"))
    for top in (source / "src", source):
        modules = [*top.glob("*.py"), *(path.parent for path in top.glob("*/__init__.py"))]
        diagnosis.modules |= {path.stem: "src" if top != source else "" for path in modules}
    files, folders = _files(row), _folders(row)
    known = _exit_evidence(row, folders)
    _read_run(diagnosis, row, files, known)
    for folder in folders:
        recorded, unreadable = dumps_in(folder)
        diagnosis.unread += unreadable
        _read_dumps(diagnosis, recorded)
    diagnosis.ended = known.ended or diagnosis.ended
    logs = [(str(path), path, None) for path in files]
    causes = _judged(diagnosis, row, known)
    state = State(row.state)
    without = Ending.HEALTHY if known.succeeded else None if state.final else Ending.UNFINISHED
    result = _concluded(diagnosis, logs, causes, failed=state is State.FAILED, without=without)
    return replace(result, run=row.run)


def of_files(names: Sequence[str], rules: RuleSet) -> RunDiagnosis:
    """The diagnosis of logs and dumps in files and folders; ``-`` is standard input."""
    diagnosis = Diagnosis(rules)
    named = [(name, path) for name in names for path in _expanded(name)]
    recorded = list(dict.fromkeys(path for _, path in named if path and dumps.is_dump(path)))
    logs = [(name, path) for name, path in named if path not in recorded]
    ranks = log_names.ranks([path for _, path in logs if path])
    texts = {path: name if path == Path(name) else str(path) for name, path in logs if path}
    for is_file, group in itertools.groupby(logs, lambda log: log[1] is not None):
        if not is_file:
            diagnosis.read("-", scan.file(None, diagnosis.literals, diagnosis.unread))
            continue
        paths = [path for _, path in group if path]
        for path, matching in scan.files(paths, diagnosis.literals, diagnosis.unread):
            diagnosis.read(texts[path], matching, ranks.get(path))
    readable, unreadable = dumps.read_all(recorded)
    diagnosis.unread += unreadable
    _read_dumps(diagnosis, readable)
    if texts and not recorded and all(path.is_file() and not path.stat().st_size for path in texts):
        diagnosis.unread.append("the logs are empty, so the result is unknown")
    ends = [(text, path, ranks.get(path)) for path, text in texts.items()]
    by_name = {name: path for path, name in texts.items()}
    causes = diagnosis.causes(lambda cause: recovery.is_overcome(cause, diagnosis.last, by_name))
    failed = not causes and any(endings.ends_in_error(path, rules) for path in texts)
    return _concluded(diagnosis, ends, causes, failed=failed)


def _expanded(name: str) -> list[Path | None]:
    """A file; of a folder its logs. None is standard input."""
    path = None if name == "-" else Path(name)
    if path is None or not path.is_dir():
        return [path]
    logs = list(log_names.logs_in(path))
    if not logs:
        hint = "name the files; in a folder, only *.log, *.out, *.err and *.RANK (or .gz) are read"
        raise NotFound(f"no logs found in the folder {path}", hint=hint)
    return list(logs)


def _concluded(
    diagnosis: Diagnosis,
    logs: Sequence[tuple[str, Path, int | None]],
    causes: Sequence[Cause],
    *,
    failed: bool,
    without: Ending | None = None,
) -> RunDiagnosis:
    """The diagnosis of what was read; for a failure without a cause, with what is known of it.

    `without` is its ending if there is no failure; None: `healthy` if everything could be read.
    """
    unread = tuple(diagnosis.unread)
    if causes and causes[0].rule.is_a_cause:
        return RunDiagnosis(tuple(causes), unread, Ending.CAUSE)
    if causes or failed:
        last = tuple(str(line) for line in endings.last_lines(logs))
        return RunDiagnosis(tuple(causes), unread, Ending.UNKNOWN, diagnosis.ended, last)
    return RunDiagnosis((), unread, without or (Ending.UNREAD if unread else Ending.HEALTHY))


def brief(row: Run) -> str | None:
    """Cause and evidence of a failed run, or of one that hung until it was cancelled, in one line.

    None if its logs are not here.
    """
    state = State(row.state)
    files = _files(row, _MAX_TASKS_BRIEFLY) if state in {State.FAILED, State.CANCELLED} else []
    if not files:
        return None
    diagnosis = Diagnosis(cause_rules.load(), *_about(row))
    known = _exit_evidence(row, _folders(row)[:_MAX_TASKS_BRIEFLY])
    if state is State.CANCELLED and not known.stalled:
        return None
    try:
        _read_run(diagnosis, row, files, known)
    except (DeploykitError, OSError):  # the status is complete without it
        return None
    causes = _judged(diagnosis, row, known)
    if not causes:
        return None
    rule, proof = causes[0].rule, causes[0].evidence[0]
    at = f" at {proof.at[:160]}" if proof.at else ""
    return f"{rule.label}, {rule.means}: {source(proof)}: {proof.text[:160]}{at}"


def _folders(row: Run) -> list[Path]:
    """The run folder, or those of the tasks of a job array that did not succeed."""
    tasks = sorted(Path(row.folder).glob("tasks/*"), key=lambda path: (len(path.name), path.name))
    codes = {task: [record.exit_code for record in exit_records.read(task)] for task in tasks}
    return [task for task in tasks if any(codes[task]) or not codes[task]] or [Path(row.folder)]


def _files(row: Run, most: int | None = None) -> list[Path]:
    """The logs of a run; of a job array those of at most `most` failed tasks."""
    files = []
    for folder in _folders(row)[:most]:
        if folder != Path(row.folder):
            files += sorted(Path(row.folder, "logs").glob(f"*-{folder.name}.log"))
        files += sorted((folder / "logs").glob("*.log"))
    return [path for path in files if path.is_file()]


def _read_run(diagnosis: Diagnosis, row: Run, files: Sequence[Path], known: ExitEvidence) -> None:
    """Read the logs of the run, from `files` or else from its backend, and its exit evidence."""
    for path, matching in scan.files(files, diagnosis.literals, diagnosis.unread):
        diagnosis.read(str(path), matching)
    if not files and State(row.state) is not State.BLOCKED:
        if row.handle is None:
            raise NotFound(f"{row.run} has no logs (state: {row.state})", hint=row.reason or None)
        lines = backend.find(row.backend).logs(row.handle, follow=False)
        diagnosis.read(row.run, scan.lines(map(_raw, lines), diagnosis.literals))
    diagnosis.first = known.first_rank
    diagnosis.rule_out(known.overcome)
    for name, texts in known.texts.items():
        raw = [f"{line}\n".encode(errors="replace") for line in texts]
        diagnosis.read(name, scan.lines(raw, diagnosis.literals))


def _raw(line: LogLine) -> bytes:
    mark = f"[rank {line.rank}] " if line.rank is not None else ""
    return f"{mark}{line.text}\n".encode(errors="surrogateescape")


@dataclass(frozen=True)
class ExitEvidence:
    """How a run ended, as its backend and its launchers recorded it."""

    texts: Mapping[str, Sequence[str]]
    """Lines for the rules of diagnose, by where they are from."""
    first: ExitRecord | None = None
    succeeded: bool = False
    stalled: bool = False
    """Whether the run made no progress when it was told to stop."""
    finished: tuple[str, ...] = ()
    """The ranks that exited with code 0 in the attempt that failed."""

    @property
    def first_rank(self) -> int | None:
        """The rank that failed first; None also if it was told to stop."""
        if self.first is None or _STOPPED in self.first.reason:
            return None
        return self.first.rank

    @property
    def overcome(self) -> frozenset[str]:
        """Causes that can only have ended an earlier attempt: in the last a rank exited itself."""
        first = self.first
        if first is None or not first.attempt or self.first_rank is None:
            return frozenset()
        return _FROM_OUTSIDE if 0 < first.exit_code < _SIGNAL_CODES else frozenset()

    @property
    def ended(self) -> str | None:
        if self.first is None:
            return None
        who = "a launcher" if self.first.rank is None else f"rank {self.first.rank}"
        return f"{who} failed first, with code {self.first.exit_code}: {self.first.reason}"

    def left_alone(self, causes: Sequence[Cause]) -> str:
        """The sentence for a rank that lost its connection to one that had finished, or nothing."""
        first = self.first_rank
        lost = (cause for cause in causes if cause.rule.label == "remote_peer_died")
        if first is None or first not in {proof.rank for cause in lost for proof in cause.evidence}:
            return ""
        who = ", ".join(self.finished[:_MAX_RANKS]) + (", ..." * (len(self.finished) > _MAX_RANKS))
        several = "s" * (len(self.finished) > 1)
        return (
            who and f"rank{several} {who} exited with code 0 while rank {first} still communicated"
        )

    def judged(self, causes: Sequence[Cause]) -> Sequence[Cause]:
        """The causes without those that the records refute.

        A run that succeeded overcame the errors in its logs. If a rank exited by itself, srun
        cancels the step of the others, and those lose their connections: both are symptoms.
        """
        if self.succeeded:
            for cause in causes:
                cause.first_rank = None  # no rank failed
            return [cause for cause in causes if cause.rule.label in _DESPITE_SUCCESS]
        if self.stalled:
            causes = [cause for cause in causes if cause.rule.label not in _ENDS_A_HANG]
        first = self.first
        if first is None or first.rank is None or not 0 < first.exit_code < _SIGNAL_CODES:
            return causes
        return [
            cause
            for cause in causes
            if cause.rule.label not in _AFTER_AN_EXIT
            or (cause.rule.raised_in and cause.first_rank == first.rank)  # lost its own worker
        ]


def _judged(diagnosis: Diagnosis, row: Run, known: ExitEvidence) -> Sequence[Cause]:
    """The causes by the logs and the records together."""
    causes = diagnosis.causes()
    kept = known.judged(causes)
    if not kept and (sentence := known.left_alone(causes)):
        name = f"exit records of {row.run}"
        diagnosis.read(name, scan.lines([f"{sentence}\n".encode()], diagnosis.literals))
        kept = known.judged(diagnosis.causes())
    return kept


def _exit_evidence(row: Run, folders: Sequence[Path]) -> ExitEvidence:
    """The exit evidence of a run; `folders` are its own, or those of its failed tasks."""
    state = State(row.state)
    texts: dict[str, Sequence[str]] = {}
    if state in {State.FAILED, State.BLOCKED}:
        texts[f"status of {row.run}"] = [f"State={row.native}", row.reason]
    elif state is State.RUNNING and row.reason.startswith(stacks.STALLED):
        texts[f"status of {row.run}"] = [row.reason]
    records = (record for folder in folders for record in exit_records.read(folder))
    stalled = ""
    if state in {State.FAILED, State.CANCELLED}:
        ended = (stacks.stall_reason(folder, ended=True) for folder in folders)
        stalled = next(filter(None, ended), "")
    if stalled and stalled not in row.reason:
        texts[f"stacks of {row.run}"] = [stalled]
    if stalled or row.reason.startswith(stacks.STALLED):
        when = "NCCL before it was stopped" if stalled else "NCCL"
        texts[f"NCCL in {row.run}"] = [f"{when}: {one}" for one in _told_by_nccl(folders)]
    failed = (record for record in records if record.exit_code and state is State.FAILED)
    first = min(failed, key=lambda record: record.finished, default=None)
    if first is not None:
        time = first.finished.isoformat(timespec="milliseconds").replace("+00:00", "Z")
        rank = "" if first.rank is None else f"[rank {first.rank}] "
        # the code of a signal is not a cause
        texts[f"exit records of {row.run}"] = [f"{time} {rank}{_CODE.sub('', first.reason)}"]
        texts[f"preflight of {row.run}"] = [
            f"preflight: FAILED: {why} ({host})"
            for folder in folders
            for host, why in exit_records.failed_checks(folder, first.attempt)
        ]
    finished = _finished(folders, first.attempt) if first is not None else ()
    return ExitEvidence(texts, first, state is State.SUCCEEDED, bool(stalled), finished)


def _finished(folders: Sequence[Path], attempt: int) -> tuple[str, ...]:
    """The ranks that exited with code 0 in an attempt; none of a job array, of several runs."""
    nodes = exit_records.numbered(folders[0], "node") if len(folders) == 1 else ()
    codes = [record.get("ranks") for _, record in nodes if record["attempt"] == attempt]
    ended = (one for each in codes if isinstance(each, dict) for one in each.items())
    return tuple(rank for rank, code in ended if rank.isdecimal() and code == 0)


def _told_by_nccl(folders: Sequence[Path]) -> Iterator[str]:
    """What NCCL reported on its communicators when the run stalled, each sentence once."""
    reports = (
        path.read_text(encoding="utf-8", errors="replace")
        for folder in folders
        for kept in stacks.stall_folders(folder)
        for path in sorted(kept.glob("*.ras"))
    )
    yield from dict.fromkeys(one for report in reports for one in ras.sentences(report))


def _about(row: Run) -> tuple[dict[str, str], set[str]]:
    """The values of a run for the text of a fix, and its traits (see `placeholders`)."""
    values = {"backend": row.backend, "job": row.id or "", "name": row.name}
    values |= {"target": row.target, "run": row.run}
    if Path(row.folder, backend.JOB).is_file():
        values[placeholders.AGAIN] = f"rerun {row.run}"
    plan = ""
    for path in Path(row.folder).glob("plan.*"):
        with contextlib.suppress(OSError):
            plan = path.read_text(encoding="utf-8", errors="replace")
    if python := _PYTHON.search(plan):
        values["python"] = python[1]
    ranks = math.prod(int(number) for number in _RANKS.findall(plan))
    return values, {row.backend, *([placeholders.SEVERAL] if ranks > 1 else [])}


def dumps_in(folder: Path) -> tuple[list[Dump], list[str]]:
    """The dumps of a run, and what could not be read of them."""
    return dumps.read_all(filter(dumps.is_dump, sorted((folder / "debug").glob("*"))))


def _read_dumps(diagnosis: Diagnosis, recorded: Sequence[Dump]) -> None:
    """Add where the ranks diverged."""
    for divergence in flight.divergences(recorded):
        diagnosis.read(str(divergence.path), [divergence.line])


def summary(diagnosis: RunDiagnosis) -> dict[str, Any]:
    causes = [
        {
            "cause": cause.rule.label,
            "also": cause.also,
            "confidence": cause.rule.confidence,
            "evidence": [
                {
                    "file": proof.file,
                    "line": proof.line,
                    "text": proof.text,
                    "rank": proof.rank,
                    "at": proof.at or None,
                }
                for proof in cause.evidence
            ],
            "first_rank": cause.first_rank,
            "fix": cause.fix,
        }
        for cause in diagnosis.causes
    ]
    ended, last = diagnosis.ended, list(diagnosis.last)
    return {"causes": causes, "ending": str(diagnosis.ending), "ended": ended, "last": last}


_ENDINGS = {
    Ending.HEALTHY: "healthy: these logs show no failure",
    Ending.UNREAD: "unread: some logs could not be read; the others show no failure",
    Ending.UNFINISHED: "unfinished: the run has not ended, and its logs show no failure so far",
    Ending.UNKNOWN: "unknown: the run failed, and its logs do not show why",
}


def report(diagnosis: RunDiagnosis) -> Iterator[str]:
    """What `diagnose` prints: the causes, or else what is known."""
    yield from (
        lines(diagnosis.causes) if diagnosis.causes else [_ENDINGS[Ending(diagnosis.ending)]]
    )
    yield from _labelled("ended", diagnosis.ended or "")
    yield from _labelled("last", "\n".join(diagnosis.last))
    if not diagnosis.causes and diagnosis.ending == Ending.UNKNOWN:
        first = re.match(r"rank (\d+)\b", diagnosis.ended or "")
        rank = f" --rank {first[1]}" if first else ""
        hint = f"read the last lines: deploykit logs {diagnosis.run} -n 50{rank}"
        yield from _labelled("next", hint)
    if diagnosis.ending == Ending.UNFINISHED:
        hint = f"if it hangs, show the stack of each rank: deploykit dump {diagnosis.run}"
        yield from _labelled("next", hint)


def lines(causes: Sequence[Cause]) -> Iterator[str]:
    """The causes in the order in which they occurred, the most probable one marked."""
    for cause in sorted(causes, key=lambda cause: cause.order):
        mark = " (most probable)" if cause is causes[0] and len(causes) > 1 else ""
        yield f"{cause.rule.label}: {cause.rule.means}{mark}"
        for proof in cause.evidence:
            at = f"\nat {proof.at}" if proof.at else ""
            yield from _labelled("proof", f"{source(proof)}\n{proof.text}{at}")
        if cause.first_rank is not None:
            yield from _labelled("first", f"rank {cause.first_rank} failed first")
        yield from _labelled("ruled out", cause.rule.probably_not)
        also = ", ".join(label for label in cause.also if label != cause_rules.UNKNOWN)
        yield from _labelled("also", f"possibly {also}" if also else "")
        yield from _labelled("fix", cause.fix)


def _labelled(name: str, text: str) -> Iterator[str]:
    """Put `name` before the first line of a text, and indent the others. Nothing if it is empty."""
    for number, line in enumerate(text.split("\n") if text else ()):
        yield f"  {'' if number else name:<10} {line}"


def source(proof: Evidence, folder: str = "") -> str:
    """Where evidence is from; `folder` is left out of its path."""
    rank = "" if proof.rank is None else f", rank {proof.rank}"
    host = f", {proof.host}" if proof.host else ""
    file = proof.file.removeprefix(f"{folder}/") if folder else proof.file
    return f"{file}:{proof.line}{rank}{host}"
