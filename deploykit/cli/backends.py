"""List the backends, what each offers, and what this machine lacks to use it.

Takes a few seconds to test whether Slurm and AWS would accept a job from this machine, and shows
how to install missing programs. Changes nothing.

With `slurm --probe`, queries the cluster's partitions, nodes and limits, and saves them as a site
profile. With `slurm.site` in the job file, `check` uses the profile on machines without Slurm.

deploykit backends
deploykit backends slurm --probe --target login.example.org
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
from typing import Any

from deploykit.backends import base as backend
from deploykit.cli import output
from deploykit.lib.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("backend", nargs="?", metavar="BACKEND", help="show only this backend")
    parser.add_argument(
        "--probe", action="store_true", help="query the backend's target, and save its profile"
    )
    parser.add_argument(
        "--target", metavar="TARGET", help="the target to probe, such as a login node (over ssh)"
    )


def run(args: argparse.Namespace) -> int:
    if args.probe:
        return _probe(args.backend, args.target, as_json=args.json)
    if args.target is not None:
        raise UsageError("--target requires --probe", hint="deploykit backends BACKEND --probe")
    rows = [_describe(args.backend)] if args.backend else list(map(_row, backend.names()))
    if args.json:
        output.emit(rows)
        return 0
    output.table(
        ["backend", "usable here", "offers", "description"],
        [[row["name"], row["here"], ", ".join(row["offers"]), row["summary"]] for row in rows],
    )
    output.note(*(f"{row['name']}: {how}" for row in rows for how in row["how"]))
    return 0


def _probe(name: str | None, target: str | None, *, as_json: bool) -> int:
    """Query the target of a backend and keep its profile."""
    if name is None:
        raise UsageError("--probe requires a backend", hint="deploykit backends BACKEND --probe")
    profile = backend.require(name, "probe").probe(target)
    if as_json:
        output.emit({"profile": str(profile.path), **profile.facts})
        return 0
    first, *others = profile.summary
    output.say(f"{profile.path}: {first}", *(f"  {line}" for line in others))
    return 0


def _row(name: str) -> dict[str, Any]:
    """One of all backends, which does not hide the others if it cannot be imported."""
    try:
        return _describe(name)
    except UsageError as error:
        broken = {"summary": "", "usable": False, "here": f"no: {error.message}"}
        return {"name": name, **broken, "missing": [], "how": [error.hint or ""], "offers": []}


def _describe(name: str) -> dict[str, Any]:
    engine = backend.find(name)
    absent = [program for program in engine.PROGRAMS if shutil.which(program) is None]
    absent += [
        f"Python's {module}"
        for module in engine.MODULES
        if importlib.util.find_spec(module) is None
    ]
    missing = [(each, f"install {each}") for each in absent]
    if backend.offers(engine, "missing"):
        missing = list(engine.missing(absent))
    return {
        "name": name,
        "summary": engine.SUMMARY,
        "usable": not missing,
        "here": _usable(absent, [what for what, _ in missing]),
        "missing": [what for what, _ in missing],
        "how": list(dict.fromkeys(how for _, how in missing)),
        "offers": [
            known for member, known in backend.REQUESTED.items() if backend.offers(engine, member)
        ],
    }


def _usable(absent: list[str], missing: list[str]) -> str:
    if absent:
        return f"no: missing {', '.join(absent)}"
    return f"no: {'; '.join(missing)}" if missing else "yes"
