"""List the backends, and what is missing here to use each.

With `slurm --probe`: ask this Slurm cluster what it has and allows, and keep the answer as a site
profile, which `check` uses where there is no Slurm (`slurm.site` in the job file).
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import shutil
from typing import Any

from deploykit import backend
from deploykit.commands import output
from deploykit.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("backend", nargs="?", metavar="B", help="only this one")
    parser.add_argument("--probe", action="store_true", help="ask the cluster, keep its profile")
    parser.add_argument("--host", metavar="H", help="ask from this login node, over ssh")


def run(args: argparse.Namespace) -> int:
    if args.probe:
        return _probe(args.backend, args.host, as_json=args.json)
    if args.host is not None:
        raise UsageError("--host is for --probe", hint="deploykit backends slurm --probe --host H")
    rows = [_describe(name) for name in ([args.backend] if args.backend else backend.names())]
    if args.json:
        output.emit(rows)
        return 0
    output.table(
        ["backend", "usable here", "what it is"],
        [[row["name"], _usable(row["missing"]), row["summary"]] for row in rows],
    )
    return 0


def _probe(name: str | None, host: str | None, *, as_json: bool) -> int:
    """Ask the cluster and keep its profile."""
    from deploykit.backends.slurm import site

    if name != "slurm":
        raise UsageError("only slurm can be probed", hint="deploykit backends slurm --probe")
    found = site.read(host)
    path = site.save(found)
    if as_json:
        output.emit({"profile": str(path), **dataclasses.asdict(found)})
        return 0
    output.say(f"{path}: {found.cluster}, Slurm {found.version}")
    for partition in found.partitions:
        limit = (
            "no time limit"
            if partition.max_seconds is None
            else f"at most {partition.max_seconds} s"
        )
        nodes = site.describe(found.nodes(partition.name))
        output.say(
            f"  {partition.name}{' (default)' if partition.default else ''}: {limit}; {nodes}"
        )
    return 0


def _describe(name: str) -> dict[str, Any]:
    engine = backend.find(name)
    missing = [program for program in engine.PROGRAMS if shutil.which(program) is None]
    missing += [
        f"Python's {module}"
        for module in engine.MODULES
        if importlib.util.find_spec(module) is None
    ]
    return {"name": name, "summary": engine.SUMMARY, "usable": not missing, "missing": missing}


def _usable(missing: list[str]) -> str:
    return f"no: without {', '.join(missing)}" if missing else "yes"
