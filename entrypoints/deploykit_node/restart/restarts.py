"""Why the job was restarted, and how often: one ``exit_records/restart-N.json`` per restart.

The first process that knows the reason writes it before the restart happens; no other process
overwrites it.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from deploykit_node import records
from deploykit_node.cluster import Environ
from deploykit_node.log import now
from deploykit_node.records import RestartRecord

TIME_LIMIT, PREEMPTION, NODE_FAILURE = "time_limit", "preemption", "node_failure"
ERROR = "error"
REQUEST = "request"
"""A user asked for it: `scontrol requeue`, or `scancel --signal=USR2`. No limit counts these."""


def limits(env: Environ) -> dict[str, int]:
    """How often the job may be restarted, by reason; empty if it is never restarted."""
    values: dict[str, int] = json.loads(env.get("DEPLOYKIT_RESTARTS") or "{}")
    return values


def record(env: Environ, number: int, why: str) -> None:
    """Record the reason for restart `number`, unless it is recorded already."""
    path = _path(env, number)
    content: RestartRecord = {"restart": number, "why": why, "time": now()}
    records.write_first(path, content)


def withdraw(env: Environ, number: int) -> None:
    """Delete the record of restart `number`, which does not happen."""
    _path(env, number).unlink(missing_ok=True)


def why(env: Environ, number: int) -> str | None:
    """The reason for restart `number`, if one was recorded."""
    reason = (records.read(_path(env, number)) or {}).get("why")
    return reason if isinstance(reason, str) else None


def counts(env: Environ, upto: int) -> Counter[str]:
    """The number of restarts by reason, among restarts 1 to `upto`.

    A restart without a record counts as a node failure.
    """
    return Counter(why(env, number) or NODE_FAILURE for number in range(1, upto + 1))


def describe(counted: Counter[str]) -> str:
    """``time limit 2, preemption 1``."""
    return ", ".join(f"{why.replace('_', ' ')} {count}" for why, count in counted.items())


def _path(env: Environ, number: int) -> Path:
    return Path(env["DEPLOYKIT_RUN_DIR"], records.FOLDER, f"restart-{number}.json")
