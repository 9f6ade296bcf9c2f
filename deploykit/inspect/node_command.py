"""The command that has a node write the stacks of its ranks, from what its launcher recorded."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from deploykit import backend
from deploykit.errors import TryAgain
from deploykit.exit_records import RankProcess


def argv(process: RankProcess, name: str, folders: tuple[str, str], *, native: bool) -> list[str]:
    """The command, for a node of the backend `name` where `process` runs.

    `folders` are the run folder and the one for the dump, as the node sees them. The Python is the
    run's own, with the libraries that it was started with.
    """
    variables = [f"DEPLOYKIT_BACKEND={name}"]
    if process.libraries:
        variables.append(f"LD_LIBRARY_PATH={process.libraries}")
    launch = f"{folders[0]}/source/{backend.LAUNCH}"
    options = ["--native"] if native else []
    if spy := _spy():
        options.append(f"--py-spy={spy}")
    return ["env", *variables, process.python, launch, "--dump-stacks", *folders, *options]


def require_some(processes: list[RankProcess], run: str) -> list[RankProcess]:
    """The same processes. Raises TryAgain where there are none."""
    if not processes:
        raise TryAgain(
            f"no rank of {run} is running: none has started yet, or all have ended",
            hint=f"`deploykit logs {run}` shows how far it is",
        )
    return processes


def _spy() -> str | None:
    """py-spy of this deploykit's environment, for nodes that see the same path."""
    search = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return shutil.which("py-spy", path=search)
