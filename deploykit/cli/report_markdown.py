"""Render a report as Markdown for a pull request: key numbers, the cause and metrics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from deploykit.cli import compare, report_sections
from deploykit.cli.markdown import block, code, table
from deploykit.job.model import State
from deploykit.observe import charts
from deploykit.run import report as run_report
from deploykit.run.report import RunReport

MAX_METRICS = 30


def report(reports: Sequence[RunReport]) -> str:
    """The key numbers of each run, why it failed, its metrics; several runs are compared."""
    parts = [part for one in reports for part in _run(one)]
    if len(reports) > 1:
        compared = run_report.compare([one.facts for one in reports])
        parts += ["### Comparison", compare.markdown_of(compared).strip()]
    return "\n\n".join(parts) + "\n"


def _run(one: RunReport) -> Iterator[str]:
    row = one.facts.row
    yield f"### {code(row.run)}: {row.state}"
    if row.reason and row.state != State.SUCCEEDED.value:
        yield code(row.reason)
    tiles = [(name, value) for name, value in report_sections.tiles(one) if value]
    if tiles:
        names, values = zip(*tiles, strict=True)
        yield table([code(name) for name in names], [[code(value) for value in values]])
    if cause := report_sections.cause(one):
        yield f"**{code(cause['label'])}**: {cause['means']}"
        yield block(cause["lines"].split("\n"))
        if cause["steps"]:
            yield block(cause["steps"])
    metrics = list(one.facts.metrics.values())[:MAX_METRICS]
    if metrics:
        rows = [
            [
                code(metric.name),
                charts.short(metric.last, 6),
                "" if metric.best is None else charts.short(metric.best, 6),
            ]
            for metric in metrics
        ]
        shown = table(["metric", "last", "best"], rows)
        yield f"<details><summary>Metrics</summary>\n\n{shown}\n\n</details>"
