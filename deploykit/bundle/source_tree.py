"""The files of a source folder that travel with the job, and their bytes as they were when read.

What stays behind: first git's rules for ``.gitignore`` (of every folder, and of those above up to
the repository's root), then what never travels by default, then ``.deploykitignore``, which
decides last: ``!.env`` in it lets that file travel.
"""

from __future__ import annotations

import contextlib
import fnmatch
import io
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from functools import partial
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
FETCHED = ".deploykit-fetched.json"
"""In a folder that `deploykit fetch` has written: what is complete there."""
_OURS = frozenset({FETCHED, "runs.sqlite"})
"""What a folder of results that were fetched, or a state folder, contains."""
_LEFT_WHOLE = _ENVIRONMENT | _OURS
_PACKAGE = frozenset({"manifest.json", "code"})
"""What a package of `deploykit export` contains, whose manifest names deploykit."""
_MAX_MANIFEST = 16 << 20
_MAX_IGNORE_FILE = 1 << 20
"""Bytes."""
_OUR_PAGE = b'<meta name="generator" content="deploykit">'
"""At the start of a report (templates/report/page.html.j2)."""
_LFS = b"version https://git-lfs.github.com/spec/"
_MAX_LFS_POINTER = 1024
"""Bytes: https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md"""
_START = 512
"""Bytes of a file that tell what it is."""

_Decide = Callable[[str], bool | None]
"""The decision of an ignore file about a path in its folder; None where no pattern matches.

git's files decide about a file or folder alone: what is in an ignored folder is never asked for. A
``.deploykitignore`` decides about all that is in a folder too.
"""


def _names(patterns: Iterable[str]) -> re.Pattern[str]:
    """A regex of the names that the patterns mean."""
    return re.compile("|".join(map(fnmatch.translate, patterns)))


_LEFT_OUT = [pattern for pattern in (*SECRETS, *_CLUTTER) if not pattern.startswith("!")]
_DEFAULT = _names(pattern for pattern in _LEFT_OUT if not pattern.endswith("/"))
_DEFAULT_FOLDER = _names(pattern[:-1] for pattern in _LEFT_OUT if pattern.endswith("/"))
_NOT_DEFAULT = _names(pattern[1:] for pattern in SECRETS if pattern.startswith("!"))
_CLUTTER_NAME = _names(pattern.rstrip("/") for pattern in _CLUTTER)
_ALWAYS = {False: {".git"}, True: {".git", ".deploykit"}}
"""Names of files and of folders that nothing can include."""


class IgnoreRules:
    """The ignore rules of one source folder, read while it is walked from the top down.

    Without `git`, only ``.deploykitignore`` and the defaults decide.
    Raises OSError where an ignore file cannot be read: the files that it names might be bundled.
    """

    def __init__(self, source: Path, *, git: bool = True) -> None:
        self._source = source
        self._uses_git = git
        self._git, self._hidden = _rules_above(source.resolve()) if git else ([], False)
        self._explicit: list[_Decide] = []
        self._entered: set[str] = set()

    def enter(self, folder: str) -> None:
        """Read the ignore files of `folder` (relative, "" or ending in a slash)."""
        if folder in self._entered:
            return
        self._entered.add(folder)
        for name, into in ((".gitignore", self._git), (".deploykitignore", self._explicit)):
            if into is self._git and not self._uses_git:
                continue
            decide = _read(self._source / folder / name, itself=into is self._git)
            if decide is not None:
                into.insert(0, partial(_below, decide, folder))

    def ignored(self, path: str, *, is_folder: bool) -> bool:
        """Whether `path`, relative to the source folder, is left out."""
        last = path.rpartition("/")[2].lower()
        if last in _ALWAYS[is_folder]:
            return True
        name = f"{path}/" if is_folder else path
        explicit = _decision(self._explicit, name)
        if explicit is not None:
            return explicit
        is_default = _DEFAULT.match(last) or (is_folder and _DEFAULT_FOLDER.match(last))
        if is_default and not _NOT_DEFAULT.match(last):
            return True
        return self._hidden or bool(_decision(self._git, name))

    def withheld(self, path: str, *, is_folder: bool) -> bool:
        """Whether an ignored `path` is left out only because its name suggests a secret."""
        is_clutter = _CLUTTER_NAME.match(path.rpartition("/")[2].lower())
        name = f"{path}/" if is_folder else path
        return not is_clutter and _decision(self._explicit, name) is None

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


