"""Optuna's samplers and pruners for a sweep. Imports Optuna.

Each trial gets a new sampler, seeded by the sweep's seed and the trial's number, so a restarted
controller chooses the same values as the first one would have.
"""

from __future__ import annotations

import functools
import logging
import random
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from optuna.exceptions import ExperimentalWarning
from optuna.pruners import (
    BasePruner,
    HyperbandPruner,
    MedianPruner,
    NopPruner,
    SuccessiveHalvingPruner,
)
from optuna.samplers import BaseSampler, CmaEsSampler, RandomSampler, TPESampler
from optuna.trial import Trial

from deploykit.sweep import space
from deploykit.sweep.model import Parameter, Sweep

_LARGEST_SEED = 2**32

logging.getLogger("optuna").setLevel(logging.ERROR)


def suggest(sweep: Sweep, trial: Trial) -> space.Values:
    """Return the values of a trial. Chooses those that the journal lacks."""

    def value(name: str, one: Parameter) -> str:
        if one.choice is not None:
            return trial.suggest_categorical(name, one.choice)
        low, high = one.range or ("0", "1")
        if one.int:
            ends, whole = (int(float(low)), int(float(high))), int(float(one.step or "1"))
            return space.shown(one, trial.suggest_int(name, *ends, step=whole, log=one.log))
        step = float(one.step) if one.step else None
        chosen = trial.suggest_float(name, float(low), float(high), step=step, log=one.log)
        return space.shown(one, chosen)

    return space.choose(sweep.parameters, value)


def values(sweep: Sweep, params: Mapping[str, Any]) -> space.Values:
    """Return the values of a trial in the journal as text, without those not yet chosen."""
    known = {name: one for name, one in sweep.parameters.items() if name in params}
    return {name: space.shown(one, params[name]) for name, one in known.items()}


def sampler(sweep: Sweep, number: int) -> BaseSampler:
    seed = random.Random(f"{sweep.seed} {number}").randrange(_LARGEST_SEED)  # noqa: S311 - no secret
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        if sweep.sampler == "cma-es":
            return CmaEsSampler(seed=seed, warn_independent_sampling=False)
        if sweep.sampler == "tpe":
            return TPESampler(seed=seed, constant_liar=True)
    return RandomSampler(seed)


def is_pointwise(sweep: Sweep) -> bool:
    """Return whether each trial's values depend on its number alone."""
    return sweep.sampler in {"grid", "random", "sobol"}


def pruner(sweep: Sweep) -> BasePruner:
    least, factor = sweep.min_steps, sweep.reduction
    if sweep.pruner == "asha":
        return SuccessiveHalvingPruner(min_resource=least, reduction_factor=factor)
    if sweep.pruner == "hyperband":
        most = sweep.max_steps or least
        return HyperbandPruner(min_resource=least, max_resource=most, reduction_factor=factor)
    if sweep.pruner == "median":
        return MedianPruner(n_startup_trials=5, n_warmup_steps=least)
    return NopPruner()


def point(sweep: Sweep, grid: Sequence[space.Values], number: int) -> dict[str, Any] | None:
    """Return the values of trial `number` in Optuna's form; None if a sampler chooses them.

    `grid` holds the points of the sweep's grid, if that is its sampler. Optuna's grid does not
    support conditions, and its Sobol sequence begins with random trials.
    """
    values: space.Values = {}
    if sweep.sampler == "grid":
        if sweep.pruner != "none":  # it keeps each trial that is better than all before it
            number = _order(len(grid), sweep.seed)[number]
        values = grid[number]
    elif sweep.sampler == "sobol":
        from scipy.stats import qmc  # slow to import

        sequence = qmc.Sobol(len(sweep.parameters), scramble=True, rng=sweep.seed)
        if number:
            sequence.fast_forward(number)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # one point is not a power of 2
            shares = sequence.random(1)[0]
        pairs = zip(sweep.parameters.items(), shares, strict=True)
        values = {name: space.at(one, float(share)) for (name, one), share in pairs}
    typed = {name: _typed(sweep.parameters[name], value) for name, value in values.items()}
    return typed or None


def _typed(one: Parameter, value: str) -> Any:
    if one.choice is not None:
        return value
    return int(value) if one.int else float(value)


@functools.lru_cache(1)
def _order(size: int, seed: int) -> Sequence[int]:
    """Return the numbers below `size` in random order."""
    numbers = list(range(size))
    random.Random(seed).shuffle(numbers)  # noqa: S311 - no secret
    return numbers
