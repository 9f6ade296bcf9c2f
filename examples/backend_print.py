"""The smallest backend: `submit` writes the program down and calls it done. Nothing is started.

Seven functions and four facts, as `deploykit/backend.py` describes them. Another package offers
such a module to deploykit by an entry point in its pyproject.toml:

    [project.entry-points."deploykit.backends"]
    print = "backend_print"
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from deploykit import contract
from deploykit.bundle import Bundle
from deploykit.errors import SubmitRefused
from deploykit.fields import Help
from deploykit.model import Handle, JobSpec, LogLine, Plan, Problem, State, Status

SUMMARY = "writes the program down, and starts nothing"
PROGRAMS: tuple[str, ...] = ()
MODULES: tuple[str, ...] = ()


@dataclass(frozen=True)
class Options:
    """The `print` section of a job file."""

    prefix: Annotated[str, Help("What stands before the program.", example="'> '")] = ""


def check(job: JobSpec, options: Options) -> Iterator[Problem]:
    """What can be seen to be wrong without asking anybody."""
    if job.resources.nodes > 1:
        yield Problem("resources.nodes", "paper has one node", "nodes: 1")
    if "\n" in options.prefix:
        yield Problem("print.prefix", "must be one line", "remove the line end")


def plan(job: JobSpec, options: Options, *, run: str, bundle: Bundle) -> Plan:
    """The artifact. Pure: nothing is asked, written or started."""
    text = f"{options.prefix}{shlex.join(contract.program(job))}\n"
    return Plan("print", "paper", run, text, "sh", job, options, bundle)


def submit(plan: Plan, folder: Path) -> Handle:
    """Send exactly `plan.text`. Here that is: write it down, whole or not at all."""
    scratch = folder / ".printed"
    try:
        scratch.write_text(plan.text, encoding="utf-8")
        scratch.replace(folder / "printed")
    except OSError as error:
        raise SubmitRefused(f"{folder} takes no file: {error.strerror}") from error
    return Handle("print", plan.target, plan.run, plan.run, str(folder))


def find(run: str, folder: Path, target: str) -> Handle | None:
    """After an interrupted submit: is the job there? Never a guess."""
    return Handle("print", target, run, run, str(folder)) if (folder / "printed").exists() else None


def status(handles: Sequence[Handle]) -> Mapping[Handle, Status]:
    """Many runs at once, so that a real backend asks its far side once."""
    done = Status(State.SUCCEEDED, "printed", "it was written down", 0)
    return dict.fromkeys(handles, done)


def logs(handle: Handle, *, follow: bool) -> Iterator[LogLine]:  # noqa: ARG001 - it never grows
    for line in (Path(handle.folder) / "printed").read_text(encoding="utf-8").splitlines():
        yield LogLine(line, node=0)


def cancel(handle: Handle) -> None:
    """Nothing runs, so nothing is to be stopped."""
