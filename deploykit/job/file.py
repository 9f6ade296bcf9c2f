"""Read a job file, YAML or TOML, with overrides (``--set a.b=c``), into a JobSpec and sections.

A job from Python is the same data without a file: its keys, in a mapping.

An unquoted scalar of YAML keeps its text and is read as the type that its key expects, so that
``args: [--lr, 0.10, --flag, yes]`` is passed as it was written.

The rules of `diagnose` are read by the same functions.
"""

from __future__ import annotations

import dataclasses
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import yaml as pyyaml

from deploykit.job import checks, spelling
from deploykit.job.decode import Malformed, Plain, decode_as_meant
from deploykit.job.model import InputChannel, JobSpec, Problem
from deploykit.lib import quoting
from deploykit.lib.errors import JobFileError, NotFound, UsageError

DEFAULT = "job.yaml"
LARGEST = 2**20
"""Bytes of a file written by a person."""
LOADER: type[pyyaml.SafeLoader] = getattr(pyyaml, "CSafeLoader", pyyaml.SafeLoader)
_NULLS = ("", "~", "null", "Null", "NULL")
_UNFINISHED: Any = object()
Source = Path | Mapping[str, Any]
"""A job file, or the keys of a job without one."""
Overrides = Sequence[str | tuple[str, Any]]
"""Texts ``a.b=c``, or paths of keys with their values."""


class Option(str):
    """An override ``a.b=c`` that an option of its own sets, such as ``--nodes``."""

    __slots__ = ("option",)
    option: str

    def __new__(cls, option: str, text: str) -> Self:
        override = super().__new__(cls, text)
        override.option = option
        return override


class Draft(NamedTuple):
    """A job as plain data, before it is decoded."""

    source: Source
    data: dict[str, Any]
    lines: Mapping[str, int]
    """Line of each key of the file, by its path; empty for TOML."""
    origins: Mapping[str, str] = {}
    """The origin of each value that the job does not set itself, by its path."""
    given: Mapping[str, str] = {}
    """The option that overrides a value, by its path; empty for ``--set`` and `set`."""


class JobFile(NamedTuple):
    """A job, and the decoded sections of the requested backends."""

    path: Source
    job: JobSpec
    sections: Mapping[str, Any]
    lines: Mapping[str, int]
    origins: Mapping[str, str]
    """Those of the draft."""
    given: Mapping[str, str] = {}
    """Those of the draft."""

    def raise_on(self, problems: Iterable[Problem]) -> list[Problem]:
        """The warnings among `problems`. Raises JobFileError with all if one is an error."""
        ordered = located(problems, self.lines, self.origins, self.given)
        if any(problem.severity == "error" for problem in ordered):
            raise _error(self.path, ordered, self.given)
        return ordered


def _error(source: Source, problems: Sequence[Problem], given: Iterable[str]) -> JobFileError:
    """The error for `problems`, which blames the arguments if nothing in the file is wrong."""
    errors = [problem for problem in problems if problem.severity == "error"]
    overridden = all(_is_inside(problem.path, given) for problem in errors)
    return JobFileError("arguments" if overridden else title(source), problems)


def read(source: Source, overrides: Overrides = ()) -> Draft:
    """A job with `overrides`. Raises NotFound, JobFileError, or UsageError for an override."""
    return override(Draft(source, *parse(source)), overrides)


def override(draft: Draft, overrides: Overrides) -> Draft:
    """Apply `overrides` to the draft. Raises UsageError."""
    given = dict(draft.given)
    for change in overrides:
        key = _override(draft.data, change)
        given[key] = getattr(change, "option", "")
    resources = draft.data.get("resources")
    if isinstance(resources, dict) and isinstance(resources.get("nodes"), str):
        least, _, most = resources["nodes"].partition(":")  # `nodes: 2:4`
        if least.isdecimal() and most.isdecimal():
            nodes = {"nodes": Plain(most), "min_nodes": Plain(least)}
            draft.data["resources"] = {**resources, **nodes}
            if "resources.nodes" in given:
                given["resources.min_nodes"] = given["resources.nodes"]
    return draft._replace(given=given)