def _decision(rules: list[_Decide], name: str) -> bool | None:
    """The first rule's decision for `name`: True ignored, False included, None no rule."""
    decisions = (decide(name) for decide in rules)
    return next((decision for decision in decisions if decision is not None), None)


def _below(decide: _Decide, folder: str, path: str) -> bool | None:
    """The decision of the ignore file in a folder below the source."""
    return decide(path.removeprefix(folder)) if path.startswith(folder) else None


def _above(decide: _Decide, folder: str, path: str) -> bool | None:
    """The decision of an ignore file for which `path` is in `folder`."""
    return decide(f"{folder}{path}")


def _rules_above(source: Path) -> tuple[list[_Decide], bool]:
    """The rules of the folders above `source` in its repository, the nearest first.

    And whether they ignore `source`, or a folder above it.
    """
    folders = [source, *source.parents]
    top = next((n for n, folder in enumerate(folders) if (folder / ".git").exists()), 0)
    rules: list[_Decide] = []
    hidden = False
    for folder in reversed(folders[:top]):
        decide = _read(folder.parent / ".gitignore", itself=True)
        rules = [decide, *rules] if decide else rules
        hidden = hidden or bool(_decision(rules, f"{folder.name}/"))
        rules = [partial(_above, decide, f"{folder.name}/") for decide in rules]
    return rules, hidden


def _read(path: Path, *, itself: bool) -> _Decide | None:
    """Return the decision function of an ignore file; None if it is missing or has no pattern.

    `itself`: about a path alone, whatever it decides about the folders above it.
    """
    try:
        content = paths.read_regular(path, _MAX_IGNORE_FILE)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    lines = content.decode("utf-8", "surrogateescape").removeprefix("\ufeff").split("\n")
    patterns: list[Any] = []
    for line in lines:
        with contextlib.suppress(ValueError, re.error):  # like git, it skips invalid patterns
            patterns += GitIgnoreSpec.from_lines([line.removesuffix("\r")]).patterns
    patterns = [pattern for pattern in patterns if pattern.include is not None]
    if not patterns:
        return None
    if not itself:
        spec = GitIgnoreSpec(patterns)
        return lambda path: spec.check_file(path).include

    def decide(path: str) -> bool | None:
        for pattern in reversed(patterns):
            match = pattern.regex.search(path)
            if match and _is_whole(match):
                return bool(pattern.include)
        return None

    return decide


def _is_whole(match: re.Match[str]) -> bool:
    """Return whether a pattern matches the path itself, not only a folder above it.

    pathspec marks the end of a folder by a group. A pattern of what is in a folder has none, and
    does not match the folder.
    """
    if match.lastindex is not None:
        return match.end(match.lastindex) == len(match.string)
    return not (match.string.endswith("/") and match.end() == len(match.string))


def rules_of(source: Path) -> IgnoreRules:
    """The ignore rules of a source folder.

    Raises JobFileError where they cannot be read, and for a whole home folder or file system.
    """
    what = {"/": "the whole file system", os.path.expanduser("~"): "your whole home folder"}  # noqa: PTH111 - pathlib's raises for an unknown user
    if everything := what.get(str(source.resolve())):
        hint = "change to the folder of your script first, or set `source`"
        problem = Problem("source", f"is {everything}, all of which would be sent", hint)
        raise JobFileError(f"the source folder {source}", [problem])
    try:
        return IgnoreRules(source)
    except OSError as error:
        problem = Problem("source", f"{error.filename} cannot be read: {error.strerror}")
        raise JobFileError(f"the source folder {source}", [problem]) from error


