"""The files of a source folder that travel with the job, and their bytes as they were when read.

What stays behind: first git's rules for ``.gitignore`` (of every folder, and of those above up to
the repository's root), then what never travels by default, then ``.deploykitignore``, which
decides last: ``!.env`` in it lets that file travel.
"""

from __future__ import annotations

import fnmatch
import os
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from deploykit import paths
from deploykit.errors import JobFileError, TryAgain
from deploykit.model import Entry, Problem
from deploykit.paths import OpenFolder

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

SECRETS = (
    *(".env", ".env.*", ".envrc", "!.env.example", "!.env.sample", "!.env.template", "!.env.dist"),
    *("*.pem", "*.key", "*.p8", "*.p12", "*.pfx", "*.ppk", "*.jks", "*.keystore", "*.kdbx"),
    *("id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*"),
    *(".netrc", "_netrc", ".pgpass", ".my.cnf", ".htpasswd", ".git-credentials", ".vault-token"),
    *(".pypirc", ".npmrc", ".yarnrc.yml", ".s3cfg", ".boto", ".databrickscfg", ".dockercfg"),
    *("credentials.json", "client_secret*.json", "application_default_credentials.json"),
    *("kaggle.json", "rclone.conf", ".terraformrc", "*.tfstate", "*.tfstate.backup"),
    *(".aws/", ".azure/", ".gcloud/", ".ssh/", ".gnupg/", ".kube/", ".docker/"),
    *(".huggingface/", ".kaggle/", ".ngc/", ".terraform.d/"),
)
"""Patterns of names that may contain secrets, in lower case; matched case-insensitively."""

_CLUTTER = (
    *(".git", ".hg/", ".svn/", ".deploykit/", ".ds_store"),
    *("__pycache__/", "*.py[co]", ".venv*/", "node_modules/", ".ipynb_checkpoints/"),
    *(".mypy_cache/", ".pytest_cache/", ".ruff_cache/", ".hypothesis/", ".tox/", ".nox/"),
)
_LARGEST = 1 << 20
"""Bytes of an ignore file."""
_PIECE = 1 << 20
"""Bytes that are read at once."""


class _Names:
    """Patterns that match the name of a file or folder, in any folder."""

    def __init__(self, patterns: Iterable[str]) -> None:
        positive = [pattern for pattern in patterns if not pattern.startswith("!")]
        self._folders = _any_of(pattern.removesuffix("/") for pattern in positive)
        self._files = _any_of(pattern for pattern in positive if not pattern.endswith("/"))
        self._not = _any_of(pattern[1:] for pattern in patterns if pattern.startswith("!"))

    def match(self, path: str, *, is_folder: bool) -> bool:
        """Whether the last part of `path` matches."""
        name = path.rpartition("/")[2].lower()
        matched = (self._folders if is_folder else self._files).match(name)
        return matched is not None and self._not.match(name) is None


def _any_of(patterns: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(fnmatch.translate, patterns)) or r"(?!)")


_DEFAULT = _Names([*SECRETS, *_CLUTTER])
_ALWAYS = _Names([".git", ".deploykit/"])


class IgnoreRules:
    """The ignore rules of one source folder, read while it is walked from the top down.

    Raises OSError where an ignore file cannot be read: the files that it names might be bundled.
    """

    def __init__(self, source: Path) -> None:
        self._source = source
        self._git: list[tuple[str, GitIgnoreSpec]] = []
        self._explicit: list[tuple[str, GitIgnoreSpec]] = []
        self._above = _specs_above(source.resolve())
        self._entered: set[str] = set()

    def enter(self, folder: str) -> None:
        """Read the ignore files of `folder` (relative, "" or ending in a slash)."""
        if folder in self._entered:
            return
        self._entered.add(folder)
        for name, into in ((".gitignore", self._git), (".deploykitignore", self._explicit)):
            spec = _read(self._source / folder / name)
            if spec is not None:
                into.append((folder, spec))

    def ignored(self, path: str, *, is_folder: bool) -> bool:
        """Whether `path`, relative to the source folder, is left out."""
        if _ALWAYS.match(path, is_folder=is_folder):
            return True
        name = f"{path}/" if is_folder else path
        explicit = _decision(self._explicit, name)
        if explicit is not None:
            return explicit
        if _DEFAULT.match(path, is_folder=is_folder):
            return True
        git = _decision(self._git, name)
        return bool(_decision_above(self._above, name) if git is None else git)

    def travels(self, path: str) -> bool:
        """Whether the file `path` would be bundled, by its name and those of its folders."""
        folder = ""
        for name in path.split("/")[:-1]:
            self.enter(folder)
            folder += f"{name}/"
            if self.ignored(folder[:-1], is_folder=True):
                return False
        self.enter(folder)
        return not self.ignored(path, is_folder=False)

    def wanted(self, path: str) -> bool:
        """Whether a ``.deploykitignore`` includes this file, whatever its content."""
        return _decision(self._explicit, path) is False


