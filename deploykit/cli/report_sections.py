"""The sections of a report, from what is known of its runs."""

from __future__ import annotations

import base64
import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from deploykit.backends import base as backend
from deploykit.cli import comparison_text, output, progress_text, report_steps, written
from deploykit.cli.comparison_text import Line
from deploykit.job.model import State
from deploykit.lib import paths, shell, units
from deploykit.lib.paths import is_address
from deploykit.lib.version import __version__
from deploykit.observe import charts
from deploykit.observe import html as markup
from deploykit.observe.charts import RunCurves, TimePart
from deploykit.observe.html import Markup
from deploykit.run import comparison
from deploykit.run import diagnosis as run_diagnosis
from deploykit.run import timeline as run_timeline
from deploykit.run.facts import RunFacts
from deploykit.run.registry import now
from deploykit.run.report import RunReport
from deploykit.run.timeline import Span

_PICTURES, _PICTURE_BYTES = 4, 80_000
"""Pictures below the output that are shown, and bytes of each at most."""
_MOST_METRICS = 200
_MOST_ENTRIES = 5_000
_MOST_PARTS = 24
_REASON = 400
"""Characters of a reason that are told in the summary."""


def document(reports: Sequence[RunReport]) -> str:
    """The page of one run, or of several that are compared, of at most `markup.LARGEST` bytes."""
    for rich in (True, False):
        made = markup.page(_title(reports), _body(reports, rich=rich), _footer())
        if len(made.encode()) <= markup.LARGEST:
            return made
    brief = markup.join(_heading(one) for one in reports[:100])
    return markup.page(_title(reports), brief, _footer())


def _title(reports: Sequence[RunReport]) -> str:
    return " · ".join(one.facts.row.run for one in reports[:4])


def _footer() -> str:
    host = os.uname().nodename
    return (
        f"Written by deploykit {__version__} on {host} at {output.when(now())}. "
        f"Links lead to files on {host}. All times are in UTC."
    )


def _body(reports: Sequence[RunReport], *, rich: bool) -> Markup:
    if len(reports) == 1:
        return _one(reports[0], rich=rich)
    facts = [one.facts for one in reports]
    inner = [
        Markup(f"<h1>{markup.text(f'{len(reports)} runs compared')}</h1>"),
        *(markup.paragraph(_sentence(one), "remark") for one in reports),
        _compared(facts),
        _charts(reports),
    ]
    if rich:
        each = (markup.details(one.facts.row.run, *_sections(one, rich=False)) for one in reports)
        inner.append(markup.section("Each run", *each))
    return markup.join(inner)


def _one(one: RunReport, *, rich: bool) -> Markup:
    sections = list(_sections(one, rich=rich))
    return markup.join([_heading(one), sections[0], _charts([one]), *sections[1:]])


def _heading(one: RunReport) -> Markup:
    row = one.facts.row
    state = f'<span class="state {State(row.state).value}">{markup.text(row.state)}</span>'
    head = f"<h1>{markup.text(row.run)} {state}</h1>"
    return markup.join([Markup(head), markup.paragraph(_sentence(one), "summary")])


def _sentence(one: RunReport) -> str:
    """The run in a sentence or two: how it ended, where it ran, how far it came."""
    row, facts = one.facts.row, one.facts
    parts = [f"{row.run} {_ended(one)}{_where(one)}"]
    if facts.restarts:
        parts[0] += f", after {facts.restarts} restart{'' if facts.restarts == 1 else 's'}"
    if row.reason and row.state != State.SUCCEEDED.value:
        parts[0] += f": {row.reason[:_REASON]}"
    if one.causes:
        parts.append(f"The cause: {one.causes[0].rule.means}")
    if far := progress_text.line(facts.progress, ended=State(row.state).final):
        parts.append(f"It reached {far}")
    return ". ".join(parts) + "."


def _ended(one: RunReport) -> str:
    facts, ran = one.facts, run_timeline.seconds(one.facts, one.spans)
    state, took = State(facts.row.state), units.span(ran)
    if state is State.SUCCEEDED:
        return f"succeeded after {took}"
    if state in {State.FAILED, State.CANCELLED}:
        verb = "failed" if state is State.FAILED else "was cancelled"
        return verb if ran is None else f"{verb} after {took}"
    has = "is " if state is not State.UNSENT else "was never sent, "
    return f"{has}{facts.row.state}" + (f" for {took}" if ran is not None else "")


