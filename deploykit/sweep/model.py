"""A sweep as data: its parameters, its objective, and how it goes about the search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from deploykit.decode import NOT_EMPTY, Bounds, Help, Pattern
from deploykit.names import METRIC, MONEY

NUMBER = Pattern(
    r"[+-]?([0-9]{1,30}([.][0-9]{0,30})?|[.][0-9]{1,30})([eE][+-]?[0-9]{1,3})?",
    "a number such as 0.1 or 1e-4",
)
PARAMETER = Pattern(r"[A-Za-z_][A-Za-z0-9_.-]{0,99}", "a name such as lr or optimizer.momentum")
SWEEP = Pattern(
    r"[a-zA-Z0-9](-?[a-zA-Z0-9]){0,29}",
    "letters, digits and single inner hyphens, at most 30 characters",
)
Number = Annotated[str, NUMBER]


@dataclass(frozen=True)
class Parameter:
    """What is varied, within which limits, and how the script gets it."""

    choice: Annotated[
        tuple[str, ...] | None, Help("Values to choose from, as they are written.", "[sgd, adamw]")
    ] = None
    range: Annotated[
        tuple[Number, ...] | None, Help("The least and the greatest value.", "[1e-4, 1e-1]")
    ] = None
    log: Annotated[bool, Help("Search the range by orders of magnitude.")] = False
    int: Annotated[bool, Help("Whole numbers only.")] = False
    step: Annotated[
        Number | None, Help("The distance of the values of a range; for `grid` it is needed.", "16")
    ] = None
    as_: Annotated[
        str | None,
        Help(
            "How the script gets it: `env:NAME`, or words with `{value}`. Default: "
            "`--NAME {value}`.",
            "--opt.lr={value}",
        ),
        NOT_EMPTY,
    ] = None
    if_: Annotated[
        Mapping[Annotated[str, PARAMETER], str],
        Help("Only where parameters above it have these values.", "{optimizer: sgd}"),
    ] = field(default_factory=dict)


@dataclass(frozen=True)
class Objective:
    """The number that tells how good a trial is."""

    metric: Annotated[str, Help("A metric, as `deploykit metrics` names it.", "loss"), METRIC]
    direction: Annotated[
        Literal["minimize", "maximize"], Help("Whether less or more is better.")
    ] = "minimize"
    value: Annotated[
        Literal["last", "best"], Help("Of the values of a trial the last one, or the best.")
    ] = "last"


@dataclass(frozen=True)
class Sweep:
    """A sweep file."""

    parameters: Annotated[
        Mapping[Annotated[str, PARAMETER], Parameter],
        Help("What is varied.", "{lr: {range: [1e-4, 1e-1], log: true}}"),
    ]
    objective: Annotated[Objective, Help("What is searched for.", "{metric: loss}")]
    name: Annotated[str | None, Help("Name of the sweep. Default: that of its job."), SWEEP] = None
    job: Annotated[
        str, Help("The job file or script of each trial, relative to the sweep file."), NOT_EMPTY
    ] = "job.yaml"
    trials: Annotated[
        int | None,
        Help("Number of trials; `grid` tries all points without it.", "40"),
        Bounds(1, 100_000),
    ] = None
    parallel: Annotated[int, Help("Runs at the same time."), Bounds(1, 10_000)] = 1
    sampler: Annotated[
        Literal["grid", "random", "sobol", "tpe", "cma-es"],
        Help("What chooses the next values; `tpe` and `cma-es` learn from the trials so far."),
    ] = "tpe"
    pruner: Annotated[
        Literal["none", "asha", "hyperband", "median"],
        Help("What stops trials early that are worse than others were at the same step."),
    ] = "none"
    min_steps: Annotated[
        int,
        Help("Steps, as the metric counts them, before a trial may be stopped."),
        Bounds(1, 10**12),
    ] = 1
    max_steps: Annotated[
        int | None, Help("Steps of a whole trial, for `hyperband`.", "1000"), Bounds(1, 10**12)
    ] = None
    reduction: Annotated[
        int,
        Help("Of how many trials `asha` and `hyperband` keep one at each rung."),
        Bounds(2, 100),
    ] = 3
    seed: Annotated[int, Help("Of the sampler."), Bounds(0, 2**31 - 1)] = 0
    retries: Annotated[
        int,
        Help("How often a run is repeated that was lost to the machines, not to the script."),
        Bounds(0, 100),
    ] = 2
    repeat: Annotated[
        int,
        Help("Runs of each trial, with seeds 0, 1, ...; the value is their mean."),
        Bounds(1, 1000),
    ] = 1
    repeat_as: Annotated[
        str, Help("How the script gets the seed of a repeated run, as `as`."), NOT_EMPTY
    ] = "--seed {value}"
    max_cost: Annotated[
        str | None,
        Help("What all runs together may cost. No trial starts that could cost more.", "50 USD"),
        MONEY,
    ] = None