def walk(source: Path, rules: IgnoreRules, problems: list[Problem]) -> Iterator[Entry]:
    """Every file and link below `source` that is not ignored; unusable ones become problems."""
    top, state = os.path.realpath(source), str(paths.state())
    folders = [""]
    while folders:
        folder = folders.pop()
        try:
            rules.enter(folder)
            items = sorted(os.scandir(source / folder), key=lambda item: item.name)
        except OSError as error:
            problems.append(_unreadable(folder or ".", error))
            continue
        for item in items:
            path = f"{folder}{item.name}"
            is_folder = item.is_dir(follow_symlinks=False)
            # the state folder may be inside a source folder
            if rules.ignored(path, is_folder=is_folder) or os.path.abspath(item.path) == state:  # noqa: PTH100 - keeps links
                continue
            if is_folder:
                folders.append(f"{path}/")
                continue
            entry = _link(item, path, top) if item.is_symlink() else _file(item, path)
            if isinstance(entry, Problem):
                problems.append(entry)
            else:
                yield entry


def opened(source: Path) -> OpenFolder:
    """The source folder, for `pieces`. Raises TryAgain where it no longer exists."""
    try:
        return OpenFolder(source)
    except OSError as error:
        raise changed(str(source)) from error


def pieces(top: OpenFolder, entry: Entry) -> Iterator[bytes]:
    """The content of a file that `walk` found, in pieces of at most 1 MiB.

    Raises TryAgain where it has changed, JobFileError where it cannot be read.
    """
    left = entry.size
    try:
        with top.open(entry.path) as file:
            while piece := file.read(min(left + 1, _PIECE)):
                left -= len(piece)
                if left < 0:
                    break
                yield piece
    except PermissionError as error:
        raise JobFileError("the source folder", [_unreadable(entry.path, error)]) from error
    except OSError as error:
        raise changed(entry.path) from error
    if left:
        raise changed(entry.path)


def changed(path: str) -> TryAgain:
    """The error for a file or folder that changed while it was read."""
    return TryAgain(
        f"{path} changed while it was being bundled",
        hint="submit again; add files that change all the time to .deploykitignore",
    )


def _file(item: os.DirEntry[str], path: str) -> Entry | Problem:
    if not item.is_file(follow_symlinks=False):
        return _problem(path, "is neither a file, a folder nor a link")
    if not os.access(item.path, os.R_OK):
        return _problem(path, "cannot be read")
    try:
        info = item.stat(follow_symlinks=False)
    except OSError as error:
        raise changed(path) from error
    return Entry(path, 0o755 if info.st_mode & stat.S_IXUSR else 0o644, info.st_size)


def _link(item: os.DirEntry[str], path: str, top: str) -> Entry | Problem:
    """The link is bundled itself, so its target is read once, and checked as read."""
    try:
        target = os.readlink(item.path)  # noqa: PTH115 - as it is written
    except OSError as error:
        raise changed(path) from error
    end = os.path.realpath(os.path.join(os.path.dirname(item.path), target))  # noqa: PTH118, PTH120 - Path.resolve() raises on a loop of links
    if target.startswith("/") or os.path.commonpath([end, top]) != top:
        return _problem(path, f"is a link to {target}, outside the source folder")
    return Entry(path, 0o777, target=target)


def _unreadable(path: str, error: OSError) -> Problem:
    name = os.path.basename(error.filename or "")  # noqa: PTH119 - may be a number
    where = f"{path.removesuffix('/')}: {name}" if name.startswith(".") and name != path else path
    return _problem(where, f"cannot be read: {error.strerror}")


def _problem(path: str, what: str) -> Problem:
    return Problem("source", f"{path} {what}", "add it to .deploykitignore, or replace it")


def _decision(specs: list[tuple[str, GitIgnoreSpec]], name: str) -> bool | None:
    """The deepest folder's rule for `name`: True ignored, False included, None no rule."""
    for folder, spec in reversed(specs):
        if name.startswith(folder):
            decision = spec.check_file(name.removeprefix(folder)).include
            if decision is not None:
                return decision
    return None


def _decision_above(specs: list[tuple[str, GitIgnoreSpec]], name: str) -> bool | None:
    for prefix, spec in specs:
        decision = spec.check_file(f"{prefix}{name}").include
        if decision is not None:
            return decision
    return None


def _specs_above(source: Path) -> list[tuple[str, GitIgnoreSpec]]:
    """Ignore rules of the folders above `source` in its repository, the nearest first."""
    if (source / ".git").exists():
        return []
    specs: list[tuple[str, GitIgnoreSpec]] = []
    for folder in source.parents:
        spec = _read(folder / ".gitignore")
        if spec is not None:
            specs.append((f"{source.relative_to(folder).as_posix()}/", spec))
        if (folder / ".git").exists():
            return specs
    return []


def _read(path: Path) -> GitIgnoreSpec | None:
    """The patterns of an ignore file; None where there is no such file, or no pattern in it."""
    try:
        content = paths.read_regular(path, _LARGEST)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    text = content.decode("utf-8", "surrogateescape").removeprefix("\ufeff")
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    if not any(line.strip() and not line.startswith("#") for line in lines):
        return None
    from pathspec import GitIgnoreSpec  # takes 25 ms, and many source folders need none

    try:
        return GitIgnoreSpec.from_lines(lines)
    except (ValueError, re.error):  # git skips an invalid pattern
        return GitIgnoreSpec.from_lines(filter(_is_pattern, lines))


def _is_pattern(line: str) -> bool:
    from pathspec import GitIgnoreSpec

    try:
        return bool(GitIgnoreSpec.from_lines([line]))
    except (ValueError, re.error):
        return False
