"""What NCCL's RAS service reported on the communicators of a stalled run, as sentences.

https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/ras.html
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from deploykit.observe import stacks

_ROW = re.compile(r"\s*(\d{1,9})(?:\s+[\d-]{1,19}){3}\s+(\d{1,9})\s+\d{1,9}\s+[A-Z]+\s+[A-Z,]+\s*")
"""A group of communicators: its number and the ranks of each."""
_BLOCK = re.compile(r"(?:#(\d{1,9})-(\d{1,9}) \(([0-9a-f]{1,16})\) )?([A-Z]{2,20})\s*")
_RANK = re.compile(r"  Rank (\d{1,9}) (?:-- (.*)|(has|reported) (.*?)(?: -- .*)?$)")
_RANKS = re.compile(r"  (\d{1,9}) ranks (?:have|reported) (.*)")
_MISSING = re.compile(r"  The missing ranks?: ([\d, ]{1,400})")
_ABOUT = re.compile(r"  Communicator ranks have different (.{1,60}?)(?: operation counts)?\s*")
_PROCESS = re.compile(r"  Process (\d{1,9}) on node (\S{1,80}) managing GPUs? (\S{1,80})")
_OPERATION = re.compile(r"launched up to operation (\d{1,18})")


@dataclass
class _Communicator:
    """One communicator in one section of the report."""

    name: str
    missing: list[int] = field(default_factory=list)
    processes: list[str] = field(default_factory=list)
    kinds: list[tuple[str, str, int, list[int]]] = field(default_factory=list)
    """What its ranks differ in: about what, what some say, how many, and those that are named."""

    def sentences(self) -> Iterator[str]:
        """What is wrong with it."""
        if self.missing:
            yield f"{self.name}: no data from {stacks.label(self.missing)}{self._where()}"
        for about in dict.fromkeys(kind[0] for kind in self.kinds):
            parts = [
                f"{stacks.label(ranks) if len(ranks) == count else f'{count} ranks'} {what}"
                for subject, what, count, ranks in self.kinds
                if subject == about
            ]
            yield f"{self.name}: {f'{about}: ' if about else ''}{'; '.join(parts)}"

    def _where(self) -> str:
        return f" ({self.processes[0]})" if len(self.processes) == 1 else ""


def sentences(report: str) -> list[str]:
    """Each communicator whose ranks differ or are missing, and each process that is gone."""
    sizes: dict[str, str] = {}
    sentences: list[str] = []
    for lines in _blocks(report, sizes):
        sentences += _of_block(lines, sizes)
    return list(dict.fromkeys(sentences))


def _blocks(report: str, sizes: dict[str, str]) -> Iterator[list[str]]:
    """The sections of a report, each with its heading; `sizes` gets the ranks of each group."""
    block: list[str] = []
    for line in report.splitlines():
        if row := _ROW.fullmatch(line):
            sizes[row[1]] = row[2]
        elif _BLOCK.fullmatch(line):
            yield block
            block = [line]
        elif line.startswith("  ") and block:
            block.append(line)
        elif line.strip():
            yield block
            block = []
    yield block


def _of_block(lines: list[str], sizes: dict[str, str]) -> Iterator[str]:
    heading = _BLOCK.fullmatch(lines[0]) if lines else None
    if heading is None:
        return
    group, number, hash_, kind = heading.groups()
    if group is None:
        for line in lines[1:] if kind in {"DEAD", "INCOMPLETE"} else ():
            if process := _PROCESS.match(line):
                state = "is dead" if kind == "DEAD" else "does not respond"
                yield f"process {process[1]} on node {process[2]} (GPU {process[3]}) {state}"
        return
    size = f" of {sizes[group]} ranks" if group in sizes else ""
    communicator = _Communicator(f"communicator #{group}-{number} ({hash_}){size}")
    about = ""
    for line in lines[1:]:
        if subject := _ABOUT.fullmatch(line):
            about = subject[1]
        elif missing := _MISSING.match(line):
            communicator.missing += map(int, re.findall(r"\d+", missing[1]))
        elif several := _RANKS.match(line):
            communicator.kinds.append((about, _told(several[2]), int(several[1]), []))
        elif rank := _RANK.match(line):
            _add_rank(communicator, kind, about, rank)
    yield from communicator.sentences()


def _add_rank(communicator: _Communicator, kind: str, about: str, rank: re.Match[str]) -> None:
    number = int(rank[1])
    if rank[3]:
        communicator.kinds.append((about, _told(rank[4]), 1, [number]))
    elif kind == "INCOMPLETE":
        communicator.missing.append(number)
        communicator.processes.append(rank[2])
    elif communicator.kinds:
        communicator.kinds[-1][3].append(number)


def _told(text: str) -> str:
    """``at 6650`` for a count of operations; else as NCCL says it."""
    if operation := _OPERATION.match(text):
        return f"at {operation[1]}"
    return "at 0" if text.startswith("not launched any") else text.removeprefix("status ")
