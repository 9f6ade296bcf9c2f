"""What the ranks of a run use, and their software, as recorded by the launchers."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from deploykit.job.decode import from_json, read_record, whole
from deploykit.job.model import LogLine
from deploykit.observe import exit_records

_MAX_HISTORY_BYTES = 1 << 23
_MAX_NODES = 64
_PACKAGES = "packages: "
"""Begins the line of the launcher that names the packages, as ``name==version``."""
_PLAIN = re.compile(r"[A-Za-z0-9._-]{1,100} [A-Za-z0-9.!+_]{1,100}")
"""A name and a version."""


@dataclass(frozen=True)
class RankUsage:
    """The usage of one rank; None is unknown."""

    rank: int
    node: int
    cpu: float | None
    """Percent of a core, of the program and its child processes."""
    memory: int | None
    """Bytes of the program in RAM (RSS)."""
    gpu: int | None
    """Percent of the time in which a kernel ran on the rank's GPU."""
    gpu_memory: int | None
    gpu_size: int | None
    """Bytes of the rank's GPU: used by all programs, and in all."""


class Sample(NamedTuple):
    """The greatest usage of a rank since the sample before; `time` in seconds since the epoch."""

    time: float
    usage: RankUsage


def history(folder: Path) -> list[Sample]:
    """What the ranks used in all attempts, by time."""
    files = sorted(folder.glob("exit_records/history-*.jsonl"))[:_MAX_NODES]
    samples = (sample for path in files for sample in _samples(path))
    return sorted(samples, key=lambda sample: sample.time)


def _samples(path: Path) -> Iterator[Sample]:
    node = whole(path.stem.rpartition("-")[2]) or 0
    try:
        lines = read_record(path, _MAX_HISTORY_BYTES).splitlines()
    except (OSError, ValueError):  # too large, or a broken link
        return
    for line in lines:
        with contextlib.suppress(ValueError, TypeError, LookupError):  # an incomplete line
            record = from_json(line)
            if time := exit_records.moment(record["time"]):
                yield from (Sample(time.timestamp(), usage) for usage in _ranks(node, record))


def read(folder: Path, attempt: int) -> list[RankUsage]:
    """The last usage of each rank in an attempt, by rank, on unfinished nodes."""
    usage = [
        rank
        for node, record in exit_records.numbered(folder, "usage")
        if record["attempt"] == attempt and not (folder / f"exit_records/node-{node}.json").exists()
        for rank in _ranks(node, record)
    ]
    return sorted(usage, key=lambda rank: rank.rank)


def _ranks(node: int, record: dict[str, Any]) -> Iterator[RankUsage]:
    for name, values in record["ranks"].items():
        yield RankUsage(
            rank=int(name),
            node=node,
            cpu=values.get("cpu"),
            memory=values.get("rss"),
            gpu=values.get("gpu"),
            gpu_memory=values.get("gpu_memory"),
            gpu_size=values.get("gpu_size"),
        )


def packages(folder: Path, remarks: Iterable[LogLine] = ()) -> dict[str, str]:
    """The version of each package of a run by its name: as recorded, or from its log.

    The launcher writes a line into the log of a run whose folder it does not see. Empty if neither
    is there.
    """
    record = exit_records.valid(folder / "exit_records/packages.json", "packages")
    if record:
        pairs = record["packages"].items()
    else:
        lines = (line.text for line in remarks if line.node == 0)
        line = next((text for text in lines if text.startswith(_PACKAGES)), "")
        pairs = [tuple(word.split("==", 1)) for word in line.split()[1:] if "==" in word]
    return {name: text for name, text in pairs if _PLAIN.fullmatch(f"{name} {text}")}


def software(folder: Path) -> list[tuple[str, str]]:
    """Versions on node 0 by name, and its GPUs; nothing where they were not recorded."""
    record = exit_records.valid(folder / "exit_records/software.json", "software")
    if not record:
        return []
    count = Counter(record["gpus"])
    named = ", ".join(f"{number} x {name}" for name, number in count.items())
    pairs = list(record["versions"].items())
    return [*pairs, ("GPUs", named), ("driver", record["driver"])] if named else pairs
