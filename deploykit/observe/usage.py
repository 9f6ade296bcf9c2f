"""What the ranks of a run use, and their software, as recorded by the launchers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from deploykit.job.decode import from_json, read_record, whole
from deploykit.observe import exit_records

_MAX_HISTORY_BYTES = 1 << 23
_MAX_NODES = 64
_MAX_NUMBER = 10**18
_MAX_NAMES, _MAX_CHARACTERS = 64, 200
"""Of versions and GPUs, and characters of each."""


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
    node = whole(path.stem.rpartition("-")[2])
    try:
        lines = read_record(path, _MAX_HISTORY_BYTES).splitlines()
    except (OSError, ValueError):
        return
    for line in lines:
        try:
            record = from_json(line)
        except ValueError:
            continue
        time = exit_records.moment(record.get("time")) if isinstance(record, dict) else None
        if time is not None and node is not None and isinstance(record.get("ranks"), dict):
            yield from (Sample(time.timestamp(), usage) for usage in _ranks(node, record))


def read(folder: Path, attempt: int) -> list[RankUsage]:
    """The last usage of each rank in an attempt, by rank, on unfinished nodes."""
    ended = {path.name.removeprefix("node") for path in folder.glob("exit_records/node-*.json")}
    usage = [
        rank
        for node, record in exit_records.numbered(folder, "usage")
        if record["attempt"] == attempt and f"-{node}.json" not in ended
        for rank in _ranks(node, record)
    ]
    return sorted(usage, key=lambda rank: rank.rank)


def _ranks(node: int, record: dict[str, Any]) -> Iterator[RankUsage]:
    for name, values in record["ranks"].items():
        rank = whole(name)
        if rank is not None and isinstance(values, dict):
            numbers = {key: _number(values.get(key)) for key in _KEYS}
            whole_numbers = {key: int(n) for key, n in numbers.items() if n is not None}
            yield RankUsage(
                rank=rank,
                node=node,
                cpu=numbers["cpu"],
                memory=whole_numbers.get("rss"),
                gpu=whole_numbers.get("gpu"),
                gpu_memory=whole_numbers.get("gpu_memory"),
                gpu_size=whole_numbers.get("gpu_size"),
            )


_KEYS = ("cpu", "rss", "gpu", "gpu_memory", "gpu_size")


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and 0 <= value <= _MAX_NUMBER else None


def software(folder: Path) -> list[tuple[str, str]]:
    """Versions on node 0 by name, and its GPUs; nothing where they were not recorded."""
    record = exit_records.valid(folder / "exit_records/software.json", "software")
    if not record:
        return []
    count = Counter(str(name)[:_MAX_CHARACTERS] for name in record["gpus"][:_MAX_NAMES])
    named = ", ".join(f"{number} x {name}" for name, number in count.items())
    versions = list(record["versions"].items())[:_MAX_NAMES]
    pairs = [(str(name), str(version)) for name, version in versions]
    pairs += [("GPUs", named), ("driver", record["driver"])] if named else []
    return [(name[:_MAX_CHARACTERS], value[:_MAX_CHARACTERS]) for name, value in pairs]
