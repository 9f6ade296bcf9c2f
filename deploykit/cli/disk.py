"""Show the disk usage of the state folder, largest run first, and the free space.

No backend is queried, so states are the last known. `deploykit prune` frees space.

deploykit disk
"""

from __future__ import annotations

import argparse
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from deploykit.cli import output
from deploykit.lib import paths, units
from deploykit.run import registry, storage

_COLUMNS = (*storage.PARTS, "other")

SHARED = ("limit",)


def run(args: argparse.Namespace) -> int:
    rows = registry.every()
    each = sorted(map(_run, rows), key=lambda one: -one["bytes"])
    used = storage.references(rows)
    kinds = {
        "runs": _total(each),
        "bundles": _files(path for name, path in storage.bundles().items() if name in used),
        "unlisted runs": _files(storage.unlisted(rows)),
        "left over": _files(storage.leftovers(rows)),
        "sweeps": _files(storage.sweep_folders()),
        "crashes": _files(storage.crashes()),
    }
    whole = storage.size(paths.state())
    known = sum(kind["bytes"] for kind in kinds.values())
    kinds["other"] = {"count": None, "bytes": max(0, whole - known)}
    free = _free(paths.state())
    if args.json:
        data = {"folder": str(paths.state()), "bytes": whole, "free": free}
        output.emit({**data, "kinds": kinds, "runs": each})
    else:
        _show(whole, free, kinds, each, args.limit)
    return 0


def _run(row: registry.Run) -> dict[str, Any]:
    used = storage.run_usage(row.run)
    parts = dict(used.parts) if used else {}
    return {
        "run": row.run,
        "state": row.state,
        "created": output.when(row.created),
        "bytes": used.size if used else 0,
        "parts": {name: parts.get(name, 0) for name in _COLUMNS},
    }


def _total(each: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    parts: Counter[str] = Counter()
    for one in each:
        parts.update(one["parts"])
    total = sum(one["bytes"] for one in each)
    return {"count": len(each), "bytes": total, "parts": dict(parts)}


def _files(files: Iterable[Path]) -> dict[str, Any]:
    sizes = [storage.size(path) for path in files]
    return {"count": len(sizes), "bytes": sum(sizes)}


def _free(folder: Path) -> int:
    """Bytes that the user may still write on the disk of `folder`, which may not exist yet."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _show(
    whole: int,
    free: int,
    kinds: Mapping[str, Mapping[str, Any]],
    each: Sequence[Mapping[str, Any]],
    limit: int,
) -> None:
    output.say(f"{paths.state()}: {units.size(whole)}, {units.size(free)} free")
    largest = sorted(kinds.items(), key=lambda kind: -kind[1]["bytes"])
    output.table(
        ["what", "count", "size"],
        [
            [name, str(kind["count"] or ""), units.size(kind["bytes"])]
            for name, kind in largest
            if kind["bytes"]
        ],
        headings_in_pipe=True,
    )
    if kinds["unlisted runs"]["count"]:
        output.note("unlisted runs are folders missing from the registry; prune keeps them")
    if not each:
        return
    output.say("")
    output.table(
        ["run", "state", "size", *_COLUMNS],
        [
            [one["run"], one["state"], *map(units.size, (one["bytes"], *one["parts"].values()))]
            for one in each[:limit]
        ],
        headings_in_pipe=True,
    )
    if limit < len(each):
        output.note(f"showing the largest {limit} of {len(each)} runs; -n {len(each)} shows all")
