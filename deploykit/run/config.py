"""The user's defaults for every job: who they are at a target, and where their jobs go.

They are in one file, ``~/.config/deploykit/config.toml``::

    backend = "slurm"

    [slurm]
    account = "physics"

What a job needs to run is not among them: a job file means the same for every user. The
environment, the job file and the command line win over the config file, in this order.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from deploykit.backends import base as backend
from deploykit.job import file as jobfile
from deploykit.job import toml_text
from deploykit.job.decode import Malformed
from deploykit.job.file import Draft
from deploykit.job.model import Problem
from deploykit.job.spelling import did_you_mean
from deploykit.lib import paths
from deploykit.lib.errors import ConfigError

SETTINGS: Mapping[str, tuple[str, ...]] = {
    "backend": ("DEPLOYKIT_BACKEND",),
    "max_cost": (),
    "budget": (),
    "local.price": (),
    "slurm.account": (),
    "slurm.partition": (),
    "slurm.host": (),
    "slurm.folder": (),
    "slurm.price": (),
    "sagemaker.role": (),
    "sagemaker.bucket": (),
    "sagemaker.region": ("AWS_REGION", "AWS_DEFAULT_REGION"),
}
"""Keys of a job file that may have a default, and the variables that set the same."""
_ONLY_WITH = {"slurm.folder": "slurm.host"}
"""Keys that mean nothing without the same value of another: the folder is on that host."""


@dataclass(frozen=True)
class Config:
    """The values of a config file, and the line of each, by key."""

    path: Path
    values: Mapping[str, str]
    lines: Mapping[str, int]

    def origin(self, key: str) -> str:
        """Where a value is set, for people."""
        return f"{self.path}, line {self.lines[key]}" if key in self.lines else str(self.path)


@dataclass(frozen=True)
class Setting:
    """A setting as a job would see it; `where` names the file and line, or the variable."""

    key: str
    value: str | None
    source: Literal["flag", "job file", "environment", "config file", "default"]
    where: str = ""


def read(path: Path) -> Config:
    """The config file. Raises ConfigError with every problem."""
    text = _text(path)
    lines = _lines(text)
    try:
        tree = toml_text.parse(text)
    except Malformed as error:
        raise ConfigError(str(path), [Problem("", str(error), line=error.line)]) from error
    values = dict(_flat(tree))
    if problems := list(_check(values)):
        raise ConfigError(str(path), jobfile.located(problems, lines))
    return Config(path, values, lines)


def _text(path: Path) -> str:
    try:
        return paths.read_regular(path, jobfile.LARGEST).decode()
    except UnicodeDecodeError as error:
        raise ConfigError(str(path), [Problem("", "is not UTF-8 text")]) from error
    except OSError as error:
        message = f"cannot be read: {error.strerror}"
        raise ConfigError(str(path), [Problem("", message)]) from error


def _lines(text: str) -> dict[str, int]:
    """The line of each key and section. tomllib does not tell."""
    lines: dict[str, int] = {}
    section = ""
    for number, line in enumerate(text.splitlines(), 1):
        name, equals, _ = line.partition("=")
        if line.lstrip().startswith("["):
            section = _bare(line.partition("]")[0].lstrip(" \t["))
            lines.setdefault(section, number)
        elif equals:
            lines.setdefault(".".join(filter(None, (section, _bare(name)))), number)
    return lines


def _bare(name: str) -> str:
    """A key of TOML without its quotes and blanks."""
    return "".join(letter for letter in name if letter not in "\"' \t")


def _flat(tree: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from ((f"{key}.{name}", inner) for name, inner in value.items())
        else:
            yield key, value


def _check(values: Mapping[str, Any]) -> Iterator[Problem]:
    for key, value in values.items():
        if key not in SETTINGS:
            yield Problem(key, "unknown key", _nearest(key))
        elif not isinstance(value, str) or not value.strip():
            yield Problem(key, "expected text", f'{key.rpartition(".")[2]} = "..."')
        elif key == "backend" and value not in backend.names():
            known = list(backend.names())
            hint = did_you_mean(value, known) or f"backends: {', '.join(known)}"
            yield Problem(key, f"unknown backend {value!r}", hint)
    for key, other in _ONLY_WITH.items():
        if key in values and other not in values:
            yield Problem(key, f"requires {other}", f"set {other}, or remove it")


def _nearest(key: str) -> str:
    same = [known for known in SETTINGS if known.rpartition(".")[2] == key.rpartition(".")[2]]
    if same:
        return f"did you mean {same[0]!r}?"
    own = f"known keys: {', '.join(SETTINGS)}; other keys belong in the job file"
    return did_you_mean(key, SETTINGS) or own


def filled(draft: Draft, config: Config) -> Draft:
    """The draft with the defaults for all that neither it nor the environment sets."""
    data, origins = dict(draft.data), {}
    for key, value in config.values.items():
        if _is_set(key, draft.data) or _is_elsewhere(key, draft.data, config):
            continue
        section, _, name = key.rpartition(".")
        if section and section not in data:
            origins[section] = config.origin(key)
        below = data
        if section:
            below = data[section] = dict(data.get(section) or {})
        below[name] = value
        origins[key] = config.origin(key)
    return draft._replace(data=data, origins=origins)


def _is_set(key: str, data: Mapping[str, Any]) -> bool:
    """Whether the environment or the job sets a key; nothing is added to what is no section."""
    section = key.rpartition(".")[0]
    odd = not isinstance(data.get(section) or {}, dict)
    return _variable(key) is not None or odd or _is_in(key, data)


def _is_in(key: str, data: Mapping[str, Any]) -> bool:
    """Whether a job sets a key, even to nothing."""
    section, _, name = key.rpartition(".")
    own = data.get(section) if section else data
    return isinstance(own, dict) and name in own


def _variable(key: str) -> str | None:
    """The variable of the environment that sets a key, if one does."""
    return next((name for name in SETTINGS[key] if os.environ.get(name)), None)


def _is_elsewhere(key: str, data: Mapping[str, Any], config: Config) -> bool:
    """Whether a key belongs to a value of another key that the job does not have."""
    other = _ONLY_WITH.get(key)
    return (
        other is not None and _is_set(other, data) and _value(other, data) != config.values[other]
    )


def _value(key: str, data: Mapping[str, Any]) -> str | None:
    section, _, name = key.rpartition(".")
    own = data.get(section) if section else data
    value = own.get(name) if isinstance(own, dict) else None
    return None if value is None else str(value)


def settings(file: Draft | None, overridden: Draft, given: Sequence[str]) -> list[Setting]:
    """Every setting and its source, as `deploykit config` shows them.

    `file` is the job file alone, if there is one; `overridden` the job with the overrides `given`
    and the defaults.
    """
    return [_setting(key, file, overridden, given) for key in SETTINGS]


def _setting(key: str, file: Draft | None, job: Draft, given: Sequence[str]) -> Setting:
    section, value = key.rpartition(".")[0], _value(key, job.data)
    if key in job.origins:
        return Setting(key, value, "config file", job.origins[key])
    if flags := [text for text in given if text.partition("=")[0] in {key, section}]:
        return Setting(key, value, "flag", flags[-1])
    if file is not None and _is_in(key, file.data):
        line = f", line {file.lines[key]}" if key in file.lines else ""
        return Setting(key, value, "job file", f"{file.source}{line}")
    if variable := _variable(key):
        return Setting(key, os.environ[variable], "environment", variable)
    return Setting(key, backend.DEFAULT if key == "backend" else None, "default")


def example() -> str:
    """A config file in which every setting is commented out."""
    from deploykit.job.decode import Help, hints, split
    from deploykit.job.model import JobSpec

    lines = [
        "# Defaults for every job. The environment, the job file and the command line win.",
        "",
    ]
    for key in SETTINGS:
        section, _, name = key.rpartition(".")
        if section and f"[{section}]" not in lines:
            lines += ["", f"[{section}]"]
        cls: Any = backend.find(section).Options if section else JobSpec
        notes = split(hints(cls)[name])[1]
        help_ = next(note for note in notes if isinstance(note, Help))
        lines += [*textwrap.wrap(f"# {help_.text}", 96, subsequent_indent="# ")]
        lines += [f'# {name} = "{help_.example or "..."}"']
    return "\n".join([*lines, ""])
