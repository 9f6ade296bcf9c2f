"""Which files of a source folder stay behind.

Git's rules for ``.gitignore`` (every folder's, and those above up to the repository's root), then
what never travels by default, then ``.deploykitignore``, which has the last word: ``!.env`` in it
lets that file travel.
"""

from __future__ import annotations

from pathlib import Path

from pathspec import GitIgnoreSpec

SECRETS = (
    ".env",
    ".env.*",
    "!.env.example",
    "!.env.sample",
    "!.env.template",
    *("*.pem", "*.key", "*.p12", "*.pfx", "*.jks", "*.keystore"),
    *("id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*"),
    *(".netrc", ".pypirc", ".npmrc", ".git-credentials", "credentials.json"),
    *(".aws/", ".ssh/", ".gnupg/", ".kube/", ".docker/"),
)
"""Patterns of files that may hold secrets."""

_CLUTTER = (
    *(".git", ".hg/", ".svn/", ".deploykit/", ".DS_Store"),
    *("__pycache__/", "*.py[co]", ".venv*/", "node_modules/", ".ipynb_checkpoints/"),
    *(".mypy_cache/", ".pytest_cache/", ".ruff_cache/", ".hypothesis/", ".tox/", ".nox/"),
)
_DEFAULT = GitIgnoreSpec.from_lines([*SECRETS, *_CLUTTER])
_ALWAYS = GitIgnoreSpec.from_lines([".git", ".deploykit/"])


class Rules:
    """The ignore rules of one source folder, gathered while it is walked from the top down."""

    def __init__(self, source: Path) -> None:
        self._source = source
        self._git: list[tuple[str, GitIgnoreSpec]] = []
        self._ours: list[tuple[str, GitIgnoreSpec]] = []
        self._above = _specs_above(source)

    def enter(self, folder: str) -> None:
        """Read the ignore files of `folder` (relative, "" or ending in a slash)."""
        for name, into in ((".gitignore", self._git), (".deploykitignore", self._ours)):
            spec = _read(self._source / folder / name)
            if spec is not None:
                into.append((folder, spec))

    def ignored(self, path: str, *, is_folder: bool) -> bool:
        """Whether `path`, relative to the source folder, stays behind."""
        name = f"{path}/" if is_folder else path
        if _ALWAYS.match_file(name):
            return True
        ours = _verdict(self._ours, name)
        if ours is not None:
            return ours
        if _DEFAULT.match_file(name):
            return True
        git = _verdict(self._git, name)
        return bool(_above_verdict(self._above, name) if git is None else git)


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
    try:
        return GitIgnoreSpec.from_lines(path.read_text(errors="replace").splitlines())
    except OSError:
        return None
