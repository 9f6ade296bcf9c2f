"""Read a sweep from a YAML or TOML file or from a grid on the command line.

All problems are reported at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from deploykit.job import file as jobfile
from deploykit.job.decode import Plain, decode
from deploykit.job.file import Draft, Overrides
from deploykit.job.spelling import did_you_mean
from deploykit.lib.errors import JobFileError, NotFound, UsageError
from deploykit.lib.problem import Problem
from deploykit.sweep import space
from deploykit.sweep.model import Parameter, Sweep

_MOST_POINTS = 100_000
_MOST_STEPS = 1_000_000
_LARGEST = 2**53
"""Whole numbers up to this are exact as floating-point numbers."""
_LEARNS_FROM_RANGES = 2
"""Parameters with a range that CMA-ES needs."""


class SweepFile(NamedTuple):
    """A sweep, and the folder that its job file is relative to."""

    source: Path
    sweep: Sweep
    folder: Path


def read(path: Path, overrides: Overrides = ()) -> SweepFile:
    """Read a sweep file. Raises NotFound, or JobFileError with every problem."""
    if not path.exists():
        hint = "name a sweep file, or search a grid with --grid lr=0.1,0.01 --metric loss"
        raise NotFound(f"sweep file {path} not found", hint=hint)
    draft = jobfile.override(Draft(path, *jobfile.parse(path)), overrides)
    return _load(path, draft.data, draft.lines, path.absolute().parent)


def from_grid(grids: Sequence[str], keys: Overrides = ()) -> SweepFile:
    """Make a sweep of grids such as ``lr=0.1,0.01``; `keys` are other keys of a sweep file.

    Raises UsageError, or JobFileError with every problem.
    """
    parameters: dict[str, Any] = {}
    for grid in grids:
        name, equals, values = grid.partition("=")
        if not equals or not name or name in parameters:
            raise UsageError(
                f"--grid {grid}: expected NAME=VALUE,VALUE, each name only once",
                hint="for example, --grid lr=0.1,0.01",
            )
        parameters[name] = {"choice": [Plain(value) for value in values.split(",")]}
    source = Path("command line")
    draft = Draft(source, {"sampler": "grid", "parameters": parameters}, {})
    return _load(source, jobfile.override(draft, keys).data, {}, Path.cwd())


def from_data(source: Path, data: Mapping[str, Any], folder: Path) -> SweepFile:
    """Decode a sweep. Raises JobFileError."""
    return _load(source, dict(data), {}, folder)


def _load(source: Path, data: dict[str, Any], lines: Mapping[str, int], folder: Path) -> SweepFile:
    sweep, problems = decode(Sweep, _with_texts(data))
    if sweep is not None:
        problems = list(_check(sweep))
    if sweep is None or problems:
        raise JobFileError(str(source), jobfile.located(problems, lines))
    return SweepFile(source, sweep, folder)


def _with_texts(data: dict[str, Any]) -> dict[str, Any]:
    """Convert the values of parameters to text, as TOML and Python may have numbers there."""
    parameters = data.get("parameters")
    if not isinstance(parameters, dict):
        return data
    read = {}
    for name, one in parameters.items():
        read[name] = one
        if isinstance(one, dict):
            own = {key: _texts(one[key]) for key in ("choice", "range", "step") if key in one}
            if isinstance(one.get("if"), dict):
                own["if"] = {other: _texts(value) for other, value in one["if"].items()}
            read[name] = {**one, **own}
    return {**data, "parameters": read}


def _texts(value: Any) -> Any:
    if isinstance(value, list):
        return [_texts(one) for one in value]
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, int | float) else value


def _check(sweep: Sweep) -> Iterator[Problem]:
    if not sweep.parameters:
        yield Problem("parameters", "is empty", "for example, {lr: {range: [1e-4, 1e-1]}}")
    for name, one in sweep.parameters.items():
        yield from _check_parameter(f"parameters.{name}", one)
        yield from _check_conditions(name, one, sweep.parameters)
    yield from _check_search(sweep)
    if sweep.repeat > 1 and (problem := space.form_problem(sweep.repeat_as)):
        yield Problem("repeat_as", problem, "--seed {value}")
    if sweep.repeat > 1 and sweep.pruner != "none":
        yield Problem("repeat", "cannot be combined with a pruner", "remove one of them")


def _check_parameter(path: str, one: Parameter) -> Iterator[Problem]:
    if (one.choice is None) == (one.range is None):
        yield Problem(path, "expected exactly one of `choice` and `range`", "{choice: [1, 2]}")
    elif one.choice is not None:
        yield from _check_choice(path, one)
    else:
        yield from _check_range(path, one)
    if one.as_ is not None and (problem := space.form_problem(one.as_)):
        yield Problem(f"{path}.as", problem, "for example, env:NAME or --opt.lr={value}")


def _check_choice(path: str, one: Parameter) -> Iterator[Problem]:
    values = one.choice or ()
    if len(set(values)) < max(1, len(values)):
        message = "contains a duplicate value" if values else "is empty"
        yield Problem(f"{path}.choice", message)
    for key in ("log", "int", "step"):
        if getattr(one, key):
            yield Problem(f"{path}.{key}", "applies only to a `range`", "remove it")


def _check_range(path: str, one: Parameter) -> Iterator[Problem]:
    ends = [float(end) for end in one.range or ()]
    if len(ends) != 2 or not -math.inf < ends[0] < ends[1] < math.inf:  # noqa: PLR2004 - both ends
        yield Problem(f"{path}.range", "expected the lowest and the highest value", "[0.1, 1]")
        return
    if one.log and ends[0] <= 0:
        yield Problem(f"{path}.range", "must be greater than 0 with `log`")
    if one.log and one.step is not None:
        yield Problem(f"{path}.step", "cannot be combined with `log`", "use `choice`")
    numbers = [*(one.range or ()), *([one.step] if one.step else [])]
    if one.int and any(not float(number).is_integer() for number in numbers):
        yield Problem(path, "must use whole numbers with `int`")
    if one.int and max(map(abs, ends)) > _LARGEST:
        yield Problem(f"{path}.range", "is too large for whole numbers")
    width = ends[1] - ends[0]
    if one.step is not None and not 0 < float(one.step) <= width:
        yield Problem(f"{path}.step", "must be greater than 0, and at most the width of the range")
    elif one.step is not None and width / float(one.step) > _MOST_STEPS:
        yield Problem(f"{path}.step", f"divides the range into more than {_MOST_STEPS:,} values")


def _check_conditions(
    name: str, one: Parameter, parameters: Mapping[str, Parameter]
) -> Iterator[Problem]:
    """Check that the parameters above can satisfy the conditions of this one."""
    above = list(parameters)[: list(parameters).index(name)]
    for other, value in one.if_.items():
        path = f"parameters.{name}.if.{other}"
        if other not in above:
            hint = did_you_mean(other, above) or "use a parameter that is listed above this one"
            yield Problem(path, "is not a parameter listed above this one", hint)
        elif value not in (values := parameters[other].choice or ()):
            known = f"values: {', '.join(values)}" if values else "a condition requires a `choice`"
            hint = did_you_mean(value, values) or known
            yield Problem(path, f"{value!r} is not a value of that parameter", hint)


def _check_search(sweep: Sweep) -> Iterator[Problem]:
    """Check that the sampler and the pruner have the settings that they need."""
    if sweep.sampler == "grid":
        each = sweep.parameters.items()
        right = {name: one for name, one in each if not any(_check_parameter(name, one))}
        for name, one in right.items():
            if one.range is not None and not space.grid_size(one):
                message = "a grid requires a `step` or a `choice`"
                yield Problem(f"parameters.{name}", message, "or use sampler: random")
        # at most so many: fewer where parameters depend on others
        if math.prod(max(1, space.grid_size(one)) for one in right.values()) > _MOST_POINTS:
            message = f"the grid has more than {_MOST_POINTS:,} points"
            yield Problem("parameters", message, "use sampler: random")
    elif sweep.trials is None:
        yield Problem("trials", "is required", "for example, trials: 40")
    ranges = [one for one in sweep.parameters.values() if one.range and not one.if_]
    if sweep.sampler == "cma-es" and len(ranges) < _LEARNS_FROM_RANGES:
        message = "`cma-es` requires at least two parameters with a `range`"
        yield Problem("sampler", message, "use sampler: tpe")
    if sweep.pruner == "hyperband" and sweep.max_steps is None:
        yield Problem(
            "max_steps", "is required for `hyperband`", "set it to the steps of a complete trial"
        )
