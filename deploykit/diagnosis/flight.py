"""Which rank missed which collective: PyTorch's own analyzer over the flight recorder's dumps.

The analyzer runs as a program, so that torch is never imported here.
https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from deploykit import shell
from deploykit.diagnosis import dumps
from deploykit.diagnosis.dumps import Dump
from deploykit.diagnosis.reading import Line
from deploykit.errors import BackendUnavailable

_PROGRAM = "torchfrtrace"
_PATIENCE = 300.0
_REPORT = re.compile(
    r"^(?:Not all ranks joining collective|Collective sequence number: \d+ has errors"
    r"|Input/output mismatch in the collective)",
    re.MULTILINE,
)
_SEQUENCE = re.compile(r"sequence number: (\d{1,18})\b")
_GROUP = re.compile(r"^group info: ([^:\n]*)", re.MULTILINE)
_MISSING = re.compile(r"^missing ranks: \{([\d, ]+)\}", re.MULTILINE)
_CULPRIT = re.compile(r"Culprit rank (\d{1,18});")
_Call = dict[str, Any]
_NAMED = 4
"""Ranks that a sentence names, at most."""


class Fault(NamedTuple):
    """A sentence, the rank at fault where there is one, and the record that shows it."""

    path: Path
    record: int
    rank: int | None
    text: str

    @property
    def line(self) -> Line:
        """The same as a line of a log."""
        mark = "" if self.rank is None else f"[rank{self.rank}]: "
        return Line(self.record, f"{mark}flight recorder: {self.text}", hit=True)


def faults(read: Sequence[Dump]) -> list[Fault]:
    """Where the ranks of a run parted.

    Raises BackendUnavailable where PyTorch's analyzer is not installed or fails.
    """
    absent = _undumped(read)
    if absent:
        return [_incomplete(read, absent)]
    return list(_reported(read, _analyzed(read)))


def _analyzed(read: Sequence[Dump]) -> str:
    """What the analyzer says. It sees what was read, never the files themselves."""
    with tempfile.TemporaryDirectory(prefix="deploykit-") as folder:
        for dump in read:
            Path(folder, f"{dumps.PREFIX}{dump.rank}").write_bytes(dump.pickled())
        argv = [_program(), folder, "--prefix", dumps.PREFIX]
        done = shell.run(argv, timeout=_PATIENCE)
    if done.code:
        last = (done.err.strip().splitlines() or ["it said nothing"])[-1]
        raise BackendUnavailable(
            f"PyTorch's analyzer cannot read these dumps: {last}",
            hint="are they all of one run, and of one version of PyTorch?",
        )
    return done.err


def _program() -> str:
    """The analyzer beside this Python, or on PATH."""
    places = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    found = shutil.which(_PROGRAM, path=places)
    if found is None:
        raise BackendUnavailable(
            f"dumps of the flight recorder are read by PyTorch's own {_PROGRAM}, and PyTorch "
            "is not installed here",
            hint="run `deploykit diagnose` where it is, for example on the cluster",
        )
    return found


def _undumped(read: Sequence[Dump]) -> list[int]:
    """Ranks that belong to a group, and of which there is no dump."""
    groups = [group for dump in read for group in dump.groups.values()]
    wanted = {rank for group in groups for rank in _numbers(group["ranks"])}
    return sorted(wanted - {dump.rank for dump in read})


def _incomplete(read: Sequence[Dump], absent: Sequence[int]) -> Fault:
    """Where a dump is missing, the analyzer cannot decide either."""
    who = ", ".join(f"rank {rank}" for rank in absent[:_NAMED])
    last = "; ".join(f"rank {dump.rank} {_last(dump)}" for dump in read[:_NAMED])
    text = f"no dump of {who}: ended before the others, or stuck; {last}"
    return Fault(read[0].path, _record(read[0]), absent[0], text)


def _reported(read: Sequence[Dump], said: str) -> Iterator[Fault]:
    """The first fault that the analyzer reports: after it nothing is in step any more."""
    starts = [found.start() for found in _REPORT.finditer(said)]
    if not starts:
        text = f"all ranks called the same; each {_last(read[0])}"
        yield Fault(read[0].path, _record(read[0]), None, text)
        return
    report = said[starts[0] : (*starts, None)[1]]
    number, group = _SEQUENCE.search(report), _GROUP.search(report)
    if number is None or group is None:
        raise BackendUnavailable(
            "PyTorch's analyzer reports something that is not known here",
            hint=f"see for yourself: {_PROGRAM} FOLDER --prefix {dumps.PREFIX}",
        )
    calls = {dump.rank: _call(dump, group[1], int(number[1])) for dump in read}
    missing = _MISSING.search(report)
    odd = _numbers(missing[1]) if missing else _minority(_culprits(report), calls)
    usual = next((call for rank, call in calls.items() if call and rank not in odd), None)
    for dump in read:
        if usual and dump.rank in odd:
            call = calls[dump.rank]
            yield Fault(dump.path, _record(dump, call), dump.rank, _sentence(dump, call, usual))


def _sentence(dump: Dump, call: _Call | None, usual: _Call) -> str:
    name, description = usual["process_group"]
    place = f"number {usual['collective_seq_id']} of group {description or name}"
    rank, expected = f"rank {dump.rank}", _described(usual)
    if call is None:
        return f"{rank} never called {place} ({expected}), where others wait; it {_last(dump)}"
    if _described(call) == expected:
        states = f"is {call['state']} on {rank} and {usual['state']} on others"
        return f"{place} ({expected}) {states}"
    return f"{rank} called {_described(call)}, and others {expected}, as {place}"


def _numbers(text: str) -> set[int]:
    return {int(number) for number in re.findall(r"\d{1,18}", text)}


def _culprits(report: str) -> set[int]:
    return {int(rank) for rank in _CULPRIT.findall(report)}


def _minority(culprits: set[int], calls: Mapping[int, object]) -> set[int]:
    """The analyzer blames all that differ from the first rank, which may be the odd one itself."""
    others = set(calls) - culprits
    return culprits if len(culprits) <= len(others) else others


def _call(dump: Dump, group: str, number: int) -> _Call | None:
    for entry in dump.entries:
        if entry["process_group"][0] == group and entry["collective_seq_id"] == number:
            return entry
    return None


def _record(dump: Dump, call: _Call | None = None) -> int:
    """The number of a record in its dump, from 1; without one, that of the last."""
    return dump.entries.index(call) + 1 if call else max(1, len(dump.entries))


def _last(dump: Dump) -> str:
    if not dump.entries:
        return "called nothing"
    last = dump.entries[-1]
    return f"came last to number {last['collective_seq_id']} ({_described(last)}, {last['state']})"


def _described(entry: _Call) -> str:
    """The operation, its tensors, and the line of the user's program that called it."""
    name = entry["profiling_name"].partition(":")[2] or entry["profiling_name"]
    tensors = f"{'/'.join(map(str, entry['input_dtypes']))} {entry['input_sizes']}"
    if entry["output_sizes"] != entry["input_sizes"]:
        tensors += f" to {entry['output_sizes']}"
    frames = [frame for frame in entry["frames"] if "/torch/" not in frame["filename"]]
    place = f" at {Path(frames[0]['filename']).name}:{frames[0]['line']}" if frames else ""
    return f"{name} of {tensors}{place}"
