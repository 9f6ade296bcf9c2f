"""Optuna's samplers and pruners for a sweep. Imports Optuna.

A sampler is made anew for each trial, seeded by the sweep's seed and the trial's number, so that a
controller that was started again chooses as the first one would have.
"""

from __future__ import annotations

import functools
import logging
import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.exceptions import ExperimentalWarning
from optuna.pruners import (
    BasePruner,
    HyperbandPruner,
    MedianPruner,
    NopPruner,
    SuccessiveHalvingPruner,
)
from optuna.samplers import BaseSampler, CmaEsSampler, TPESampler
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial

from deploykit.sweep import space
from deploykit.sweep.model import Parameter, Sweep

_LARGEST_SEED = 2**32

logging.getLogger("optuna").setLevel(logging.ERROR)


def suggest(sweep: Sweep, trial: Trial) -> space.Values:
    """The values of a trial, each chosen unless the journal has it already."""

    def value(name: str, one: Parameter) -> str:
        return space.shown(one, _suggested(trial, name, one))

    return space.choose(sweep.parameters, value)


def _suggested(trial: Trial, name: str, one: Parameter) -> Any:
    if one.choice is not None:
        return trial.suggest_categorical(name, one.choice)
    low, high = one.range or ("0", "1")
    if one.int:
        ends, whole = (int(float(low)), int(float(high))), int(float(one.step or "1"))
        return trial.suggest_int(name, *ends, step=whole, log=one.log)
    step = float(one.step) if one.step else None
    return trial.suggest_float(name, float(low), float(high), step=step, log=one.log)


def values(sweep: Sweep, params: Mapping[str, Any]) -> space.Values:
    """The values of a trial of the journal as text, as far as they are chosen."""
    known = {name: one for name, one in sweep.parameters.items() if name in params}
    return {name: space.shown(one, params[name]) for name, one in known.items()}


def sampler(sweep: Sweep, number: int) -> BaseSampler:
    """The sampler of the trial with this number."""
    seed = random.Random(f"{sweep.seed} {number}").randrange(_LARGEST_SEED)  # noqa: S311 - no secret
    if sweep.sampler in _POINTS:
        return Pointwise(_POINTS[sweep.sampler](sweep, number))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        if sweep.sampler == "cma-es":
            return CmaEsSampler(seed=seed, warn_independent_sampling=False)
        return TPESampler(seed=seed, constant_liar=True)


def is_pointwise(sweep: Sweep) -> bool:
    """Whether each trial's values follow from its number alone."""
    return sweep.sampler in _POINTS


def pruner(sweep: Sweep) -> BasePruner:
    """The pruner of a sweep."""
    least, factor = sweep.min_steps, sweep.reduction
    if sweep.pruner == "asha":
        return SuccessiveHalvingPruner(min_resource=least, reduction_factor=factor)
    if sweep.pruner == "hyperband":
        most = sweep.max_steps or least
        return HyperbandPruner(min_resource=least, max_resource=most, reduction_factor=factor)
    if sweep.pruner == "median":
        return MedianPruner(n_startup_trials=5, n_warmup_steps=least)
    return NopPruner()


Point = Callable[[str, BaseDistribution], str]
"""The value of a parameter, by its name, as text."""


class Pointwise(BaseSampler):
    """Chooses by the trial's number alone, whatever the other trials were."""

    def __init__(self, point: Point) -> None:
        self._point = point

    def infer_relative_search_space(
        self,
        study: Study,  # noqa: ARG002 - Optuna's
        trial: FrozenTrial,  # noqa: ARG002
    ) -> dict[str, BaseDistribution]:
        """Nothing: each value is chosen by itself."""
        return {}

    def sample_relative(
        self,
        study: Study,  # noqa: ARG002 - Optuna's
        trial: FrozenTrial,  # noqa: ARG002
        search_space: dict[str, BaseDistribution],  # noqa: ARG002
    ) -> dict[str, Any]:
        """Nothing."""
        return {}

    def sample_independent(
        self,
        study: Study,  # noqa: ARG002 - Optuna's
        trial: FrozenTrial,  # noqa: ARG002
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """The value of one parameter."""
        value = self._point(param_name, param_distribution)
        if isinstance(param_distribution, CategoricalDistribution):
            return value
        if isinstance(param_distribution, IntDistribution):
            return int(value)
        assert isinstance(param_distribution, FloatDistribution)  # noqa: S101 - for mypy
        return float(value)


def _grid(sweep: Sweep, number: int) -> Point:
    points = space.points(sweep.parameters)
    if sweep.pruner != "none":  # it keeps each trial that is better than all before it
        number = _order(len(points), sweep.seed)[number]
    return lambda name, _: points[number][name]


@functools.lru_cache(1)
def _order(size: int, seed: int) -> Sequence[int]:
    """The numbers below `size` in random order."""
    numbers = list(range(size))
    random.Random(seed).shuffle(numbers)  # noqa: S311 - no secret
    return numbers


def _random(sweep: Sweep, number: int) -> Point:
    def point(name: str, _: BaseDistribution) -> str:
        share = random.Random(f"{sweep.seed} {number} {name}").random()  # noqa: S311 - no secret
        return space.at(sweep.parameters[name], share)

    return point


def _sobol(sweep: Sweep, number: int) -> Point:
    from scipy.stats import qmc  # slow to import

    names = list(sweep.parameters)
    sequence = qmc.Sobol(len(names), scramble=True, rng=sweep.seed)
    if number:
        sequence.fast_forward(number)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that one point is no power of 2
        shares = sequence.random(1)[0]
    return lambda name, _: space.at(sweep.parameters[name], float(shares[names.index(name)]))


_POINTS: dict[str, Callable[[Sweep, int], Point]] = {
    "grid": _grid,
    "random": _random,
    "sobol": _sobol,
}
