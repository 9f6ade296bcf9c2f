"""The revision of a source folder: the git commit, and the uncommitted changes as a patch.

Commit and patch together give the bundle. A repository may be another user's work. So the commit is
read without git: only from regular files in ``.git``, and only a hash is taken from them
(https://git-scm.com/docs/gitrepository-layout). For the patch git runs, and a repository's own
configuration and attributes can name programs that it starts: diff drivers, filters, monitors,
transports, hooks. So it runs in an empty repository of deploykit's own, which only borrows the
objects of the other one, and compares two trees: the commit's, and one made of the files in the
stored archive. It reads no work tree.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, NamedTuple

from deploykit.bundle import secret_scan
from deploykit.bundle.source_tree import IgnoreRules
from deploykit.job.model import Bundle
from deploykit.lib import paths, shell
from deploykit.lib.errors import DeploykitError

_HASH = rb"[0-9a-f]{40}|[0-9a-f]{64}"
_REF = rb"(?s)(?!.*(?:\.\.|@\{|//|/\.|\.lock(?:/|$)|[./]$))refs/[^\x00-\x20\x7f~^:?*\[\\]+"
"""A ref by the rules of git-check-ref-format, below ``refs/``."""
_SMALL, _PACKED = 4096, 1 << 26
"""Most bytes of a file with one name, and of ``packed-refs``."""
_MOST_HOPS = 5
"""Refs that may point to other refs in a row, as in git."""
_MOST_CHANGED = 100 * 1024**2
"""Bytes of changed files above which no patch is made; the archive contains them anyway."""
_LARGE_FILE = (
    rb"version https://git-lfs\.github\.com/spec/v1\noid sha256:([0-9a-f]{64})\nsize \d+\n"
)
"""The pointer that git stores for a file in Git LFS."""
_LINK = 0o120000
_BRANCH = "refs/heads/bundle"


class Patch(NamedTuple):
    """For ``git apply`` at the top of the work tree."""

    text: bytes
    left_out: tuple[str, ...]
    """Changed files whose committed version contains a private key."""


def commit(source: Path) -> str | None:
    """The hash of the commit that is checked out at `source`; None where unknown."""
    repository = _find(source)
    return _head(repository) if repository is not None else None


def patch(bundle: Bundle, archive: Path) -> Patch:
    """The changes from the bundle's commit to its stored `archive`.

    Raises DeploykitError where they cannot be determined.
    """
    import tarfile  # not needed for a dry run

    try:
        return _patch(bundle, archive)
    except (OSError, ValueError, tarfile.TarError) as error:
        raise DeploykitError(str(error)) from error


class _Repository(NamedTuple):
    """A work tree `top`, its own git folder, and the one `shared` by all work trees."""

    top: Path
    git: Path
    shared: Path


def _find(source: Path) -> _Repository | None:
    """The repository that `source` is in; None without one, or where its layout is unusual."""
    source = Path(os.path.realpath(source))
    for folder in (source, *source.parents):
        git = folder / ".git"
        if git.is_file():
            return _linked(folder)
        if git.is_dir():
            return _Repository(folder, git, git)
    return None


def _linked(top: Path) -> _Repository | None:
    """The repository of a submodule, or of a further work tree: ``.git`` is a file there."""
    text = paths.read_below(top, ".git", _SMALL)
    if text is None or not text.startswith(b"gitdir:"):
        return None
    git = _folder(top, text.removeprefix(b"gitdir:"))
    if git is None:
        return None
    common = paths.read_below(git, "commondir", _SMALL)
    if common is None and not os.path.lexists(git / "commondir"):
        return _Repository(top, git, git)
    shared = _folder(git, common or b"")
    if shared is None or git.parent != shared / "worktrees":
        return None
    return _Repository(top, git, shared)


def _folder(base: Path, text: bytes) -> Path | None:
    name = text.strip()
    if not name or b"\0" in name or b"\n" in name:
        return None
    path = Path(os.path.realpath(base / os.fsdecode(name)))
    return path if path.is_dir() else None


def _head(repository: _Repository) -> str | None:
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


def _packed(repository: _Repository, name: bytes) -> bytes | None:
    lines = paths.read_below(repository.shared, "packed-refs", _PACKED) or b""
    match = re.search(rb"^([0-9a-f]+) " + re.escape(name) + rb"$", lines, re.MULTILINE)
    return match[1] if match else None


class _File(NamedTuple):
    """A file of a tree; `content` only where it has changed."""

    mode: int
    hash: str
    content: bytes = b""


def _patch(bundle: Bundle, archive: Path) -> Patch:
    repository = _find(bundle.source)
    if repository is None or bundle.commit is None:
        raise DeploykitError("the source is not in a git repository")
    inside = Path(os.path.realpath(bundle.source)).relative_to(repository.top)
    prefix = "".join(f"{part}/" for part in inside.parts)
    import tempfile  # not needed for a dry run

    with tempfile.TemporaryDirectory(dir=archive.parent) as folder:
        git = _Git(Path(folder), repository.shared / "objects", bundle.commit)
        before = git.files(prefix)
        after = _changed(bundle, archive, before)
        gone = _gone(bundle, before)
        contents = git.contents({path: before[path] for path in (*after, *gone) if path in before})
        left_out = {path for path, text in contents.items() if secret_scan.private_key(text)}
        same = {path for path in after if _is_large_file(contents.get(path), after[path])}
        for path in left_out | same:
            after.pop(path, None)
        gone = [path for path in gone if path not in left_out]
        return Patch(git.patch(prefix, after, gone), tuple(sorted(left_out)))


def _changed(bundle: Bundle, archive: Path, before: Mapping[str, _File]) -> dict[str, _File]:
    """The files and links of the archive that differ from the commit."""
    import tarfile

    algorithm = _algorithm(bundle.commit or "")
    from_source = {entry.path for entry in bundle.entries if entry.content is None}
    changed: dict[str, _File] = {}
    size = 0
    with tarfile.open(archive, "r:gz") as tar:
        for info in tar:
            if info.name not in from_source:
                continue
            target = os.fsencode(info.linkname)
            length = info.size if info.isfile() else len(target)
            stream = tar.extractfile(info) if info.isfile() else None
            digest, content = _read(stream or io.BytesIO(target), length, algorithm)
            file = _File(0o100000 | info.mode if info.isfile() else _LINK, digest, content)
            old = before.get(info.name)
            if old is None or (old.mode, old.hash) != (file.mode, file.hash):
                changed[info.name] = file
                size = _add(size, length)
    return changed


def _read(stream: IO[bytes], length: int, algorithm: str) -> tuple[str, bytes]:
    """Git's hash of a file, and its content unless that is too large."""
    digest = hashlib.new(algorithm, b"blob %d\0" % length, usedforsecurity=False)
    kept = []
    while piece := stream.read(1 << 20):
        digest.update(piece)
        if length <= _MOST_CHANGED:
            kept.append(piece)
    return digest.hexdigest(), b"".join(kept)