def _where(one: RunReport) -> str:
    resources = one.job.get("resources")
    row = one.facts.row
    at = f" on {row.backend} ({row.target})"
    match resources:
        case {"nodes": int(nodes), "processes_per_node": int(ranks)}:
            count = f"{nodes} node{'' if nodes == 1 else 's'}"
            return f"{at}, {count} with {ranks} rank{'' if ranks == 1 else 's'} each"
    return at


def _sections(one: RunReport, *, rich: bool) -> Iterator[Markup]:
    """All but the heading and the charts; the first is about how the run went."""
    facts = one.facts
    yield markup.join([_cause(one), markup.section("Run", _facts(one), _timeline(one))])
    yield markup.section("Metrics", _metrics(facts))
    yield report_steps.step(_numbers(facts).metrics)
    yield report_steps.profile(one.profile)
    yield markup.section("Slowest rank", *map(markup.paragraph, one.slow))
    yield markup.section("Nodes", markup.table(["node", "network"], one.nodes))
    if one.preflight:
        yield markup.section("Preflight", markup.block("\n".join(one.preflight)))
    if one.stacks:
        title = "Where the ranks stood when they were last looked at"
        yield markup.section("Stacks", markup.details(title, markup.block("\n".join(one.stacks))))
    if rich:
        yield markup.section("Pictures", *_pictures(one))
    yield markup.section("Environment", _environment(one))
    yield markup.section("Job", markup.details("All settings", markup.facts(_settings(facts))))
    yield markup.section("Files", _files(one))
    missing = (markup.text(problem) for problem in one.problems)
    yield markup.section("Not read", markup.items(missing))


def _cause(one: RunReport) -> Markup:
    """Why it failed, with the proof and what to do."""
    if not one.causes:
        return Markup("")
    first, *others = one.causes
    lines = "\n".join(run_diagnosis.lines([first]))
    rest = "\n".join(run_diagnosis.lines(others)) if others else ""
    also = markup.details("Other causes", markup.block(rest)) if rest else Markup("")
    title = f"Cause: {first.rule.label}, {first.rule.means}"
    return markup.section("Why it failed", markup.paragraph(title), markup.block(lines), also)


def _facts(one: RunReport) -> Markup:
    facts, row = one.facts, one.facts.row
    waited = sum(span.end - span.begin for span in one.spans if span.attempt is None)
    ran = run_timeline.seconds(facts, one.spans)
    code = "" if row.exit_code is None else str(row.exit_code)
    return markup.facts(
        [
            ("state", row.state),
            ("exit code", code),
            ("reason", row.reason),
            ("command", _command(one)),
            ("handle", str(row.handle or f"{row.backend}://{row.target}, not confirmed")),
            ("submitted", output.when(row.created)),
            ("waited", units.span(waited) if one.spans else ""),
            ("ran for", units.span(ran) if ran is not None else ""),
            ("restarts", str(facts.restarts) if facts.restarts else ""),
            ("commit", facts.source.commit or ""),
            ("uncommitted changes", facts.source.changes or ""),
            ("bundle", facts.source.bundle),
            ("cost", str(facts.cost) if facts.cost else ""),
            ("pace", progress_text.rate(facts.progress)),
        ]
    )


def _command(one: RunReport) -> str:
    """The script with its arguments, as one would type them."""
    match one.job.get("entrypoint"):
        case {"script": str(script), "args": [*words]}:
            return shell.command(script, *map(str, words))
        case {"module": str(module), "args": [*words]}:
            return shell.command("-m", module, *map(str, words))
    return ""


def _timeline(one: RunReport) -> Markup:
    parts = [_part(span) for span in one.spans]
    sentence = "; ".join(part.label for part in parts[:_MOST_PARTS])
    more = f"; and {len(parts) - _MOST_PARTS} more" if len(parts) > _MOST_PARTS else ""
    rows = [(output.when(event.time), event.text) for event in one.events]
    table = markup.table(["time", "event"], rows)
    return markup.join(
        [
            charts.time_bar(parts),
            markup.paragraph(f"{sentence}{more}.", "remark"),
            markup.element("div", table, "times"),
        ]
    )


