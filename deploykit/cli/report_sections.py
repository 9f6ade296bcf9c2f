"""Values for run.html.j2, the page of a report."""

from __future__ import annotations

import base64
import contextlib
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from deploykit.backends import base as backend
from deploykit.cli import compare, describe, output, report_page
from deploykit.cli.compare import Line
from deploykit.diagnose import cause_rules
from deploykit.job.model import State
from deploykit.lib import paths, shell, units
from deploykit.lib.paths import is_address
from deploykit.observe import charts
from deploykit.observe.charts import MAX_POINTS, Chart, Curve, RunCurves
from deploykit.observe.metrics.series import Series
from deploykit.observe.traces import RankProfile
from deploykit.observe.usage import RankUsage, Sample
from deploykit.run import diagnosis as run_diagnosis
from deploykit.run import report as run_report
from deploykit.run.report import RunFacts, RunReport, Span

MAX_PICTURES, MAX_PICTURE_BYTES = 4, 80_000
"""Pictures below the output that are shown, and bytes of each."""
MAX_METRICS = 200
MAX_ENTRIES = 5_000
"""Files and folders below the output among which pictures are looked for."""
MAX_PARTS = 24
"""Of the timeline, in words."""
MAX_REASON = 400
"""Characters of a reason in the summary."""
MAX_HEADINGS = 100
_STEP, _PART = "step_seconds", "_seconds"
"""Metrics: a whole step, and how the names of its parts end."""
_TIMES = ((3600, "hours"), (60, "minutes"), (1, "seconds"))
_MIN_TIMES = 2
"""Units of time on an axis, or it is in the next smaller ones."""


def document(reports: Sequence[RunReport]) -> str:
    """The page of one run, or of several that are compared."""
    return report_page.rendered(
        "report/run.html.j2",
        _attempts(reports),
        "Links open files on {host}. All times are in UTC.",
    )


def _attempts(reports: Sequence[RunReport]) -> Iterator[dict[str, Any]]:
    """The values of the page: whole, then without the largest parts, then headings alone."""
    several = len(reports) > 1
    views = [_view(report) for report in reports]
    values = {
        "title": " · ".join(report.facts.row.run for report in reports[:4]),
        "runs": views,
        "compared": _compared([report.facts for report in reports]) if several else None,
        "figures": _figures(reports),
        "pictures": [],
        "is_rich": False,
        "is_brief": False,
    }
    yield {**values, "pictures": [] if several else _pictures(reports[0]), "is_rich": True}
    yield values
    yield {**values, "runs": views[:MAX_HEADINGS], "is_brief": True}


def _view(report: RunReport) -> dict[str, Any]:
    """What the page says of a run."""
    facts, folder = report.facts, Path(report.facts.row.folder)
    return {
        "id": facts.row.run,
        "state": State(facts.row.state).value,
        "sentence": _sentence(report),
        "tiles": tiles(report),
        "cause": cause(report),
        "facts": _facts(report),
        "timeline": _timeline(report),
        "metrics": [
            (one.name, charts.short(one.last, 6), _best(one.best), one.source)
            for one in list(facts.metrics.values())[:MAX_METRICS]
        ],
        "evaluation": _evaluation(facts),
        "step": _step(facts.curves),
        "profile": [_profile(rank) for rank in report.profile],
        "slow": report.slow,
        "nodes": report.nodes,
        "preflight": "\n".join(report.preflight),
        "stacks": "\n".join(report.stacks),
        "environment": _environment(report),
        # without the variables, which the environment shows
        "settings": [one for one in facts.settings.items() if not one[0].startswith("env.")],
        "files": [(path.as_uri(), str(path.relative_to(folder))) for path in report.files],
        "written": "\n".join(describe.written_lines(facts.row)),
        "problems": report.problems,
    }


def _evaluation(facts: RunFacts) -> dict[str, Any] | None:
    """What is known of the predictions of its model."""
    if facts.evaluation is None:
        return None
    run, result = facts.evaluation
    known = dict(result.facts)
    samples = f"{known['evaluated']} samples" if "evaluated" in known else ""
    data = f"the {known['split']} data" if "split" in known else ""
    step = f"the model after step {known['step']}" if "step" in known else ""
    parts = ", with ".join(filter(None, (" of ".join(filter(None, (samples, data))), step)))
    return {
        "sentence": f"Run {run}: {parts}." if parts else f"Run {run}.",
        "numbers": [(name, charts.short(value, 6)) for name, value in result.numbers.items()],
        "figures": charts.draw(result.charts),
        "tables": result.tables,
    }


