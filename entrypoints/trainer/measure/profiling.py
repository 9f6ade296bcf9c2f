"""Traces of selected steps by torch.profiler, for https://ui.perfetto.dev, and a progress bar."""

from __future__ import annotations

import re
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch.profiler import profile, schedule

from trainer.parallel.process_group import DistributedContext

STEP_RANGE = re.compile(r"(\d+):(\d+)")
"""The option --profile: first and last step."""
COLLECTIVES = ("gloo:", "nccl:")
"""Prefixes of profiler events that are collectives."""


def profiler(
    steps: str | None, completed: int, folder: Path, context: DistributedContext
) -> AbstractContextManager[Any]:
    """Writes a trace of steps FIRST to LAST of every rank to ``trace/rank-N.json`` in `folder`.

    `completed` steps were done before it starts. Its `step` is to be called after each step; None
    if there is nothing to trace.
    """
    match = STEP_RANGE.fullmatch(steps or "")
    first, last = map(int, match.groups()) if match else (0, 0)
    if not completed < first <= last:
        return nullcontext()
    count = last + 1 - first

    def write(trace: profile) -> None:
        path = folder / "trace" / f"rank-{context.rank}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        trace.export_chrome_trace(str(path))
        microseconds = sum(
            event.time_range.elapsed_us()
            for event in trace.events() or []
            if event.name.startswith(COLLECTIVES)
        )
        context.log(
            f"trace of steps {first} to {last} written to {path}; communication took "
            f"{microseconds / 1000 / count:.2f} ms per step, including what overlapped with compute"
        )

    before = first - 1 - completed
    warmup = min(1, before)
    planned = schedule(wait=0, warmup=warmup, active=count, repeat=1, skip_first=before - warmup)
    return profile(schedule=planned, on_trace_ready=write)


def progress_bar(context: DistributedContext, total: int, completed: int) -> Any:
    """A bar of tqdm on rank 0 if standard output is a terminal; otherwise no method acts."""
    if context.is_rank_zero and sys.stdout.isatty():
        try:
            from tqdm import tqdm
        except ImportError:
            print("tqdm is not installed: no progress bar", flush=True)
        else:
            return tqdm(
                total=total,
                initial=completed,
                unit="step",
                file=sys.stdout,
                dynamic_ncols=True,
                leave=False,
            )
    return SimpleNamespace(update=_nothing, clear=_nothing, close=_nothing)


def _nothing() -> None:
    pass