def walk(source: Path, rules: IgnoreRules, problems: list[Problem]) -> Iterator[Entry]:
    """Every file and link below `source` that is not ignored; unusable ones become problems.

    A Python environment is left out, with a warning; deploykit's own reports, fetched results and
    state folders silently.
    """
    top, state = os.path.realpath(source), paths.state()
    folders = [""]
    while folders:
        folder = folders.pop()
        try:
            rules.enter(folder)
            items = sorted(os.scandir(source / folder), key=lambda item: item.name)
        except OSError as error:
            problems.append(_unreadable(folder or ".", error))
            continue
        names = {item.name for item in items} if folder and not rules.wanted(folder) else set()
        if not _ENVIRONMENT.isdisjoint(names):
            problems.append(_environment_warning(source, folder))
        if not _LEFT_WHOLE.isdisjoint(names) or _is_package(source / folder, names):
            continue
        for item in items:
            path = f"{folder}{item.name}"
            is_folder = item.is_dir(follow_symlinks=False)
            if rules.ignored(path, is_folder=is_folder) or _is_folder(item, state):
                continue
            if is_folder:
                folders.append(f"{path}/")
                continue
            entry = _link(item, path, top) if item.is_symlink() else _file(item, path)
            if isinstance(entry, Problem):
                problems.append(entry)
            elif _is_report(source, entry) and not rules.wanted(path):
                continue
            else:
                yield entry


def _is_folder(item: os.DirEntry[str], folder: Path) -> bool:
    """Whether an entry is this folder, such as the state folder inside a source folder."""
    return item.name == folder.name and os.path.abspath(item.path) == str(folder)  # noqa: PTH100 - keeps links


def _environment_warning(source: Path, folder: str) -> Problem:
    size = sum(
        os.lstat(os.path.join(root, name)).st_size  # noqa: PTH118 - fast for many files
        for root, _, names in os.walk(source / folder)
        for name in names
    )
    message = f"left out: the Python environment {folder} ({size / 1e6:.0f} MB)"
    hint = (
        "an environment works only in the folder where it was created; "
        f"to include it, add !/{folder} to .deploykitignore"
    )
    return Problem("source", message, hint, severity="warning")


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


def _is_package(folder: Path, names: set[str]) -> bool:
    """Whether a folder, with these names in it, is a package of `deploykit export`."""
    if not names >= _PACKAGE:
        return False
    return b'"deploykit": ' in (paths.read_below(folder, "manifest.json", _MAX_MANIFEST) or b"")


def _is_report(source: Path, entry: Entry) -> bool:
    """Whether a file is a page that deploykit has written."""
    if entry.target is not None or not entry.path.endswith(".html"):
        return False
    with opened(source, entry) as file:
        return _OUR_PAGE in file.read(_START)


def is_lfs_pointer(file: IO[bytes], entry: Entry) -> bool:
    """Whether a file, open at its start, is a pointer of Git LFS."""
    if not len(_LFS) < entry.size <= _MAX_LFS_POINTER:
        return False
    start = file.read(len(_LFS))
    file.seek(0)
    return start == _LFS


def lfs_warning(pointers: list[str]) -> Problem:
    """The warning about files that hold no content."""
    more = f" and {len(pointers) - 1} more" if len(pointers) > 1 else ""
    are = "are Git LFS pointers" if more else "is a Git LFS pointer"
    message = f"{pointers[0]}{more} {are} without content"
    hint = "run `git lfs pull`, or list them in .deploykitignore"
    return Problem("source", message, hint, severity="warning")


def changed(path: str) -> TryAgain:
    """The error for a file or folder that changed while it was read."""
    return TryAgain(
        f"{path} changed while it was being bundled",
        hint="submit again; add files that change constantly to .deploykitignore",
    )


def _file(item: os.DirEntry[str], path: str) -> Entry | Problem:
    if not item.is_file(follow_symlinks=False):
        return _problem(path, "is not a file, folder or link")
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
        return _problem(path, f"is a link to {target}, which is outside the source folder")
    return Entry(path, 0o777, target=target)


def _unreadable(path: str, error: OSError) -> Problem:
    name = os.path.basename(error.filename or "")  # noqa: PTH119 - may be a number
    where = f"{path.removesuffix('/')}: {name}" if name.startswith(".") and name != path else path
    return _problem(where, f"cannot be read: {error.strerror}")


def _problem(path: str, what: str) -> Problem:
    return Problem("source", f"{path} {what}", "add it to .deploykitignore, or replace it")
