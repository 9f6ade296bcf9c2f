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
from deploykit.lib import errors

FUNCTIONS = ("submit", "plan", "check", "launch", "runs", "get", "attach")
CLASSES = (
    *("Job", "Run", "Runs", "Plan", "RunDiagnosis", "Progress"),
    *("Status", "State", "LogLine", "Problem"),
)
ALIASES = {
    "JobLike": "str | os.PathLike[str] | Job",
    "Argument": "str | int | float | os.PathLike[str]",
    "Overrides": "Sequence[str | tuple[str, Any]]",
}
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
        table(["class", "code", "meaning"], every_error()),
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
    """The call, on one line where it fits, with annotations as written."""
    shown = inspect.signature(one)
    written = [written_parameter(each) for each in shown.parameters.values()]
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
    line = f"{name}({', '.join(written)}){returns}"
    if len(line) <= words.WIDTH:
        return line
    lines = "".join(f"    {each},\n" for each in written)
    return f"{name}(\n{lines}){returns}"


def written_parameter(parameter: inspect.Parameter) -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    kind = "" if parameter.annotation is parameter.empty else f": {parameter.annotation}"
    for alias, meaning in ALIASES.items():
        kind = re.sub(rf"\b{alias}\b", meaning, kind)
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
    yield documentation(cls)
    if issubclass(cls, enum.Enum):
        yield (
            ", ".join(f"`{member.value}`" for member in cls)
            + ": [what they mean](commands.md#states-of-a-run)."
        )
    elif issubclass(cls, tuple) or dataclasses.is_dataclass(cls):
        yield table(
            ["attribute", "type"],
            (
                [f"`{key}`", f"`{written_type(value)}`"]
                for key, value in inspect.get_annotations(cls).items()
            ),
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
            yield "\n".join(["```python", signature(f"{name}.{key}", value), "```"])
            yield documentation(value)


def written_type(annotation: Any) -> str:
    """As it is in the source: `typing.NamedTuple` wraps it."""
    return str(getattr(annotation, "__forward_arg__", annotation))


def every_error() -> Iterator[list[str]]:
    """Each class of errors with its exit code, those that derive from another below it."""
    todo = [errors.DeploykitError]
    while todo:
        kind = todo.pop(0)
        todo = [each for each in kind.__subclasses__() if each.__module__ == errors.__name__] + todo
        yield [
            f"`{kind.__name__}`",
            str(kind.exit_code),
            " ".join(documentation(kind).split("\n\n")[0].split()),
        ]
