"""Commands beside the ranks of a running job, for backends that can start one on their node."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from deploykit.backends import base
from deploykit.lib.errors import TryAgain
from deploykit.observe import stacks
from deploykit.observe.exit_records import RankProcess


def dump_command(
    process: RankProcess, name: str, folders: tuple[str, str], *, native: bool
) -> list[str]:
    """The command that writes the stacks of the node where `process` runs, of the backend `name`.

    `folders` are the run folder and the one for the dump, as the node sees them. The Python is the
    run's own, with the libraries that it was started with.
    """
    options = ["--native"] if native else []
    if spy := _py_spy():  # nodes may see the same path
        options.append(f"--py-spy={spy}")
    return [*_launch(process, name, folders[0]), "--dump-stacks", *folders, *options]


def enter_command(
    process: RankProcess, name: str, folder: str, command: Sequence[str]
) -> list[str]:
    """The command that runs `command`, or without one a shell, beside `process` on its node.

    `folder` is the run's, as the node sees it.
    """
    rank = str(process.rank)
    return [*_launch(process, name, folder), "--enter", folder, rank, "--", *command]


def _py_spy() -> str | None:
    """py-spy on this machine, beside this Python first."""
    search = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return shutil.which("py-spy", path=search)


def _launch(process: RankProcess, name: str, folder: str) -> list[str]:
    variables = [f"DEPLOYKIT_BACKEND={name}"]
    if process.libraries:
        variables.append(f"LD_LIBRARY_PATH={process.libraries}")
    return ["env", *variables, process.python, f"{folder}/source/{base.LAUNCH}"]


def rank_process(processes: list[RankProcess], run: str, rank: int) -> RankProcess:
    """The process of a rank. Raises TryAgain where it does not run."""
    known = {one.rank: one for one in require_processes(processes, run)}
    if rank not in known:
        raise TryAgain(
            f"rank {rank} of {run} is not running",
            hint=f"still running: {stacks.label(list(known))}",
        )
    return known[rank]


def require_processes(processes: list[RankProcess], run: str) -> list[RankProcess]:
    """Return the processes. Raises TryAgain if there are none."""
    if not processes:
        raise TryAgain(
            f"no rank of {run} is running; none has started yet, or all have ended",
            hint=f"run `deploykit logs {run}` to see its progress",
        )
    return processes
