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
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from deploykit.backends import base as backend
from deploykit.job import file as jobfile
from deploykit.job.decode import Help, Malformed, decode, hints, split
from deploykit.job.file import Draft
from deploykit.job.model import JobSpec, Notify, Problem
from deploykit.job.spelling import did_you_mean
from deploykit.lib import paths
from deploykit.lib.errors import ConfigError

SETTINGS: Mapping[str, tuple[str, ...]] = {
    "backend": ("DEPLOYKIT_BACKEND",),
    "max_cost": (),
    "budget": (),
    "notify.to": (),
    "notify.events": (),
    "notify.command": (),
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
"""Keys that depend on the value of another: the folder is on that host."""


_SECTIONS: Mapping[str, Any] = {"": JobSpec, "notify": Notify}
"""The sections that are no backend's."""
_LISTS = {
    "notify.to": '["secret:env:SLACK_WEBHOOK"]',
    "notify.events": '["failed", "succeeded"]',
    "notify.command": '["/home/me/bin/page-me"]',
}
"""Settings that are lists, with an example."""


class Config(NamedTuple):
    """The values of a config file, and the line of each, by key."""

    path: Path
    values: Mapping[str, Any]
    lines: Mapping[str, int]

    def origin(self, key: str) -> str:
        return f"{self.path}, line {self.lines[key]}" if key in self.lines else str(self.path)


class Setting(NamedTuple):
    """A setting as a job would see it; `where` names the file and line, or the variable."""

    key: str
    value: str | None
    source: Literal["flag", "job file", "environment", "config file", "default"]
    where: str = ""


def read(path: Path) -> Config:
    """The config file. Raises ConfigError with every problem."""
    try:
        text = jobfile.read_text(path)
        tree = jobfile.toml(text)
    except OSError as error:
        message = f"cannot be read: {error.strerror}"
        raise ConfigError(str(path), [Problem("", message)]) from error
    except Malformed as error:
        raise ConfigError(str(path), [Problem("", str(error), line=error.line)]) from error
    lines, values = _lines(text), dict[str, Any]()
    for key, value in tree.items():
        inner = value if isinstance(value, dict) else None
        values |= {key: value} if inner is None else {f"{key}.{n}": v for n, v in inner.items()}
    if problems := list(_check(values)):
        raise ConfigError(str(path), jobfile.located(problems, lines))
    return Config(path, values, lines)


def notify() -> Notify | None:
    """`notify` for runs without their own; None without receivers. Raises ConfigError."""
    path = paths.config()
    if not path.exists():
        return None
    config, prefix = read(path), "notify."
    own = {
        key.removeprefix(prefix): v for key, v in config.values.items() if key.startswith(prefix)
    }
    decoded, problems = decode(Notify, own, "notify")
    if decoded is None or problems:
        lines = [config.lines.get(problem.path.partition("[")[0]) for problem in problems]
        raise ConfigError(
            str(path), [one._replace(line=line) for one, line in zip(problems, lines, strict=True)]
        )
    return decoded.in_folder(path.parent) if decoded.to or decoded.command else None


def _lines(text: str) -> dict[str, int]:
    """The line of each key and section, which tomllib does not report."""
    lines: dict[str, int] = {}
    section = ""
    for number, line in enumerate(text.splitlines(), 1):
        is_section = line.lstrip().startswith("[")
        name, equals, _ = line.strip(" \t[").partition("]" if is_section else "=")
        name = re.sub(r"[\"' \t]", "", name)  # without its quotes
        if is_section:
            section = name
            lines.setdefault(section, number)
        elif equals:
            lines.setdefault(f"{section}.{name}".removeprefix("."), number)
    return lines


def _check(values: Mapping[str, Any]) -> Iterator[Problem]:
    for key, value in values.items():
        if key not in SETTINGS:
            same = [
                known for known in SETTINGS if known.rpartition(".")[2] == key.rpartition(".")[2]
            ]
            near = f"did you mean {same[0]!r}?" if same else did_you_mean(key, SETTINGS)
            own = f"known keys: {', '.join(SETTINGS)}; other keys belong in the job file"
            yield Problem(key, "unknown key", near or own)
        elif key in _LISTS:
            if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
                hint = f"{key.rpartition('.')[2]} = {_LISTS[key]}"
                yield Problem(key, "expected a list of strings", hint)
            elif key == "notify.command" and value and _is_relative(value[0]):
                hint = f"command = {_LISTS[key]}"
                yield Problem(
                    key, "expected an absolute path, or the name of a program on PATH", hint
                )
        elif not isinstance(value, str) or not value.strip():
            yield Problem(key, "expected text", f'{key.rpartition(".")[2]} = "..."')
        elif key == "backend" and value not in (known := list(backend.names())):
            hint = did_you_mean(value, known) or f"backends: {', '.join(known)}"
            yield Problem(key, f"unknown backend {value!r}", hint)
    for key, other in _ONLY_WITH.items():
        if key in values and other not in values:
            yield Problem(key, f"requires {other}", f"set {other}, or remove it")


def _is_relative(program: str) -> bool:
    return "/" in program and not program.startswith(("/", "~"))


def filled(draft: Draft, config: Config) -> Draft:
    """The draft with the defaults for all that neither it nor the environment sets."""
    data, origins = dict(draft.data), {}
    for key, value in config.values.items():
        other = _ONLY_WITH.get(key)
        if _is_set(key, draft.data) or (
            other is not None
            and _is_set(other, draft.data)
            and _found(other, draft.data)[1] != config.values[other]
        ):
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
    """Whether the environment or the job sets a key, or its section is not a mapping."""
    section = data.get(key.rpartition(".")[0]) or {}
    return bool(_variable(key) or not isinstance(section, dict) or _found(key, data)[0])


def _variable(key: str) -> str | None:
    return next((name for name in SETTINGS[key] if os.environ.get(name)), None)


def _found(key: str, data: Mapping[str, Any]) -> tuple[bool, str | None]:
    """Whether a job sets a key, even to nothing; and its value as text."""
    section, _, name = key.rpartition(".")
    own = data.get(section) if section else data
    if not isinstance(own, dict) or name not in own:
        return False, None
    value = own[name]
    if isinstance(value, list):
        return True, ", ".join(map(str, value))
    return True, None if value is None else str(value)


def settings(file: Draft | None, overridden: Draft, given: Sequence[str]) -> list[Setting]:
    """Every setting and its source, as `deploykit config` shows them.

    `file` is the job file alone, if there is one; `overridden` the job with the overrides `given`
    and the defaults.
    """
    return [_setting(key, file, overridden, given) for key in SETTINGS]


def _setting(key: str, file: Draft | None, job: Draft, given: Sequence[str]) -> Setting:
    section, value = key.rpartition(".")[0], _found(key, job.data)[1]
    if key in job.origins:
        return Setting(key, value, "config file", job.origins[key])
    if flags := [text for text in given if text.partition("=")[0] in {key, section}]:
        return Setting(key, value, "flag", flags[-1])
    if file is not None and _found(key, file.data)[0]:
        line = f", line {file.lines[key]}" if key in file.lines else ""
        return Setting(key, value, "job file", f"{file.source}{line}")
    if variable := _variable(key):
        return Setting(key, os.environ[variable], "environment", variable)
    return Setting(key, backend.DEFAULT if key == "backend" else None, "default")


def example() -> str:
    """A config file in which every setting is commented out."""
    lines = [
        "# Defaults for every job; environment, job file and command line override them.",
        "",
    ]
    for key in SETTINGS:
        section, _, name = key.rpartition(".")
        if section and f"[{section}]" not in lines:
            lines += ["", f"[{section}]"]
        cls: Any = _SECTIONS.get(section) or backend.find(section).Options
        notes = split(hints(cls)[name])[1]
        help_ = next(note for note in notes if isinstance(note, Help))
        lines += [*textwrap.wrap(f"# {help_.text}", 96, subsequent_indent="# ")]
        value = f'"{help_.example or "..."}"'
        lines += [f"# {name} = {_LISTS.get(key, value)}"]
    return "\n".join([*lines, ""])
