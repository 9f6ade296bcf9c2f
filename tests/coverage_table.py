"""Prints what `make coverage` measured, one row a package: lines and branches that the tests ran.

python -m tests.coverage_table build/coverage/report.json
python -m tests.coverage_table build/coverage/report.json --missing deploykit/cli
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path

ROOMS = (
    *("deploykit/cli", "deploykit/api", "deploykit/sweep", "deploykit/run"),
    *("deploykit/backends/slurm", "deploykit/backends/sagemaker", "deploykit/backends"),
    *("deploykit/bundle", "deploykit/doctor", "deploykit/advise", "deploykit/diagnose"),
    *("deploykit/cost", "deploykit/observe", "deploykit/job", "deploykit/lib", "deploykit"),
    *("entrypoints/deploykit_node", "entrypoints/trainer"),
    "entrypoints",
)
"""A file belongs to the first of these that holds it."""
COUNTS = ("covered_lines", "num_statements", "covered_branches", "num_branches")
HEAD = f"| {'package':<28} | {'lines':>6} | {'run':>5} | {'branches':>8} | {'run':>5} |"
RULE = "|---|---:|---:|---:|---:|"


def room(path: str) -> str:
    return next(name for name in ROOMS if path.startswith(f"{name}/"))


def by_room(files: dict[str, dict]) -> dict[str, list[int]]:
    """The sums of `COUNTS` of each room, and of all."""
    sums = defaultdict(lambda: [0] * len(COUNTS))
    for path, file in files.items():
        for name in (room(path), "all"):
            found = [file["summary"][count] for count in COUNTS]
            sums[name] = [total + more for total, more in zip(sums[name], found, strict=True)]
    return sums


def row(name: str, sums: list[int]) -> str:
    lines_run, lines, branches_run, branches = sums
    return (
        f"| {name:<28} | {lines:>6} | {share(lines_run, lines):>5} "
        f"| {branches:>8} | {share(branches_run, branches):>5} |"
    )


def share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def missing(files: dict[str, dict], folder: str) -> list[str]:
    """For each file below `folder`: the lines and branches that no test ran."""
    return [
        f"{path}: lines {file['missing_lines']}, branches {file['missing_branches']}"
        for path, file in sorted(files.items())
        if path.startswith(folder) and (file["missing_lines"] or file["missing_branches"])
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("report", type=Path, help="what `coverage json` wrote")
    parser.add_argument("--missing", metavar="FOLDER", help="list what no test ran instead")
    args = parser.parse_args()
    files = json.loads(args.report.read_text())["files"]
    if args.missing:
        print(*missing(files, args.missing), sep="\n")
        return
    sums = by_room(files)
    print(HEAD, RULE, sep="\n")
    for name in (*ROOMS, "all"):
        print(row(name, sums[name]))


if __name__ == "__main__":
    main()
