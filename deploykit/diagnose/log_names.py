"""What the names of logs tell: the logs in a folder, and the rank that wrote a file."""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

_LOG = re.compile(
    r"(?i)(?:.+\.(?:log|out|err)|.*(?:log|out|err|rank|event|journal).*\.(?:txt|jsonl?|ndjson)"
    r"|stdout|stderr|log)"
    r"(?:[.-]\d+|\.rank\.?\d+)?(?:\.gz|\.zst)?|fr_\d+|.*_trace_rank_.+|.*_dump_\d+(?:\.[a-z]+)?|.*\brank[._-]?\d+"
)
"""Names of logs, rotated or compressed ones too, and of dumps of the flight recorder."""
_MOST_FOLDERS = 10_000
_RANK = re.compile(r"(?i)(?:^|[^a-z])rank[._-]?(\d{1,6})(?!\d)")
_ATTEMPT = re.compile(r"attempt_(\d{1,6})")
_TASK = re.compile(r"(?:(?P<job>.*\d{2,})[-_.])?(?P<task>\d{1,6})(?:_log)?\.(?:out|err|log)")
"""Slurm's --output with %j and %t, or %t alone; submitit."""
_ARRAY = re.compile(r"slurm-\d+_\d+\.")
"""Slurm's default for a task of an array, which is no rank."""
_HOST = re.compile(r"(?:^|[^a-z])(algo-\d+)\b")


def logs_in(folder: Path) -> Iterator[Path]:
    """The logs in a folder and those below; of torchrun's attempts only the last."""
    for number, (root, folders, names) in enumerate(os.walk(folder)):
        if number > _MOST_FOLDERS:
            return
        attempts = [int(match[1]) for name in folders if (match := _ATTEMPT.fullmatch(name))]
        last = f"attempt_{max(attempts, default=0)}"
        folders[:] = sorted(
            (
                name
                for name in folders
                if name[0] != "." and (not _ATTEMPT.fullmatch(name) or name == last)
            ),
            key=_by_number,
        )
        for name in sorted(names, key=_by_number):
            if _LOG.fullmatch(name) and name[0] != ".":
                yield Path(root, name)


def _by_number(name: str) -> list[tuple[int, str]]:
    """A sort key: numbers in the name by value."""
    parts = re.split(r"(\d{1,18})", name)
    return [(int(part) if part.isdigit() else -1, part) for part in parts]


def ranks(paths: Sequence[Path]) -> Mapping[Path, int]:
    """The ranks that the names tell, of all logs of a run.

    A number that is the rank only if the files beside it have the others (Slurm's %t, torchrun's
    folders of local ranks) counts where no two folders claim it.
    """
    known: dict[Path, int] = {}
    groups: dict[str, dict[Path, int]] = defaultdict(dict)
    for path in paths:
        named = _RANK.search(path.name) or _RANK.search(path.parent.name)
        if named:
            known[path] = int(named[1])
        elif path.parent.name.isdecimal() and _ATTEMPT.fullmatch(path.parent.parent.name):
            groups["torchrun"][path] = int(path.parent.name[:9])
        elif (match := _TASK.fullmatch(path.name)) and not _ARRAY.match(path.name):
            groups[f"{path.parent}/{match['job']}"][path] = int(match["task"])
    for group in groups.values():
        known |= group if _complete(group) else {}
    return known


def _complete(group: Mapping[Path, int]) -> bool:
    """Whether the numbers are those of several ranks from 0, each of one folder."""
    folders = Counter(number for number, _ in {(n, path.parent) for path, n in group.items()})
    return 0 in folders and len(folders) > 1 and max(folders.values()) == 1


def host(path: Path) -> str | None:
    """SageMaker's name of the machine, where a log or its folder has the name of a stream."""
    match = _HOST.search(path.name) or _HOST.search(path.parent.name)
    return match[1] if match else None
