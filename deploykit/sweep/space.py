"""The search space: which parameters a trial has, their values as text, the points of a grid."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterator, Mapping
from decimal import ROUND_FLOOR, Decimal
from typing import NamedTuple

from deploykit.sweep.model import Parameter, Sweep

Values = Mapping[str, str]
"""The values of a trial as text, by parameter, without those that have no effect."""
_PLACE = "{value}"
_ENVIRONMENT = "env:"


class Passed(NamedTuple):
    arguments: list[str]
    env: dict[str, str]


def applies(one: Parameter, values: Values) -> bool:
    """Return whether a parameter has an effect, given the values before it."""
    return all(values.get(name) == value for name, value in one.if_.items())


def choose(parameters: Mapping[str, Parameter], value: Callable[[str, Parameter], str]) -> Values:
    """Choose the values of a trial: call `value` for each parameter that applies, in order."""
    chosen: dict[str, str] = {}
    for name, one in parameters.items():
        if applies(one, chosen):
            chosen[name] = value(name, one)
    return chosen


def at(one: Parameter, share: float) -> str:
    """Return the value at `share` of a parameter's range or choices, 0 <= share < 1."""
    if count := grid_size(one):
        return grid_value(one, min(int(share * count), count - 1))
    low, high = (float(end) for end in one.range or ())
    if not one.log:
        return text(low + share * (high - low))
    # a whole number is as probable as its part of the line of logarithms
    half = 0.5 if one.int else 0.0
    start, end = math.log(low - half), math.log(high + half)
    value = min(max(math.exp(start + share * (end - start)), low), high)
    return str(round(value)) if one.int else text(value)


def text(value: float | str) -> str:
    """Format a value as an argument, with as many digits as it needs."""
    return value if isinstance(value, str) else repr(value)


def points(parameters: Mapping[str, Parameter], begun: Values | None = None) -> Iterator[Values]:
    """Yield the points of a grid that extend `begun`; the last parameter varies fastest."""
    begun = begun or {}
    if not parameters:
        yield begun
        return
    (name, one), *rest = parameters.items()
    if not applies(one, begun):
        yield from points(dict(rest), begun)
        return
    for number in range(grid_size(one)):
        yield from points(dict(rest), {**begun, name: grid_value(one, number)})


def trials(sweep: Sweep) -> int:
    """Return the number of trials of a sweep, for a grid at most its number of points."""
    if sweep.sampler != "grid":
        return sweep.trials or 0
    count = sum(1 for _ in points(sweep.parameters))
    return min(count, sweep.trials or count)


def grid_size(one: Parameter) -> int:
    """Return the number of values of a parameter in a grid; 0 if its range has no step."""
    if one.choice is not None:
        return len(one.choice)
    step = _step(one)
    if step is None or one.range is None:
        return 0
    width = Decimal(one.range[1]) - Decimal(one.range[0])
    return int((width / step).to_integral_value(ROUND_FLOOR)) + 1


def grid_value(one: Parameter, number: int) -> str:
    """Return a value of a parameter in a grid, computed exactly in decimals."""
    if one.choice is not None:
        return one.choice[number]
    low, *_ = one.range or ("0",)
    value = Decimal(low) + number * (_step(one) or 1)
    return str(int(value)) if one.int else text(float(value))


def _step(one: Parameter) -> Decimal | None:
    step = one.step or ("1" if one.int and not one.log else None)
    return None if step is None else Decimal(step)


def passed(parameters: Mapping[str, Parameter], values: Values) -> Passed:
    """Return the arguments and variables of a trial, in the order of the parameters."""
    result = Passed([], {})
    for name, value in values.items():
        add(result, parameters[name].as_ or default_form(name), value)
    return result


def default_form(name: str) -> str:
    """Return the default way to pass a parameter to the script."""
    return f"--{name} {_PLACE}"


def add(result: Passed, form: str, value: str) -> None:
    """Add a value in its form: as a variable, or as the words of `form` that contain it."""
    if form.startswith(_ENVIRONMENT):
        result.env[form.removeprefix(_ENVIRONMENT)] = value
    else:
        result.arguments.extend(word.replace(_PLACE, value) for word in shlex.split(form))


def form_problem(form: str) -> str | None:
    """Return the problem of a form; None if it is valid."""
    if form.startswith(_ENVIRONMENT):
        name = form.removeprefix(_ENVIRONMENT)
        plain = name.isascii() and name.isidentifier()
        return None if plain else f"{name!r} is not a valid environment variable name"
    try:
        words = shlex.split(form)
    except ValueError:
        return "contains an unclosed quote"
    return None if any(_PLACE in word for word in words) else f"must contain {_PLACE}"


def shown(one: Parameter, value: float | str) -> str:
    """Return a sampled value as text, rounded exactly to its range's step."""
    if isinstance(value, str) or one.range is None or one.step is None:
        return text(value)
    return grid_value(one, round((value - float(one.range[0])) / float(one.step)))


def brief(one: Parameter, value: str) -> str:
    """A number in at most six digits; a choice as written."""
    return value if one.choice is not None else f"{float(value):.6g}"
