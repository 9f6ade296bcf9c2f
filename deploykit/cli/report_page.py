"""Write the page of a report, within a size limit, to a new file."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from deploykit.cli import output
from deploykit.lib import paths, render, units
from deploykit.lib.version import __version__
from deploykit.run.registry import now

MAX_BYTES = 1_000_000
"""Of a page."""


def rendered(template: str, attempts: Iterable[dict[str, Any]], more: str = "") -> str:
    """The first page of at most `MAX_BYTES`, made of the values of each attempt; else the last.

    `more` is said in the footer.
    """
    host = os.uname().nodename
    footer = f"Written by deploykit {__version__} on {host} at {output.when(now())}."
    if more:
        footer += f" {more.format(host=host)}"
    page = ""
    for values in attempts:
        page = render.html(template, footer=footer, **values)
        if len(page.encode()) <= MAX_BYTES:
            break
    return page


def save(path: Path, page: str, *, force: bool) -> dict[str, Any]:
    """Write the file, and return where it is and its size. Raises UsageError if it exists."""
    if force:
        path.unlink(missing_ok=True)
    paths.create(path, page, "choose another file with --output, or replace it with --force")
    return {"file": str(path), "uri": path.absolute().as_uri(), "bytes": path.stat().st_size}


def announce(saved: dict[str, Any]) -> None:
    """Print where a report is, and its size."""
    output.say(f"{saved['file']}: {units.size(saved['bytes'])}")
