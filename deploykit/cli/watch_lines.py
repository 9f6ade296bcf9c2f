"""The lines that `watch` shows: one run in detail, several as a table."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from deploykit.cli import describe
from deploykit.job.model import State
from deploykit.lib import units
from deploykit.observe.metrics.progress import Progress
from deploykit.observe.usage import RankUsage
from deploykit.run import watch as run_watch
from deploykit.run.registry import now
from deploykit.run.watch import View

_CURVE, _SMALL_CURVE = 40, 12
"""Columns of the curve of the loss."""
_GAUGE, _SMALL_GAUGE = 40, 6
"""Columns of the bar of the steps, and of those of a GPU or of one run of several."""
_PER_SECOND = re.compile(
    r"(?i)(?:.*[\W_])?(example|image|sample|sequence|token)s?[\W_]*"
    r"(?:per[\W_]*s(?:ec(?:ond)?)?|/s(?:ec)?)"
)
_ERROR_LINES, _FEW = 8, 2
"""Lines of an error that are shown of one run, and of each of several."""


def lines(views: Sequence[View]) -> list[str]:
    """The runs as lines, of any length."""
    if len(views) == 1:
        return list(_one(views[0]))
    return [*describe.columns([_HEADINGS, *map(_cells, views)]), *_below(views)]


def _one(view: View) -> Iterator[str]:
    """One run: a line for its state, then what is known."""
    row = view.row
    yield f"{row.run}: {_state(view)}"
    for label, value in (
        ("reason", row.reason),
        ("handle", str(row.handle or f"{row.backend}://{row.target}, not confirmed")),
        ("at", _position(view)),
        ("done", _done(view)),
        ("loss", _loss(view)),
        ("speed", _throughput(view)),
        ("restart", _restarts(view)),
        *(("" if number else "uses", line) for number, line in enumerate(_usage(view))),
        ("slowest", view.slowest),
        ("cause", view.cause),
    ):
        if value:
            yield f"  {label:<7} {value}"
    for number, text in enumerate(run_watch.last_lines(view.error, _ERROR_LINES)):
        yield f"  {'' if number else 'error':<7} {text}"
    for problem in view.problems:
        yield f"  could not read {problem}"


def _state(view: View) -> str:
    """``running for 5m 3s``, ``queued for 2h 0m``, ``failed after 3s, exit code 1``."""
    row, seconds = view.row, view.row.seconds(now())
    state = State(row.state)
    if state.final:
        code = f", exit code {row.exit_code}" if row.exit_code is not None else ""
        return f"{row.state}{f' after {units.span(seconds)}' if seconds is not None else ''}{code}"
    return f"{row.state} for {units.span(_elapsed(view))}"


def _elapsed(view: View) -> float:
    """Seconds since the start; before it since the submit."""
    seconds = view.row.seconds(now())
    return now() - view.row.created if seconds is None else seconds


def _position(view: View) -> str:
    parts = [*describe.position(view.progress), describe.rate(view.progress)]
    if view.progress.left is not None and not State(view.row.state).final:
        parts.append(f"{units.span(view.progress.left)} left")
    text = ", ".join(filter(None, parts))
    if not text and State(view.row.state) is State.RUNNING:
        return describe.line_or_bar(view.progress, view.row.folder)
    source = view.progress.sources.get("step") or view.progress.sources.get("epoch")
    return f"{text} ({source})" if text and source else text


def _done(view: View) -> str:
    share = describe.share(view.progress)
    return "" if share is None else f"{describe.gauge(share, _GAUGE)} {share:.0%}"


def _loss(view: View) -> str:
    if view.progress.loss is None:
        return ""
    curve = describe.sparkline(view.progress.curve, _CURVE)
    return f"{view.progress.loss:.4g} {curve} ({view.progress.sources.get('loss', '')})"


def _throughput(view: View) -> str:
    if view.progress.throughput is None:
        return ""
    name, value = view.progress.throughput
    counted = _PER_SECOND.fullmatch(name)
    unit = f"{counted[1].lower()}s/s" if counted else name
    return f"{describe.rounded(value)} {unit} ({view.progress.sources.get('throughput', '')})"


def _restarts(view: View) -> str:
    if not view.attempt:
        return ""
    reasons = ", ".join(reason.replace("_", " ") for reason in view.restarts)
    return f"{view.attempt}{f': {reasons}' if reasons else ''}"


def _usage(view: View) -> Iterator[str]:
    return usage_lines(view.usage) if view.usage else iter(())


_HEADINGS = ("run", "state", "for", "at", "left", "loss", "")


def far(one: Progress) -> str:
    """The position of one of several runs: ``━━━─── 120/500``, ``step 120``, ``epoch 2/5``."""
    share, (text, *_) = describe.share(one), [*describe.position(one), "-"]
    if share is None:
        return text
    return f"{describe.gauge(share, _SMALL_GAUGE)} {text.removeprefix('step ')}"


def _cells(view: View) -> tuple[str, ...]:
    one, over = view.progress, State(view.row.state).final
    seconds = view.row.seconds(now()) if over else _elapsed(view)
    return (
        view.row.run,
        view.row.state,
        units.span(seconds),
        far(one),
        "-" if one.left is None or over else units.span(one.left),
        "-" if one.loss is None else f"{one.loss:.4g}",
        describe.sparkline(one.curve, _SMALL_CURVE),
    )


def _below(views: Sequence[View]) -> Iterator[str]:
    """Of each of several runs what does not fit into its line."""
    for view in views:
        error = run_watch.last_lines(view.error, _FEW)
        restarts = _restarts(view)
        notes = [f"restart {restarts}"] if restarts else []
        is_well = State(view.row.state) is State.SUCCEEDED
        notes += [view.row.reason] if view.row.reason and not is_well else []
        notes += [view.cause] if view.cause else []
        if notes or error:
            yield ""
            yield f"{view.row.run}: {'; '.join(notes)}".removesuffix(": ")
            yield from (f"  {text}" for text in error)


def data(view: View) -> dict[str, Any]:
    """One run as JSON: what `status --json` has, and what is known of its inside."""
    return {
        **describe.run_data(view.row),
        "progress": describe.data(view.progress),
        "loss_curve": [describe.number(value) for value in view.progress.curve],
        "attempt": view.attempt,
        "restarts": list(view.restarts),
        "error": [
            {"rank": line.rank, "node": line.node, "task": line.task, "text": line.text}
            for line in view.error
        ],
        "ranks": [usage_data(one) for one in view.usage],
        "slowest": view.slowest or None,
        "cause": view.cause or None,
        "problems": list(view.problems),
    }


_EACH = 8
"""Ranks that are shown one by one."""
_GIB = 1 << 30


def usage_lines(ranks: Sequence[RankUsage]) -> Iterator[str]:
    """``rank 0  98% CPU  1.2 GiB  GPU ━━━━━━ 95%  ━━━─── 40.1 of 80.0 GiB``.

    Of many ranks the extremes.
    """
    if len(ranks) <= _EACH:
        yield from describe.columns([(f"rank {one.rank}", *_parts(one)) for one in ranks])
        return
    yield f"{len(ranks)} ranks, minimum to maximum:"
    yield from _extremes("CPU", [(one.cpu, one) for one in ranks], _percent)
    yield from _extremes("memory", [(one.memory, one) for one in ranks], units.memory)
    yield from _extremes("GPU", [(one.gpu, one) for one in ranks], _percent)
    yield from _extremes("GPU memory", [(one.gpu_memory, one) for one in ranks], units.memory)


def usage_data(one: RankUsage) -> dict[str, Any]:
    """The usage of a rank as JSON."""
    return {
        "rank": one.rank,
        "node": one.node,
        "cpu_percent": one.cpu,
        "memory_bytes": one.memory,
        "gpu_percent": one.gpu,
        "gpu_memory_bytes": one.gpu_memory,
        "gpu_size_bytes": one.gpu_size,
    }


def _percent(value: float) -> str:
    return f"{value:.0f}%"


def _parts(one: RankUsage) -> list[str]:
    """CPU, memory, GPU and its memory, as far as they are known."""
    gpu = "" if one.gpu is None else f"GPU {_small(one.gpu / 100)} {one.gpu:3}%"
    filled = ""
    if one.gpu_memory is not None and one.gpu_size:
        used, size = f"{one.gpu_memory / _GIB:.1f}", units.memory(one.gpu_size)
        filled = f"{_small(one.gpu_memory / one.gpu_size)} {used} of {size}"
    cpu = "-" if one.cpu is None else f"{one.cpu:3.0f}% CPU"
    memory = "-" if one.memory is None else units.memory(one.memory)
    return [cpu, memory, gpu, filled]


def _small(part: float) -> str:
    return describe.gauge(part, _SMALL_GAUGE)


def _extremes(
    name: str, values: Sequence[tuple[float | None, RankUsage]], shown: Callable[[float], str]
) -> Iterator[str]:
    known = sorted((value, one.rank) for value, one in values if value is not None)
    if known:
        (least, first), (most, last) = known[0], known[-1]
        middle = known[len(known) // 2][0]
        ends = f"{shown(least)} (rank {first}) to {shown(most)} (rank {last})"
        yield f"{name} {ends}, median {shown(middle)}"
