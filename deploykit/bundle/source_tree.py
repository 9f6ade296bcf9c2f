"""The files of a source folder that travel with the job, and their bytes as they were when read.

What stays behind: first git's rules for ``.gitignore`` (of every folder, and of those above up to
the repository's root), then what never travels by default, then ``.deploykitignore``, which
decides last: ``!.env`` in it lets that file travel.
"""

from __future__ import annotations

import fnmatch
import io
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from pathspec import GitIgnoreSpec

from deploykit.job.model import Entry, Problem
from deploykit.lib import paths
from deploykit.lib.errors import JobFileError, TryAgain

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
    *("__pycache__/", "*.pyc", "*.pyo", ".venv*/", "node_modules/", ".ipynb_checkpoints/"),
    *(".mypy_cache/", ".pytest_cache/", ".ruff_cache/", ".hypothesis/", ".tox/", ".nox/"),
)
_ENVIRONMENT = frozenset({"pyvenv.cfg", "conda-meta"})
"""What the folder of a virtual environment, or of one of conda's, contains."""
_MAX_IGNORE_FILE = 1 << 20
"""Bytes."""

_Decide = Callable[[str], bool | None]
"""The decision of an ignore file about a path in its folder; None where no pattern matches.

git's files decide about a file or folder alone: what is in an ignored folder is never asked for. A
``.deploykitignore`` decides about all that is in a folder too.
"""


def _names(patterns: Iterable[str], *, folders: bool) -> re.Pattern[str]:
    """A regex of the names that the patterns mean; those with a slash at the end mean folders."""
    chosen = (p.removesuffix("/") for p in patterns if folders or not p.endswith("/"))
    return re.compile("|".join(map(fnmatch.translate, chosen)))


_LEFT_OUT = [pattern for pattern in (*SECRETS, *_CLUTTER) if not pattern.startswith("!")]
_DEFAULT = {is_folder: _names(_LEFT_OUT, folders=is_folder) for is_folder in (False, True)}
_NOT_DEFAULT = _names([p[1:] for p in SECRETS if p.startswith("!")], folders=False)
_ALWAYS = {False: {".git"}, True: {".git", ".deploykit"}}
"""Names of files and of folders that nothing can include."""


class IgnoreRules:
    """The ignore rules of one source folder, read while it is walked from the top down.

    Raises OSError where an ignore file cannot be read: the files that it names might be bundled.
    """

    def __init__(self, source: Path) -> None:
        self._source = source
        self._git: list[tuple[str, _Decide]] = []
        self._explicit: list[tuple[str, _Decide]] = []
        self._above, self._hidden = _rules_above(source.resolve())
        self._entered: set[str] = set()

    def enter(self, folder: str) -> None:
        """Read the ignore files of `folder` (relative, "" or ending in a slash)."""
        if folder in self._entered:
            return
        self._entered.add(folder)
        for name, into in ((".gitignore", self._git), (".deploykitignore", self._explicit)):
            decide = _read(self._source / folder / name, itself=into is self._git)
            if decide is not None:
                into.append((folder, decide))

    def ignored(self, path: str, *, is_folder: bool) -> bool:
        """Whether `path`, relative to the source folder, is left out."""
        last = path.rpartition("/")[2].lower()
        if last in _ALWAYS[is_folder]:
            return True
        name = f"{path}/" if is_folder else path
        explicit = _decision(self._explicit, name)
        if explicit is not None:
            return explicit
        if _DEFAULT[is_folder].match(last) and not _NOT_DEFAULT.match(last):
            return True
        git = _decision(self._git, name)
        return self._hidden or bool(_decision_above(self._above, name) if git is None else git)

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


def rules_of(source: Path) -> IgnoreRules:
    """The ignore rules of a source folder. Raises JobFileError where they cannot be read."""
    try:
        return IgnoreRules(source)
    except OSError as error:
        problem = Problem("source", f"{error.filename} cannot be read: {error.strerror}")
        raise JobFileError(f"the source folder {source}", [problem]) from error


def walk(source: Path, rules: IgnoreRules, problems: list[Problem]) -> Iterator[Entry]:
    """Every file and link below `source` that is not ignored; unusable ones become problems.

    A Python environment is left out, with a warning.
    """
    top, state = os.path.realpath(source), str(paths.state())
    state_name = os.path.basename(state)  # noqa: PTH119 - as text
    folders = [""]
    while folders:
        folder = folders.pop()
        try:
            rules.enter(folder)
            items = sorted(os.scandir(source / folder), key=lambda item: item.name)
        except OSError as error:
            problems.append(_unreadable(folder or ".", error))
            continue
        is_environment = not _ENVIRONMENT.isdisjoint(item.name for item in items)
        if folder and is_environment and not rules.wanted(folder):
            problems.append(_left_out(source, folder))
            continue
        for item in items:
            path = f"{folder}{item.name}"
            is_folder = item.is_dir(follow_symlinks=False)
            if rules.ignored(path, is_folder=is_folder):
                continue
            # the state folder may be inside a source folder
            if item.name == state_name and os.path.abspath(item.path) == state:  # noqa: PTH100 - keeps links
                continue
            if is_folder:
                folders.append(f"{path}/")
                continue
            entry = _link(item, path, top) if item.is_symlink() else _file(item, path)
            if isinstance(entry, Problem):
                problems.append(entry)
            else:
                yield entry


