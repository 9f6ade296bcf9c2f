"""Why a job was started again, and how often: ``ends/restart-<N>.json``, one file a restart.

Whoever knows the reason first writes it down, before the restart happens; nobody writes it over.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from pathlib import Path

import ends
import private

Environ = ends.Environ

TIME_LIMIT, PREEMPTION, NODE_FAILURE = "time_limit", "preemption", "node_failure"
ERROR = "error"
REQUEST = "request"
"""Somebody asked: `scontrol requeue`, or `scancel --signal=USR2`. No limit counts these."""


def limits(env: Environ) -> dict[str, int]:
    """How often the job may be started again, by reason; nothing where nobody would do it."""
    found: dict[str, int] = json.loads(env.get("DEPLOYKIT_RESTARTS") or "{}")
    return found


def note(env: Environ, number: int, why: str) -> None:
    """Say why restart `number` happens, unless that has been said."""
    path = _file(env, number)
    record = {"restart": number, "why": why, "time": ends.now()}
    scratch = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}")
    private.write(scratch, json.dumps(record) + "\n")
    with contextlib.suppress(FileExistsError):
        os.link(scratch, path)
    scratch.unlink()


def withdraw(env: Environ, number: int) -> None:
    """Restart `number` does not happen after all."""
    _file(env, number).unlink(missing_ok=True)


def why(env: Environ, number: int) -> str | None:
    """The reason for restart `number`, where somebody knew it."""
    reason = (ends.read(_file(env, number)) or {}).get("why")
    return reason if isinstance(reason, str) else None


def counts(env: Environ, upto: int) -> Counter[str]:
    """How many of the restarts 1 to `upto` had each reason."""
    return Counter(why(env, number) or NODE_FAILURE for number in range(1, upto + 1))


def words(counted: Counter[str]) -> str:
    """``time limit 2, preemption 1``."""
    return ", ".join(f"{why.replace('_', ' ')} {count}" for why, count in counted.items())


def _file(env: Environ, number: int) -> Path:
    return Path(env["DEPLOYKIT_RUN_DIR"], "ends", f"restart-{number}.json")
