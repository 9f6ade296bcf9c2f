"""What the program of a run wrote into `output` and into its working folder, with sizes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deploykit import exit_records, quoting
from deploykit.registry import Run

_NAMED = 5
"""Files of a folder that are listed."""


def data(run: Run) -> dict[str, Any] | None:
    """What the program wrote, as JSON; None where it is not known."""
    found = exit_records.written(Path(run.folder))
    if found is None:
        return None
    return {
        name: {
            "folder": files.folder,
            "count": files.count,
            "bytes": files.bytes,
            "largest": [{"path": path, "bytes": size} for path, size in files.largest],
        }
        for name, files in (("output", found.output), ("working_folder", found.working_folder))
    }


def lines(run: Run) -> Iterator[str]:
    """Lines about what the program wrote into output and into its working folder."""
    found = exit_records.written(Path(run.folder))
    if found is None:
        return
    working, results = found.working_folder, found.output
    yield from _listed("in output", results)
    if working.count:
        yield from _listed(f"in the working folder, {working.folder}", working)
    if working.count and not found.collects:
        names = ", ".join(quoting.yaml(path) for path, _ in working.largest[:_NAMED])
        yield f"to have them copied to output, add to the job file: outputs: [{names}]"


def _listed(where: str, files: exit_records.Files) -> Iterator[str]:
    if not files.count:
        yield f"{where}: none"
        return
    yield f"{where}: {files.count}, {readable(files.bytes)}"
    for path, size in files.largest[:_NAMED]:
        yield f"  {readable(size):>8}  {path if path.isprintable() else ascii(path)}"


def readable(size: float) -> str:
    """A number of bytes as text, in powers of 1000."""
    for unit in ("B", "kB", "MB"):
        if size < 1000:  # noqa: PLR2004 - the step between two units
            return f"{size:.1f} {unit}".replace(".0 ", " ")
        size /= 1000
    return f"{size:.1f} GB"