def _best(value: float | None) -> str:
    return "" if value is None else charts.short(value, 6)


def _sentence(one: RunReport) -> str:
    """The run in a sentence or two: how it ended, where it ran, how far it came."""
    row, facts = one.facts.row, one.facts
    parts = [f"{row.run} {_ended(one)}{_where(one)}"]
    if facts.restarts:
        parts[0] += f", after {units.plural(facts.restarts, 'restart')}"
    if row.reason and row.state != State.SUCCEEDED.value:
        parts[0] += f": {row.reason[:MAX_REASON]}"
    if far := describe.line(facts.progress, ended=State(row.state).final):
        parts.append(f"It reached {far}")
    return ". ".join(parts) + "."


def _ended(one: RunReport) -> str:
    facts, ran = one.facts, run_report.seconds(one.facts, one.spans)
    state, took = State(facts.row.state), units.span(ran)
    if state is State.SUCCEEDED:
        return f"succeeded after {took}"
    if state in {State.FAILED, State.CANCELLED}:
        verb = "failed" if state is State.FAILED else "was cancelled"
        return verb if ran is None else f"{verb} after {took}"
    if state is State.UNSENT:
        return "was never sent"
    return f"is {facts.row.state}" + (f" for {took}" if ran is not None else "")


def _where(one: RunReport) -> str:
    resources = one.job.get("resources")
    row = one.facts.row
    at = f" on {row.backend} ({row.target})"
    match resources:
        case {"nodes": int(nodes), "processes_per_node": int(ranks)}:
            count = units.plural(nodes * ranks, "rank")
            return f"{at}, {units.plural(nodes, 'node')}, {count}"
    return at


def tiles(one: RunReport) -> list[Sequence[str]]:
    """The numbers that people look for first; without a value where one is not known."""
    facts, row = one.facts, one.facts.row
    resources = one.job.get("resources")
    match resources:
        case {"nodes": int(nodes), "processes_per_node": int(ranks)}:
            size = f"{nodes * ranks} on {units.plural(nodes, 'node')}"
        case _:
            size = ""
    ran = run_report.seconds(facts, one.spans)
    return [
        ("duration", "" if ran is None else units.span(ran)),
        ("cost", str(facts.cost) if facts.cost else ""),
        *_best_metrics(facts),
        *(text.split(" ", 1) for text in describe.position(facts.progress)[:1]),
        ("pace", describe.rate(facts.progress)),
        ("ranks", size),
        ("restarts", str(facts.restarts) if facts.restarts else ""),
        ("exit code", str(row.exit_code) if row.exit_code else ""),
    ]


def _best_metrics(facts: RunFacts) -> Iterator[tuple[str, str]]:
    """The best loss and the best of a metric that grows, such as the accuracy."""
    for side in ("less", "more"):
        names = (name for name in facts.metrics if run_report.better(name) == side)
        metrics = (facts.metrics[name] for name in sorted(names, key=len))
        best = next(((one.name, one.best) for one in metrics if one.best is not None), None)
        if best is not None:
            yield f"best {best[0]}", charts.short(best[1], 4)


def cause(report: RunReport) -> dict[str, Any] | None:
    """Why it failed, with the evidence and what to do."""
    if not report.causes:
        return None
    first, *others = report.causes
    folder, proofs = report.facts.row.folder, first.evidence
    texts = dict.fromkeys(proof.text for proof in proofs)
    also = ", ".join(label for label in first.also if label != cause_rules.UNKNOWN)
    return {
        "label": first.rule.label,
        "means": first.rule.means,
        "lines": "\n".join([*report.raised_at, *texts]),
        "rank": first.first_rank,
        "steps": first.fix.split("\n") if first.fix else [],
        "notes": [
            ("found in", "; ".join(run_diagnosis.source(it, folder) for it in proofs)),
            ("ruled out", first.rule.probably_not),
            ("possibly also", also),
        ],
        "others": "\n".join(run_diagnosis.lines(others)) if others else "",
    }


