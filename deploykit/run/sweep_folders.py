"""The folders of sweeps: whose run is whose, and which sweeps still need their runs and source.

Only file names and one key of a definition are read here; `sweep.folder` reads the rest.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from pathlib import Path

from deploykit.job.decode import Malformed, read_json
from deploykit.lib import paths

DEFINITION = "sweep.json"
FINISHED = "finished"
"""Made when a sweep has ended: its journal has all results, and nothing goes on."""
_RUN = re.compile(r"(.+?)-[0-9]+(?:-s[0-9]+)?(?:-r[0-9]+)?")
"""A run id of a trial: the sweep, the trial, the repeat, the attempt."""


def every() -> list[Path]:
    """The folder of each sweep, also of one whose definition was not written yet, by name."""
    try:
        return sorted((paths.state() / "sweeps").iterdir())
    except OSError:
        return []


def unfinished() -> dict[str, str]:
    """The sweeps that have not ended, by their ids, each with the hash of its source."""
    by_id = {}
    for folder in every():
        with contextlib.suppress(OSError, Malformed):
            if not (folder / FINISHED).exists():
                match read_json(folder / DEFINITION):
                    case {"bundle": str(bundle)}:
                        by_id[folder.name] = bundle
    return by_id


def of_run(run: str, sweeps: Mapping[str, object]) -> str | None:
    """Which of these sweeps the run belongs to."""
    match = _RUN.fullmatch(run)
    return match[1] if match and match[1] in sweeps else None
