"""Read a job file: YAML or TOML, with ``--set a.b=c`` on top, into a JobSpec and its sections.

A scalar that stands unquoted in YAML keeps its text and takes the type that its place expects, so
that ``args: [--lr, 0.10, --flag, yes]`` arrives as it was written.
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
from deploykit.decode import Plain, decode, did_you_mean, unknown_keys
from deploykit.errors import JobFileError, NotFound, UsageError
from deploykit.model import JobSpec, Problem


@dataclass(frozen=True)
class JobFile:
    """A job, and the decoded sections of the backends that were asked for."""

    path: Path
    job: JobSpec
    sections: Mapping[str, Any]
    lines: Mapping[str, int]
    """Line of each key of the file, by its path; empty for TOML."""

    def raise_on(self, problems: Iterable[Problem]) -> list[Problem]:
        """The warnings among `problems`; raises JobFileError with all when one is an error."""
        found = located(problems, self.lines)
        if any(problem.severity == "error" for problem in found):
            raise JobFileError(str(self.path), found)
        return found


def load(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    options: Mapping[str, type[Any]],
    backends: Callable[[], Iterable[str]],
) -> JobFile:
    """Read and decode `path`, with `overrides` (``a.b=c``) on top.

    `options` are the classes of the sections to decode; `backends` gives the names of all backends
    that may have a section, the built-in ones first.

    Relative places in the file become absolute, from the file's folder.

    Raises NotFound, UsageError (a bad override) or JobFileError with every problem.
    """
    tree, lines = parse(path)
    for override in overrides:
        _override(tree, override)
    names = [field.name for field in dataclasses.fields(JobSpec)]
    known = [*names, *_sections(set(tree).difference(names), backends)]
    problems = list(unknown_keys("", [key for key in tree if key not in known], known))
    job, found = decode(JobSpec, {key: tree[key] for key in tree if key in names})
    problems += found
    sections = {}
    for name, cls in options.items():
        sections[name], found = decode(cls, tree.get(name), name)
        problems += found
    if job is not None:
        job = _absolute(job, path.absolute().parent)
        problems += [*_check(job), *contract.check(job)]
    if problems or job is None:
        raise JobFileError(str(path), located(problems, lines))
    return JobFile(path, job, sections, lines)


def _sections(keys: set[str], backends: Callable[[], Iterable[str]]) -> Iterator[str]:
    """Names of backends until all `keys` are among them: installed ones take 25 ms to look for."""
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
    except (OSError, parsing.Malformed) as error:
        what = error.strerror if isinstance(error, OSError) else f"it {error}"
        raise NotFound(
            f"cannot read the job file {path}: {what}",
            hint="name it, or write one with `deploykit init`",
        ) from error
    try:
        if path.suffix == ".toml":
            return parsing.toml(text), {}
        tree, lines, problems = parsing.yaml(text)
    except parsing.Malformed as error:
        raise JobFileError(str(path), [Problem("", str(error), line=error.line)]) from error
    if not isinstance(tree, dict):
        problems.append(Problem("", "expected keys and values, such as `name: digits`"))
    if problems:
        raise JobFileError(str(path), problems)
    return tree, lines


def _override(tree: dict[str, Any], text: str) -> None:
    """Apply one ``--set a.b=c``. A list, section or quoted text is written as in YAML."""
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
    except parsing.Malformed as error:
        hint = "lists are written [a, b]; quote the whole argument for the shell"
        raise UsageError(f"--set {text}: the value is not valid YAML", hint=hint) from error


def _check(job: JobSpec) -> Iterable[Problem]:
    """What is wrong with the neutral part, beyond the types."""
    entry, source = job.entrypoint, Path(job.source)
    if (entry.script is None) == (entry.module is None):
        yield Problem("entrypoint", "expected exactly one of `script` and `module`")
    if not os.path.isdir(source):  # noqa: PTH112 - Path.is_dir() raises on a name too long
        yield Problem("source", f"there is no folder {source}")
    elif entry.script is not None:
        yield from _check_script(entry.script, source)


def _check_script(script: str, source: Path) -> Iterable[Problem]:
    path = Path(script)
    if path.is_absolute() or ".." in path.parts or script.startswith("-"):
        yield Problem("entrypoint.script", "must be a path inside the source folder", "train.py")
    elif not os.path.isfile(source / path):  # noqa: PTH113 - as above
        here = sorted(item.relative_to(source).as_posix() for item in source.glob("*.py"))
        hint = did_you_mean(script, here) or f"Python files there: {', '.join(here[:8]) or 'none'}"
        yield Problem("entrypoint.script", f"there is no file {script!r} in {source}", hint)


def _absolute(job: JobSpec, folder: Path) -> JobSpec:
    """The job with every relative place made absolute; addresses (s3://...) stay."""

    def place(text: str) -> str:
        if "://" in text:
            return text
        home = os.path.expanduser(text)  # noqa: PTH111 - Path.expanduser() raises on ~nobody
        return os.path.normpath(folder / home)

    return dataclasses.replace(
        job,
        source=place(job.source),
        data={name: place(where) for name, where in job.data.items()},
        output=place(job.output) if job.output else None,
        checkpoints=place(job.checkpoints) if job.checkpoints else None,
    )


def located(problems: Iterable[Problem], lines: Mapping[str, int]) -> list[Problem]:
    """The problems with their lines, in the order of the file."""
    found = [
        dataclasses.replace(problem, line=problem.line or lines.get(problem.path))
        for problem in problems
    ]
    return sorted(found, key=lambda problem: problem.line or sys.maxsize)