def _left_out(source: Path, folder: str) -> Problem:
    """The warning for an environment, which works only where it was made."""
    size = sum(
        os.lstat(os.path.join(root, name)).st_size  # noqa: PTH118 - fast for many files
        for root, _, names in os.walk(source / folder)
        for name in names
    )
    return Problem(
        "source",
        f"left out: the Python environment {folder} ({size / 1e6:.0f} MB)",
        "an environment works only in the folder in which it was made; "
        f"to include it, add !/{folder} to .deploykitignore",
        severity="warning",
    )


def opened(source: Path, entry: Entry) -> IO[bytes]:
    """The content of a file that `walk` found. Raises TryAgain, JobFileError where it is lost."""
    if entry.content is not None:
        return io.BytesIO(entry.content)
    try:
        return paths.open_regular(source / entry.path)
    except PermissionError as error:
        raise JobFileError("the source folder", [_unreadable(entry.path, error)]) from error
    except OSError as error:
        raise changed(entry.path) from error


def changed(path: str) -> TryAgain:
    """The error for a file or folder that changed while it was read."""
    return TryAgain(
        f"{path} changed while it was being bundled",
        hint="submit again; add files that change constantly to .deploykitignore",
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


def _decision(files: list[tuple[str, _Decide]], name: str) -> bool | None:
    """The deepest folder's rule for `name`: True ignored, False included, None no rule."""
    for folder, decide in reversed(files):
        if name.startswith(folder):
            decision = decide(name.removeprefix(folder))
            if decision is not None:
                return decision
    return None


def _decision_above(files: list[tuple[str, _Decide]], name: str) -> bool | None:
    for prefix, decide in files:
        decision = decide(f"{prefix}{name}")
        if decision is not None:
            return decision
    return None


def _rules_above(source: Path) -> tuple[list[tuple[str, _Decide]], bool]:
    """Ignore files of the folders above `source` in its repository, the nearest first.

    Each with the path from its folder to `source`; and whether they ignore `source`, or a folder
    above it.
    """
    folders = [source, *source.parents]
    top = next((n for n, folder in enumerate(folders) if (folder / ".git").exists()), 0)
    files: list[tuple[str, _Decide]] = []
    hidden = False
    for folder in reversed(folders[:top]):
        decide = _read(folder.parent / ".gitignore", itself=True)
        files = [("", decide), *files] if decide else files
        hidden = hidden or bool(_decision_above(files, f"{folder.name}/"))
        files = [(f"{prefix}{folder.name}/", decide) for prefix, decide in files]
    return files, hidden


def _read(path: Path, *, itself: bool) -> _Decide | None:
    """What an ignore file decides; None where there is no such file, or no pattern in it.

    `itself`: about a path alone, whatever it decides about the folders above it.
    """
    try:
        content = paths.read_regular(path, _MAX_IGNORE_FILE)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    text = content.decode("utf-8", "surrogateescape").removeprefix("\ufeff")
    spec = _spec([line.removesuffix("\r") for line in text.split("\n")])
    patterns = [pattern for pattern in spec.patterns if pattern.include is not None]
    if not patterns:
        return None
    if not itself:
        return lambda path: spec.check_file(path).include
    last_first: list[tuple[re.Pattern[str], bool]] = [
        (pattern.regex, pattern.include) for pattern in reversed(patterns)
    ]

    def decide(path: str) -> bool | None:
        for regex, include in last_first:
            match = regex.search(path)
            if match and _is_whole(match):
                return include
        return None

    return decide


def _spec(lines: list[str]) -> Any:
    """The patterns of an ignore file; like git, it skips invalid ones."""
    try:
        return GitIgnoreSpec.from_lines(lines)
    except (ValueError, re.error):
        return GitIgnoreSpec.from_lines(filter(_is_pattern, lines))


def _is_pattern(line: str) -> bool:
    try:
        return bool(GitIgnoreSpec.from_lines([line]))
    except (ValueError, re.error):
        return False


def _is_whole(match: re.Match[str]) -> bool:
    """Whether a pattern matches a path itself, and not only a folder above it.

    pathspec marks the end of a folder by a group. A pattern of what is in a folder has none, and
    does not match the folder.
    """
    if match.lastindex is not None:
        return match.end(match.lastindex) == len(match.string)
    return not (match.string.endswith("/") and match.end() == len(match.string))