def load(
    draft: Draft,
    *,
    options: Mapping[str, type[Any]],
    backends: Callable[[], Iterable[str]],
    check: Callable[[JobFile], Iterable[Problem]] = lambda _: (),
) -> JobFile:
    """Decode a draft.

    `options` are the classes of the sections to decode; `backends` gives the names of all backends
    that may have a section, the built-in ones first. `check` finds further problems. It is called
    only if there are errors already, with the sections that have none, so that as many problems as
    possible are reported at once.

    Relative locations become absolute, from the folder of the file, else from the current one.
    Raises JobFileError with every problem.
    """
    tree = draft.data
    names = [field.name for field in dataclasses.fields(JobSpec)]
    known = [*names, *_sections(set(tree).difference(names), backends)]
    problems: list[Problem] = []
    written = {key: key for key in tree}
    if not set(tree).issubset(known):
        problems += spelling.unknown_keys("", tree, known)
        written |= {meant: key for key, meant in spelling.meant(tree, known).items()}
    parts: dict[str, tuple[type[Any], Any]] = {
        "": (JobSpec, {name: tree[written[name]] for name in names if name in written}),
        **{name: (cls, tree.get(written.get(name, name))) for name, cls in options.items()},
    }
    values: dict[str, Any] = {}
    for name, (cls, data) in parts.items():
        value, more = decode_as_meant(cls, data, name)
        problems += [_with_name(_as_written(problem, written), tree) for problem in more]
        values |= {name: value} if value is not None else {}
    file = None
    if "" in values:
        folder = draft.source.absolute().parent if isinstance(draft.source, Path) else Path.cwd()
        job: JobSpec = values.pop("").in_folder(folder)
        if job.restarts and job.restarts.policy == "never":
            job = dataclasses.replace(job, retries=0)
        file = JobFile(draft.source, job, values, draft.lines, draft.origins, draft.given)
    problems += checks.check(file.job) if file else []
    if file is None or problems:
        places = [problem.path for problem in problems]
        later = check(file) if file else ()
        problems += [problem for problem in later if not _is_inside(problem.path, places)]
        ordered = located(problems, draft.lines, draft.origins, draft.given)
        raise _error(draft.source, ordered, draft.given)
    return file


def _as_written(problem: Problem, written: Mapping[str, str]) -> Problem:
    """The problem with its top-level key as it is spelled in the file."""
    name = re.split(r"[.\[]", problem.path, maxsplit=1)[0]
    return problem._replace(path=written.get(name, name) + problem.path.removeprefix(name))


def _is_inside(path: str, places: Iterable[str]) -> bool:
    """Whether a path is one of the places, or below one."""
    return any(path == place or path.startswith((f"{place}.", f"{place}[")) for place in places)


def title(source: Source) -> str:
    """The name of a job in messages."""
    return str(source) if isinstance(source, Path) else "the job"


def parse(path: Source) -> tuple[dict[str, Any], dict[str, int]]:
    """A job as plain data, and the line of each key of a file. Raises NotFound or JobFileError."""
    if not isinstance(path, Path):
        return dict(path), {}
    try:
        text = read_text(path)
    except (OSError, Malformed) as error:
        what = error.strerror if isinstance(error, OSError) else f"it {error}"
        hint = "pass a job file or a script, or create a job file with `deploykit init`"
        script = Path(f"{path}.py")
        raise NotFound(
            f"cannot read the job file {path}: {what}",
            hint=f"did you mean {script}?" if script.is_file() else hint,
        ) from error
    try:
        if path.suffix == ".toml":
            return toml(text), {}
        tree, lines, problems = yaml(text)
    except Malformed as error:
        raise JobFileError(str(path), [Problem("", str(error), line=error.line)]) from error
    if not isinstance(tree, dict):
        problems.append(Problem("", "expected a mapping such as `name: digits`"))
    if problems:
        raise JobFileError(str(path), problems)
    return tree, lines


