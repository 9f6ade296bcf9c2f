"""The revision of a source folder: the git commit, and the uncommitted changes as a patch.

Commit and patch together give the bundle.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from deploykit.bundle import secret_scan
from deploykit.bundle.source_tree import rules_of
from deploykit.job.model import Bundle
from deploykit.lib import paths, shell
from deploykit.lib.errors import DeploykitError

_HASH = r"[0-9a-f]{40}|[0-9a-f]{64}"
_MAX_REF_FILE, _MAX_PACKED_REFS = 4096, 1 << 26
"""Bytes of a file with one name, and of ``packed-refs``."""
_MAX_HOPS = 5
"""Refs in a row that point to another ref, as in git."""
_MAX_CHANGED = 100 * 1024**2
"""Bytes of new files, or of a patch, above which no patch is kept; the archive has them anyway."""
_GIT_TIMEOUT = 600
_SAFE = ("core.fsmonitor=false", f"core.hooksPath={os.devnull}", "core.quotePath=false")
"""Configuration of git: it starts no monitor and no hook, and prints names as they are."""
_DIFF = (
    *("diff-index", "--cached", "-p", "-M", "--binary", "--full-index", "--ignore-submodules=all"),
    *("--no-ext-diff", "--no-textconv", "--no-color"),
)


class Patch(NamedTuple):
    """For ``git apply`` at the top of the work tree."""

    text: bytes
    left_out: tuple[str, ...]
    """Changed files whose committed version contains a private key."""


def commit(source: Path) -> str | None:
    """The hash of the commit that is checked out at `source`; None where unknown.

    It is read from git's files (https://git-scm.com/docs/gitrepository-layout), since a plan starts
    no process.
    """
    source = Path(os.path.realpath(source))
    for folder in (source, *source.parents):
        git = folder / ".git"
        if git.is_file():  # of a submodule, or of a further work tree
            git = folder / _text(git).removeprefix("gitdir:").strip()
        if git.is_dir():
            return _head(git)
    return None


def _head(git: Path) -> str | None:
    shared = git / _text(git / "commondir")
    text = _text(git / "HEAD")
    for _ in range(_MAX_HOPS):
        if re.fullmatch(_HASH, text):
            return text
        ref = text.removeprefix("ref:").strip()
        text = _text(shared / ref) or _packed(shared, ref)
    return None


def _packed(shared: Path, ref: str) -> str:
    lines = _text(shared / "packed-refs", _MAX_PACKED_REFS)
    match = re.search(rf"^({_HASH}) {re.escape(ref)}$", lines, re.MULTILINE)
    return match[1] if match else ""


def _text(path: Path, limit: int = _MAX_REF_FILE) -> str:
    """The text of one of git's files; empty where there is none."""
    return os.fsdecode(paths.read_below(path.parent, path.name, limit) or b"").strip()


def patch(bundle: Bundle) -> Patch:
    """The changes from the bundle's commit to its files, as git sees them.

    Git compares in an index and an object store of its own, so the repository stays as it is.
    Raises DeploykitError where the changes cannot be determined.
    """
    bundled = [entry for entry in bundle.entries if entry.content is None]
    revision = str(bundle.commit)
    with tempfile.TemporaryDirectory() as scratch:
        git = _Git(bundle.source, Path(scratch))
        listing = git.run("ls-tree", "-r", "-z", "--name-only", revision)
        committed = {os.fsdecode(path) for path in listing.split(b"\0")[:-1]}
        new = sum(entry.size for entry in bundled if entry.path not in committed)
        if new > _MAX_CHANGED:
            raise DeploykitError(f"more than {_MAX_CHANGED >> 20} MiB of files are new")
        git.run("read-tree", revision)
        git.update_index("--force-remove", files=_gone(bundle, committed))
        git.update_index("--add", "--replace", files=(entry.path for entry in bundled))
        text = git.run(*_DIFF, revision)
    if len(text) > _MAX_CHANGED:
        raise DeploykitError(f"the changes are more than {_MAX_CHANGED >> 20} MiB")
    return _without_keys(text)


def _gone(bundle: Bundle, committed: Iterable[str]) -> Iterator[str]:
    """Committed files that were deleted; not those that exist and are ignored."""
    rules = rules_of(bundle.source)
    bundled = {entry.path for entry in bundle.entries}
    for path in committed:
        full = bundle.source / path
        exists = full.is_symlink() or full.is_file()
        if path not in bundled and not exists and rules.travels(path):
            yield path


def _without_keys(text: bytes) -> Patch:
    """The patch without the files in whose changed lines a private key is."""
    kept, left_out = [], []
    for part in re.split(rb"(?m)^(?=diff --git )", text):
        if secret_scan.has_private_key(re.sub(rb"(?m)^[-+ ]", b"", part)):
            names = re.findall(rb"(?m)^(?:---|\+\+\+) \"?[ab]/(.*?)\"?$", part)
            left_out.append(os.fsdecode(names[-1]))
        else:
            kept.append(part)
    return Patch(b"".join(kept), tuple(left_out))


class _Git:
    """Git in the work tree of a source folder, with an index and new objects in `scratch`."""

    def __init__(self, source: Path, scratch: Path) -> None:
        self._source = source
        self._env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
        objects = self.run("rev-parse", "--git-path", "objects").removesuffix(b"\n")
        (scratch / "objects/info").mkdir(parents=True)
        alternate = os.path.realpath(source / os.fsdecode(objects))
        (scratch / "objects/info/alternates").write_bytes(os.fsencode(f"{alternate}\n"))
        self._env["GIT_ALLOW_PROTOCOL"] = "none"  # a partial clone would fetch what is missing
        self._env["GIT_INDEX_FILE"] = str(scratch / "index")
        self._env["GIT_OBJECT_DIRECTORY"] = str(scratch / "objects")

    def update_index(self, *options: str, files: Iterable[str]) -> None:
        """Take these paths, relative to the source folder, from the work tree into the index."""
        data = b"".join(os.fsencode(path) + b"\0" for path in files)
        self.run("update-index", *options, "-z", "--stdin", data=data)

    def run(self, *argv: str, data: bytes = b"") -> bytes:
        """What git prints. Raises DeploykitError where it fails."""
        configured = (word for setting in _SAFE for word in ("-c", setting))
        code, out, err = shell.raw(
            ["git", *configured, *argv],
            cwd=self._source,
            env=self._env,
            data=data,
            timeout=_GIT_TIMEOUT,
        )
        if code:
            raise DeploykitError(f"git {argv[0]}: {err.strip().splitlines()[-1:] or code}")
        return out
