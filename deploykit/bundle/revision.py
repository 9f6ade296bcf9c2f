"""The revision of a source folder: the git commit, and the uncommitted changes as a patch.

Commit and patch together give the bundle.
"""

from __future__ import annotations

import io
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from deploykit.bundle import secret_scan
from deploykit.bundle.source_tree import rules_of
from deploykit.job.model import Bundle
from deploykit.lib import shell
from deploykit.lib.errors import DeploykitError

_HASH = r"[0-9a-f]{40}|[0-9a-f]{64}"
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
        packed = rf"^({_HASH}) {re.escape(ref)}$"
        match = re.search(packed, _text(shared / "packed-refs"), re.MULTILINE)
        text = _text(shared / ref) or (match[1] if match else "")
    return None


def _text(path: Path) -> str:
    """The text of one of git's files; empty where there is none."""
    try:
        return os.fsdecode(path.read_bytes()).strip()
    except (OSError, ValueError):
        return ""


def patch(bundle: Bundle) -> Patch:
    """The changes from the bundle's commit to its files, as git sees them.

    Git compares in an index and an object store of its own, so the repository stays as it is.
    Raises DeploykitError where the changes cannot be determined.
    """
    bundled = [entry for entry in bundle.entries if entry.content is None]
    revision = str(bundle.commit)
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    env["GIT_ALLOW_PROTOCOL"] = "none"  # a partial clone would fetch what is missing

    def git(*argv: str, files: Iterable[str] = ()) -> bytes:
        configured = (word for setting in _SAFE for word in ("-c", setting))
        code, out, err = shell.raw(
            ["git", *configured, *argv],
            cwd=bundle.source,
            env=env,
            data=b"".join(os.fsencode(path) + b"\0" for path in files),
            timeout=_GIT_TIMEOUT,
        )
        if code:
            raise DeploykitError(
                f"git {argv[0]}: {(err.strip().splitlines() or [f'exit code {code}'])[-1]}"
            )
        return out

    with tempfile.TemporaryDirectory() as scratch:
        objects = Path(scratch, "objects")
        own = os.fsdecode(git("rev-parse", "--git-path", "objects").removesuffix(b"\n"))
        (objects / "info").mkdir(parents=True)
        alternate = os.path.realpath(bundle.source / own)
        (objects / "info/alternates").write_bytes(os.fsencode(f"{alternate}\n"))
        env |= {"GIT_INDEX_FILE": f"{scratch}/index", "GIT_OBJECT_DIRECTORY": str(objects)}
        listing = git("ls-tree", "-r", "-z", "--name-only", revision)
        committed = {os.fsdecode(path) for path in listing.split(b"\0")[:-1]}
        new = sum(entry.size for entry in bundled if entry.path not in committed)
        if new > _MAX_CHANGED:
            raise DeploykitError(f"the new files exceed {_MAX_CHANGED >> 20} MiB")
        update = ("update-index", "-z", "--add", "--replace", "--stdin")
        git("read-tree", revision)
        git("update-index", "-z", "--force-remove", "--stdin", files=_gone(bundle, committed))
        git(*update, files=(entry.path for entry in bundled))
        text = git(*_DIFF, revision)
    if len(text) > _MAX_CHANGED:
        raise DeploykitError(f"the changes exceed {_MAX_CHANGED >> 20} MiB")
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
        changes = io.BytesIO(re.sub(rb"(?m)^[-+ ]", b"", part))
        if secret_scan.has_key(secret_scan.find(changes)):
            names = re.findall(rb"(?m)^(?:---|\+\+\+) \"?[ab]/(.*?)\"?$", part)
            left_out.append(os.fsdecode(names[-1]))
        else:
            kept.append(part)
    return Patch(b"".join(kept), tuple(left_out))
