"""Run a Python function: send it with its arguments, call it on every rank, and read the results.

The run is an ordinary one, with ``entrypoints/call.py`` as its program. Function, arguments and
results are pickles in the state folder, which is closed to other users (paths.py), because
unpickling a file can run any code.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import cloudpickle

from deploykit.backends import base
from deploykit.job import file as jobfile
from deploykit.job import spelling
from deploykit.job.job import EntrypointKeys, Job
from deploykit.job.model import State
from deploykit.lib import paths
from deploykit.lib.errors import (
    DeploykitError,
    FunctionFailed,
    JobFileError,
    NotFound,
    NotPermitted,
    RunFailed,
    UsageError,
)
from deploykit.run import diagnosis as run_diagnosis
from deploykit.run import lifecycle
from deploykit.run import state as run_state
from deploykit.run.registry import Run

_FOLDER = "results"


def send(
    function: Callable[..., Any], args: tuple[Any, ...], backend: str | None, keys: Any
) -> Run:
    """Submit a function with the keys of a job; the job's name comes from the function's.

    Raises UsageError if the function cannot be pickled or the backend cannot run functions, and the
    errors of `lifecycle.prepare` and `lifecycle.submit`.
    """
    chosen = lifecycle.chosen(backend, keys)
    engine = base.require(chosen, "check_function")
    name = spelling.near_name(getattr(function, "__name__", "")) or "function"
    keys = {"name": name, **keys}
    # among the archives `prune` finds the scratch of a process that was killed
    with tempfile.TemporaryDirectory(dir=paths.private_folder(paths.bundles())) as scratch:
        folder = Path(scratch)
        _write(folder, function, args)
        entrypoint: EntrypointKeys = {"script": "call.py"}
        job = Job(**keys, source=folder, entrypoint=entrypoint)
        plan = lifecycle.prepare(job, (), chosen, None, pack=True).plan
        if problems := list(engine.check_function(plan.options)):
            raise JobFileError(jobfile.title(job), problems)
        return lifecycle.submit(plan)


def _write(folder: Path, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Write the source of the job: what the node needs to call the function. Raises UsageError."""
    try:
        packed = cloudpickle.dumps((function, args))
    except Exception as error:
        raise UsageError(
            f"cannot pickle the function or its arguments: {type(error).__name__}: {error}",
            hint="files, connections and locks cannot be sent; open them inside the function",
        ) from error
    launched = {"python": sys.version_info[:2], "path": _search_path(), "folder": str(Path.cwd())}
    paths.write(folder / "call.pkl", packed)
    paths.write(folder / "call.json", json.dumps(launched))
    paths.write(folder / "call.py", (paths.shipped("entrypoints") / "call.py").read_bytes())
    paths.write(folder / ".deploykitignore", "!*\n")  # whatever a repository around it ignores
    paths.make_folder(folder / "cloudpickle")
    for path in Path(cloudpickle.__file__).parent.glob("*.py"):
        paths.write(folder / "cloudpickle" / path.name, path.read_bytes())


def _search_path() -> list[str]:
    """The folders of the user's own modules here; the node has a Python and packages of its own."""
    installed = sysconfig.get_path("stdlib")
    folders = [os.path.abspath(path) for path in sys.path]  # noqa: PTH100 - "" is the current one
    packages = {"site-packages", "dist-packages"}
    return [
        path
        for path in folders
        if not path.startswith(installed)
        and not path.endswith(".zip")
        and packages.isdisjoint(Path(path).parts)
    ]


def results(row: Run) -> dict[int, Any]:
    """Return the results of a finished run, by rank.

    Raises FunctionFailed if the function raised an exception, RunFailed if the run ended in any
    other way, NotFound if the run calls no function.
    """
    folder = Path(row.folder, _FOLDER)
    records = list(_records(folder)) if folder.exists() else []
    if failures := [record for record in records if "kind" in record]:
        raise _function_failed(min(failures, key=lambda record: record["time"]), row)
    if row.state != State.SUCCEEDED.value:
        raise failure(row)
    if not records:
        raise NotFound(f"{row.run} has no results", hint="only runs of `launch` return values")
    return {record["rank"]: _unpacked(record, row) for record in records}


def _records(folder: Path) -> Iterator[Mapping[str, Any]]:
    """The record of each rank, in the order of ranks. Raises NotPermitted or DeploykitError."""
    if not paths.is_private_folder(folder):
        raise NotPermitted(
            f"{folder} is open to other users, who could put code there",
            hint=f"if you trust its content, run `chmod 700 {folder}`",
        )
    for rank in sorted(int(path.stem) for path in folder.glob("*.pkl") if path.stem.isdecimal()):
        yield pickle.loads((folder / f"{rank}.pkl").read_bytes())  # noqa: S301 - checked above


def _unpacked(record: Mapping[str, Any], row: Run) -> Any:
    """The value that a rank returned. Raises DeploykitError where this process cannot read it."""
    try:
        return pickle.loads(record["value"])  # noqa: S301 - as above
    except Exception as error:
        raise DeploykitError(
            f"cannot read the value of rank {record['rank']} of {row.run}: {type(error).__name__}: "
            f"{error}",
            hint="return only numbers, strings, lists and dicts, or install the node's packages "
            "here",
        ) from error


def _function_failed(record: Mapping[str, Any], row: Run) -> FunctionFailed:
    error = FunctionFailed(record["rank"], record["kind"], record["traceback"], run=row.run)
    try:
        error.__cause__ = pickle.loads(record["error"])  # noqa: S301 - as above
    except Exception:  # noqa: BLE001 - its text is enough
        error.__cause__ = None
    return error


def failure(row: Run) -> RunFailed:
    """Return the error for a run that did not succeed, with the cause if known."""
    reason = f": {row.reason}" if row.reason else ""
    cause = run_diagnosis.brief(row)
    return RunFailed(
        f"{row.run} {row.state}{reason}",
        run=row.run,
        exit_code=run_state.exit_code(row),
        hint=f"cause: {cause}" if cause else None,
    )
