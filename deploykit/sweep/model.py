"""A sweep as data: its parameters, its objective, and its search method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from deploykit.job.decode import NOT_EMPTY, Bounds, Help, Pattern
from deploykit.job.model import METRIC, MONEY

NUMBER = Pattern(
    r"[+-]?([0-9]{1,30}([.][0-9]{0,30})?|[.][0-9]{1,30})([eE][+-]?[0-9]{1,3})?",
    "a number such as 0.1 or 1e-4",
)
PARAMETER = Pattern(r"[A-Za-z_][A-Za-z0-9_.-]{0,99}", "a name such as lr or optimizer.momentum")
SWEEP = Pattern(
    r"[a-zA-Z0-9](-?[a-zA-Z0-9]){0,29}",
    "up to 30 letters and digits, with single hyphens between them",
)
Number = Annotated[str, NUMBER]


@dataclass(frozen=True)
class Parameter:
    """A parameter to search: its values, and how to pass them to the script."""

    choice: Annotated[
        tuple[str, ...] | None, Help("Values to choose from, passed as written.", "[sgd, adamw]")
    ] = None
    range: Annotated[
        tuple[Number, ...] | None, Help("Lowest and highest value.", "[1e-4, 1e-1]")
    ] = None
    log: Annotated[bool, Help("Search the range on a logarithmic scale.")] = False
    int: Annotated[bool, Help("Whole numbers only.")] = False
    step: Annotated[
        Number | None, Help("Step between the values of a range; required for `grid`.", "16")
    ] = None
    as_: Annotated[
        str | None,
        Help(
            "How to pass the value to the script: `env:NAME`, or arguments that contain `{value}`. "
            "Default: `--NAME {value}`.",
            "--opt.lr={value}",
        ),
        NOT_EMPTY,
    ] = None
    if_: Annotated[
        Mapping[Annotated[str, PARAMETER], str],
        Help(
            "Use this parameter only if parameters listed above it have these values.",
            "{optimizer: sgd}",
        ),
    ] = field(default_factory=dict)


@dataclass(frozen=True)
class Objective:
    """The metric to optimize."""

    metric: Annotated[
        str, Help("Name of the metric, as `deploykit metrics` prints it.", "loss"), METRIC
    ]
    direction: Annotated[
        Literal["minimize", "maximize"], Help("Whether lower or higher is better.")
    ] = "minimize"
    value: Annotated[
        Literal["last", "best"], Help("Which value of a trial counts: the last or the best.")
    ] = "last"


@dataclass(frozen=True)
class Sweep:
    """A sweep file."""

    parameters: Annotated[
        Mapping[Annotated[str, PARAMETER], Parameter],
        Help("The parameters to search.", "{lr: {range: [1e-4, 1e-1], log: true}}"),
    ]
    objective: Annotated[Objective, Help("The metric to optimize.", "{metric: loss}")]
    name: Annotated[str | None, Help("Name of the sweep. Default: the job's name."), SWEEP] = None
    job: Annotated[
        str, Help("The job file or script of each trial, relative to the sweep file."), NOT_EMPTY
    ] = "job.yaml"
    trials: Annotated[
        int | None,
        Help("Number of trials. Default for `grid`: all points.", "40"),
        Bounds(1, 100_000),
    ] = None
    parallel: Annotated[int, Help("Maximum number of runs at a time."), Bounds(1, 10_000)] = 1
    sampler: Annotated[
        Literal["grid", "random", "sobol", "tpe", "cma-es"],
        Help("How the next values are chosen; `tpe` and `cma-es` learn from earlier trials."),
    ] = "tpe"
    pruner: Annotated[
        Literal["none", "asha", "hyperband", "median"],
        Help("How trials that do worse than earlier ones at the same step are stopped early."),
    ] = "none"
    min_steps: Annotated[
        int,
        Help("Minimum number of steps before a trial can be stopped."),
        Bounds(1, 10**12),
    ] = 1
    max_steps: Annotated[
        int | None,
        Help("Steps of a complete trial; required for `hyperband`.", "1000"),
        Bounds(1, 10**12),
    ] = None
    reduction: Annotated[
        int,
        Help("At each rung, `asha` and `hyperband` keep one trial out of this many."),
        Bounds(2, 100),
    ] = 3
    seed: Annotated[int, Help("Seed of the sampler."), Bounds(0, 2**31 - 1)] = 0
    retries: Annotated[
        int,
        Help("How often to restart a run that failed because of the machine, not the script."),
        Bounds(0, 100),
    ] = 2
    repeat: Annotated[
        int,
        Help("Runs per trial, with seeds 0, 1, ...; the trial's value is their mean."),
        Bounds(1, 1000),
    ] = 1
    repeat_as: Annotated[
        str,
        Help("How to pass the seed of a repeated run to the script, in the same form as `as`."),
        NOT_EMPTY,
    ] = "--seed {value}"
    max_cost: Annotated[
        str | None,
        Help(
            "Maximum total cost of all runs. A trial that could exceed it is not started.", "50 USD"
        ),
        MONEY,
    ] = None
