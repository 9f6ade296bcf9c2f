"""Read a job file: YAML or TOML, with ``--set a.b=c`` on top, into a JobSpec and its sections.

A scalar that stands unquoted in YAML keeps its text and takes the type that its place expects, so
that ``args: [--lr, 0.10, --flag, yes]`` arrives as it was written.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from deploykit import contract
from deploykit.decode import Plain, decode, did_you_mean, unknown_key
from deploykit.errors import JobFileError, NotFound, UsageError
from deploykit.model import JobSpec, Problem

_NULLS = ("", "~", "null", "Null", "NULL")
_MOST_NODES = 100_000
_LONGEST_PATH = 1_000
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


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
    unknown = [key for key in tree if key not in names and key not in backends()]
    problems = [unknown_key("", key, [*names, *backends()]) for key in unknown]
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


def parse(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """A job file as plain data, and the line of each key. Raises NotFound or JobFileError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        what = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise NotFound(
            f"cannot read the job file {path}: {what}",
            hint="name it, or write one with `deploykit init`",
        ) from error
    return _parse_toml(path, text) if path.suffix == ".toml" else _parse_yaml(path, text)


def _parse_toml(path: Path, text: str) -> tuple[dict[str, Any], dict[str, int]]:
    import tomllib

    try:
        return tomllib.loads(text), {}
    except tomllib.TOMLDecodeError as error:
        raise JobFileError(str(path), [Problem("", f"is not valid TOML: {error}")]) from error


def _parse_yaml(path: Path, text: str) -> tuple[dict[str, Any], dict[str, int]]:
    reader = _YamlReader()
    try:
        node = yaml.compose(text, Loader=_Loader)
        tree = reader.read(node, "") if node is not None else {}
    except yaml.YAMLError as error:
        raise JobFileError(str(path), [_syntax_problem(error)]) from error
    if not isinstance(tree, dict):
        reader.problems.append(Problem("", "expected keys and values, such as `name: digits`"))
    if reader.problems:
        raise JobFileError(str(path), reader.problems)
    return tree, reader.lines


def _syntax_problem(error: yaml.YAMLError) -> Problem:
    mark = getattr(error, "problem_mark", None)
    what = getattr(error, "problem", None) or str(error).splitlines()[0]
    return Problem("", f"is not valid YAML: {what}", line=mark.line + 1 if mark else None)


class _YamlReader:
    """Nodes of a YAML file as plain data, unquoted scalars as `Plain`."""

    def __init__(self) -> None:
        self.lines: dict[str, int] = {}
        self.problems: list[Problem] = []
        self._count = 0

    def read(self, node: Any, path: str) -> Any:
        self._count += 1
        if self._count > _MOST_NODES or len(path) > _LONGEST_PATH:
            raise yaml.YAMLError("too many values; is an alias part of itself?")
        self.lines.setdefault(path, node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.read(item, f"{path}[{n}]") for n, item in enumerate(node.value)]
        if not node.style:  # unquoted
            return None if node.value in _NULLS else Plain(node.value)
        return node.value

    def _mapping(self, node: yaml.MappingNode, path: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.YAMLError("expected a plain name as a key")
            key = key_node.value
            place = f"{path}.{key}" if path else key
            line = key_node.start_mark.line + 1
            if key in found:
                self.problems.append(Problem(place, "stands twice", line=line))
            self.lines[place] = line
            found[key] = self.read(value_node, place)
        return found


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
    if value in _NULLS[1:]:
        return None
    if not value.startswith(("[", "{", '"', "'")):
        return Plain(value)
    try:
        return _YamlReader().read(yaml.compose(value, Loader=_Loader), "")
    except yaml.YAMLError as error:
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
