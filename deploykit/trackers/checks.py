"""What is wrong with the section `track` of a job."""

from __future__ import annotations

from collections.abc import Iterator

from deploykit.job_sections import TRACKERS, Track
from deploykit.problem import Problem


def problems(track: Track) -> Iterator[Problem]:
    """Yield the problems. Asks no server: one that is down now may be up when there are metrics."""
    if not track.chosen:
        yield Problem("track", "names no tracker", f"one of {', '.join(TRACKERS)}, or remove it")
