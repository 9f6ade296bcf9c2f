"""Find why a run failed, from the logs of all its ranks: the cause, the evidence and the fix.

Without RUN or FILE, the newest run is diagnosed. The exit code is 0 if the logs show no failure,
79 if a cause was found, 82 for a failure without a known cause, 84 if the run has not ended and
shows no failure so far, and 66 if logs or dumps could not be read.

deploykit diagnose exp-1
deploykit diagnose slurm-4242.out
deploykit diagnose torchrun-logs/
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from deploykit.cli import output
from deploykit.diagnose import cause_rules, guides
from deploykit.diagnose.cause_rules import RuleSet
from deploykit.diagnose.endings import Ending
from deploykit.diagnose.ranking import Cause
from deploykit.lib import shell
from deploykit.lib.errors import NotFound
from deploykit.run import diagnosis as run_diagnosis
from deploykit.run import registry
from deploykit.run import state as run_state
from deploykit.run.diagnosis import RunDiagnosis

CAUSE_FOUND = 79
"""Above the codes of `sysexits.h`: the command worked, and found that the run did not."""
CAUSE_UNKNOWN = 82
UNFINISHED = 84
_CODES = {
    Ending.HEALTHY: 0,
    Ending.CAUSE: CAUSE_FOUND,
    Ending.UNKNOWN: CAUSE_UNKNOWN,
    Ending.UNFINISHED: UNFINISHED,
    Ending.UNREAD: NotFound.exit_code,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        nargs="*",
        metavar="RUN|FILE",
        help="a run; or log files, dumps of PyTorch's flight recorder, or folders of both: plain, "
        "gzip, UTF-16 or JSON records; - reads standard input (default: the newest run)",
    )
    parser.add_argument(
        "--rules",
        action="append",
        type=Path,
        default=[],
        metavar="FILE",
        help="TOML file of rules that take precedence over the built-in ones (repeatable)",
    )


def run(args: argparse.Namespace) -> int:
    """Print the causes, or what else is known; return the code of the ending."""
    known = cause_rules.load(args.rules)
    files = _are_files(args.what)
    diagnosis = run_diagnosis.of_files(args.what, known) if files else _of_run(args.what, known)
    for text in diagnosis.warnings:
        output.note(*f"warning: {text}".split("\n"))
    if args.json:
        output.emit(run_diagnosis.summary(diagnosis))
    else:
        output.say(*run_diagnosis.report(diagnosis))
        output.say(*_further_reading(diagnosis.causes, args.what))
    return _CODES[Ending(diagnosis.ending)]


def _further_reading(causes: Sequence[Cause], what: Sequence[str]) -> Iterator[str]:
    """Name the pages about the most probable cause."""
    label = causes[0].rule.label if causes else cause_rules.UNKNOWN
    if label == cause_rules.UNKNOWN or label not in cause_rules.load().labels:
        return
    yield from ("", f"more on this cause: {shell.command('deploykit', 'explain', label)}")
    if guide := guides.BY_CAUSE.get(label):
        words = [] if not what or _are_files(what) else what
        yield f"step-by-step guide: {shell.command('deploykit', 'guide', guide, *words)}"


def _are_files(words: Sequence[str]) -> bool:
    if len(words) == 1 and Path(words[0]).is_dir() and registry.lookup(words[0]):
        return False  # a run, and a folder of the same name
    return bool(words) and all(word == "-" or Path(word).exists() for word in words)


def _of_run(what: Sequence[str], known: RuleSet) -> RunDiagnosis:
    if len(what) > 1:
        missing = next(name for name in what if name != "-" and not Path(name).exists())
        raise NotFound(f"no such file: {missing}", hint="name one run, or existing files")
    row = run_state.refresh([registry.get(next(iter(what), None))])[0]
    return run_diagnosis.of_run(row, known)
