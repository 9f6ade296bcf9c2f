"""Pack logs of real runs into tests/diagnose/logs, with other names and paths, 60 lines each.

python tests/pack_runs.py FOLDER

FOLDER holds NAME.log, and for those of runs that failed a line `NAME LABEL|LABEL` in labels.txt:
what is right as the first finding, written down before diagnose saw the log. A log without a line
is healthy. Left out are the lines of code of libraries that tracebacks and warnings quote.
"""

from __future__ import annotations

import gzip
import json
import re
import socket
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

PACKED = Path(__file__).parent / "diagnose/logs/runs.jsonl.gz"
MOST, HEAD, WIDEST = 60, 25, 300
"""Lines of a log that are kept, those of them from its beginning, and their characters."""
_ALIKE = 2
_ENVIRONMENT = re.compile(
    r"(?:/[\w.@+-]+)+/\.(?:venv[\w.-]*|pyenv/versions/[\w.]+)|/usr/(?:local/)?lib(?=/python)"
)
_OURS = re.compile(r"/(?:tmp|work|root|home|check)(?:/[\w.@+-]+(?: folder)?)*/([\w.@+-]+)")
_VARIES = re.compile(r"0x[0-9a-f]+|[\d.:,TZ-]*\d[\d.:eZ-]*")
_LIBRARY = re.compile(r'File "(?:/opt/env|<)')
_WARNING = re.compile(r"/opt/env\S+:\d+: \w*Warning: ")


def anonymous(text: str) -> str:
    """A line with other paths and another host."""
    text = _ENVIRONMENT.sub("/opt/env", text)
    text = _OURS.sub(r"/home/ada/\1", text)
    return re.sub(rf"\b{re.escape(socket.gethostname())}\b", "lynx-1", text)[:WIDEST]


def without_libraries(lines: Iterable[str]) -> Iterator[str]:
    """The lines without code of libraries."""
    column: int | None = None
    for line in lines:
        frame = line.find('File "')
        code = line[column or 0 :]
        if column is not None and frame < 0 and (not code.strip() or code[:2] == "  "):
            continue
        column = frame if _LIBRARY.search(line) else None
        yield line
        if _WARNING.search(line):
            column = 0


def short(lines: list[str]) -> list[str]:
    """Of lines that differ in their numbers only the first ones, and of the rest both ends."""
    kept: list[str] = []
    seen: dict[str, int] = {}
    for line in lines:
        kind = _VARIES.sub("0", line)
        seen[kind] = seen.get(kind, 0) + 1
        if seen[kind] <= _ALIKE or line in lines[-3:]:
            kept.append(line)
    return kept if len(kept) <= MOST else [*kept[:HEAD], *kept[HEAD - MOST :]]


def packed(folder: Path) -> Iterator[dict[str, object]]:
    """The logs of a folder."""
    labels: dict[str, list[str]] = {}
    if (folder / "labels.txt").exists():
        for row in (folder / "labels.txt").read_text(encoding="utf-8").splitlines():
            name, _, right = row.partition(" ")
            labels[name] = right.split("|")
    for path in sorted(folder.glob("*.log")):
        text = path.read_text(encoding="utf-8", errors="replace").replace("\r\n", "\n")
        lines = [anonymous(line) for line in text.split("\n")]
        kept = short(list(without_libraries(lines)))
        yield {"name": path.stem, "causes": labels.get(path.stem, []), "text": "\n".join(kept)}


def main() -> None:
    """Write the packed file, the same bytes for the same logs."""
    rows = [json.dumps(log, ensure_ascii=False) for log in packed(Path(sys.argv[1]))]
    with PACKED.open("wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=0) as out:
        out.write("".join(f"{row}\n" for row in rows).encode())
    sys.stdout.write(f"{len(rows)} logs, {PACKED.stat().st_size} bytes\n")


if __name__ == "__main__":
    main()
