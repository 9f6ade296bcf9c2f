"""What is wrong with the section `track` of a job."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from deploykit.job.sections import TRACKERS, Track
from deploykit.lib.problem import Problem

_PACKAGES = ("trackio", "wandb")
"""Trackers that need the package of their name."""


def problems(track: Track) -> Iterator[Problem]:
    """Yield the problems. Asks no server: one that is down now may be up when there are metrics."""
    if not track.chosen:
        yield Problem("track", "names no tracker", f"one of {', '.join(TRACKERS)}, or remove it")
    for name in _PACKAGES:
        if name in track.chosen and not _is_installed(name):
            message = f"the package {name} is not installed for the Python that runs deploykit"
            yield Problem(f"track.{name}", message, f"pip install {name}")


def _is_installed(name: str) -> bool:
    """Whether there is a package of that name, and not just a folder, as wandb leaves one."""
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None