def located(
    problems: Iterable[Problem],
    lines: Mapping[str, int],
    origins: Mapping[str, str] | None = None,
    given: Mapping[str, str] | None = None,
) -> list[Problem]:
    """The problems with their lines or the origins of their values, in the order of the file.

    Those of overridden values come last, without a line. One that several backends report is
    there once.
    """
    numbered = []
    given = given or {}
    for problem in dict.fromkeys(problems):
        overridden = next((key for key in given if _is_inside(problem.path, [key])), None)
        if overridden is not None:
            numbered.append(problem._replace(line=None, argument=given[overridden] or None))
            continue
        line, key = problem.line or lines.get(problem.path), problem.path.partition("[")[0]
        origin = (origins or {}).get(key)
        text = f"{problem.message}; set in {origin}" if origin else problem.message
        numbered.append(problem._replace(line=line, message=text))
    return sorted(numbered, key=lambda problem: problem.line or sys.maxsize)


def read_text(path: Path) -> str:
    """The text of a file or pipe of at most 1 MiB, in UTF-8. Raises OSError or Malformed."""
    with path.open("rb") as file:
        data = file.read(LARGEST + 1)
    if len(data) > LARGEST:
        raise Malformed(f"is larger than {LARGEST >> 20} MiB")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise Malformed("is not UTF-8 text") from None


def yaml(text: str) -> tuple[Any, dict[str, int], list[Problem]]:
    """YAML as data, the line of each key by its path, and the duplicate keys.

    Unquoted scalars become `Plain`; an empty text is an empty mapping. Raises Malformed.
    """
    try:
        root = pyyaml.compose(text, Loader=LOADER)
    except pyyaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        what = getattr(error, "problem", None) or str(error).splitlines()[0]
        if mark and text[mark.index : mark.index + 1] == "\t":
            what = "found a tab; indent with spaces"
        message = f"is not valid YAML: {what.removeprefix('but ')}"
        raise Malformed(message, mark.line + 1 if mark else None) from None
    except UnicodeError:
        raise Malformed("is not valid YAML: invalid characters") from None
    reader = _YamlReader()
    return {} if root is None else reader.value(root, ""), reader.lines, reader.problems


def toml(text: str) -> dict[str, Any]:
    """TOML as data. Raises Malformed."""
    try:
        return tomllib.loads(text)
    except ValueError as error:
        what, at, where = str(error).partition(" (at ")  # "line 3, column 5" or "end of document"
        last = len(text.rstrip().splitlines()) if at else None
        number = re.match(r"line (\d+)", where)
        line = int(number[1]) if number else last
        raise Malformed(f"is not valid TOML: {what}", line) from None


def _sections(keys: set[str], backends: Callable[[], Iterable[str]]) -> Iterator[str]:
    """Names of backends until they include all `keys`: finding installed ones takes 25 ms."""
    for name in backends() if keys else ():
        yield name
        keys.discard(name)
        if not keys:
            return


def _with_name(problem: Problem, tree: Mapping[str, Any]) -> Problem:
    """Add a similar valid name to a problem of the job's name."""
    if problem.path != "name" or not isinstance(tree.get("name"), str):
        return problem
    near = spelling.near_name(tree["name"])
    return problem._replace(hint=f"for example {near}" if near else problem.hint)


def _override(tree: dict[str, Any], override: str | tuple[str, Any]) -> str:
    """Apply one ``--set a.b=c``, and return its key. Raises UsageError.

    Lists, sections and quoted text are YAML.
    """
    path, value = _read_override(override) if isinstance(override, str) else override
    if not all(path.split(".")):
        raise UsageError(f"set: {path!r} is not a key", hint="for example resources.nodes")
    *parents, last = path.split(".")
    for name in parents:
        below = tree.get(name)
        if isinstance(below, str) and parents == ["data", name]:
            below = {InputChannel.SHORT: below}
        tree[name] = dict(below) if isinstance(below, dict) else {}
        tree = tree[name]
    tree[last] = value
    return path


