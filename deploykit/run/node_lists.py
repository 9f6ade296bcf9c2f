"""The lists of nodes that failed: the user's own, and those that the users of a site share.

A shared folder, ``$DEPLOYKIT_SHARED_NODES``, holds a file for each user, who alone writes it. The
owner of a file, not its name, says whose it is. Clearing a node overrides all earlier entries about
it, also those of other users.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pwd
import re
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeGuard

from deploykit.job.decode import from_json
from deploykit.lib import paths
from deploykit.lib.errors import UsageError

DAYS = 7
"""Days after which a node may be used again."""
_DAY = 86_400.0
_AHEAD = 3_600.0
"""Seconds by which another machine's clock may be ahead; an entry of later is not believed."""
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
"""A node's name, which becomes part of a directive."""
_LONGEST = 1 << 20
_USERS = 1_000
_REASON = 300
_TIMES = 2
"""Failures of jobs, for other reasons than a failed check, from which on a node is left out."""


@dataclass(frozen=True)
class Node:
    """A node of a target that failed, and why."""

    target: str
    """``slurm://localhost``."""
    node: str
    reason: str
    failed_check: bool
    runs: tuple[str, ...]
    """The attempts in which it failed, ``exp-1.0``; none: the node was cleared."""
    until: float
    """Seconds since 1970, `DAYS` after the entry was made."""
    user: str = ""
    """Who made the entry; empty: this user."""

    @property
    def why(self) -> str:
        """The reason, and whose run found it if that was another user's."""
        return f"{self.reason} (in a run of {self.user})" if self.user else self.reason

    @property
    def is_left_out(self) -> bool:
        """Whether new jobs are kept off it now."""
        return (self.failed_check or len(self.runs) >= _TIMES) and time.time() < self.until


def is_name(text: object) -> TypeGuard[str]:
    """Whether this can be the name of a node."""
    return isinstance(text, str) and _NODE.fullmatch(text) is not None


def entry(target: str, node: str, reason: str, failed_check: bool, runs: tuple[str, ...]) -> Node:  # noqa: FBT001 - as Node
    """A new entry of this user."""
    return Node(target, node, reason[:_REASON], failed_check, runs, _expiry())


def own() -> list[Node]:
    """What this user's runs found, and this user cleared, in the last `DAYS` days."""
    try:
        return list(_nodes(paths.read_regular(paths.left_out(), _LONGEST)))
    except OSError:
        return []


def others() -> list[Node]:
    """The same of all other users who share the folder.

    Raises UsageError where it cannot be read.
    """
    folder = paths.shared_nodes()
    if folder is None:
        return []
    try:
        return [node for file in _files(folder) for node in _of_other(file)]
    except OSError as error:
        message = f"{folder} cannot be read: {error.strerror}"
        hint = "DEPLOYKIT_SHARED_NODES names it: make it, or unset the variable"
        raise UsageError(message, hint=hint) from error


def write(nodes: Iterable[Node]) -> None:
    """Replace this user's list, and its copy in the shared folder.

    Logs a warning where the copy cannot be written.
    """
    text = json.dumps([asdict(node) for node in nodes], indent=1) + "\n"
    file = paths.left_out()
    paths.private_folder(file.parent)
    _replace(file, text, 0o600)
    if (folder := paths.shared_nodes()) is not None:
        try:
            _replace(folder / f"{os.getuid()}.json", text, 0o644)
        except OSError as error:
            what = f"{folder} cannot be written: {error.strerror}; others still use these nodes"
            logging.getLogger(__name__).warning("warning: DEPLOYKIT_SHARED_NODES: %s", what)


def _replace(file: Path, text: str, mode: int) -> None:
    """Write a file in one step."""
    descriptor, scratch = tempfile.mkstemp(prefix=".", dir=file.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as out:
            os.fchmod(descriptor, mode)
            out.write(text)
        Path(scratch).replace(file)
    except OSError:
        Path(scratch).unlink(missing_ok=True)
        raise


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix == ".json")[:_USERS]


def _of_other(path: Path) -> Iterator[Node]:
    """The entries of another user's file, if it is one, and can be read."""
    with contextlib.suppress(OSError), paths.open_regular(path) as file:
        owner = os.fstat(file.fileno()).st_uid
        if owner != os.getuid():
            yield from (replace(node, user=_name(owner)) for node in _nodes(file.read(_LONGEST)))


def _name(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"uid {user}"


def _nodes(text: bytes) -> Iterator[Node]:
    """The entries that hold now; what is none is left out."""
    data: Any = None
    with contextlib.suppress(ValueError):
        data = from_json(text)
    for node in map(_node, data if isinstance(data, list) else []):
        if node is not None and time.time() < node.until <= _expiry() + _AHEAD:
            yield node


def _node(item: Any) -> Node | None:
    match item:
        case {
            "target": str(target),
            "node": str(name),
            "reason": str(reason),
            "failed_check": bool(checked),
            "runs": [*runs],
            "until": float(until),
        } if is_name(name):
            return Node(target, name, reason[:_REASON], checked, tuple(map(str, runs)), until)
    return None


def _expiry() -> float:
    return time.time() + DAYS * _DAY
