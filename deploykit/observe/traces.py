"""Traces of PyTorch's profiler, one for each rank: what took the time, and who waited.

The format is Chrome's, with times in microseconds:
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import gzip
import math
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from deploykit.job.decode import from_json, whole
from deploykit.lib.errors import BackendUnavailable

FOLDER = "profile"
"""Folder of the traces in a run folder."""
TRACES = "rank-*.trace.json.gz"
REPORTS = "rank-*.nsys-rep"
"""Reports of Nsight Systems, which its own programs read."""
SNAPSHOTS = "rank-*.memory.pickle"
"""What was allocated on a GPU that ran out of memory."""
_MAX_TRACE_BYTES = 1 << 28
"""Bytes of an unpacked trace that are read."""
_MAX_MICROSECONDS = 1e12
"""Microseconds of an event, some ten days."""
_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}
_CPU = {"cpu_op", "user_annotation"}
_MIN_DIFFERENCE = 0.1
"""Difference of the shares of waiting, from which a rank counts as slow."""
_WAITING = ("gloo:", "nccl:", "mpi:", "ucc:", "c10d::")
"""How names of collectives begin, as c10d records them on the CPU."""
_NOT_OPERATORS = ("Optimizer.", "ProfilerStep#", "DistributedDataParallel.")


class Span(NamedTuple):
    """An event: where it ran, and from when to when in microseconds."""

    thread: str
    name: str
    start: float
    end: float


@dataclass(frozen=True)
class RankProfile:
    """What a rank did in the profiled steps, in seconds."""

    rank: int
    file: Path
    seconds: float
    """From the first to the last event."""
    computing: float
    """While an operator ran: on the GPU if there is one, else on any CPU thread."""
    communicating: float
    """While a collective ran."""
    waiting: float
    """While a collective ran, and nothing else."""
    on_gpu: bool
    operators: dict[str, tuple[int, float]] = field(default_factory=dict)
    """By name: calls and self time."""

    @property
    def idle(self) -> float:
        """Seconds in which neither an operator nor a collective ran."""
        return max(0.0, self.seconds - self.computing - self.waiting)


def files(folder: Path, pattern: str = TRACES) -> list[Path]:
    """The traces in a folder, or other files of profiles, by rank."""
    ranked = ((_rank(path), path) for path in folder.glob(pattern))
    return [path for _, path in sorted((rank, path) for rank, path in ranked if rank is not None)]


def read(path: Path) -> RankProfile:
    """The profile of a rank. Raises BackendUnavailable if the trace is incomplete or too large."""
    spans = list(_spans(_events(path)))
    on_gpu = any(category in _GPU for category, _ in spans)
    operators, collectives = list[Span](), list[Span]()
    for category, one in spans:
        if category in (_GPU if on_gpu else _CPU):
            if one.name.startswith((*_WAITING, "nccl")) or "ncclDevKernel" in one.name:
                collectives.append(one)
            elif not one.name.startswith(_NOT_OPERATORS):
                operators.append(one)
    computing, communicating = _union(operators), _union(collectives)
    both = _length(_union([*operators, *collectives]))
    ends = [time for _, one in spans for time in (one.start, one.end)]
    return RankProfile(
        rank=_rank(path) or 0,
        file=path,
        seconds=(max(ends) - min(ends)) / 1e6 if ends else 0.0,
        computing=_length(computing) / 1e6,
        communicating=_length(communicating) / 1e6,
        waiting=(both - _length(computing)) / 1e6,
        on_gpu=on_gpu,
        operators=_own_times(operators),
    )


def _rank(path: Path) -> int | None:
    """The number in ``rank-3.trace.json.gz``."""
    return whole(path.name[5:].partition(".")[0])


def slowest(ranks: Sequence[RankProfile]) -> RankProfile | None:
    """The rank that clearly waits least for the others, if any."""
    if len(ranks) < 2 or not all(one.seconds for one in ranks):  # noqa: PLR2004 - a comparison
        return None
    shares = sorted((one.waiting / one.seconds, number) for number, one in enumerate(ranks))
    least, most = shares[0][0], shares[-1][0]
    return ranks[shares[0][1]] if most - least >= _MIN_DIFFERENCE else None


def costliest(ranks: Sequence[RankProfile], count: int) -> list[tuple[str, int, float]]:
    """Name, calls and seconds of the operators with the most self time over all ranks."""
    calls: Counter[str] = Counter()
    seconds: dict[str, float] = defaultdict(float)
    for one in ranks:
        for name, (times, own) in one.operators.items():
            calls[name] += times
            seconds[name] += own
    by_time = sorted(seconds.items(), key=lambda item: -item[1])
    return [(name, calls[name], own) for name, own in by_time[:count]]


def _events(path: Path) -> list[Any]:
    try:
        with gzip.open(path) as file:
            text = file.read(_MAX_TRACE_BYTES + 1)
        data = from_json(text) if len(text) <= _MAX_TRACE_BYTES else None
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise BackendUnavailable(f"{path} is not a complete trace: {error}") from None
    if data is None:
        hint = "profile fewer steps, or open the trace in https://ui.perfetto.dev"
        message = f"{path} is larger than {_MAX_TRACE_BYTES >> 20} MiB when decompressed"
        raise BackendUnavailable(message, hint=hint)
    events = data.get("traceEvents") if isinstance(data, dict) else None
    if not isinstance(events, list):
        raise BackendUnavailable(f"{path} contains no trace events")
    return events


def _spans(events: Iterable[Any]) -> Iterator[tuple[str, Span]]:
    """Each complete event of a known kind, with its category."""
    for event in events:
        match event:
            case {
                "ph": "X",
                "cat": str(category),
                "name": str(name),
                "ts": int() | float() as start,
                "dur": int() | float() as length,
            } if (
                category in _GPU | _CPU and math.isfinite(start) and 0 <= length < _MAX_MICROSECONDS
            ):
                thread = f"{event.get('pid')}/{event.get('tid')}"
                yield category, Span(thread, name, float(start), float(start + length))


def _union(spans: Iterable[Span]) -> list[tuple[float, float]]:
    """The times that any span covers, as disjoint intervals in their order."""
    covered: list[tuple[float, float]] = []
    for start, end in sorted((one.start, one.end) for one in spans):
        if covered and start <= covered[-1][1]:
            covered[-1] = covered[-1][0], max(end, covered[-1][1])
        else:
            covered.append((start, end))
    return covered


def _length(intervals: Iterable[tuple[float, float]]) -> float:
    return sum(end - start for start, end in intervals)


def _own_times(spans: Iterable[Span]) -> dict[str, tuple[int, float]]:
    """By name: how often, and seconds without the spans inside on the same thread."""
    by_thread: dict[str, list[Span]] = defaultdict(list)
    for one in spans:
        by_thread[one.thread].append(one)
    calls: Counter[str] = Counter()
    own: dict[str, float] = defaultdict(float)
    for ordered in by_thread.values():
        open_ones: list[Span] = []
        for one in sorted(ordered, key=lambda span: (span.start, -span.end)):
            while open_ones and open_ones[-1].end <= one.start:
                open_ones.pop()
            if open_ones:
                own[open_ones[-1].name] -= (one.end - one.start) / 1e6
            calls[one.name] += 1
            own[one.name] += (one.end - one.start) / 1e6
            open_ones.append(one)
    return {name: (calls[name], max(0.0, seconds)) for name, seconds in own.items()}
