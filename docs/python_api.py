"""The reference of the Python API, from its signatures and docstrings."""

# ruff: noqa: INP001

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import words

import deploykit
from deploykit import sagemaker, slurm

FUNCTIONS = ("submit", "plan", "check", "launch", "runs", "get", "attach")
CLASSES = (
    *("Job", "Run", "Plan", "RunDiagnosis", "Progress"),
    *("Status", "State", "LogLine", "Problem"),
)
OTHERS = (slurm.executor, sagemaker.estimator, sagemaker.model_trainer)


def text(page: Callable[..., str], table: Callable[..., str]) -> str:
    parts = ["## Functions"]
    for name in FUNCTIONS:
        parts += function(f"deploykit.{name}", getattr(deploykit, name))
    parts += ["## Classes"]
    for name in CLASSES:
        parts += described(name, getattr(deploykit, name), table)
    parts += [
        "## Errors",
        words.part("api-errors"),
    ]
    parts += ["## For submitit and the SageMaker SDK"]
    for one in OTHERS:
        parts += function(f"{one.__module__}.{one.__name__}", one)
    return page("Python API", words.part("api"), *parts)


def function(name: str, one: Any) -> Iterator[str]:
    yield f"### {name}"
    yield "\n".join(["```python", signature(name, one), "```"])
    yield documentation(one)


def signature(name: str, one: Any) -> str:
    """The call with annotations as written; that of a job, whose keys have a page, without."""
    shown = inspect.signature(one)
    parameters = list(shown.parameters.values())
    if one is deploykit.Job:
        parameters = [each.replace(annotation=each.empty) for each in parameters]
    written = [written_parameter(each) for each in parameters]
    stars = any(each.kind is each.VAR_POSITIONAL for each in shown.parameters.values())
    first = next(
        (n for n, each in enumerate(shown.parameters.values()) if each.kind is each.KEYWORD_ONLY),
        None,
    )
    if first is not None and not stars:
        written.insert(first, "*")
    written = [each for each in written if each != "self"]
    returns = (
        ""
        if shown.return_annotation in {inspect.Signature.empty, "None"}
        else f" -> {shown.return_annotation}"
    )
    return filled(f"{name}(", [*(f"{each}," for each in written[:-1]), *written[-1:]], returns)


def filled(start: str, parameters: list[str], returns: str) -> str:
    """The call in lines of at most `words.WIDTH` characters, which break between parameters."""
    lines, indent = [start], " " * len(start)
    for each in [*parameters[:-1], "".join(parameters[-1:]) + f"){returns}"]:
        longer = lines[-1] + ("" if lines[-1].endswith(("(", indent)) else " ") + each
        if len(longer) <= words.WIDTH or lines[-1] in {start, indent}:
            lines[-1] = longer
        else:
            lines.append(indent + each)
    return "\n".join(lines)


def written_parameter(parameter: inspect.Parameter) -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    kind = "" if parameter.annotation is parameter.empty else f": {parameter.annotation}"
    if parameter.default is parameter.empty:
        return f"{stars}{parameter.name}{kind}"
    return f"{parameter.name}{kind}{' = ' if kind else '='}{parameter.default!r}"


def documentation(one: Any) -> str:
    """The docstring as Markdown, where indented lines are code too."""
    return re.sub(r"``([^`\n]+)``", r"`\1`", inspect.getdoc(one) or "")


def described(name: str, cls: Any, table: Callable[..., str]) -> Iterator[str]:
    yield f"### {name}"
    if name == "Job":
        yield "\n".join(["```python", signature(f"deploykit.{name}", cls), "```"])
    elif issubclass(cls, tuple) or dataclasses.is_dataclass(cls):
        kinds = inspect.get_annotations(cls).items()
        attributes = [f"{key}: {written_type(kind)}," for key, kind in kinds]
        shown = filled(f"{name}(", [*attributes[:-1], attributes[-1].rstrip(",")], "")
        yield f"```python\n{shown}\n```"
    yield documentation(cls)
    if issubclass(cls, enum.Enum):
        yield (
            ", ".join(f"`{member.value}`" for member in cls)
            + ": [what they mean](commands.md#states-of-a-run)."
        )
    own = {key: value for key, value in vars(cls).items() if not key.startswith("_")}
    properties = {key: value for key, value in own.items() if isinstance(value, property)}
    if properties and not issubclass(cls, enum.Enum):
        yield table(
            ["attribute", "meaning"],
            (
                [f"`{key}`", " ".join(documentation(value).split())]
                for key, value in properties.items()
            ),
        )
    for key, value in own.items():
        if inspect.isfunction(value):
            call = signature(f"{name}.{key}", value)
            yield f"**`{call}`**" if "\n" not in call else f"```python\n{call}\n```"
            yield documentation(value)


def written_type(annotation: Any) -> str:
    """As it is in the source: `typing.NamedTuple` wraps it."""
    return str(getattr(annotation, "__forward_arg__", annotation))
