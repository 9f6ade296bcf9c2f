"""Find why a run failed, from the logs of all its ranks: the cause, the evidence and the fix.

Without RUN or FILE: the newest run. Exits with 0 when no cause was found, with 79 otherwise.

deploykit diagnose exp-1
deploykit diagnose slurm-4242.out
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path

from deploykit import guides, lifecycle, registry, run_diagnosis, shell
from deploykit.commands import output
from deploykit.diagnosis import cause_rules, dumps, scan
from deploykit.diagnosis.cause_rules import RuleSet
from deploykit.diagnosis.ranking import Cause, Diagnosis
from deploykit.errors import NotFound
from deploykit.run_diagnosis import RunDiagnosis

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
    found = _of_files(args.what, known) if _are_files(args.what) else _of_run(args.what, known)
    for text in found.warnings:
        output.note(*f"warning: {text}".split("\n"))
    if args.json:
        output.emit({"causes": [run_diagnosis.data(cause) for cause in found.causes]})
    else:
        output.say(*run_diagnosis.lines(found.causes))
        _point_to_guide(found.causes, args.what)
    return CAUSE_FOUND if found.causes else 0


def _point_to_guide(causes: Sequence[Cause], what: Sequence[str]) -> None:
    """Name the page about the most probable cause."""
    guide = guides.BY_CAUSE.get(causes[0].rule.label) if causes else None
    if guide is not None:
        words = [] if not what or _are_files(what) else what
        command = shell.command("deploykit", "guide", guide, *words)
        output.say("", f"more about this, step by step: {command}")


def _are_files(words: Sequence[str]) -> bool:
    return bool(words) and all(word == "-" or Path(word).exists() for word in words)


def _of_run(what: Sequence[str], known: RuleSet) -> RunDiagnosis:
    if len(what) > 1:
        missing = next(name for name in what if name != "-" and not Path(name).exists())
        raise NotFound(f"no such file: {missing}", hint="name one run, or existing files")
    row = lifecycle.refresh([registry.get(next(iter(what), None))])[0]
    return run_diagnosis.of_run(row, known)


def _of_files(names: Sequence[str], known: RuleSet) -> RunDiagnosis:
    diagnosis = Diagnosis(known)
    paths = [None if name == "-" else Path(name) for name in names]
    recorded = [path for path in paths if path and dumps.is_dump(path)]
    name_by_path = {path: name for name, path in zip(names, paths, strict=True) if path}
    logs = (path for path in paths if path not in recorded)
    for is_file, group in itertools.groupby(logs, lambda path: path is not None):
        if not is_file:
            diagnosis.read("-", scan.file(None, diagnosis.literals))
            continue
        for path, found in scan.files([path for path in group if path], diagnosis.literals):
            diagnosis.read(name_by_path[path], found)
    warnings = run_diagnosis.read_dumps(diagnosis, [dumps.read(path) for path in recorded])
    return RunDiagnosis(tuple(diagnosis.causes()), tuple(warnings))
