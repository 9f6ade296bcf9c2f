"""What the program of a run wrote into output, checkpoints and its working folder, with sizes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deploykit.job.model import State
from deploykit.lib import quoting, units
from deploykit.observe import exit_records
from deploykit.run.registry import Run

_NAMED = 5
"""Files of a folder that are listed."""


def data(run: Run) -> dict[str, Any] | None:
    """What the program wrote, as JSON; None where it is not known."""
    record = exit_records.written(Path(run.folder))
    if record is None:
        return None
    return {
        "output": _data(record.output),
        "checkpoints": _data(record.checkpoints),
        "working_folder": _data(record.working_folder),
    }


def _data(files: exit_records.Files) -> dict[str, Any]:
    return {
        "folder": files.folder,
        "count": files.count,
        "bytes": files.bytes,
        "largest": [{"path": path, "bytes": size} for path, size in files.largest],
    }


def lines(run: Run) -> Iterator[str]:
    """Lines about what the program wrote into output, checkpoints and its working folder."""
    record = exit_records.written(Path(run.folder))
    if record is None:
        return
    working, results, checkpoints = record.working_folder, record.output, record.checkpoints
    written = working.count or results.count or checkpoints.count
    if not written and run.state == State.FAILED.value:
        return
    if results.count or not checkpoints.count:
        yield from _listed("in output", results)
    if checkpoints.count:
        yield from _listed("in checkpoints", checkpoints)
    if working.count:
        yield from _listed(f"in the working folder, {working.folder}", working)
    if working.count and not record.collects:
        names = ", ".join(quoting.yaml(path) for path, _ in working.largest[:_NAMED])
        yield f"to have them copied to output, add to the job file: outputs: [{names}]"


def _listed(where: str, files: exit_records.Files) -> Iterator[str]:
    if not files.count:
        yield f"{where}: none"
        return
    yield f"{where}: {files.count}, {units.size(files.bytes)}"
    for path, size in files.largest[:_NAMED]:
        yield f"  {units.size(size):>8}  {path if path.isprintable() else ascii(path)}"
