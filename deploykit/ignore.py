"""Which files of a source folder stay behind.

Git's rules for ``.gitignore`` (every folder's, and those above up to the repository's root), then
what never travels by default, then ``.deploykitignore``, which has the last word: ``!.env`` in it
lets that file travel.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable
from pathlib import Path

from pathspec import GitIgnoreSpec

from deploykit import paths

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
"""Patterns of names that may hold secrets, in small letters; case makes no difference."""

_CLUTTER = (
    *(".git", ".hg/", ".svn/", ".deploykit/", ".ds_store"),
    *("__pycache__/", "*.py[co]", ".venv*/", "node_modules/", ".ipynb_checkpoints/"),
    *(".mypy_cache/", ".pytest_cache/", ".ruff_cache/", ".hypothesis/", ".tox/", ".nox/"),
)
_LARGEST = 1 << 20
"""Bytes of an ignore file."""


class _Names:
    """Patterns for a file's or folder's own name, whatever folder it is in."""

    def __init__(self, patterns: Iterable[str]) -> None:
        wanted = [pattern for pattern in patterns if not pattern.startswith("!")]
        self._folders = _any_of(pattern.removesuffix("/") for pattern in wanted)
        self._files = _any_of(pattern for pattern in wanted if not pattern.endswith("/"))
        self._not = _any_of(pattern[1:] for pattern in patterns if pattern.startswith("!"))

    def match(self, path: str, *, is_folder: bool) -> bool:
        name = path.rpartition("/")[2].lower()
        found = (self._folders if is_folder else self._files).match(name)
        return found is not None and self._not.match(name) is None


def _any_of(patterns: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(fnmatch.translate, patterns)) or r"(?!)")


_DEFAULT = _Names([*SECRETS, *_CLUTTER])
_ALWAYS = _Names([".git", ".deploykit/"])


class Rules:
    """The ignore rules of one source folder, gathered while it is walked from the top down.

    Raises OSError where an ignore file is there and cannot be read: what it names might travel.
    """

    def __init__(self, source: Path) -> None:
        self._source = source
        self._git: list[tuple[str, GitIgnoreSpec]] = []
        self._ours: list[tuple[str, GitIgnoreSpec]] = []
        self._above = _specs_above(source.resolve())
        self._entered: set[str] = set()

    def enter(self, folder: str) -> None:
        """Read the ignore files of `folder` (relative, "" or ending in a slash)."""
        if folder in self._entered:
            return
        self._entered.add(folder)
        for name, into in ((".gitignore", self._git), (".deploykitignore", self._ours)):
            spec = _read(self._source / folder / name)
            if spec is not None:
                into.append((folder, spec))

    def ignored(self, path: str, *, is_folder: bool) -> bool:
        """Whether `path`, relative to the source folder, stays behind."""
        if _ALWAYS.match(path, is_folder=is_folder):
            return True
        name = f"{path}/" if is_folder else path
        ours = _verdict(self._ours, name)
        if ours is not None:
            return ours
        if _DEFAULT.match(path, is_folder=is_folder):
            return True
        git = _verdict(self._git, name)
        return bool(_above_verdict(self._above, name) if git is None else git)

    def travels(self, path: str) -> bool:
        """Whether the file `path` would travel, by the names of it and of the folders it is in."""
        folder = ""
        for name in path.split("/")[:-1]:
            self.enter(folder)
            folder += f"{name}/"
            if self.ignored(folder[:-1], is_folder=True):
                return False
        self.enter(folder)
        return not self.ignored(path, is_folder=False)

    def wanted(self, path: str) -> bool:
        """Whether a ``.deploykitignore`` lets this file travel, whatever it holds."""
        return _verdict(self._ours, path) is False


def _verdict(specs: list[tuple[str, GitIgnoreSpec]], name: str) -> bool | None:
    """The deepest folder's word on `name`: True ignored, False wanted, None not mentioned."""
    for folder, spec in reversed(specs):
        if name.startswith(folder):
            verdict = spec.check_file(name.removeprefix(folder)).include
            if verdict is not None:
                return verdict
    return None


def _above_verdict(specs: list[tuple[str, GitIgnoreSpec]], name: str) -> bool | None:
    for prefix, spec in specs:
        verdict = spec.check_file(f"{prefix}{name}").include
        if verdict is not None:
            return verdict
    return None


def _specs_above(source: Path) -> list[tuple[str, GitIgnoreSpec]]:
    """Ignore rules of the folders above `source` in its repository, the nearest first."""
    if (source / ".git").exists():
        return []
    found: list[tuple[str, GitIgnoreSpec]] = []
    for folder in source.parents:
        spec = _read(folder / ".gitignore")
        if spec is not None:
            found.append((f"{source.relative_to(folder).as_posix()}/", spec))
        if (folder / ".git").exists():
            return found
    return []


def _read(path: Path) -> GitIgnoreSpec | None:
    """None where there is no such file."""
    try:
        content = paths.read_regular(path, _LARGEST)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    text = content.decode("utf-8", "surrogateescape").removeprefix("\ufeff")
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    try:
        return GitIgnoreSpec.from_lines(lines)
    except (ValueError, re.error):  # git passes over a pattern that is none
        return GitIgnoreSpec.from_lines(filter(_is_pattern, lines))


def _is_pattern(line: str) -> bool:
    try:
        return bool(GitIgnoreSpec.from_lines([line]))
    except (ValueError, re.error):
        return False