def _gone(bundle: Bundle, before: Iterable[str]) -> list[str]:
    """Committed files that were deleted; not those that exist and are ignored."""
    rules = IgnoreRules(bundle.source)
    bundled = {entry.path for entry in bundle.entries}
    return [
        path
        for path in before
        if path not in bundled
        and rules.travels(path)
        and not _exists(bundle.source / path, path, bundled)
    ]


def _exists(full: Path, path: str, bundled: set[str]) -> bool:
    parents = path.split("/")[:-1]
    if any("/".join(parents[: n + 1]) in bundled for n in range(len(parents))):
        return False  # a folder on the way is now a file or a link
    return os.path.lexists(full) and (full.is_symlink() or not full.is_dir())


def _is_large_file(committed: bytes | None, file: _File) -> bool:
    pointer = re.fullmatch(_LARGE_FILE, committed or b"")
    return pointer is not None and hashlib.sha256(file.content).hexdigest() == pointer[1].decode()


def _algorithm(commit: str) -> str:
    return "sha1" if len(commit) == 40 else "sha256"  # noqa: PLR2004 - hex digits


def _add(size: int, more: int) -> int:
    if size + more > _MOST_CHANGED:
        raise DeploykitError(f"more than {_MOST_CHANGED >> 20} MiB of files have changed")
    return size + more


