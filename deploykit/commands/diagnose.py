"""Find why a run failed, from the logs of all its ranks: the cause, the evidence and the fix.

Without RUN or FILE: the newest run. Exits with 0 when no cause was found, with 79 otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from deploykit import backend, exit_records, guides, lifecycle, runs, shell
from deploykit.commands import output
from deploykit.diagnosis import cause_rules, dumps, flight, placeholders, scan
from deploykit.diagnosis.dumps import Dump
from deploykit.diagnosis.ranking import Cause, Diagnosis, Evidence
from deploykit.errors import BackendUnavailable, DeploykitError, NotFound
from deploykit.model import LogLine, State
from deploykit.runs import Run

_BRIEFLY = 20
"""Tasks of a job array whose logs are read for the cause in one line."""
_PYTHON = re.compile(r"(/[\w./+-]+) \.deploykit/launch\.py")
_RANKS = re.compile(r"--(?:nnodes|nproc-per-node)=(\d{1,6})\b")
CAUSE_FOUND = 79
"""Above the codes of `sysexits.h`: the command worked, and found that the run did not."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the run or files, and --rules."""
    parser.add_argument(
        "what",
        nargs="*",
        metavar="RUN|FILE",
        help="a run, or log files and dumps of PyTorch's flight recorder; - for standard input "
        "(default: the newest run)",
    )
    parser.add_argument(
        "--rules",
        action="append",
        type=Path,
        default=[],
        metavar="FILE",
        help="additional rules, in TOML, applied before the built-in ones (repeatable)",
    )


def run(args: argparse.Namespace) -> int:
    """Print the causes; return CAUSE_FOUND where there is one."""
    known = cause_rules.load(args.rules)
    if _are_files(args.what):
        diagnosis = Diagnosis(known)
        _read_files(diagnosis, args.what)
    else:
        if len(args.what) > 1:
            missing = next(name for name in args.what if name != "-" and not Path(name).exists())
            raise NotFound(f"no such file: {missing}", hint="name one run, or existing files")
        row = lifecycle.refresh([runs.get(next(iter(args.what), None))])[0]
        diagnosis = Diagnosis(known, *_about(row))
        _read_run(diagnosis, row, _files(row))
        for folder in _folders(row):
            _read_dumps(diagnosis, _dumps(folder))
    causes = diagnosis.causes()
    if args.json:
        output.emit({"causes": [_data(cause) for cause in causes]})
    else:
        _print(causes)
        _point_to_guide(causes, args.what)
    return CAUSE_FOUND if causes else 0


def _point_to_guide(causes: Sequence[Cause], what: Sequence[str]) -> None:
    """Name the page about the most probable cause."""
    guide = guides.BY_CAUSE.get(causes[0].rule.label) if causes else None
    if guide is not None:
        words = [] if not what or _are_files(what) else what
        command = shell.command("deploykit", "guide", guide, *words)
        output.say("", f"more about this, step by step: {command}")


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


def _are_files(words: Sequence[str]) -> bool:
    return bool(words) and all(word == "-" or Path(word).exists() for word in words)


def _read_files(diagnosis: Diagnosis, names: Sequence[str]) -> None:
    paths = [None if name == "-" else Path(name) for name in names]
    recorded = [path for path in paths if path and dumps.is_dump(path)]
    for name, path in zip(names, paths, strict=True):
        if path not in recorded:
            diagnosis.read(name, scan.file(path, diagnosis.literals))
    _read_dumps(diagnosis, [dumps.read(path) for path in recorded])


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
    for path in files:
        diagnosis.read(str(path), scan.file(path, diagnosis.literals))
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


def _dumps(folder: Path) -> list[Dump]:
    """The dumps in a folder; a truncated one is skipped with a warning."""
    readable = []
    for path in sorted((folder / "debug").glob(f"{dumps.PREFIX}*")):
        try:
            readable.append(dumps.read(path))
        except dumps.NotADump as error:
            output.note(f"warning: {error}")
    return readable


def _read_dumps(diagnosis: Diagnosis, recorded: Sequence[Dump]) -> None:
    """Add what PyTorch's analyzer finds; without it, warn and use the logs alone."""
    if not recorded:
        return
    try:
        divergences = flight.divergences(recorded)
    except BackendUnavailable as error:
        output.note(f"warning: {error}", f"  {error.hint}")
        return
    for divergence in divergences:
        diagnosis.read(str(divergence.path), [divergence.line])


def _raw(lines: Iterator[LogLine]) -> Iterator[bytes]:
    for line in lines:
        mark = f"[rank {line.rank}] " if line.rank is not None else ""
        yield f"{mark}{line.text}\n".encode(errors="surrogateescape")


def _data(cause: Cause) -> dict[str, Any]:
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


def _print(causes: Sequence[Cause]) -> None:
    """Print the causes in the order in which they occurred, the most probable one marked."""
    if not causes:
        output.say("no known cause: these logs show no failure, or one that no rule matches")
        output.say("  next    see the first error of any rank: deploykit logs RUN --first-error")
        return
    likely = causes[0]
    for cause in sorted(causes, key=lambda cause: cause.order):
        mark = " (the most probable)" if cause is likely and len(causes) > 1 else ""
        output.say(f"{cause.rule.label}: {cause.rule.means}{mark}")
        for proof in cause.evidence:
            output.say(f"  proof   {_source(proof)}", f"          {proof.text}")
        rank = cause.first_rank
        others = ", ".join(label for label in cause.also if label != cause_rules.UNKNOWN)
        for name, value in (
            ("first", "" if rank is None else f"rank {rank} failed first"),
            ("not", cause.rule.probably_not),
            ("also", f"perhaps {others}" if others else ""),
            ("fix", cause.fix),
        ):
            for number, text in enumerate(value.split("\n") if value else ()):
                output.say(f"  {'' if number else name:<7} {text}")


def _source(proof: Evidence) -> str:
    rank = "" if proof.rank is None else f", rank {proof.rank}"
    host = f", {proof.host}" if proof.host else ""
    return f"{proof.file}:{proof.line}{rank}{host}"