def _part(span: Span) -> TimePart:
    took = units.span(span.end - span.begin)
    if span.attempt is None:
        return TimePart(span.begin, span.end, "waited", f"waited {took}")
    return TimePart(span.begin, span.end, "ran", f"attempt {span.attempt + 1} ran {took}")


def _compared(facts: Sequence[RunFacts]) -> Markup:
    compared = comparison.of(facts)
    lines = [*comparison_text.ends(compared), *comparison_text.settings(compared)]
    headings = ["", *(one.row.run for one in facts)]
    metrics = list(comparison_text.metrics(compared))[:_MOST_METRICS]
    same = markup.paragraph(f"{compared.same} settings are the same in all.", "remark")
    return markup.join(
        [
            markup.section("What differs", markup.table(headings, map(_row, lines)), same),
            markup.section("Metrics", markup.table(headings, map(_row, metrics))),
        ]
    )


def _row(line: Line) -> list[str | tuple[str, bool]]:
    return [line.name, *((text, at in line.best) for at, text in enumerate(line.texts))]


def _charts(reports: Sequence[RunReport]) -> Markup:
    drawn = charts.charts_of([_numbers(one.facts) for one in reports])
    if len(reports) == 1:
        drawn += report_steps.usage_charts(reports[0].usage, reports[0].starts[1:])
    figures = markup.join(charts.draw(one, number) for number, one in enumerate(drawn))
    return (
        markup.section("Curves", markup.element("div", figures, "charts")) if figures else figures
    )


def _numbers(facts: RunFacts) -> RunCurves:
    """The curve of each metric, and the restarts."""
    begins = sorted(facts.attempts.items())
    marks = [(float(step), f"restart {number}") for number, step in begins]
    return RunCurves(facts.row.run, facts.curves, marks)


def _metrics(facts: RunFacts) -> Markup:
    rows = [
        (one.name, _number(one.last), "" if one.best is None else _number(one.best), one.source)
        for one in list(facts.metrics.values())[:_MOST_METRICS]
    ]
    return markup.table(["metric", "last", "best", "source"], rows)


def _number(value: float) -> str:
    return charts.short(value, 6)


def _environment(one: RunReport) -> Markup:
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
    return markup.facts(pairs)


def _items(data: object) -> list[tuple[str, object]]:
    return list(data.items()) if isinstance(data, dict) else []


def _settings(facts: RunFacts) -> list[tuple[str, str]]:
    """Keys and arguments but the variables, which the environment shows."""
    return [pair for pair in facts.settings.items() if not pair[0].startswith("env.")]


def _files(one: RunReport) -> Markup:
    folder = Path(one.facts.row.folder)
    links = [markup.link(path, str(path.relative_to(folder))) for path in one.files]
    lines = list(written.lines(one.facts.row))
    listed = markup.block("\n".join(lines)) if lines else Markup("")
    return markup.join([markup.items(links), listed])


def _pictures(one: RunReport) -> Iterator[Markup]:
    """Small PNG files below the output, such as a confusion matrix, within the page."""
    where = one.facts.row.output
    if not where or is_address(where):
        return
    for path in _png_files(Path(where))[:_PICTURES]:
        with contextlib.suppress(OSError):
            data = base64.b64encode(paths.read_regular(path, _PICTURE_BYTES)).decode()
            name = markup.text(str(path.relative_to(where)))
            image = f'<img src="data:image/png;base64,{data}" alt="{name}">'
            yield Markup(f"<figure><figcaption>{name}</figcaption>{image}</figure>")


def _png_files(top: Path) -> list[Path]:
    pictures: list[Path] = []
    seen = 0
    for here, folders, files in os.walk(top):
        seen += len(files) + len(folders)
        if seen > _MOST_ENTRIES:
            break
        folders.sort()
        pictures += [Path(here, name) for name in sorted(files) if name.endswith(".png")]
    return [path for path in pictures if path.is_file() and path.stat().st_size <= _PICTURE_BYTES]