def _read_override(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not all(key.split(".")):
        raise UsageError(f"--set {text}: expected KEY=VALUE", hint="for example resources.nodes=2")
    if value and value in _NULLS:
        return key, None
    if not value.startswith(("[", "{", '"', "'")):
        return key, Plain(value)
    try:
        return key, yaml(value)[0]
    except Malformed as error:
        hint = "write a list as [a, b], and quote the whole argument for the shell"
        raise UsageError(f"--set {text}: the value is not valid YAML", hint=hint) from error


class _YamlReader:
    """Plain data from the nodes of a YAML document, with the lines and duplicates of its keys."""

    def __init__(self) -> None:
        self.lines: dict[str, int] = {}
        self.problems: list[Problem] = []
        self._values: dict[int, Any] = {}
        """By the id of the node, which all aliases of an anchor share."""

    def value(self, node: pyyaml.Node, path: str) -> Any:
        """The value of a node. Raises Malformed."""
        self.lines.setdefault(path, _line(node))
        if id(node) not in self._values:
            self._values[id(node)] = _UNFINISHED
            self._values[id(node)] = self._new_value(node, path)
        if self._values[id(node)] is _UNFINISHED:
            raise Malformed("is not valid YAML: an alias refers to itself", _line(node))
        return self._values[id(node)]

    def _new_value(self, node: pyyaml.Node, path: str) -> Any:
        if isinstance(node, pyyaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, pyyaml.SequenceNode):
            return [self.value(item, f"{path}[{number}]") for number, item in enumerate(node.value)]
        if isinstance(node, pyyaml.ScalarNode) and not node.style:  # unquoted
            return None if node.value in _NULLS else Plain(node.value)
        return node.value

    def _mapping(self, node: pyyaml.MappingNode, path: str) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, value in node.value:
            if not isinstance(key, pyyaml.ScalarNode):
                raise Malformed("is not valid YAML: a key must be plain text", _line(key))
            below = f"{path}.{key.value}" if path else key.value
            if key.value in values:
                self.problems.append(Problem(below, "duplicate key", line=_line(key)))
            self.lines[below] = _line(key)
            values[key.value] = self.value(value, below)
        return values


def _line(node: pyyaml.Node) -> int:
    return node.start_mark.line + 1


def set_key(path: Path, key: str, value: str) -> None:
    """Set ``section.key`` in a YAML file.

    The changed text is read again: only this key may differ. Raises UsageError if the text cannot
    be changed so, and for a file that cannot be written.
    """
    before, _ = parse(path)
    section, _, name = key.partition(".")
    old = before.get(section) or {}
    text = read_text(path)
    changed = None
    if path.suffix != ".toml" and isinstance(old, dict):
        changed = _with_key(text, section, name, quoting.yaml(value))
    if changed is None or not _has_values(changed, {**before, section: {**old, name: value}}):
        raise UsageError(
            f"cannot edit {path} automatically", hint=f"set {key} to {value!r} in the file"
        )
    try:
        path.write_text(changed, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error


def _with_key(text: str, section: str, name: str, value: str) -> str:
    """The text with the key in its section; the result may not be valid."""
    root = pyyaml.compose(text, Loader=LOADER)
    keys = {key.value: (key, node) for key, node in root.value} if root else {}
    if section not in keys:
        return "\n".join([*text.splitlines(), f"{section}:", f"  {name}: {value}", ""])
    heading, node = keys[section]
    start, end = node.start_mark.index, node.end_mark.index
    if not isinstance(node, pyyaml.MappingNode):  # nothing, or null
        return f"{text[:start].rstrip()}\n  {name}: {value}{text[end:]}"
    for key, old in node.value:
        if key.value == name:
            return text[: old.start_mark.index] + value + text[old.end_mark.index :]
    if node.flow_style:
        more = ", " if node.value else ""
        return f"{text[: start + 1]}{name}: {value}{more}{text[start + 1 :]}"
    below = text.index("\n", heading.end_mark.index) + 1
    return f"{text[:below]}{' ' * node.start_mark.column}{name}: {value}\n{text[below:]}"


def _has_values(text: str, wanted: object) -> bool:
    """Whether a YAML text has exactly these values."""
    try:
        data, _, problems = yaml(text)
    except Malformed:
        return False
    return not problems and data == wanted
