"""What the ranks of a run use, and with which software, as the launchers have recorded."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from deploykit.job.decode import from_json, read_record, whole

_LARGEST = 1 << 18
_LARGEST_HISTORY = 1 << 23
_MOST_NODES = 64
_MOST = 10**18
_MOST_NAMES, _LONGEST = 64, 200
"""Of versions and GPUs, and characters of each."""


@dataclass(frozen=True)
class RankUsage:
    """The usage of one rank. What is not known is None."""

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
    """Bytes that are used of the rank's GPU, by all programs, and that it has."""


class Sample(NamedTuple):
    """The greatest usage of a rank since the sample before; `time` in seconds since the epoch."""

    time: float
    usage: RankUsage


def history(folder: Path) -> list[Sample]:
    """What the ranks used over time, of all attempts, in the order of time."""
    files = sorted(folder.glob("exit_records/history-*.jsonl"))[:_MOST_NODES]
    return sorted((one for path in files for one in _samples(path)), key=lambda one: one.time)


def _samples(path: Path) -> Iterator[Sample]:
    try:
        lines = read_record(path, _LARGEST_HISTORY).splitlines()
    except (OSError, ValueError):
        return
    for line in lines:
        with contextlib.suppress(ValueError, OverflowError):
            data = from_json(line)
            time = data.get("time") if isinstance(data, dict) else None
            if isinstance(time, str):
                seconds = datetime.fromisoformat(time).timestamp()
                yield from (Sample(seconds, one) for one in _ranks(path, data))


def read(folder: Path, attempt: int) -> list[RankUsage]:
    """The last usage of each rank in an attempt, by rank; of nodes that have not ended."""
    ended = {path.name.removeprefix("node") for path in folder.glob("exit_records/node-*.json")}
    paths = folder.glob("exit_records/usage-*.json")
    running = (path for path in paths if path.name.removeprefix("usage") not in ended)
    usage = [one for path in running for one in _of_node(path, attempt)]
    return sorted(usage, key=lambda one: one.rank)


def _of_node(path: Path, attempt: int) -> Iterator[RankUsage]:
    try:
        data = from_json(read_record(path, _LARGEST))
    except (OSError, ValueError):
        return
    if isinstance(data, dict) and data.get("attempt") == attempt:
        yield from _ranks(path, data)


def _ranks(path: Path, data: dict[str, Any]) -> Iterator[RankUsage]:
    """The ranks in a record, whose file has the number of their node in its name."""
    node = whole(path.stem.rpartition("-")[2])
    match data:
        case {"ranks": dict(ranks)}:
            for name, one in ranks.items():
                rank = whole(name)
                if rank is not None and node is not None and isinstance(one, dict):
                    yield _usage(rank, node, one)


def software(folder: Path) -> list[tuple[str, str]]:
    """Versions on node 0 by name, and its GPUs; nothing where they were not recorded."""
    try:
        data = from_json(read_record(folder / "exit_records/software.json", _LARGEST))
    except (OSError, ValueError):
        return []
    match data:
        case {"versions": dict(versions), "gpus": list(gpus), "driver": str(driver)}:
            count = Counter(str(name)[:_LONGEST] for name in gpus[:_MOST_NAMES])
            named = ", ".join(f"{number} x {name}" for name, number in count.items())
            pairs = [(str(name), str(one)) for name, one in [*versions.items()][:_MOST_NAMES]]
            pairs += [("GPUs", named), ("driver", driver)] if named else []
            return [(name[:_LONGEST], value[:_LONGEST]) for name, value in pairs]
    return []


def _usage(rank: int, node: int, one: dict[str, Any]) -> RankUsage:
    def number(name: str) -> int | None:
        value = one.get(name)
        return value if isinstance(value, int) and 0 <= value <= _MOST else None

    value = one.get("cpu")
    cpu = float(value) if isinstance(value, int | float) and 0 <= value <= _MOST else None
    sizes = (number("rss"), number("gpu"), number("gpu_memory"), number("gpu_size"))
    return RankUsage(rank, node, cpu, *sizes)
