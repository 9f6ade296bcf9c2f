"""The part of a bundle that is ours: its place, its files, and the list of all files."""

from __future__ import annotations

import json
from collections.abc import Iterable

from deploykit.job.model import Entry
from deploykit.lib import paths

FOLDER = ".deploykit"
"""The folder of the node plane in every bundle."""

FILES = f"{FOLDER}/files.json"
"""The list of a bundle's other files, by which a node can verify what it has unpacked."""

NODE_PLANE = ("launch.py", "deploykit_node")
"""The file and the package of ``entrypoints/`` that travel in every bundle."""


def node_plane() -> dict[str, bytes]:
    """The content of the node plane's files, by their path inside the bundle, sorted."""
    here = paths.shipped("entrypoints")
    launch, package = NODE_PLANE
    files = [here / launch, *(here / package).rglob("*.py")]
    return {
        f"{FOLDER}/{path.relative_to(here).as_posix()}": path.read_bytes() for path in sorted(files)
    }


def file_list(entries: Iterable[Entry]) -> Entry:
    """The list of all other files and links, by which a node verifies what it has unpacked.

    Files that are not in the list were added later, and are not hashed.
    """
    listed = {entry.path: entry.target or [entry.mode, entry.size] for entry in entries}
    content = json.dumps(listed, sort_keys=True).encode()
    return Entry(FILES, size=len(content), content=content)
