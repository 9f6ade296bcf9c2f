"""Problems of a job that are the same on every backend."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from deploykit.job.decode import Plain
from deploykit.job.model import JobSpec, Problem

DEBUGGER = "DEPLOYKIT_DEBUGGER"
"""In `env`: the number of the rank that waits for an editor's debugger."""

SECRET_KINDS = ("env", "file", "ssm", "secretsmanager")

_RESERVED = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
)

_SETTABLE = (
    *("DEPLOYKIT_COLLECT_SECONDS", "DEPLOYKIT_GRACE", "DEPLOYKIT_PORTS"),
    *("DEPLOYKIT_STALL_SECONDS", DEBUGGER),
)


def is_secret(value: str) -> bool:
    """Whether an environment value is a reference, ``secret:KIND:NAME``."""
    return value.startswith("secret:")


def spread_nodes(tree: dict[str, Any]) -> None:
    """Replace ``nodes: 2:4`` in a job by ``nodes: 4`` and ``min_nodes: 2``, in place."""
    resources = tree.get("resources")
    if not isinstance(resources, dict) or not isinstance(resources.get("nodes"), str):
        return
    least, _, most = resources["nodes"].partition(":")
    if least.isdecimal() and most.isdecimal():
        tree["resources"] = {**resources, "nodes": Plain(most), "min_nodes": Plain(least)}


def check_nodes(job: JobSpec) -> Iterator[Problem]:
    """Whether the fewest nodes are at most the most."""
    least, most = job.resources.min_nodes, job.resources.nodes
    if least is not None and least > most:
        message = f"the minimum, {least} nodes, exceeds the maximum, {most}"
        yield Problem("resources.min_nodes", message, f"nodes: {most}:{least}")


def check_launcher(job: JobSpec) -> Iterator[Problem]:
    """What needs torchrun, for a script that starts its own processes."""
    if job.entrypoint.launcher != "python":
        return
    why = "`launcher: python` starts one process on each node, without torchrun"
    if job.resources.min_nodes is not None:
        yield Problem("resources.min_nodes", why, f"nodes: {job.resources.nodes}")
    if (job.resources.processes_per_node or 1) > 1:
        hint = "remove it, and pass the number to the script, for example in entrypoint.args"
        yield Problem("resources.processes_per_node", why, hint)


def check_variables(job: JobSpec) -> Iterator[Problem]:
    """Problems of what becomes variables on the nodes, the same on every backend."""
    yield from _same_variable(job.data)
    kind, *steps = (job.profile or "").split(":")  # those of `torch:FIRST:LAST`
    if steps and int(steps[1]) < int(steps[0]):
        hint = f"for example {kind}:{steps[1]}:{steps[0]}"
        yield Problem("profile", "ends before it begins", hint)
    yield from _check_debugger(job)
    for name, value in job.env.items():
        if name in _RESERVED or (name.startswith("DEPLOYKIT_") and name not in _SETTABLE):
            yield Problem(
                f"env.{name}",
                "is set by the launcher on each rank and cannot be overridden",
                "remove it; the trainer reads what the launcher has set",
            )
        if is_secret(value) and _kind(value) is None:
            yield Problem(
                f"env.{name}",
                f"expected secret:KIND:NAME, with KIND one of {', '.join(SECRET_KINDS)}",
                "for example secret:env:HF_TOKEN",
            )


def _check_debugger(job: JobSpec) -> Iterator[Problem]:
    """Whether the rank that waits for a debugger is one of the job."""
    rank, count = job.env.get(DEBUGGER), job.resources.nodes * job.resources.processes
    if rank is not None and rank not in map(str, range(count)):
        message = f"{rank!r} is no rank of this job"
        yield Problem(f"env.{DEBUGGER}", message, f"its ranks are 0 to {count - 1}")


def check_metrics(job: JobSpec) -> Iterator[Problem]:
    """Problems of the patterns for metrics in the log, which no backend reads."""
    if job.metrics:
        from deploykit.job import metrics  # few jobs have any

        yield from metrics.problems(job.metrics)


def check_track(job: JobSpec) -> Iterator[Problem]:
    """Problems of the trackers, to which this machine sends the metrics."""
    if job.track is not None:
        from deploykit.job import track as checks  # few jobs have any

        yield from checks.problems(job.track)


def _same_variable(names: Iterable[str]) -> Iterator[Problem]:
    """Problems of channels that would share a variable."""
    first: dict[str, str] = {}
    for name in names:
        other = first.setdefault(name.upper(), name)
        if other != name:
            yield Problem(
                f"data.{name}",
                f"sets the same variable as {other!r}, DEPLOYKIT_DATA_{name.upper()}",
                "choose names that differ in more than case",
            )


def _kind(reference: str) -> str | None:
    _, kind, name = (*reference.split(":", 2), "", "")[:3]
    return kind if kind in SECRET_KINDS and name else None
