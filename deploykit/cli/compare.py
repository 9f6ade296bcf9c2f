"""Compare the source, job, arguments and metrics of runs; `*` marks the best value.

Identical settings and package versions are omitted. For a loss, error or time, the lowest value is
best; for an accuracy or rate, the highest. The name of the metric decides which.

deploykit compare exp-1 exp-2
deploykit compare exp-1 exp-2 exp-3 --name '*loss*'
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from deploykit.cli import describe, output
from deploykit.cli.markdown import code, table
from deploykit.lib import units
from deploykit.lib.errors import UsageError
from deploykit.run import registry
from deploykit.run import report as run_report
from deploykit.run import state as run_state
from deploykit.run.report import Comparison, MetricRow, RunFacts

SHARED = ("metric",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", nargs="+", metavar="RUN", help="run ids, or unique prefixes or suffixes"
    )
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table")


def run(args: argparse.Namespace) -> int:
    if args.markdown and args.json:
        raise UsageError("--markdown and --json cannot be used together")
    rows = {row.run: row for row in registry.selected(args.run)}
    if len(rows) == 1:
        raise UsageError(
            f"only one run was given: {next(iter(rows))}", hint="name two or more runs to compare"
        )
    facts = [run_report.facts(row, args.name) for row in run_state.refresh(list(rows.values()))]
    compared = run_report.compare(facts)
    for one in facts:
        output.note(*(f"{one.row.run}: could not read {problem}" for problem in one.problems))
    if args.json:
        output.emit(data(compared))
    elif args.markdown:
        output.block(markdown_of(compared))
    else:
        _show(compared)
    return 0


def _show(compared: Comparison) -> None:
    headings = ["", *(facts.row.run for facts in compared.facts)]
    lines = [*ends(compared), *settings(compared), *packages(compared)]
    of_metrics = list(metrics(compared))
    output.table(headings, list(_cells([*lines, *of_metrics])), headings_in_pipe=True)
    if not compared.settings:
        output.note("source, job and arguments are identical")
    elif compared.same:
        output.note(f"{units.plural(compared.same, 'identical setting')} not shown")
    if not any(row.values for row in compared.metrics):
        output.note("no metrics found in the files or logs of these runs")


def _cells(lines: Iterable[Line]) -> Iterator[Sequence[str]]:
    for name, texts, best in lines:
        yield [name, *(f"{text} *" if at in best else text for at, text in enumerate(texts))]


def markdown_of(one: Comparison) -> str:
    """The table of `compare`, the best values in bold."""
    headings = ["", *(code(facts.row.run) for facts in one.facts)]
    lines = [*ends(one), *settings(one), *packages(one)]
    lines += list(metrics(one))
    rows = [
        [code(name), *(f"**{code(it)}**" if at in best else code(it) for at, it in enumerate(them))]
        for name, them, best in lines
    ]
    same = f"{units.plural(one.same, 'identical setting')} not shown." if one.same else ""
    return "\n\n".join(filter(None, [table(headings, rows), same])) + "\n"


UNKNOWN = "-"
_HASH = 12
"""Characters of a commit or of a bundle's hash that are shown."""


class Line(NamedTuple):
    """A heading, a text for each run, and the places of the best ones."""

    name: str
    texts: list[str]
    best: frozenset[int] = frozenset()


def ends(one: Comparison) -> Iterator[Line]:
    """How the runs ended, whether or not that differs."""
    yield Line("state", [state(facts) for facts in one.facts])
    yield Line("duration", [units.span(run_report.seconds(facts)) for facts in one.facts])
    if any(facts.cost for facts in one.facts):
        yield Line("cost", [f.cost.total if f.cost else UNKNOWN for f in one.facts])
    if any(facts.restarts for facts in one.facts):
        yield Line("restarts", [str(facts.restarts) for facts in one.facts])


def settings(one: Comparison) -> Iterator[Line]:
    """Source, keys of the job and arguments that differ."""
    for row in one.settings:
        most = _HASH if row.name in {"commit", "bundle"} else None
        yield Line(row.name, [UNKNOWN if it is None else it[:most] for it in row.values])


def packages(one: Comparison) -> Iterator[Line]:
    """Python packages whose versions differ."""
    for row in one.packages:
        yield Line(f"package {row.name}", [it or UNKNOWN for it in row.values])


def metrics(one: Comparison) -> Iterator[Line]:
    """Metrics that differ: the last value, and the best one where that is another."""
    for row in one.metrics:
        if row.differs:
            yield from _of_metric(row)


def _of_metric(row: MetricRow) -> Iterator[Line]:
    last = [_number(it.last if it else None) for it in row.values]
    yield Line(f"{row.name}, last", last, row.winners(lambda it: it.last))
    if row.has_best and any(it and it.best != it.last for it in row.values):
        best = [_number(it.best if it else None) for it in row.values]
        yield Line(f"{row.name}, best", best, row.winners(lambda it: it.best))


def state(facts: RunFacts) -> str:
    """``failed, exit code 3``."""
    code = facts.row.exit_code
    return f"{facts.row.state}, exit code {code}" if code else facts.row.state


def data(one: Comparison) -> dict[str, Any]:
    """The same as JSON: each value by its run."""
    names = [facts.row.run for facts in one.facts]
    return {
        "runs": [_run(facts) for facts in one.facts],
        "settings": [
            {"name": row.name, "values": dict(zip(names, row.values, strict=True))}
            for row in one.settings
        ],
        "same_settings": one.same,
        "packages": [
            {"name": row.name, "values": dict(zip(names, row.values, strict=True))}
            for row in one.packages
        ],
        "metrics": [_metric(row, names) for row in one.metrics],
    }


def _run(facts: RunFacts) -> dict[str, Any]:
    own = {"restarts": facts.restarts, "problems": facts.problems}
    return {**describe.run_data(facts.row), **own}


def _metric(row: MetricRow, names: list[str]) -> dict[str, Any]:
    winners = row.winners(lambda it: it.best if row.has_best else it.last)
    known = {name: one for name, one in zip(names, row.values, strict=True) if one is not None}
    return {
        "name": row.name,
        "better": row.better,
        "last": {name: describe.number(one.last) for name, one in known.items()},
        "best": {name: describe.number(one.best) for name, one in known.items()},
        "best_runs": [names[at] for at in sorted(winners)],
        "sources": {name: one.source for name, one in known.items()},
    }


def _number(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.6g}"