def _facts(one: RunReport) -> list[tuple[str, str]]:
    facts, row = one.facts, one.facts.row
    waited = sum(span.end - span.begin for span in one.spans if span.attempt is None)
    ran = run_report.seconds(facts, one.spans)
    return [
        ("command", _command(one)),
        ("handle", str(row.handle or f"{row.backend}://{row.target}, not confirmed")),
        ("submitted", output.when(row.created)),
        ("waited", units.span(waited) if one.spans else ""),
        ("ran for", units.span(ran) if ran is not None else ""),
        ("commit", facts.source.commit or ""),
        ("uncommitted changes", facts.source.changes or ""),
        ("bundle", facts.source.bundle),
    ]


def _command(one: RunReport) -> str:
    """The command line as you would type it."""
    match one.job.get("entrypoint"):
        case {"script": str(script), "args": [*words]}:
            return shell.command(script, *map(str, words))
        case {"module": str(module), "args": [*words]}:
            return shell.command("-m", module, *map(str, words))
    return ""


def _timeline(report: RunReport) -> dict[str, Any]:
    """Phases as parts of the whole time, in the styles of their states; then all events."""
    spans, state = report.spans, report.facts.row.state
    last = max((span.attempt or 0 for span in spans), default=0)
    whole = spans[-1].end - spans[0].begin if spans else 0.0
    parts = []
    for one in spans if whole else ():
        kind = "waited" if one.attempt is None else state if one.attempt == last else "ended"
        parts.append(_part(kind, (one.end - one.begin) / whole, _phase(one)))
    sentence = "; ".join(_phase(span) for span in spans[:MAX_PARTS])
    more = f"; and {len(spans) - MAX_PARTS} more" if len(spans) > MAX_PARTS else ""
    return {
        "parts": parts,
        "ends": [output.when(spans[0].begin), output.when(spans[-1].end)] if spans else [],
        "sentence": f"{sentence}{more}." if spans else "",
        "events": [(output.when(event.time), event.text) for event in report.events],
    }


def _part(kind: str, share: float, label: str) -> dict[str, Any]:
    """A part of a strip, by its share from 0 to 1."""
    return {"kind": kind, "share": round(1000 * share, 1), "label": label}


def _phase(span: Span) -> str:
    took = units.span(span.end - span.begin)
    return f"waited {took}" if span.attempt is None else f"attempt {span.attempt + 1} ran {took}"


def _compared(facts: Sequence[RunFacts]) -> dict[str, Any]:
    compared = run_report.compare(facts)
    settings = [*compare.ends(compared), *compare.settings(compared), *compare.packages(compared)]
    metrics = list(compare.metrics(compared))[:MAX_METRICS]
    return {
        "headings": ["", *(one.row.run for one in facts)],
        "settings": [_row(line) for line in settings],
        "same": f"{compared.same} settings are the same in all runs.",
        "metrics": [_row(line) for line in metrics],
    }


def _row(line: Line) -> list[str | tuple[str, bool]]:
    return [line.name, *((text, at in line.best) for at, text in enumerate(line.texts))]


def _figures(reports: Sequence[RunReport]) -> list[str]:
    drawn = charts.charts_of([_curves(report.facts) for report in reports])
    if len(reports) == 1:
        drawn += _usage_charts(reports[0].usage, reports[0].starts[1:])
    return charts.draw(drawn)


def _curves(facts: RunFacts) -> RunCurves:
    """The curve of each metric, and the restarts."""
    begins = sorted(facts.attempts.items())
    marks = [(float(step), f"restart {number}") for number, step in begins]
    return RunCurves(facts.row.run, facts.curves, marks)


def _environment(one: RunReport) -> list[tuple[str, str]]:
    """Versions, GPUs, what the job chose to run in, its variables; secrets are references."""
    chosen = one.job.get("environment")
    variables = one.job.get("env")
    pairs = [*one.software]
    pairs += [(key, str(value)) for key, value in _items(chosen) if value]
    pairs += [(f"${key}", str(value)) for key, value in _items(variables)]
    for name in backend.names():
        pairs += [
            (f"{name}.{key}", str(it))
            for key, it in _items(one.job.get(name))
            if isinstance(it, str | int | float) and it
        ]
    return pairs


