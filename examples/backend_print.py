"""The smallest backend: `submit` writes the command to a file. Nothing is started.

It has the seven functions and four constants that `deploykit/backends/base.py` describes, and one
optional capability. A package provides such a module through an entry point in its pyproject.toml:

    [project.entry-points."deploykit.backends"]
    print = "backend_print"
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from deploykit.backends import base as backend
from deploykit.job.decode import Help
from deploykit.job.model import Bundle, Handle, JobSpec, LogLine, Plan, Problem, State, Status
from deploykit.lib.errors import SubmitRefused
from deploykit.lib.finding import Finding, Fix

SUMMARY = "writes the command to a file without running it"
PROGRAMS: tuple[str, ...] = ()
MODULES: tuple[str, ...] = ()


@dataclass(frozen=True)
class Options:
    """The `print` section of a job file."""

    prefix: Annotated[str, Help("Text before the command.", example="'> '")] = ""


def check(job: JobSpec, options: Options) -> Iterator[Problem]:
    """Every problem that can be found offline."""
    if job.resources.nodes > 1:
        yield Problem("resources.nodes", "print supports only one node", "set nodes: 1")
    if "\n" in options.prefix:
        yield Problem("print.prefix", "must be one line", "remove the newline")


def plan(job: JobSpec, options: Options, *, run: str, bundle: Bundle) -> Plan:
    """The text that `submit` will send. Pure: no network, no writes, no programs."""
    text = f"{options.prefix}{shlex.join(backend.program(job))}\n"
    return Plan("print", "paper", run, text, "sh", job, options, bundle)


def submit(plan: Plan, folder: Path) -> Handle:
    """Send exactly `plan.text`. Here: write a file, completely or not at all."""
    scratch = folder / ".printed"
    try:
        scratch.write_text(plan.text, encoding="utf-8")
        scratch.replace(folder / "printed")
    except OSError as error:
        raise SubmitRefused(f"cannot write to {folder}: {error.strerror}") from error
    return Handle("print", plan.target, plan.run, plan.run, str(folder))


def find(run: str, folder: Path, target: str) -> Handle | None:
    """After an interrupted submit: the job, if it exists. Never a guess."""
    return Handle("print", target, run, run, str(folder)) if (folder / "printed").exists() else None


def status(handles: Sequence[Handle]) -> Mapping[Handle, Status]:
    """The status of many runs at once, so that a real backend sends one query."""
    done = Status(State.SUCCEEDED, "printed", "the file was written", 0)
    return dict.fromkeys(handles, done)


def logs(handle: Handle, *, follow: bool) -> Iterator[LogLine]:  # noqa: ARG001 - it never grows
    """The lines of the file."""
    for line in (Path(handle.folder) / "printed").read_text(encoding="utf-8").splitlines():
        yield LogLine(line, node=0)


def cancel(handle: Handle) -> None:
    """Do nothing: a file cannot be stopped."""


def examine(job: JobSpec, options: Options, **_: Path | None) -> Iterator[Finding]:
    """A capability: with this function, `deploykit doctor --backend print` works."""
    width = len(options.prefix + shlex.join(backend.program(job)))
    if width > 80:  # noqa: PLR2004 - columns of a line
        fix = Fix("pass fewer arguments, or set a shorter prefix")
        yield Finding("too_wide", "warning", "the line is too wide", (f"{width} columns",), fix)
