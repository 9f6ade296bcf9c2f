"""Which rank keeps the others waiting: the flight recorder's dumps of all ranks, compared.

An operation is a number in a process group. Until all ranks of the group have called it, it waits.
The ranks that have not called it, and wait for no other rank themselves, are where a run hangs.
https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from deploykit.diagnose.dumps import Dump
from deploykit.diagnose.scan import RawLine
from deploykit.observe import stacks

_NAMED = 4
"""Maximum number of ranks in a sentence."""
_COMPLETED = "completed"
_ELEMENTS = {
    **dict.fromkeys(("all_reduce", "allreduce_coalesced", "all_to_all"), (False, False)),
    **dict.fromkeys(
        ("all_gather", "_all_gather_base", "all_gather_into_tensor_coalesced"), (True, False)
    ),
    **dict.fromkeys(
        ("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced"), (False, True)
    ),
}
"""By operation: whether all inputs of N ranks times N are as many elements as all outputs, or all
outputs times N as many as all inputs."""
_FREE = {
    "all_to_all": ("input_sizes", "output_sizes"),
    "broadcast": ("input_dtypes",),
    "gather": ("output_sizes", "output_dtypes"),
    "scatter": ("input_sizes", "input_dtypes"),
}
"""By operation, what may differ between the ranks of a group."""
_PAIR = re.compile(r"(?:send \d{1,9}->(?P<to>\d{1,9})|recv \d{1,9}<-(?P<from>\d{1,9}))")

_Call = dict[str, Any]


class _Group(NamedTuple):
    """A process group; groups that were split from one another share a name."""

    name: str
    ranks: tuple[int, ...]


class _Number(NamedTuple):
    group: _Group
    sequence: int


_Calls = Mapping[int, Sequence[_Call]]
"""What each rank called under a number: several records if they are coalesced."""


class Divergence(NamedTuple):
    """Where the ranks of a run diverged: a sentence, the ranks that it names, and its record."""

    path: Path
    record: int
    ranks: tuple[int, ...]
    text: str

    @property
    def rank(self) -> int | None:
        """The first rank that it names, if any."""
        return self.ranks[0] if self.ranks else None

    @property
    def line(self) -> RawLine:
        """The divergence as a line of a log, which the rules match."""
        mark = "" if self.rank is None else f"[rank{self.rank}]: "
        text = f"{mark}flight recorder: {self.text}"
        return RawLine(self.record, text.encode(errors="replace"), hit=True)


def divergences(recorded: Sequence[Dump]) -> list[Divergence]:
    """Where the ranks of a run diverged; at least one sentence if there are dumps.

    Operations that have completed are compared last: they are not what the ranks wait in.
    """
    if not recorded:
        return []
    run = _Run({dump.rank: dump for dump in recorded})
    for find in (run.mismatches, run.missing, run.unmatched, run.states, run.completed):
        if divergences := _merged(find()):
            return divergences
    first = recorded[0]
    absent = [rank for rank in run.members if rank not in run.dumps]
    last = "; ".join(f"rank {one.rank}'s last call: {_last(one)}" for one in recorded[:_NAMED])
    if absent:
        text = f"no dump of {stacks.label(absent)}, which exited early or hung; {last}"
        return [Divergence(first.path, _record(first), tuple(absent), text)]
    text = f"all ranks called the same collectives; last call: {_last(first)}"
    return [Divergence(first.path, _record(first), (), text)]


class _Found(NamedTuple):
    """A divergence of one rank, or of none; its number stands between two parts of a sentence."""

    path: Path
    record: int
    rank: int | None
    before: str
    after: str


def _merged(divergences: Iterator[_Found]) -> list[Divergence]:
    """The divergences, those that differ in the rank only as one."""
    merged: dict[tuple[str, str], tuple[_Found, list[int]]] = {}
    for one in divergences:
        _, ranks = merged.setdefault((one.before, one.after), (one, []))
        ranks += [] if one.rank is None else [one.rank]
    return [
        Divergence(
            one.path,
            one.record,
            tuple(sorted(ranks)),
            f"{one.before}{stacks.label(sorted(ranks)) if ranks else ''}{one.after}",
        )
        for one, ranks in merged.values()
    ]


class _Run:
    """The dumps of a run, by rank, and what its ranks called."""

    def __init__(self, dumps: Mapping[int, Dump]) -> None:
        self.dumps = dumps
        self._groups = {
            (rank, name): _Group(name, tuple(sorted(map(int, re.findall(r"\d+", group["ranks"])))))
            for rank, dump in dumps.items()
            for name, group in dump.groups.items()
        }
        self.members = sorted({rank for group in self._groups.values() for rank in group.ranks})
        calls: dict[_Number, dict[int, list[_Call]]] = defaultdict(lambda: defaultdict(list))
        self._reached: dict[tuple[int, _Group], int] = {}
        """The last number that a rank called in a group."""
        self._pairs: list[tuple[int, _Call]] = []
        for rank, dump in dumps.items():
            for call in dump.entries:
                if call["is_p2p"]:
                    self._pairs.append((rank, call))
                elif group := self._groups.get((rank, call["process_group"][0])):
                    calls[_Number(group, call["collective_seq_id"])][rank].append(call)
            for name, last in dump.enqueued.items():
                if group := self._groups.get((rank, name)):
                    self._reached[rank, group] = last
        for number, by_rank in calls.items():
            for rank in by_rank:
                reached = self._reached.get((rank, number.group), -1)
                self._reached[rank, number.group] = max(number.sequence, reached)
        self._calls = dict(sorted(calls.items(), key=lambda item: _began(item[1])))
        self._pending = {
            number: by_rank for number, by_rank in self._calls.items() if _is_pending(by_rank)
        }

    def mismatches(self) -> Iterator[_Found]:
        """The first operation of each group in which the ranks called something else."""
        return self._compared(
            self._pending, lambda *at: [*self._other_calls(*at)] or self._wrong_sizes(*at)
        )

    def states(self) -> Iterator[_Found]:
        """The first operation of each group that is in another state on some ranks."""
        return self._compared(self._pending, self._other_states)

    def completed(self) -> Iterator[_Found]:
        """The same among operations that have completed."""
        return self._compared(self._calls, self._other_calls)

    def _compared(
        self,
        numbers: Mapping[_Number, _Calls],
        differing: Callable[[_Number, Mapping[int, _Call]], Iterable[_Found]],
    ) -> Iterator[_Found]:
        seen: set[_Group] = set()
        for number, by_rank in numbers.items():
            for position in range(max(map(len, by_rank.values()))):
                if number.group in seen:
                    break
                at = {rank: each[position] for rank, each in by_rank.items() if each[position:]}
                divergences = list(differing(number, at))
                seen.update([number.group] if divergences else [])
                yield from divergences

    def _other_calls(self, number: _Number, calls: Mapping[int, _Call]) -> Iterator[_Found]:
        deviants, usual = _deviants(calls, _kind)
        for rank, call in deviants.items():
            text = f" ran {_described(call)} as {_of(number, usual)}; the others ran "
            yield self._found(rank, f"{text}{_described(usual)}", call)

    def _other_states(self, number: _Number, calls: Mapping[int, _Call]) -> Iterator[_Found]:
        deviants, usual = _deviants(calls, lambda call: call["state"])
        for rank, call in deviants.items():
            before = f"{_of(number, usual)} ({_described(usual)}) is {call['state']} on "
            yield self._found(rank, f" and {usual['state']} on the others", call, before)

    def _wrong_sizes(self, number: _Number, calls: Mapping[int, _Call]) -> Iterator[_Found]:
        """An operation whose elements do not add up over all ranks of the group."""
        first, model = next(iter(calls.items()))
        name, size = _name(model), len(calls)
        if name not in _ELEMENTS or size < len(number.group.ranks):
            return
        given, got = (
            sum(math.prod(sizes) for call in calls.values() for sizes in call[f"{way}_sizes"])
            for way in ("input", "output")
        )
        gathers, scatters = _ELEMENTS[name]
        if given * (size if gathers else 1) != got * (size if scatters else 1):
            text = f"{_of(number, model)} ({_described(model)}) has {given} input elements and "
            record = _record(self.dumps[first], model)
            yield _Found(self.dumps[first].path, record, None, f"{text}{got} output elements", "")

    def missing(self) -> Iterator[_Found]:
        """The ranks for which the others wait, and that wait for no other rank themselves.

        If each of them waits for another one, all are named.
        """
        absent: dict[int, list[_Number]] = defaultdict(list)
        waiting: set[int] = set()
        for number, by_rank in self._pending.items():
            late = [
                rank
                for rank in number.group.ranks
                if rank not in by_rank
                and self._reached.get((rank, number.group), -1) < number.sequence
            ]
            for rank in late:
                absent[rank].append(number)
            if late:
                waiting.update(rank for rank, calls in by_rank.items() if _is_open(calls))
        for rank in [rank for rank in absent if rank not in waiting] or absent:
            number = absent[rank][0]
            model = next(calls[0] for calls in self._pending[number].values() if _is_open(calls))
            yield self._late(rank, f"never made {_of(number, model)} ({_described(model)})")

    def unmatched(self) -> Iterator[_Found]:
        """The ranks that have not called their part of a send or receive that waits for them."""
        wanted: dict[tuple[int, int], _Call] = {}
        for rank, call in self._pairs:
            group = self._groups.get((rank, call["process_group"][0]))
            match = _PAIR.search(call["profiling_name"])
            if call["state"] != _COMPLETED and group and match:
                peer = int(match["to"] or match["from"])
                if peer < len(group.ranks):
                    wanted.setdefault((rank, group.ranks[peer]), call)
        alone = {pair: call for pair, call in wanted.items() if pair[::-1] not in wanted}
        waiting = {rank for rank, _ in alone}
        late = {peer: (rank, call) for (rank, peer), call in alone.items()}
        for peer in [rank for rank in late if rank not in waiting] or late:
            rank, call = late[peer]
            yield self._late(
                peer, f"never called the counterpart of {_described(call)} on rank {rank}"
            )

    def _late(self, rank: int, text: str) -> _Found:
        if rank in self.dumps:
            return self._found(rank, f" {text}; last call: {_last(self.dumps[rank])}")
        path = next(iter(self.dumps.values())).path
        return _Found(path, 1, rank, "no dump of ", f", which exited early or hung: it {text}")

    def _found(self, rank: int, after: str, call: _Call | None = None, before: str = "") -> _Found:
        dump = self.dumps[rank]
        return _Found(dump.path, _record(dump, call), rank, before, after)


def _deviants(
    calls: Mapping[int, _Call], kind: Callable[[_Call], object]
) -> tuple[dict[int, _Call], _Call]:
    """The calls of the ranks that differ from most others, and one of those."""
    kinds = {rank: kind(call) for rank, call in calls.items()}
    usual = Counter(kinds.values()).most_common(1)[0][0]
    deviants = {rank: call for rank, call in calls.items() if kinds[rank] != usual}
    return deviants, next(calls[rank] for rank in calls if kinds[rank] == usual)


def _began(by_rank: _Calls) -> int:
    return min(int(call["time_created_ns"]) for calls in by_rank.values() for call in calls)


def _is_open(calls: Sequence[_Call]) -> bool:
    return any(call["state"] != _COMPLETED for call in calls)


def _is_pending(by_rank: _Calls) -> bool:
    return any(map(_is_open, by_rank.values()))


def _kind(call: _Call) -> tuple[str, ...]:
    """What must be the same on all ranks of a group; the root of a gather has more than others."""
    name = _name(call)
    free = _FREE.get(name, ())
    fields = ("input_sizes", "output_sizes", "input_dtypes", "output_dtypes")
    return name, *(repr(call[field]) for field in fields if field not in free)


def _of(number: _Number, call: _Call) -> str:
    """``call 5 of group default_pg``."""
    return f"call {number.sequence} of group {call['process_group'][1] or number.group.name}"


def _record(dump: Dump, call: _Call | None = None) -> int:
    """The number of a record in its dump, from 1; that of the last record for None."""
    return dump.entries.index(call) + 1 if call else max(1, len(dump.entries))


def _last(dump: Dump) -> str:
    if not dump.entries:
        return "none recorded"
    last = dump.entries[-1]
    group = last["process_group"][1] or last["process_group"][0]
    number = f"number {last['collective_seq_id']} of group {group}"
    return f"{number} ({_described(last)}, {last['state']})"


def _name(call: _Call) -> str:
    return str(call["profiling_name"].partition(":")[2] or call["profiling_name"])


def _described(call: _Call) -> str:
    """The operation, its tensors, and the line of the user's program that called it."""
    tensors = f"{'/'.join(map(str, call['input_dtypes']))} {call['input_sizes']}"
    if call["output_sizes"] != call["input_sizes"]:
        tensors += f" to {call['output_sizes']}"
    frames = [frame for frame in call["frames"] if "/torch/" not in frame["filename"]]
    location = f" at {Path(frames[0]['filename']).name}:{frames[0]['line']}" if frames else ""
    return f"{_name(call)} of {tensors}{location}"