def _items(data: object) -> list[tuple[str, object]]:
    return list(data.items()) if isinstance(data, dict) else []


def _pictures(report: RunReport) -> list[tuple[str, str]]:
    """Small PNG files below the output, such as a confusion matrix: names, and data in Base64."""
    where = report.facts.row.output
    pictures: list[tuple[str, str]] = []
    if not where or is_address(where):
        return pictures
    for path in _png_files(Path(where))[:MAX_PICTURES]:
        with contextlib.suppress(OSError):
            data = base64.b64encode(paths.read_regular(path, MAX_PICTURE_BYTES)).decode()
            pictures.append((str(path.relative_to(where)), data))
    return pictures


def _png_files(top: Path) -> list[Path]:
    pictures: list[Path] = []
    seen = 0
    for here, folders, files in os.walk(top):
        seen += len(files) + len(folders)
        if seen > MAX_ENTRIES:
            break
        folders.sort()
        pictures += [Path(here, name) for name in sorted(files) if name.endswith(".png")]
    return [
        path for path in pictures if path.is_file() and path.stat().st_size <= MAX_PICTURE_BYTES
    ]


class _Quantity(NamedTuple):
    title: str
    unit: str
    of: Callable[[RankUsage], float | None]


_QUANTITIES = (
    _Quantity("Memory per rank", "GiB", lambda one: _gib(one.memory)),
    _Quantity("GPU memory per rank", "GiB", lambda one: _gib(one.gpu_memory)),
    _Quantity("GPU utilization per rank", "%", lambda one: one.gpu),
    _Quantity("CPU usage per rank", "% of a core", lambda one: one.cpu),
)


def _usage_charts(samples: Sequence[Sample], restarts: Sequence[float]) -> Iterator[Chart]:
    """What each rank used over time; of many ranks those that used least and most.

    `restarts` are the times at which later attempts began.
    """
    if not samples:
        return
    begin, end = samples[0].time, samples[-1].time
    fitting = (one for one in _TIMES if end - begin >= _MIN_TIMES * one[0])
    seconds, name = next(fitting, _TIMES[-1])
    marks = [((time - begin) / seconds, f"restart {at}") for at, time in enumerate(restarts, 1)]
    for title, unit, value_of in _QUANTITIES:
        by_rank: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for time, one in samples:
            value = value_of(one)
            if value is not None:
                by_rank[one.rank].append(((time - begin) / seconds, value))
        chosen = _extremes(by_rank)
        curves = [Curve(f"rank {rank}", charts.thin(by_rank[rank], MAX_POINTS)) for rank in chosen]
        yield Chart(title, name, curves, marks, unit)


def _extremes(by_rank: Mapping[int, Sequence[tuple[float, float]]]) -> list[int]:
    order = sorted(by_rank, key=lambda rank: max(value for _, value in by_rank[rank]))
    half = charts.COLORS // 2
    return sorted(order if len(order) <= charts.COLORS else [*order[:half], *order[-half:]])


def _gib(size: int | None) -> float | None:
    return None if size is None else size / 2**30


def _step(metrics: Mapping[str, Series]) -> dict[str, Any] | None:
    """How the time of a step is divided, if the script reports its parts."""
    means = {name: one.curve.mean() for name, one in metrics.items() if name.endswith(_PART)}
    whole = means.pop(_STEP, 0.0)
    parts = {name.removesuffix(_PART): mean for name, mean in means.items()}
    if not whole or not parts or sum(parts.values()) > 1.05 * whole:
        return None  # they are not parts of it
    listed = [*parts.items(), ("other", max(0.0, whole - sum(parts.values())))]
    return {
        "sentence": f"{1000 * whole:.3g} ms on average, of which:",
        "parts": [
            _part(f"f{at % charts.COLORS}", part / whole, name)
            for at, (name, part) in enumerate(listed)
        ],
        "rows": [(name, f"{1000 * part:.3g} ms", f"{part / whole:.0%}") for name, part in listed],
    }


def _profile(rank: RankProfile) -> list[str]:
    """The shares of what a rank did in the profiled steps."""
    parts = (rank.computing, rank.communicating, rank.waiting, rank.idle)
    return [f"rank {rank.rank}", *(f"{part / max(rank.seconds, 1e-9):.0%}" for part in parts)]
