"""The report of a sweep: one HTML file, from what is known of its trials."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from deploykit.cli import output
from deploykit.lib import paths, shell, units
from deploykit.lib.version import __version__
from deploykit.observe.report import chart, coordinates, markup, page
from deploykit.observe.report.markup import Markup
from deploykit.run.registry import now
from deploykit.sweep import report, space, trial_job
from deploykit.sweep.folder import SweepRecord
from deploykit.sweep.model import Parameter
from deploykit.sweep.report import SweepReport
from deploykit.sweep.summary import SweepSummary, TrialSummary

_MOST = 300
"""Trials in the table: the best, then the others."""
_FACTS = ("state", "cost", "run", "reason")
_STYLES = {"finished": "succeeded", "running": "running", "stopping": "running"}


def write(record: SweepRecord, path: Path | None, *, force: bool, as_json: bool) -> int:
    """Write the page, and print where it is. Raises UsageError where it cannot be written."""
    path = path or Path(f"report-{record.id}.html")
    text = document(report.of(record))
    if force:
        path.unlink(missing_ok=True)
    paths.create(path, text, "name another file with --output, or replace it with --force")
    size = path.stat().st_size
    if as_json:
        uri = path.absolute().as_uri()
        output.emit({"sweep": record.id, "file": str(path), "uri": uri, "bytes": size})
    else:
        output.say(f"{path}: {units.size(size)}")
    return 0


def document(content: SweepReport) -> str:
    """The page, of at most `page.LARGEST` bytes."""
    for most in (_MOST, 0):
        made = page.page(content.summary.record.id, _body(content, most), _footer())
        if len(made.encode()) <= page.LARGEST:
            break
    return made


def _footer() -> str:
    host = os.uname().nodename
    return f"Written by deploykit {__version__} on {host} at {output.when(now())}."


def _body(content: SweepReport, most: int) -> Markup:
    one = content.summary
    return markup.join(
        [
            _heading(one),
            markup.section("Best trial", _best(one)),
            markup.section("Search", _charts(content)),
            markup.section("Importance", *_importance(content)),
            markup.section("Parallel coordinates", *_coordinates(content)),
            markup.section("Repeats", *_repeats(one)),
            markup.section("Money", *_money(one)),
            markup.section("Trials", *_trials(one, most)),
            markup.section("Sweep", *_definition(one)),
        ]
    )


def _heading(one: SweepSummary) -> Markup:
    kind = _STYLES.get(one.state, "")
    state = f'<span class="state {kind}">{markup.text(one.state)}</span>'
    head = Markup(f"<h1>{markup.text(one.record.id)} {state}</h1>")
    return markup.join([head, markup.paragraph(_sentence(one), "summary")])


def _sentence(one: SweepSummary) -> str:
    """The sweep in a few sentences: how far it is, what is best, what it has cost."""
    counts = ", ".join(f"{count} {state}" for state, count in sorted(one.counts.items()))
    of_them = f": {counts}" if counts else ""
    parts = [f"{len(one.trials)} of {one.total} trials on {one.record.backend}{of_them}"]
    if one.best is not None:
        metric = one.record.sweep.objective.metric
        parts.append(f"The best is trial {one.best.number}, {metric} {one.best.value:.6g}")
    if one.cost is not None:
        cap = one.record.sweep.max_cost
        parts.append(f"It has cost {one.cost}{f' of at most {cap}' if cap else ''}")
    return ". ".join(parts) + "."


def _best(one: SweepSummary) -> Markup:
    best = one.best
    if best is None:
        return markup.paragraph("No trial has succeeded.", "remark")
    command = shell.command("deploykit", "sweep", "best", one.record.id, "--write", "best.yaml")
    pairs = [("trial", str(best.number)), (one.record.sweep.objective.metric, f"{best.value:.6g}")]
    pairs += list(best.values.items())
    pairs += [("run", row.run) for row in best.runs]
    return markup.join([markup.facts(pairs), markup.block(command)])


def _charts(content: SweepReport) -> Markup:
    figures = markup.join(chart.draw(one, number) for number, one in enumerate(content.charts))
    return markup.element("div", figures, "charts") if figures else figures


def _importance(content: SweepReport) -> Iterator[Markup]:
    if content.importance:
        yield coordinates.bars(list(content.importance.items()), "importance of each parameter")
        text = "How strongly each parameter affects whether a trial is among the best (PED-ANOVA)."
        yield markup.paragraph(text, "remark")
    elif len(content.summary.record.sweep.parameters) > 1:
        text = f"Not available: it requires {report.LEAST} successful trials with different values."
        yield markup.paragraph(text, "remark")


def _coordinates(content: SweepReport) -> Iterator[Markup]:
    drawn = coordinates.draw(content.axes, content.lines, "parameters and objective of each trial")
    if drawn:
        yield drawn
        text = "Each line is a successful trial: the best is thick, the best quarter blue."
        yield markup.paragraph(text, "remark")


def _repeats(one: SweepSummary) -> Iterator[Markup]:
    """Mean, deviation and interval of each repeated trial, the best first."""
    near, rows = {*one.not_clearly_worse}, []
    for trial in one.ranked:
        if (spread := trial.spread) is not None:
            numbers = (spread.mean, spread.sd, spread.low, spread.high)
            cells = [f"{number:.6g}" for number in numbers]
            verdict = "may be as good" if trial.number in near else "clearly worse"
            verdict = "best" if trial is one.best else verdict
            rows.append([str(trial.number), str(len(spread.values)), *cells, verdict])
    headings = ["trial", "runs", "mean", "sd", "95% from", "to", "beside the best"]
    yield markup.table(headings, rows[:_MOST])
    if rows:
        text = "Student's t. Where intervals overlap, the difference from the best may be chance."
        yield markup.paragraph(text, "remark")


def _money(one: SweepSummary) -> Iterator[Markup]:
    if one.cost is None:
        return
    yield markup.facts([("spent", str(one.cost)), ("cap", one.record.sweep.max_cost or "")])
    rows = []
    for state, count in sorted(one.counts.items()):
        of_state = (trial.cost for trial in one.trials if trial.state == state)
        cost = trial_job.sum_of(amount for amount in of_state if amount is not None)
        rows.append([state, str(count), "-" if cost is None else str(cost)])
    yield markup.table(["trials", "count", "cost"], rows)


def _trials(one: SweepSummary, most: int) -> Iterator[Markup]:
    ranked = one.ranked
    numbers = {trial.number for trial in ranked}
    shown = [*ranked, *(trial for trial in one.trials if trial.number not in numbers)][:most]
    names = list(one.record.sweep.parameters)
    headings = ["trial", one.record.sweep.objective.metric, *names, *_FACTS]
    rows = markup.table(headings, ([*_result(one, trial), *_facts(trial)] for trial in shown))
    yield markup.element("div", rows, "trials")
    if len(shown) < len(one.trials):
        text = f"{len(shown)} of {len(one.trials)}; `deploykit sweep status --json` has all."
        yield markup.paragraph(text, "remark")


def _result(sweep: SweepSummary, one: TrialSummary) -> list[str | tuple[str, bool]]:
    value = "-" if one.value is None else f"{one.value:.6g}"
    values = [
        _brief(limits, one.values.get(name, "-"))
        for name, limits in sweep.record.sweep.parameters.items()
    ]
    return [str(one.number), (value, one is sweep.best), *values]


def _brief(one: Parameter, value: str) -> str:
    """A value with the digits that matter; a choice as it is written."""
    return value if one.choice is not None or value == "-" else f"{float(value):.6g}"


def _facts(one: TrialSummary) -> list[str]:
    run = one.runs[-1].run if one.runs else "-"
    return [one.state, str(one.cost or "-"), run, one.reason]


def _definition(one: SweepSummary) -> Iterator[Markup]:
    sweep, objective = one.record.sweep, one.record.sweep.objective
    rows = [
        [name, _limits(it), it.as_ or space.default_form(name)]
        for name, it in sweep.parameters.items()
    ]
    yield markup.table(["parameter", "values", "the script gets"], rows)
    yield markup.facts(
        [
            ("job", one.record.source),
            ("objective", f"{objective.direction} {objective.metric} ({objective.value})"),
            ("sampler", f"{sweep.sampler}, seed {sweep.seed}"),
            ("pruner", sweep.pruner),
            ("parallel", str(sweep.parallel)),
            ("repeat", str(sweep.repeat) if sweep.repeat > 1 else ""),
            ("started", output.when(one.record.created)),
            ("folder", str(one.record.folder)),
        ]
    )


def _limits(one: Parameter) -> str:
    """The values that a parameter may have, and when it has any."""
    if one.choice is not None:
        values = ", ".join(one.choice)
    else:
        values = " to ".join(one.range or ())
        values += f", step {one.step}" if one.step else ""
        values += "".join(f", {word}" for word in ("log", "int") if getattr(one, word))
    conditions = " and ".join(f"{name} is {value}" for name, value in one.if_.items())
    return f"{values}; if {conditions}" if conditions else values
