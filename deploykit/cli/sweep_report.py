"""Values for sweep.html.j2, the report of a sweep."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deploykit.cli import output, report_page
from deploykit.lib import render, shell
from deploykit.observe import charts
from deploykit.run.registry import Run
from deploykit.sweep import report, space, trial_job
from deploykit.sweep.folder import SweepRecord
from deploykit.sweep.model import Parameter
from deploykit.sweep.report import SweepReport
from deploykit.sweep.summary import SweepSummary, TrialSummary

MAX_TRIALS = 300
"""Maximum number of trials in the table, best first."""
_FACTS = ("state", "cost", "run", "reason")


def write(record: SweepRecord, path: Path | None, *, force: bool, as_json: bool) -> int:
    """Write the report, and print its path. Raises UsageError if it cannot be written."""
    path = path or Path(f"report-{record.id}.html")
    saved = report_page.save(path, document(report.of(record)), force=force)
    if as_json:
        output.emit({"sweep": record.id, **saved})
    else:
        report_page.announce(saved)
    return 0


def document(content: SweepReport) -> str:
    """Render the report, without the table of trials if it would be too large."""
    values = _values(content)
    trials = _trials(content.summary)
    return report_page.rendered(
        "report/sweep.html.j2", [{**values, "trials": trials}, {**values, "trials": []}]
    )


def _values(content: SweepReport) -> dict[str, Any]:
    """The content of the report, except for the table of trials."""
    one, sweep = content.summary, content.summary.record.sweep
    title = "parameters and objective of each trial"
    return {
        "title": one.record.id,
        "state": one.state,
        "kind": one.state,
        "sentence": _sentence(one),
        "best": _best(one),
        "best_command": shell.command(
            *("deploykit", "sweep", "best", one.record.id, "--write", "best.yaml")
        ),
        "numbers": _tiles(one),
        "figures": charts.draw(content.charts),
        "importance": list(content.importance.items()),
        "min_trials": report.LEAST,
        "coordinates": charts.draw_coordinates(content.axes, content.lines, title),
        "repeats": list(_repeats(one))[:MAX_TRIALS],
        "money": _money(one),
        "costs": list(_costs(one)),
        "trial_headings": ["trial", sweep.objective.metric, *sweep.parameters, *_FACTS],
        "all_trials": len(one.trials),
        "parameters": [
            [name, _limits(parameter), parameter.as_ or space.default_form(name)]
            for name, parameter in sweep.parameters.items()
        ],
        "definition": _definition(one),
    }


def _sentence(one: SweepSummary) -> str:
    """Summarize the progress, the best trial and the cost in a few sentences."""
    counts = ", ".join(f"{count} {state}" for state, count in sorted(one.counts.items()))
    of_them = f": {counts}" if counts else ""
    parts = [f"{len(one.trials)} of {one.total} trials on {one.record.backend}{of_them}"]
    if one.best is not None:
        metric = one.record.sweep.objective.metric
        parts.append(f"The best is trial {one.best.number}, with {metric} {one.best.value:.6g}")
    if one.cost is not None:
        cap = one.record.sweep.max_cost
        parts.append(f"Cost so far: {one.cost}{f' of at most {cap}' if cap else ''}")
    return ". ".join(parts) + "."


def _best(one: SweepSummary) -> list[tuple[str, str]]:
    best = one.best
    if best is None:
        return []
    pairs = [("trial", str(best.number)), (one.record.sweep.objective.metric, f"{best.value:.6g}")]
    return [*pairs, *best.values.items(), *(("run", _link(row)) for row in best.runs)]


def _link(row: Run) -> str:
    """Link the id of a run to its folder, if that exists."""
    if not Path(row.folder).is_dir():
        return row.run
    link: str = render.macros("report/parts.html.j2").link(Path(row.folder).as_uri(), row.run)
    return link


def _tiles(one: SweepSummary) -> list[tuple[str, str]]:
    """The key numbers; empty if unknown."""
    metric, best = one.record.sweep.objective.metric, one.best
    return [
        (f"best {metric}", "" if best is None else charts.short(best.value or 0.0, 4)),
        ("best trial", "" if best is None else str(best.number)),
        ("trials", f"{len(one.trials)} of {one.total}"),
        *((state, str(count)) for state, count in sorted(one.counts.items())),
        ("cost", str(one.cost or "")),
    ]


def _repeats(one: SweepSummary) -> Iterator[list[str]]:
    """Yield mean, deviation and interval of each repeated trial, best first."""
    near = {*one.not_clearly_worse}
    for trial in one.ranked:
        if (spread := trial.spread) is not None:
            numbers = (spread.mean, spread.sd, spread.low, spread.high)
            cells = [f"{number:.6g}" for number in numbers]
            verdict = "may be as good" if trial.number in near else "clearly worse"
            verdict = "best" if trial is one.best else verdict
            yield [str(trial.number), str(len(spread.values)), *cells, verdict]


def _money(one: SweepSummary) -> list[tuple[str, str]]:
    if one.cost is None:
        return []
    return [("spent", str(one.cost)), ("cap", one.record.sweep.max_cost or "")]


def _costs(one: SweepSummary) -> Iterator[list[str]]:
    """Yield the number and cost of trials by state; nothing without a price."""
    if one.cost is None:
        return
    for state, count in sorted(one.counts.items()):
        of_state = (trial.cost for trial in one.trials if trial.state == state)
        cost = trial_job.sum_of(amount for amount in of_state if amount is not None)
        yield [state, str(count), "-" if cost is None else str(cost)]


def _trials(one: SweepSummary) -> list[list[str | tuple[str, bool]]]:
    """List the successful trials, best first, then the others."""
    ranked = one.ranked
    numbers = {trial.number for trial in ranked}
    others = (trial for trial in one.trials if trial.number not in numbers)
    return [[*_result(one, trial), *_facts(trial)] for trial in [*ranked, *others][:MAX_TRIALS]]


def _result(sweep: SweepSummary, one: TrialSummary) -> list[str | tuple[str, bool]]:
    value = "" if one.value is None else f"{one.value:.6g}"
    values = [
        space.brief(limits, one.values[name]) if name in one.values else ""
        for name, limits in sweep.record.sweep.parameters.items()
    ]
    return [str(one.number), (value, one is sweep.best), *values]


def _facts(one: TrialSummary) -> list[str]:
    run = _link(one.runs[-1]) if one.runs else ""
    return [one.state, str(one.cost or ""), run, one.reason]


def _definition(one: SweepSummary) -> list[tuple[str, str]]:
    sweep, objective = one.record.sweep, one.record.sweep.objective
    return [
        ("job", one.record.source),
        ("objective", f"{objective.direction} {objective.metric} ({objective.value})"),
        ("sampler", f"{sweep.sampler}, seed {sweep.seed}"),
        ("pruner", sweep.pruner),
        ("parallel", str(sweep.parallel)),
        ("repeat", str(sweep.repeat) if sweep.repeat > 1 else ""),
        ("started", output.when(one.record.created)),
        ("folder", str(one.record.folder)),
    ]


def _limits(one: Parameter) -> str:
    """Describe a parameter's values and conditions."""
    if one.choice is not None:
        values = ", ".join(one.choice)
    else:
        values = " to ".join(one.range or ())
        values += f", step {one.step}" if one.step else ""
        values += "".join(f", {word}" for word in ("log", "int") if getattr(one, word))
    conditions = " and ".join(f"{name} is {value}" for name, value in one.if_.items())
    return f"{values}; if {conditions}" if conditions else values
