"""Read a job file, YAML or TOML, with overrides (``--set a.b=c``), into a JobSpec and sections.

An unquoted scalar of YAML keeps its text, and takes the type that its key expects, so that
``args: [--lr, 0.10, --flag, yes]`` is passed as it was written.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploykit import contract, parsing
from deploykit.decode import Malformed, Plain, decode, did_you_mean, unknown_keys
from deploykit.errors import JobFileError, NotFound, UsageError
from deploykit.model import JobSpec, Problem


@dataclass(frozen=True)
class JobFile:
    """A job, and the decoded sections of the requested backends."""

    path: Path
    job: JobSpec
    sections: Mapping[str, Any]
    lines: Mapping[str, int]
    """Line of each key of the file, by its path; empty for TOML."""

    def raise_on(self, problems: Iterable[Problem]) -> list[Problem]:
        """The warnings among `problems`. Raises JobFileError with all if one is an error."""
        ordered = located(problems, self.lines)
        if any(problem.severity == "error" for problem in ordered):
            raise JobFileError(str(self.path), ordered)
        return ordered


def load(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    options: Mapping[str, type[Any]],
    backends: Callable[[], Iterable[str]],
) -> JobFile:
    """Read and decode `path`, then apply `overrides` (``a.b=c``).

    `options` are the classes of the sections to decode; `backends` gives the names of all backends
    that may have a section, the built-in ones first.

    Relative locations become absolute, from the folder of the file.

    Raises NotFound, UsageError (an invalid override) or JobFileError with every problem.
    """
    tree, lines = parse(path)
    for override in overrides:
        _override(tree, override)
    names = [field.name for field in dataclasses.fields(JobSpec)]
    known = [*names, *_sections(set(tree).difference(names), backends)]
    problems = list(unknown_keys("", [key for key in tree if key not in known], known))
    job, more = decode(JobSpec, {key: tree[key] for key in tree if key in names})
    problems += more
    sections = {}
    for name, cls in options.items():
        sections[name], more = decode(cls, tree.get(name), name)
        problems += more
    if job is not None:
        job = _absolute(job, path.absolute().parent)
        problems += [*_check(job), *contract.check(job)]
    if problems or job is None:
        raise JobFileError(str(path), located(problems, lines))
    return JobFile(path, job, sections, lines)


def _sections(keys: set[str], backends: Callable[[], Iterable[str]]) -> Iterator[str]:
    """Names of backends until they include all `keys`: finding installed ones takes 25 ms."""
    if not keys:
        return
    for name in backends():
        yield name
        keys.discard(name)
        if not keys:
            return


def parse(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """A job file as plain data, and the line of each key. Raises NotFound or JobFileError."""
    try:
        text = parsing.text_of(path)
    except (OSError, Malformed) as error:
        what = error.strerror if isinstance(error, OSError) else f"it {error}"
        raise NotFound(
            f"cannot read the job file {path}: {what}",
            hint="name an existing file, or write one with `deploykit init`",
        ) from error
    try:
        if path.suffix == ".toml":
            return parsing.toml(text), {}
        tree, lines, problems = parsing.yaml(text)
    except Malformed as error:
        raise JobFileError(str(path), [Problem("", str(error), line=error.line)]) from error
    if not isinstance(tree, dict):
        problems.append(Problem("", "expected keys with values, such as `name: digits`"))
    if problems:
        raise JobFileError(str(path), problems)
    return tree, lines


def _override(tree: dict[str, Any], text: str) -> None:
    """Apply one ``--set a.b=c``; lists, sections and quoted text are YAML. Raises UsageError."""
    key, equals, value = text.partition("=")
    if not equals or not all(key.split(".")):
        raise UsageError(f"--set {text}: expected KEY=VALUE", hint="for example resources.nodes=2")
    *parents, last = key.split(".")
    for name in parents:
        below = tree.get(name)
        tree[name] = dict(below) if isinstance(below, dict) else {}
        tree = tree[name]
    tree[last] = _override_value(text, value)


def _override_value(text: str, value: str) -> Any:
    if value and parsing.is_null(value):
        return None
    if not value.startswith(("[", "{", '"', "'")):
        return Plain(value)
    try:
        return parsing.yaml(value)[0]
    except Malformed as error:
        hint = "write lists as [a, b], and quote the whole argument for the shell"
        raise UsageError(f"--set {text}: the value is not valid YAML", hint=hint) from error


def _check(job: JobSpec) -> Iterable[Problem]:
    """Problems of the neutral part, beyond the types."""
    entry, source = job.entrypoint, Path(job.source)
    if (entry.script is None) == (entry.module is None):
        yield Problem("entrypoint", "expected exactly one of `script` and `module`")
    if not os.path.isdir(source):  # noqa: PTH112 - Path.is_dir() raises on a name too long
        yield Problem("source", f"folder {source} not found")
    elif entry.script is not None:
        yield from _check_script(entry.script, source)


def _check_script(script: str, source: Path) -> Iterable[Problem]:
    path = Path(script)
    if path.is_absolute() or ".." in path.parts or script.startswith("-"):
        yield Problem("entrypoint.script", "must be a path inside the source folder", "train.py")
    elif not os.path.isfile(source / path):  # noqa: PTH113 - as above
        scripts = sorted(item.relative_to(source).as_posix() for item in source.glob("*.py"))
        hint = did_you_mean(script, scripts) or f"Python files: {', '.join(scripts[:8]) or 'none'}"
        yield Problem("entrypoint.script", f"file {script!r} not found in {source}", hint)


def _absolute(job: JobSpec, folder: Path) -> JobSpec:
    """The job with absolute locations; addresses (s3://...) are kept."""

    def absolute(text: str) -> str:
        if "://" in text:
            return text
        home = os.path.expanduser(text)  # noqa: PTH111 - Path.expanduser() raises on ~nobody
        return os.path.normpath(folder / home)

    return dataclasses.replace(
        job,
        source=absolute(job.source),
        data={name: absolute(location) for name, location in job.data.items()},
        output=absolute(job.output) if job.output else None,
        checkpoints=absolute(job.checkpoints) if job.checkpoints else None,
    )


def located(problems: Iterable[Problem], lines: Mapping[str, int]) -> list[Problem]:
    """The problems with their lines, in the order of the file."""
    numbered = [
        dataclasses.replace(problem, line=problem.line or lines.get(problem.path))
        for problem in problems
    ]
    return sorted(numbered, key=lambda problem: problem.line or sys.maxsize)
