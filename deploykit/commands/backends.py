"""List the backends, and what is missing here to use each."""

from __future__ import annotations

import argparse
import importlib.util
import shutil
from typing import Any

from deploykit import backend
from deploykit.commands import output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    del parser


def run(args: argparse.Namespace) -> int:
    rows = [_describe(name) for name in backend.names()]
    if args.json:
        output.emit(rows)
        return 0
    output.table(
        ["backend", "usable here", "what it is"],
        [[row["name"], _usable(row["missing"]), row["summary"]] for row in rows],
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
