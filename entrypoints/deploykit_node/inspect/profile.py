"""Where a rank's program writes the profile that the job asks for (``DEPLOYKIT_PROFILE``)."""

from __future__ import annotations

from pathlib import Path

from deploykit_node.inspect import faults

FOLDER = "profile"
"""Folder of the traces in the run folder (SageMaker: in the output)."""


def environment(env: dict[str, str], rank: int) -> dict[str, str]:
    """The variables of a program, with the hook that profiles it where the job asks for that.

    A trace of an earlier attempt is kept, and not taken again; a snapshot of memory is replaced.
    """
    parent = env.get("DEPLOYKIT_RUN_DIR") or env.get("DEPLOYKIT_OUTPUT_DIR") or ""
    if not env.get("DEPLOYKIT_PROFILE") or not parent or "://" in parent:
        return env
    if env["DEPLOYKIT_PROFILE"] == "memory":
        file = Path(parent, FOLDER, f"rank-{rank}.memory.pickle")
        return faults.hooked(env, "DEPLOYKIT_TRACE_FILE", file)
    file = Path(parent, FOLDER, f"rank-{rank}.trace.json.gz")
    return env if file.exists() else faults.hooked(env, "DEPLOYKIT_TRACE_FILE", file)
