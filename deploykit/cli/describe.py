"""Describe a run: its progress, its cost, and the files that its program wrote."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploykit.cli import output
from deploykit.job.model import State
from deploykit.lib import quoting, shell, units
from deploykit.observe import exit_records, logfiles
from deploykit.run import budgets
from deploykit.run.budgets import Use
from deploykit.run.registry import Run, now

if TYPE_CHECKING:
    from deploykit.observe.metrics.progress import Progress

_BLOCKS = "▁▂▃▄▅▆▇█"
FILLED, EMPTY = "━", "─"
"""What a gauge is drawn with."""
_WHOLE = 100
"""Numbers from here on are shown without decimals."""


def line(one: Progress, *, ended: bool = False) -> str:
    """How far a run is, or was at its end, in one line; empty where nothing is known."""
    parts = [*position(one)]
    parts += [f"loss {one.loss:.4g}"] if one.loss is not None else []
    parts += (
        [f"{units.span(one.left)} left"]
        if one.left is not None and not (ended or _is_done(one))
        else []
    )
    return ", ".join(parts)


def line_or_bar(one: Progress, folder: str) -> str:
    """The same; where nothing is known, the bar of rank 0 as it is."""
    return line(one) or logfiles.bar(Path(folder)).strip()


def bar(folder: str) -> str:
    """The bar of rank 0 after its rank, as a log line has it; empty where there is none."""
    state = logfiles.bar(Path(folder)).strip("\n")
    return f"[rank 0] {state}" if state else ""


def position(one: Progress) -> list[str]:
    """``step 120/500`` and ``epoch 2/5``, as far as they are known."""
    pairs = (("step", one.step, one.total), ("epoch", one.epoch, one.epochs))
    return [
        f"{name} {at:.10g}{f'/{end}' if end is not None else ''}"
        for name, at, end in pairs
        if at is not None
    ]


def share(one: Progress) -> float | None:
    """How much of a run is done, from 0 to 1, by its steps or else its epochs."""
    for at, end in ((one.step, one.total), (one.epoch, one.epochs)):
        if at is not None and end:
            return min(1.0, max(0.0, at / end))
    return None


def rounded(value: float) -> str:
    """A number with three digits or more: ``0.512``, ``51.2``, ``5,123``."""
    return f"{value:,.0f}" if abs(value) >= _WHOLE else f"{value:.3g}"


def gauge(part: float, width: int) -> str:
    """A bar of `width` characters, of which `part` (from 0 to 1) is filled."""
    filled = round(min(1.0, max(0.0, part)) * width)
    return FILLED * filled + EMPTY * (width - filled)


def rate(one: Progress) -> str:
    """``12 steps/s``, or ``1.5 s per step`` where that is slow; empty where it is not known."""
    if not one.rate:
        return ""
    return (
        f"{rounded(one.rate)} steps/s" if one.rate >= 1 else f"{rounded(1 / one.rate)} s per step"
    )


def columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The rows as lines whose cells stand below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()


def sparkline(values: Sequence[float], width: int) -> str:
    """The values as blocks, each the mean of its part; ``!`` where one is no number."""
    width = min(width, len(values))
    if not width:
        return ""
    bounds = [len(values) * part // width for part in range(width + 1)]
    means = [_mean(values[start:end]) for start, end in itertools.pairwise(bounds)]
    finite = [mean for mean in means if math.isfinite(mean)]
    least, size = min(finite, default=0.0), max(finite, default=0.0) - min(finite, default=0.0)
    top = len(_BLOCKS) - 1
    return "".join(
        _BLOCKS[round((mean - least) / size * top) if size else 0] if math.isfinite(mean) else "!"
        for mean in means
    )


def data(one: Progress) -> dict[str, Any]:
    """The same as JSON; numbers that JSON lacks are texts, as `number` has them."""
    return {
        "step": one.step,
        "total": one.total,
        "epoch": one.epoch,
        "epochs": one.epochs,
        "loss": number(one.loss),
        "steps_per_second": one.rate,
        "throughput": one.throughput
        and {
            "name": one.throughput[0],
            "value": number(one.throughput[1]),
        },
        "seconds_left": one.left if one.left is None else round(one.left, 1),
        "sources": dict(one.sources),
    }


def number(value: float | None) -> float | str | None:
    """A number as JSON has it; ``nan``, ``inf`` and ``-inf`` as texts."""
    return value if value is None or math.isfinite(value) else str(value)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _is_done(one: Progress) -> bool:
    return one.step is not None and one.step == one.total


def cost(run: Run, *, brief: bool = False) -> str:
    """What a run has cost, so far or in all; empty where nothing is billed or known."""
    cost = run.spent()
    if cost is None:
        return ""
    shown = cost.total if brief else str(cost)
    return shown if State(run.state).final else f"{shown} so far"


def cost_data(run: Run) -> dict[str, Any] | None:
    """The same as data; None where nothing is billed or known."""
    cost = run.spent()
    return None if cost is None else cost.data()


def budget(written: str) -> Use:
    """The use of a budget as a job has it; asks about endpoints past their time."""
    from deploykit.run import deployments  # 30 ms, for budgets only

    deployments.ask_overdue()
    return budgets.of(written)


_NAMED = 5
"""Files of a folder that are listed."""


def written_data(run: Run) -> dict[str, Any] | None:
    """What the program wrote, as JSON; None where it is not known."""
    record = exit_records.written(Path(run.folder))
    if record is None:
        return None
    return {
        "output": _data(record.output),
        "checkpoints": _data(record.checkpoints),
        "working_folder": _data(record.working_folder),
    }


def _data(files: exit_records.Files) -> dict[str, Any]:
    return {
        "folder": files.folder,
        "count": files.count,
        "bytes": files.bytes,
        "largest": [{"path": path, "bytes": size} for path, size in files.largest],
    }


def files_line(run: Run) -> str:
    """How many files the program wrote, and where; empty where that is not known."""
    record = exit_records.written(Path(run.folder))
    if record is None:
        return ""
    parts: list[str] = []
    parent = None
    for files in (record.output, record.checkpoints, record.working_folder):
        if not files.count or (files is record.working_folder and record.collects):
            continue
        folder = Path(files.folder)
        where = folder.name if folder.parent == parent else files.folder
        parts.append(f"{units.plural(files.count, 'file')}, {units.size(files.bytes)}, in {where}")
        parent = folder.parent
    return "; ".join(parts) or "none"


def copied_line(run: Run) -> str:
    """The newest checkpoint in a bucket, and what went wrong; empty without a bucket."""
    record = exit_records.copied(Path(run.folder))
    if record is None:
        return ""
    warning = f"; warning: {record.error}" if record.error else ""
    return f"{record.newest or 'no checkpoint yet'} in {record.location}{warning}"


def copied_data(run: Run) -> dict[str, Any] | None:
    """The same as JSON; None without a bucket."""
    record = exit_records.copied(Path(run.folder))
    return None if record is None else asdict(record)


def written_lines(run: Run) -> Iterator[str]:
    """Lines about what the program wrote into output, checkpoints and its working folder."""
    record = exit_records.written(Path(run.folder))
    if record is None:
        return
    working, results, checkpoints = record.working_folder, record.output, record.checkpoints
    written = working.count or results.count or checkpoints.count
    if not written and run.state == State.FAILED.value:
        return
    if results.count or not checkpoints.count:
        yield from _listed("in output", results)
    if checkpoints.count:
        yield from _listed("in checkpoints", checkpoints)
    if working.count:
        yield from _listed(f"in the working folder, {working.folder}", working)
    if working.count and not record.collects:
        tops = dict.fromkeys(path.partition("/")[0] for path, _ in working.largest)
        names = ", ".join(quoting.yaml(top) for top in list(tops)[:_NAMED])
        yield f"to copy them to output, add this to the job file: outputs: [{names}]"


def _listed(where: str, files: exit_records.Files) -> Iterator[str]:
    if not files.count:
        yield f"{where}: none"
        return
    yield f"{where}: {units.plural(files.count, 'file')}, {units.size(files.bytes)}"
    for path, size in files.largest[:_NAMED]:
        yield f"  {units.size(size):>8}  {path if path.isprintable() else ascii(path)}"


_USUAL_REASONS = {"every rank exited with code 0", "completed"}
"""Of a run that succeeded: they say nothing more."""


def run_data(run: Run) -> dict[str, Any]:
    """A run as JSON. Times are ISO 8601 in UTC; null where the target has not told them."""
    started, seconds = run.started, run.seconds(now())
    return {
        "run": run.run,
        "name": run.name,
        "backend": run.backend,
        "handle": str(run.handle) if run.handle else None,
        "state": run.state,
        "native": run.native,
        "reason": run.reason,
        "exit_code": run.exit_code,
        "final": State(run.state).final,
        "created": output.when(run.created),
        "started": started and output.when(started),
        "finished": run.finished and output.when(run.finished),
        "queue_seconds": started and round(max(0.0, started - run.created), 3),
        "duration_seconds": seconds if seconds is None else round(seconds, 3),
        "folder": run.folder,
        "output": run.output,
        "bundle": run.bundle,
        "commit": run.revision,
        "cost": cost_data(run),
        "written": written_data(run) if _is_over(run) else None,
        "checkpoints": copied_data(run),
    }


def run_text(run: Run, diagnosis: str | None = None, progress: str = "") -> None:
    """Print all that is known of a run; `diagnosis` is the cause of its failure, if known.

    `progress` is how far it is, if known.
    """
    output.run_line(run)
    for label, value in (
        ("reason", run.reason),
        ("handle", str(run.handle or f"{run.backend}://{run.target}, not confirmed")),
        *_times(run),
        ("cost", cost(run)),
        ("at", progress),
        ("folder", run.folder),
        ("output", run.output),
        ("saved", copied_line(run)),
        ("logs", shell.command("deploykit", "logs", run.run) if run.handle else ""),
        ("cause", diagnosis),
    ):
        if value:
            output.say(f"  {label:<7} {value}")
    if _is_over(run):
        for number, text in enumerate(written_lines(run)):
            output.say(f"  {'' if number else 'files':<7} {text}")


def run_brief(run: Run, diagnosis: str | None = None) -> None:
    """Print what matters once a command has sent, stopped or awaited a run, and how to see more."""
    output.run_line(run)
    verb, succeeded = "status", run.state == State.SUCCEEDED.value
    if succeeded:
        line = files_line(run)
        label, value = ("files", line) if line else ("output", run.output)
    elif diagnosis:
        verb, label, value = "diagnose", "cause", diagnosis
    elif run.reason:
        label, value = "reason", run.reason
        if run.state == State.FAILED.value and run.exit_code:
            verb = "diagnose"  # it shows the last lines of the ranks
    else:
        label, value = "handle", str(run.handle or f"{run.backend}://{run.target}, not confirmed")
    more = shell.command("deploykit", verb, run.run)
    remark = run.reason if succeeded and run.reason not in _USUAL_REASONS else ""
    saved = copied_line(run) if _is_over(run) else ""
    rows = (
        *(("reason", remark), (label, value)),
        *(("saved", saved), ("cost", cost(run)), ("more", more)),
    )
    for name, text in rows:
        if text:
            output.say(f"  {name:<7} {text}")


def _is_over(run: Run) -> bool:
    """Whether a run has ended after it was sent."""
    return State(run.state).final and run.id is not None


def _times(run: Run) -> Iterator[tuple[str, str]]:
    """When a run was sent, when it started and ended, and how long it took."""
    at, seconds = now(), run.seconds(now())
    yield "sent", f"{output.when(run.created)}, {units.span(at - run.created)} ago"
    if run.started is not None and seconds is not None:
        running = "" if run.finished else f", running for {units.span(seconds)}"
        yield "started", f"{output.when(run.started)}{running}"
    if run.finished is not None and State(run.state).final:
        after = f", after {units.span(seconds)}" if seconds else ""
        yield "ended", f"{output.when(run.finished)}{after}"
