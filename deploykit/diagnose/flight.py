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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from deploykit.diagnose import dumps
from deploykit.diagnose.dumps import Dump
from deploykit.diagnose.scan import RawLine
from deploykit.lib import shell
from deploykit.lib.errors import BackendUnavailable

_PROGRAM = "torchfrtrace"
_TIMEOUT = 300.0
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
"""Maximum number of ranks in a sentence."""


class Divergence(NamedTuple):
    """Where the ranks of a run diverged: a sentence, the rank (or None), and its record."""

    path: Path
    record: int
    rank: int | None
    text: str

    @property
    def line(self) -> RawLine:
        """The divergence as a line of a log, which the rules match."""
        mark = "" if self.rank is None else f"[rank{self.rank}]: "
        text = f"{mark}flight recorder: {self.text}"
        return RawLine(self.record, text.encode(errors="replace"), hit=True)


def divergences(recorded: Sequence[Dump]) -> list[Divergence]:
    """Where the ranks of a run diverged.

    Raises BackendUnavailable if PyTorch's analyzer is not installed or fails.
    """
    groups = [group for dump in recorded for group in dump.groups.values()]
    wanted = {rank for group in groups for rank in _numbers(group["ranks"])}
    if missing := sorted(wanted - {dump.rank for dump in recorded}):  # then it cannot decide
        ranks = ", ".join(f"rank {rank}" for rank in missing[:_NAMED])
        last = "; ".join(f"rank {dump.rank} {_last(dump)}" for dump in recorded[:_NAMED])
        text = f"no dump of {ranks}, which exited early or hung; {last}"
        return [Divergence(recorded[0].path, _record(recorded[0]), missing[0], text)]
    return list(_reported(recorded, _analyzed(recorded)))


def _analyzed(read: Sequence[Dump]) -> str:
    """The analyzer's report. It reads what was decoded here, never the files themselves."""
    search_path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    program = shutil.which(_PROGRAM, path=search_path)
    if program is None:
        raise BackendUnavailable(
            f"{_PROGRAM} is required to read dumps, but PyTorch is not installed here",
            hint="run `deploykit diagnose` where PyTorch is installed, for example on the cluster",
        )
    with tempfile.TemporaryDirectory(prefix="deploykit-") as folder:
        for dump in read:
            Path(folder, f"{dumps.PREFIX}{dump.rank}").write_bytes(dump.pickled())
        done = shell.run([program, folder, "--prefix", dumps.PREFIX], timeout=_TIMEOUT)
    if done.code:
        last = (done.err.strip().splitlines() or ["no output"])[-1]
        raise BackendUnavailable(
            f"PyTorch's analyzer failed to read the dumps: {last}",
            hint="check that all are from one run and one version of PyTorch",
        )
    return done.err


def _reported(read: Sequence[Dump], output: str) -> Iterator[Divergence]:
    """The first mismatch that the analyzer reports; later ones follow from it."""
    starts = [match.start() for match in _REPORT.finditer(output)]
    if not starts:
        text = f"all ranks called the same collectives; each {_last(read[0])}"
        yield Divergence(read[0].path, _record(read[0]), None, text)
        return
    report = output[starts[0] : (*starts, None)[1]]
    number, group = _SEQUENCE.search(report), _GROUP.search(report)
    if number is None or group is None:
        raise BackendUnavailable(
            "the report of PyTorch's analyzer has an unknown format",
            hint=f"read it yourself: {_PROGRAM} FOLDER --prefix {dumps.PREFIX}",
        )
    calls = {dump.rank: _call(dump, group[1], int(number[1])) for dump in read}
    if missing := _MISSING.search(report):
        deviant = _numbers(missing[1])
    else:  # the analyzer blames all that differ from the first rank, which may be the culprit
        culprits = {int(rank) for rank in _CULPRIT.findall(report)}
        deviant = min(culprits, set(calls) - culprits, key=len)
    usual = next((call for rank, call in calls.items() if call and rank not in deviant), None)
    for dump in read:
        if usual and dump.rank in deviant:
            call = calls[dump.rank]
            text = _sentence(dump, call, usual)
            yield Divergence(dump.path, _record(dump, call), dump.rank, text)


def _sentence(dump: Dump, call: _Call | None, usual: _Call) -> str:
    name, description = usual["process_group"]
    collective = f"number {usual['collective_seq_id']} of group {description or name}"
    rank, expected = f"rank {dump.rank}", _described(usual)
    if call is None:
        return f"{rank} never called {collective} ({expected}); it {_last(dump)}"
    if _described(call) == expected:
        states = f"is {call['state']} on {rank} and {usual['state']} on the others"
        return f"{collective} ({expected}) {states}"
    return f"{rank} called {_described(call)} as {collective}; the others called {expected}"


def _numbers(text: str) -> set[int]:
    return {int(number) for number in re.findall(r"\d{1,18}", text)}


def _call(dump: Dump, group: str, number: int) -> _Call | None:
    for entry in dump.entries:
        if entry["process_group"][0] == group and entry["collective_seq_id"] == number:
            return entry
    return None


def _record(dump: Dump, call: _Call | None = None) -> int:
    """The number of a record in its dump, from 1; that of the last record for None."""
    return dump.entries.index(call) + 1 if call else max(1, len(dump.entries))


def _last(dump: Dump) -> str:
    if not dump.entries:
        return "called no collective"
    last = dump.entries[-1]
    return f"last called number {last['collective_seq_id']} ({_described(last)}, {last['state']})"


def _described(entry: _Call) -> str:
    """The operation, its tensors, and the line of the user's program that called it."""
    name = entry["profiling_name"].partition(":")[2] or entry["profiling_name"]
    tensors = f"{'/'.join(map(str, entry['input_dtypes']))} {entry['input_sizes']}"
    if entry["output_sizes"] != entry["input_sizes"]:
        tensors += f" to {entry['output_sizes']}"
    frames = [frame for frame in entry["frames"] if "/torch/" not in frame["filename"]]
    location = f" at {Path(frames[0]['filename']).name}:{frames[0]['line']}" if frames else ""
    return f"{name} of {tensors}{location}"
