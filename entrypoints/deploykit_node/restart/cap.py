"""The cap on what the job may cost: when its ranks must be told to save and stop.

``DEPLOYKIT_CAP`` says how many seconds the cap pays for. The clock of the first attempt runs on in
the next one: each attempt leaves ``exit_records/billed-N.json``, whose time of change is kept up
to date while it runs, so that an attempt that was killed counts too.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

from deploykit_node import records
from deploykit_node.cluster import Environ
from deploykit_node.restart import slurm_job

VARIABLE = "DEPLOYKIT_CAP"
KEEP = 15.0
"""Seconds between two updates of the time that an attempt has run."""
NOTICE = 90.0
"""Seconds before the end at which the ranks are told to stop, or half of a short time."""
LEAST_NOTICE = 5.0
_FRESH = 3600.0
"""Seconds since its start within which a SageMaker instance was started for this job."""
_INPUT = Path("/opt/ml/input")
_UPTIME = Path("/proc/uptime")


@dataclass(frozen=True)
class Cap:
    """The cap of this attempt, by the monotonic clock."""

    text: str
    """``50.00 USD, at 14.18 USD an hour``."""
    stop_at: float
    """When the ranks get SIGTERM."""
    end_at: float
    """When the last of them is killed."""
    record: Path | None
    """Where the time of this attempt is kept; None on SageMaker, which has one attempt."""

    def at_its_end(self) -> Cap:
        """The same, once the ranks were told to stop: what is left is to kill them."""
        return replace(self, stop_at=self.end_at)

    @property
    def used_up(self) -> bool:
        """Whether too little is left to begin an attempt."""
        return self.end_at - time.monotonic() < 2 * LEAST_NOTICE

    def keep(self) -> None:
        """Update the time that this attempt has run."""
        if self.record is not None:
            with contextlib.suppress(OSError):
                os.utime(self.record)


def begin(env: Environ, node: int) -> Cap | None:
    """The cap of the attempt that begins; None without one.

    Node 0 keeps the time of the job. Others count what it has left of earlier attempts.
    """
    text = env.get(VARIABLE)
    if not text:
        return None
    values = json.loads(text)
    now = time.time()
    began = _began(env, now, node)
    folder, attempt = records.folder(env), records.attempt(env)
    earlier = sum(_billed(folder, number) for number in range(attempt)) if folder else 0.0
    left = float(values["seconds"]) - earlier - (now - began)
    record = None
    if folder is not None and node == 0:
        record = folder / f"billed-{attempt}.json"
        records.write(record, {"attempt": attempt, "began": began})
    return _cap(f"{values['cap']}, at {values['hourly']} an hour", left, record)


def _cap(text: str, left: float, record: Path | None) -> Cap:
    """The cap where `left` seconds are left."""
    now = time.monotonic()
    notice = max(LEAST_NOTICE, min(NOTICE, left / 2))
    return Cap(text, now + left - notice, now + left, record)


def _billed(folder: Path, attempt: int) -> float:
    """Seconds that an earlier attempt has run, as its first node has kept them."""
    path = folder / f"billed-{attempt}.json"
    record = records.read(path)
    return max(0.0, path.stat().st_mtime - record["began"] + KEEP) if record else 0.0


def _began(env: Environ, now: float, node: int) -> float:
    """When billing began (`time.time`), which is before this launcher started."""
    if "SM_HOSTS" in env:
        return min(now, _sagemaker_began(now))
    start = env.get("SLURM_JOB_START_TIME", "")  # Slurm 22.05 does not set it
    if start.isdecimal():
        return min(now, float(start))
    if "SLURM_JOB_ID" in env and node == 0:  # one node asks, for all
        job = slurm_job.query(env)
        return now - job.ran if job else now
    return now


def _sagemaker_began(now: float) -> float:
    """At the latest when the service brought the input, at the earliest when the machine started.

    The service bills from the download of image and data. An instance of a warm pool started long
    before; a fresh one shortly before, so that its start is the safe choice.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        up = float(_UPTIME.read_text().split()[0])
        if up < _FRESH:
            return now - up
    times = [now]
    for path in (*_INPUT.glob("config/*"), *_INPUT.glob("data/*")):
        with contextlib.suppress(OSError):
            times.append(path.stat().st_ctime)
    return max(min(times), now - _FRESH)
