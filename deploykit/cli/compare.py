"""Compare runs: differences in source, job and arguments, and the metrics, the best marked `*`.

What is the same in all runs is left out. The best value of a metric is the lowest loss, error or
time, or the highest accuracy or rate. Which of these a metric is, its name must tell.

deploykit compare exp-1 exp-2
deploykit compare exp-1 exp-2 exp-3 --name '*loss*'
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence

from deploykit.cli import comparison_text, output
from deploykit.cli.comparison_text import Line
from deploykit.lib.errors import UsageError
from deploykit.run import registry
from deploykit.run import report as run_report
from deploykit.run import state as run_state
from deploykit.run.report import Comparison


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the runs and --name."""
    parser.add_argument(
        "run", nargs="+", metavar="RUN", help="run ids, or their unique beginnings or ends"
    )
    parser.add_argument(
        "--name",
        action="append",
        default=[],
        metavar="PATTERN",
        help="only metrics of this name, in which * matches any text; may be repeated",
    )


def run(args: argparse.Namespace) -> int:
    """Print what differs between the runs."""
    rows = {row.run: row for row in registry.selected(args.run)}
    if len(rows) == 1:
        raise UsageError(
            f"{next(iter(rows))} is the only run named", hint="name two runs or more to compare"
        )
    facts = [run_report.facts(row, args.name) for row in run_state.refresh(list(rows.values()))]
    compared = run_report.compare(facts)
    for one in facts:
        output.note(*(f"{one.row.run}: not read: {problem}" for problem in one.problems))
    if args.json:
        output.emit(comparison_text.data(compared))
    else:
        _show(compared)
    return 0


def _show(compared: Comparison) -> None:
    headings = ["", *(facts.row.run for facts in compared.facts)]
    lines = [*comparison_text.ends(compared), *comparison_text.settings(compared)]
    metrics = list(comparison_text.metrics(compared))
    output.table(headings, list(_cells([*lines, *metrics])), headings_in_pipe=True)
    if not compared.settings:
        output.note("source, job and arguments are the same in all")
    elif compared.same:
        output.note(f"{compared.same} other settings are the same in all")
    if not any(row.values for row in compared.metrics):
        output.note("no metrics were found in the files and the logs of these runs")


def _cells(lines: Iterable[Line]) -> Iterator[Sequence[str]]:
    for name, texts, best in lines:
        yield [name, *(f"{text} *" if at in best else text for at, text in enumerate(texts))]
