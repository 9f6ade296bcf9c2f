"""The variables that have `hook/sitecustomize.py` do something when a rank's program starts.

It registers a signal at which the program writes its stacks, profiles it (``DEPLOYKIT_PROFILE``),
and waits for an editor's debugger (``DEPLOYKIT_DEBUGGER``).
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path

from deploykit_node import records
from deploykit_node.cluster import BadEnvironment

_HOOK = Path(__file__).with_name("hook")
VARIABLES = ("DEPLOYKIT_STACK_FILE", "DEPLOYKIT_TRACE_FILE", "DEPLOYKIT_DEBUG_FILE")
"""Those that tell the hook what to do, each with the file for it."""
DEBUGGER = "debugger.json"
"""The port where a program waits for its debugger, among the records of the run."""
_PROFILES = "profile"
"""Folder of the traces in the run folder (SageMaker: in the output)."""
REPORT = ".nsys-rep"
"""Suffix of reports of Nsight Systems."""


def environment(env: Mapping[str, str], folder: Path, rank: int) -> tuple[dict[str, str], Path]:
    """The variables of a rank's program with all hooks, and the file for its stacks in `folder`."""
    stacks = folder / f"rank-{rank}.stacks"
    stacks.unlink(missing_ok=True)
    hooked = profiled(_hooked(env, "DEPLOYKIT_STACK_FILE", stacks), rank)
    kept = records.folder(env)
    if kept is not None and env.get("DEPLOYKIT_DEBUGGER") == str(rank):
        (kept / DEBUGGER).unlink(missing_ok=True)
        hooked = _hooked(hooked, "DEPLOYKIT_DEBUG_FILE", kept / DEBUGGER)
    return hooked, stacks


def profiled(env: dict[str, str], rank: int) -> dict[str, str]:
    """The variables of a program, with the hook that profiles it where the job asks for that.

    A trace of an earlier attempt is kept, and not taken again; a snapshot of memory is replaced.
    """
    kind, _, steps = env.get("DEPLOYKIT_PROFILE", "").partition(":")
    suffix = {"memory": ".memory.pickle", "torch": ".trace.json.gz", "nsys": REPORT}.get(kind)
    path = profile(env, f"rank-{rank}{suffix}") if suffix else None
    if path is None or (kind == "nsys" and not steps) or (kind != "memory" and path.exists()):
        return env
    return _hooked(env, "DEPLOYKIT_TRACE_FILE", path)


def profile(env: Mapping[str, str], name: str) -> Path | None:
    """Where a file of a profile goes; None without a folder for it."""
    folder = records.beside(env, _PROFILES)
    return folder / name if folder else None


def check_debugger(env: Mapping[str, str]) -> None:
    """Raise BadEnvironment where the job asks for a debugger and this Python has none."""
    if env.get("DEPLOYKIT_DEBUGGER") and importlib.util.find_spec("debugpy") is None:
        raise BadEnvironment(
            "--debugger: debugpy is not installed in the job's Python. Install it with "
            "`pip install debugpy`, or submit without --debugger."
        )


def _hooked(env: Mapping[str, str], name: str, file: Path) -> dict[str, str]:
    """The variables of a program whose hook finds `file` in the variable `name`."""
    if any(other in env for other in VARIABLES):
        return {**env, name: str(file)}
    own = env.get("PYTHONPATH")
    added = {name: str(file), "PYTHONPATH": f"{_HOOK}{os.pathsep}{own}" if own else str(_HOOK)}
    if own is not None:
        added["DEPLOYKIT_PYTHONPATH"] = own
    return {**env, **added}


def without(env: dict[str, str]) -> dict[str, str]:
    """The variables as they were before the hook was added."""
    if any(name in env for name in VARIABLES):
        env.pop("PYTHONPATH", None)
        if "DEPLOYKIT_PYTHONPATH" in env:
            env["PYTHONPATH"] = env["DEPLOYKIT_PYTHONPATH"]
    added = (*VARIABLES, "DEPLOYKIT_PYTHONPATH")
    return {name: value for name, value in env.items() if name not in added}
