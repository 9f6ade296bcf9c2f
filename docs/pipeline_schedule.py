"""Simulate the schedules of a pipeline, for the picture of the bubble.

A forward pass of a micro-batch through all stages of a rank takes 1, a backward pass 2; sending
takes no time. The order on each rank is that of torch.distributed.pipelining's ScheduleGPipe,
Schedule1F1B and ScheduleInterleaved1F1B.
"""

# ruff: noqa: INP001

from __future__ import annotations

from dataclasses import dataclass

SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2}
"""Stages on each rank, by schedule."""
_Work = tuple[bool, int, int]
"""Forward or not, stage, micro-batch."""


@dataclass(frozen=True)
class Slot:
    """One pass of one micro-batch through one stage."""

    rank: int
    stage: int
    piece: int
    forward: bool
    start: float
    length: float


@dataclass(frozen=True)
class Schedule:
    """One step of a pipeline."""

    slots: tuple[Slot, ...]
    length: float
    bubble: float
    """Share of the step in which a rank waits, averaged over the ranks."""


def simulate(name: str, ranks: int, pieces: int) -> Schedule:
    """Run the orders of all ranks against each other."""
    stages_each = SCHEDULES[name]
    todo = [list(_order(name, rank, ranks, pieces)) for rank in range(ranks)]
    free, done, slots = [0.0] * ranks, dict[_Work, float](), list[Slot]()
    while any(todo):
        for rank, rest in enumerate(todo):
            ready = _ready(rest[0], done, ranks * stages_each) if rest else None
            if ready is not None:
                work = forward, stage, piece = rest.pop(0)
                start, length = max(free[rank], ready), (1 if forward else 2) / stages_each
                slots.append(Slot(rank, stage, piece, forward, start, length))
                free[rank] = done[work] = start + length
    length = max(free)
    busy = sum(slot.length for slot in slots)
    return Schedule(tuple(slots), length, 1 - busy / (ranks * length))


def _ready(work: _Work, done: dict[_Work, float], stages: int) -> float | None:
    """When the inputs of `work` are there, or None while they are not computed yet."""
    forward, stage, piece = work
    if forward:
        return 0 if stage == 0 else done.get((True, stage - 1, piece))
    if stage == stages - 1:
        return done.get((True, stage, piece))
    return done.get((False, stage + 1, piece))


def _order(name: str, rank: int, ranks: int, pieces: int) -> list[_Work]:
    """What a rank does, in order."""
    each = SCHEDULES[name]
    count = pieces * each
    forward = [_nth(number, rank, (ranks, each), forward=True) for number in range(count)]
    backward = [_nth(number, rank, (ranks, each), forward=False) for number in range(count)]
    if name == "gpipe":
        return forward + backward
    warm_up = ranks - rank - 1 if each == 1 else (ranks - rank - 1) * 2 + (each - 1) * ranks
    warm_up = min(warm_up, count)
    steady = [work for pair in zip(forward[warm_up:], backward, strict=False) for work in pair]
    return [*forward[:warm_up], *steady, *backward[count - warm_up :]]


def _nth(number: int, rank: int, sizes: tuple[int, int], *, forward: bool) -> _Work:
    """The pass at a position of a rank's forward or backward passes."""
    ranks, each = sizes
    if each == 1:
        return forward, rank, number
    block, within = divmod(number, ranks * each)
    local, piece = divmod(within, ranks)
    local = local if forward else each - 1 - local
    return forward, rank + local * ranks, block * ranks + piece
