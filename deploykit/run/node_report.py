"""One page about a node that failed, for those who repair it: when, what was seen, what to do."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from deploykit.lib import shell
from deploykit.lib.errors import DeploykitError
from deploykit.run import registry
from deploykit.run.excluded_nodes import Node
from deploykit.run.log_selection import Selection, of_run
from deploykit.run.registry import Run

_LINES = 12
"""Most log lines of a run that are shown, and most runs."""
_READ = 20_000
"""Lines of a run's log that are searched; the preflight is at their beginning."""
_REASON = 60
"""Characters of the reason in the state of a Slurm node, whose lists cut it off anyway."""
_LOOK = {
    "GPU": "nvidia-smi -q -d ECC,ROW_REMAPPER,PERFORMANCE,TEMPERATURE; dcgmi diag -r 3",
    "DCGM": "dcgmi diag -r 3",
    "Infini": "ibstat; perfquery",
    "EFA": "fi_info -p efa; rdma -p statistic show",
    "write into": "df -h; mount; dmesg --level=err,crit",
    "cannot be reached": "ping it, and compare its firewall, routes and cables with its neighbors'",
    "is slow": "ethtool its interface, tc qdisc show, and its load",
}
"""What to look at, by a part of the reason."""


def lines(node: Node) -> Iterator[str]:
    """The page, a line at a time. Logs that are gone are left out."""
    state = f"excluded until {_day(node.until)}" if node.is_left_out else "still used: failed once"
    yield f"{node.node} of {node.target}: {state}"
    yield ""
    yield f"Reason: {node.reason}"
    for attempt in node.runs[-_LINES:]:
        run, _, number = attempt.rpartition(".")
        row = registry.lookup(run).get(run)
        if row is not None:
            yield ""
            yield f"Run {run}, attempt {number}, submitted {_minute(row.created)}:"
            yield from (f"  {text}" for text in islice(_seen(row, node.node), _LINES))
    yield ""
    yield from _to_do(node)


def _seen(row: Run, host: str) -> Iterator[str]:
    """What the preflight of a run says of a node; else its record."""
    try:
        log = of_run(row, Selection(node=0), follow=False)
        texts = [line.text for line in islice(log, _READ) if _is_about(line.text, host)]
    except (DeploykitError, OSError):
        texts = []
    yield from dict.fromkeys(texts)
    if not texts:
        yield f"its log says no more; records are in {Path(row.folder, 'exit_records')}"


def _is_about(text: str, host: str) -> bool:
    named = text.replace("(", " ").replace(",", " ").replace(")", " ").split()
    return text.startswith("preflight: ") and host in named


def _to_do(node: Node) -> Iterator[str]:
    yield "To do:"
    steps = list(_steps(node))
    yield from (f"  {number}. {step}" for number, step in enumerate(steps, 1))


def _steps(node: Node) -> Iterator[str]:
    is_slurm, name = node.target.startswith("slurm://"), f"NodeName={node.node}"
    if is_slurm:
        why = f"Reason={node.reason[:_REASON]}"
        drain = shell.command("scontrol", "update", name, "State=DRAIN", why)
        yield f"Keep all jobs off it: {drain}"
    for part, what in _LOOK.items():
        if part in node.reason:
            yield f"Look there: {what}"
            break
    else:
        yield "Look there: dmesg -T, its load, its disks"
    if is_slurm:
        resume = shell.command("scontrol", "update", name, "State=RESUME")
        yield f"Once it is repaired: {resume}"
    yield f"Then use it again: {shell.command('deploykit', 'nodes', '--clear', node.node)}"


def _day(seconds: float) -> str:
    return dt.datetime.fromtimestamp(seconds, dt.UTC).strftime("%Y-%m-%d")


def _minute(seconds: float) -> str:
    return dt.datetime.fromtimestamp(seconds, dt.UTC).strftime("%Y-%m-%d %H:%M UTC")
