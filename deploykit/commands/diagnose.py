"""Find why a run failed, from the logs of all its ranks: the cause, the evidence and the fix.

Without RUN or FILE: the newest run. Exits with 0 when no cause was found, with 79 otherwise.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from deploykit import backend, guides, lifecycle, runs, shell
from deploykit.commands import output
from deploykit.diagnosis import cause_rules, dumps, flight, scan
from deploykit.diagnosis.dumps import Dump
from deploykit.diagnosis.ranking import Cause, Diagnosis, Evidence
from deploykit.errors import BackendUnavailable, DeploykitError, NotFound
from deploykit.model import LogLine, State
from deploykit.runs import Run

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
        diagnosis = Diagnosis(known, _values(row))
        _read_run(diagnosis, row)
        _read_dumps(diagnosis, _dumps(row))
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


def _are_files(words: Sequence[str]) -> bool:
    return bool(words) and all(word == "-" or Path(word).exists() for word in words)


def _read_files(diagnosis: Diagnosis, names: Sequence[str]) -> None:
    paths = [None if name == "-" else Path(name) for name in names]
    recorded = [path for path in paths if path and dumps.is_dump(path)]
    for name, path in zip(names, paths, strict=True):
        if path not in recorded:
            diagnosis.read(name, scan.file(path, diagnosis.literals))
    _read_dumps(diagnosis, [dumps.read(path) for path in recorded])


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


def _dumps(row: Run) -> list[Dump]:
    """The dumps in the run folder; a truncated one is skipped with a warning."""
    readable = []
    for path in sorted(Path(row.folder, "debug").glob(f"{dumps.PREFIX}*")):
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
