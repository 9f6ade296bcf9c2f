"""The git commit that is checked out at a folder, read without git.

A ``.git`` may be another user's work: only regular files inside it are read, and only the hash of
a commit is taken from them. https://git-scm.com/docs/gitrepository-layout
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from deploykit import paths

_HASH = rb"[0-9a-f]{40}|[0-9a-f]{64}"
_REF = rb"(?s)(?!.*(?:\.\.|@\{|//|/\.|\.lock(?:/|$)|[./]$))refs/[^\x00-\x20\x7f~^:?*\[\\]+"
"""A ref by the rules of git-check-ref-format, below ``refs/``."""
_SMALL, _PACKED = 4096, 1 << 26
"""Most bytes of a file with one name, and of ``packed-refs``."""
_MOST_HOPS = 5
"""Refs that may point to other refs in a row, as in git."""


class Repository(NamedTuple):
    """A work tree `top`, its own git folder, and the one `shared` by all work trees."""

    top: Path
    git: Path
    shared: Path


def find(source: Path) -> Repository | None:
    """The repository that `source` is in; None without one, or where its layout is unusual."""
    source = Path(os.path.realpath(source))
    for folder in (source, *source.parents):
        git = folder / ".git"
        if git.is_file():
            return _linked(folder)
        if git.is_dir():
            return Repository(folder, git, git)
    return None


def commit(source: Path) -> str | None:
    """The hash of the commit that is checked out at `source`; None where unknown."""
    repository = find(source)
    return _head(repository) if repository is not None else None


def _linked(top: Path) -> Repository | None:
    """The repository of a submodule, or of a further work tree: ``.git`` is a file there."""
    text = paths.read_below(top, ".git", _SMALL)
    if text is None or not text.startswith(b"gitdir:"):
        return None
    git = _folder(top, text.removeprefix(b"gitdir:"))
    if git is None:
        return None
    common = paths.read_below(git, "commondir", _SMALL)
    if common is None and not os.path.lexists(git / "commondir"):
        return Repository(top, git, git)
    shared = _folder(git, common or b"")
    if shared is None or git.parent != shared / "worktrees":
        return None
    return Repository(top, git, shared)


def _folder(base: Path, text: bytes) -> Path | None:
    name = text.strip()
    if not name or b"\0" in name or b"\n" in name:
        return None
    path = Path(os.path.realpath(base / os.fsdecode(name)))
    return path if path.is_dir() else None


def _head(repository: Repository) -> str | None:
    text = paths.read_below(repository.git, "HEAD", _SMALL)
    for _ in range(_MOST_HOPS):
        text = (text or b"").strip()
        if re.fullmatch(_HASH, text):
            return text.decode()
        name = text.removeprefix(b"ref:").strip()
        if not text.startswith(b"ref:") or not re.fullmatch(_REF, name):
            return None
        text = paths.read_below(repository.shared, os.fsdecode(name), _SMALL)
        text = _packed(repository, name) if text is None else text
    return None


def _packed(repository: Repository, name: bytes) -> bytes | None:
    lines = paths.read_below(repository.shared, "packed-refs", _PACKED) or b""
    match = re.search(rb"^([0-9a-f]+) " + re.escape(name) + rb"$", lines, re.MULTILINE)
    return match[1] if match else None