class _Git:
    """Git in an empty repository that borrows another's objects, without any configuration."""

    def __init__(self, folder: Path, objects: Path, commit: str) -> None:
        self._folder, self._commit = folder, commit
        for name in ("objects", "refs"):
            (folder / name).mkdir()
        (folder / "HEAD").write_text("ref: refs/heads/none\n")
        (folder / "config").write_text(
            "[core]\nrepositoryformatversion = 1\nbare = true\ncompression = 1\n"
            f"protectNTFS = false\n[extensions]\nobjectFormat = {_algorithm(commit)}\n"
        )
        self._env = {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": str(folder),
            "LC_ALL": "C",
            "GIT_DIR": str(folder),
            "GIT_ALTERNATE_OBJECT_DIRECTORIES": os.fsdecode(_quoted(str(objects))),
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_ATTR_NOSYSTEM": "1",
            "GIT_LITERAL_PATHSPECS": "1",
            "GIT_NO_LAZY_FETCH": "1",
            "GIT_ALLOW_PROTOCOL": "none",
            "GIT_TERMINAL_PROMPT": "0",
        }

    def files(self, prefix: str) -> dict[str, _File]:
        """The commit's files and links below `prefix`, without it; no submodules."""
        listing = self._run("ls-tree", "-r", "-z", self._commit, "--", *filter(None, [prefix]))
        files = {}
        for line in listing.split(b"\0")[:-1]:
            about, _, path = line.partition(b"\t")
            mode, kind, name = about.decode().split()
            if kind == "blob":
                files[os.fsdecode(path).removeprefix(prefix)] = _File(int(mode, 8), name)
        return files

    def contents(self, files: Mapping[str, _File]) -> dict[str, bytes]:
        """The committed content of each file."""
        hashes = "".join(f"{file.hash}\n" for file in files.values()).encode()
        size = 0
        for line in self._run("cat-file", "--batch-check", data=hashes).decode().splitlines():
            _, *kind, bytes_ = line.split()
            if kind != ["blob"]:
                raise DeploykitError(f"git cat-file: {line}")
            size = _add(size, int(bytes_))
        answer = self._run("cat-file", "--batch", data=hashes)
        contents, start = {}, 0
        for path in files:
            end = answer.index(b"\n", start)
            length = int(answer[start:end].split()[2])
            contents[path] = answer[end + 1 : end + 1 + length]
            start = end + 2 + length
        return contents

    def patch(self, prefix: str, changed: Mapping[str, _File], gone: Collection[str]) -> bytes:
        """The patch from the commit to the commit with these changes."""
        if not changed and not gone:
            return b""
        commands = b"".join(_new_commit(self._commit, prefix, changed, gone))
        self._run("fast-import", "--quiet", data=commands)
        options = ("-r", "-p", "-M", "--binary", "--full-index", "--ignore-submodules=all")
        safe = ("--no-ext-diff", "--no-textconv", "--no-color")
        return self._run("diff-tree", *options, *safe, self._commit, _BRANCH)

    def _run(self, *argv: str, data: bytes = b"") -> bytes:
        code, out, err = shell.raw(["git", *argv], cwd=self._folder, env=self._env, data=data)
        if code:
            raise DeploykitError(f"git {argv[0]}: {err.strip().splitlines()[-1:] or code}")
        return out


def _new_commit(
    commit: str, prefix: str, changed: Mapping[str, _File], gone: Collection[str]
) -> Iterator[bytes]:
    """The input of fast-import: https://git-scm.com/docs/git-fast-import#_commands."""
    yield f"commit {_BRANCH}\ncommitter deploykit <> 0 +0000\ndata 0\nfrom {commit}\n".encode()
    for path in gone:
        yield b"D %b\n" % _quoted(prefix + path)
    for path, file in changed.items():
        yield b"M %06o inline %b\n" % (file.mode, _quoted(prefix + path))
        yield b"data %d\n%b\n" % (len(file.content), file.content)


def _quoted(path: str) -> bytes:
    """A path in git's quotes, whatever is in it."""
    inside = "".join(
        chr(byte) if chr(byte).isascii() and chr(byte).isalnum() else f"\\{byte:03o}"
        for byte in os.fsencode(path)
    )
    return f'"{inside}"'.encode()
