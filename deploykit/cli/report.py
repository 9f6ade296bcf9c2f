"""Write a report of one or more runs: an HTML file with curves, timeline, cause and settings.

The file opens offline, runs no script, follows light and dark mode, and prints well. For several
runs, curves share a chart, and the table of `compare` is included. It quotes the log, so review it
before you publish it.

deploykit report exp-1                          report-exp-1.html
deploykit report exp-1 exp-2 --output two.html
"""

from __future__ import annotations

import argparse
from pathlib import Path

from deploykit.cli import output
from deploykit.lib.errors import UsageError
from deploykit.run import registry
from deploykit.run import report as run_report
from deploykit.run import state as run_state

MAX_RUNS = 8
"""Runs in a report, whose curves can be told apart."""
SHARED = ("newest",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        *("-o", "--output"),
        type=Path,
        metavar="FILE",
        help="where to write it (default: report-RUN.html in the current folder)",
    )
    parser.add_argument("--force", action="store_true", help="replace an existing file")


def run(args: argparse.Namespace) -> int:
    rows = {row.run: row for row in map(registry.get, args.run or [None])}
    if len(rows) > MAX_RUNS:
        raise UsageError(
            f"a report shows at most {MAX_RUNS} runs, but {len(rows)} are given",
            hint="`deploykit compare` takes any number",
        )
    from deploykit.cli import report_page, report_sections  # not needed for --help

    reports = [run_report.of(row) for row in run_state.refresh(list(rows.values()))]
    path = args.output or Path(f"report-{next(iter(rows))}.html")
    saved = report_page.save(path, report_sections.document(reports), force=args.force)
    problems = [f"{one.facts.row.run}: {it}" for one in reports for it in one.problems]
    if args.json:
        output.emit({"runs": list(rows), **saved, "problems": problems})
        return 0
    output.note(*(f"could not read {problem}" for problem in problems))
    report_page.announce(saved)
    return 0
