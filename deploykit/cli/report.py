"""Write a report of one or more runs: an HTML file with curves, timeline, cause and settings.

The file works offline, runs no scripts, supports light and dark mode, and prints well. With several
runs, their curves share charts, and the `compare` table is included. The file quotes the log, so
review it before you publish it.

deploykit report exp-1                          report-exp-1.html
deploykit report exp-1 exp-2 --output two.html
deploykit report exp-1 --markdown               for a pull request, on standard output
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
        help="file to write (default: report-RUN.html in the current folder)",
    )
    parser.add_argument("--force", action="store_true", help="replace an existing file")
    parser.add_argument(
        "--markdown",
        action="store_true",
        help="print the key numbers, the cause and the metrics as Markdown instead",
    )


def run(args: argparse.Namespace) -> int:
    rows = {row.run: row for row in map(registry.get, args.run or [None])}
    if len(rows) > MAX_RUNS:
        raise UsageError(
            f"a report shows at most {MAX_RUNS} runs, but {len(rows)} were given",
            hint="`deploykit compare` accepts any number of runs",
        )
    if args.markdown and (args.json or args.output or args.force):
        raise UsageError(
            "--markdown cannot be combined with --json, --output or --force",
            hint="redirect standard output instead: `deploykit report --markdown > comment.md`",
        )
    from deploykit.cli import report_markdown, report_page, report_sections  # not needed for --help

    reports = [run_report.of(row) for row in run_state.refresh(list(rows.values()))]
    if args.markdown:
        output.block(report_markdown.report(reports))
        output.note(*(f"could not read {problem}" for one in reports for problem in one.problems))
        return 0
    path = args.output or default_path(next(iter(rows)))
    saved = report_page.save(path, report_sections.document(reports), force=args.force)
    problems = [f"{one.facts.row.run}: {it}" for one in reports for it in one.problems]
    if args.json:
        output.emit({"runs": list(rows), **saved, "problems": problems})
        return 0
    output.note(*(f"could not read {problem}" for problem in problems))
    report_page.announce(saved)
    return 0


def default_path(run: str) -> Path:
    """Where the report of a run is written, unless the user names a file."""
    return Path(f"report-{run}.html")
