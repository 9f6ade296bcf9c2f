"""The search space: which parameters a trial has, their values as text, the points of a grid."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import ROUND_FLOOR, Decimal
from typing import NamedTuple

from deploykit.sweep.model import Parameter, Sweep

Values = Mapping[str, str]
"""The values of a trial as text, by parameter; those without effect are left out."""
_PLACE = "{value}"
_ENVIRONMENT = "env:"


class Passed(NamedTuple):
    """What a trial adds to its job."""

    arguments: list[str]
    env: dict[str, str]


def applies(one: Parameter, values: Values) -> bool:
    """Whether a parameter has an effect, given those before it."""
    return all(values.get(name) == value for name, value in one.if_.items())


def choose(parameters: Mapping[str, Parameter], value: Callable[[str, Parameter], str]) -> Values:
    """The values of a trial: `value` is asked for each parameter that applies, in order."""
    chosen: dict[str, str] = {}
    for name, one in parameters.items():
        if applies(one, chosen):
            chosen[name] = value(name, one)
    return chosen


def at(one: Parameter, share: float) -> str:
    """The value at a share of a parameter's range or choices, 0 <= share < 1."""
    values = one.choice or _steps(one)
    if values:
        return values[min(int(share * len(values)), len(values) - 1)]
    low, high = (float(end) for end in one.range or ())
    if one.int:
        return str(_whole(low, high, share, log=one.log))
    if one.log:
        value = math.exp(math.log(low) + share * (math.log(high) - math.log(low)))
    else:
        value = low + share * (high - low)
    return text(min(max(value, low), high))


def _whole(low: float, high: float, share: float, *, log: bool) -> int:
    """A whole number of the range, each as probable as its part of a line (of logarithms)."""
    if not log:
        return int(low) + int(share * (int(high) - int(low) + 1))
    start, end = math.log(low - 0.5), math.log(high + 0.5)
    return min(max(round(math.exp(start + share * (end - start))), int(low)), int(high))


def text(value: float | str) -> str:
    """A value as an argument: a number with as many digits as it needs."""
    return value if isinstance(value, str) else repr(value)


def points(parameters: Mapping[str, Parameter]) -> Sequence[Values]:
    """The points of a grid; the last parameter varies fastest."""
    if not any(one.if_ for one in parameters.values()):
        return _Grid({name: grid_values(one) for name, one in parameters.items()})
    grid: list[dict[str, str]] = [{}]
    for name, one in parameters.items():
        grid = [more for point in grid for more in _with(point, name, one)]
    return grid


def _with(point: dict[str, str], name: str, one: Parameter) -> Iterator[dict[str, str]]:
    if not applies(one, point):
        yield point
        return
    for value in grid_values(one):
        yield {**point, name: value}


def size(parameters: Mapping[str, Parameter]) -> int:
    """At most so many points a grid has; fewer where parameters depend on others."""
    return math.prod(max(1, len(grid_values(one))) for one in parameters.values())


def trials(sweep: Sweep) -> int:
    """Number of trials of a sweep; a grid has no more than its points."""
    if sweep.sampler != "grid":
        return sweep.trials or 0
    count = len(points(sweep.parameters))
    return min(count, sweep.trials or count)


def grid_values(one: Parameter) -> Sequence[str]:
    """The values of a parameter in a grid; none where its range has no step."""
    return one.choice or _steps(one)


def _steps(one: Parameter) -> Sequence[str]:
    """The values of a range with a step, exactly as they are added up in decimals."""
    step = one.step or ("1" if one.int and not one.log else None)
    if step is None or one.range is None:
        return ()
    low, high, each = Decimal(one.range[0]), Decimal(one.range[1]), Decimal(step)
    count = int(((high - low) / each).to_integral_value(ROUND_FLOOR)) + 1
    return _Steps(low, each, count, whole=one.int)


class _Grid(Sequence[Values]):
    """The points of a grid without conditions, made when they are asked for."""

    def __init__(self, values: Mapping[str, Sequence[str]]) -> None:
        self._values = values

    def __len__(self) -> int:
        return math.prod(map(len, self._values.values()))

    def __getitem__(self, index: int) -> Values:  # type: ignore[override]
        if not 0 <= index < len(self):
            raise IndexError(index)
        point = {}
        for name, values in reversed(list(self._values.items())):
            index, position = divmod(index, len(values))
            point[name] = values[position]
        return dict(reversed(list(point.items())))


class _Steps(Sequence[str]):
    """Equally spaced values, made when they are asked for."""

    def __init__(self, low: Decimal, each: Decimal, count: int, *, whole: bool) -> None:
        self._low, self._each, self._count, self._whole = low, each, count, whole

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> str:  # type: ignore[override]
        if not 0 <= index < self._count:
            raise IndexError(index)
        value = self._low + index * self._each
        return str(int(value)) if self._whole else text(float(value))


def passed(parameters: Mapping[str, Parameter], values: Values) -> Passed:
    """The arguments and variables of a trial, in the order of the parameters."""
    result = Passed([], {})
    for name, value in values.items():
        add(result, parameters[name].as_ or default_form(name), value)
    return result


def default_form(name: str) -> str:
    """How a script gets a parameter that says nothing else."""
    return f"--{name} {_PLACE}"


def add(result: Passed, form: str, value: str) -> None:
    """Add a value in its form: a variable, or the words of `form` with the value in them."""
    if form.startswith(_ENVIRONMENT):
        result.env[form.removeprefix(_ENVIRONMENT)] = value
    else:
        result.arguments.extend(word.replace(_PLACE, value) for word in shlex.split(form))


def form_problem(form: str) -> str | None:
    """What is wrong with a form; None where nothing is."""
    if form.startswith(_ENVIRONMENT):
        name = form.removeprefix(_ENVIRONMENT)
        plain = name.isascii() and name.isidentifier()
        return None if plain else f"{name!r} is not an environment variable's name"
    try:
        words = shlex.split(form)
    except ValueError:
        return "a quote is not closed"
    return None if any(_PLACE in word for word in words) else f"expected {_PLACE} in it"


def shown(one: Parameter, value: float | str) -> str:
    """A value that a sampler chose, as text; one of a range with a step is exactly on it."""
    steps = _steps(one)
    if isinstance(value, str) or one.range is None or not steps or not one.step:
        return text(value)
    return steps[round((value - float(one.range[0])) / float(one.step))]
