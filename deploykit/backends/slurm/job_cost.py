"""What a job may cost on a cluster that charges for its resources, by the time they are allocated.

Slurm knows no money. The job file or the user's defaults say what the site charges
(`slurm.price`), and for which resource.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal

from deploykit.backends.slurm import billing, site
from deploykit.backends.slurm.options import Options, Restarts
from deploykit.cost import money
from deploykit.cost.estimate import Charge, Estimate, Seconds
from deploykit.job.model import JobSpec
from deploykit.lib import units
from deploykit.lib.errors import NotFound

_LATE = 60
"""Seconds that a job may run on: Slurm looks at time limits every 30 s, then KillWait passes.

https://slurm.schedmd.com/slurm.conf.html#OPT_KillWait
"""
_FREE = "slurm.price is not set"
_RESIZE = re.compile(r"(cpus|gpus|mem|ntasks|tres)-per-\w+|gres|mincpus|cores-per-socket|core-spec")
"""Options of `slurm.extra` that change what a job gets."""


def estimate(job: JobSpec, options: Options) -> Estimate:
    """What the job may cost in its currency."""
    if options.price is None:
        return Estimate(free=_FREE)
    written, _, unit = options.price.partition("/")
    price, per = money.parse(written), unit.removesuffix("-hour").lower()
    try:
        count = quantity(job, options, per)
    except Unknown as error:
        return Estimate(unknown=(str(error),), currency=price.currency)
    tasks = options.array or 1
    charge = Charge(
        what=f"{_number(count * tasks)} {_names(per)}",
        hourly=count * tasks * price.amount,
        seconds=_seconds(job, options),
        how=_how(job, options),
    )
    return Estimate(
        charges=(charge,),
        currency=price.currency,
        source=f"slurm.price, {options.price}",
        notes=tuple(_notes(options)),
    )


class Unknown(Exception):
    """What a job gets is not known here; the text says why, and what to do."""


def quantity(job: JobSpec, options: Options, per: str) -> Decimal:
    """How many GPUs, CPU cores, nodes or billing units one task of the job gets. Raises Unknown."""
    resources = job.resources
    if per == "node":
        return Decimal(resources.nodes)
    changed = [name for name in options.extra if _RESIZE.fullmatch(name)]
    if changed:
        raise Unknown(f"the number of {_names(per)}: slurm.extra sets {changed[0]}")
    if options.exclusive:
        raise Unknown(
            f"the number of {_names(per)}: with slurm.exclusive the job is charged by whole nodes; "
            "set the price of a node-hour"
        )
    if per == "gpu":
        return Decimal(resources.nodes * resources.gpus_per_node)
    if per == "cpu":
        if resources.cpus_per_node is None:
            raise Unknown("the number of CPU cores: set resources.cpus_per_node")
        return Decimal(resources.nodes * resources.cpus_per_node)
    return _billing(job, options)


def _billing(job: JobSpec, options: Options) -> Decimal:
    """The billing units of the job, by the weights of its partition."""
    if options.site is None:
        probe = "`deploykit backends slurm --probe`, then slurm.site"
        raise Unknown(f"the billing weights of the partition: {probe}")
    try:
        profile = site.load(options.site)
    except NotFound as error:
        raise Unknown(f"the billing weights of the partition: {error}") from error
    partition = profile.partition(options.partition)
    if partition is None or not partition.billing_weights:
        name = options.partition or "the default partition"
        raise Unknown(f"the billing weights of {name}: the site profile has none")
    try:
        weights = billing.weights(partition.billing_weights)
        return billing.units(weights, job.resources, largest=profile.max_tres)
    except ValueError as error:
        raise Unknown(f"the billing units: {error}") from error


def _seconds(job: JobSpec, options: Options) -> Seconds:
    limit = job.resources.time_limit
    return Seconds(limit, limit, _attempts(options) * (_rounded(limit) + _LATE))


def _rounded(limit: int) -> int:
    """The time limit in whole minutes, as Slurm keeps it."""
    return -(-limit // 60) * 60


def _attempts(options: Options) -> int:
    one: Restarts = options.restarts
    return 1 + one.time_limit + one.preemption + one.node_failure + one.error


def _how(job: JobSpec, options: Options) -> str:
    limit = units.exact_span(_rounded(job.resources.time_limit))
    attempts = units.plural(_attempts(options), "attempt")
    return f"{attempts} of {limit} and {units.exact_span(_LATE)} to end"


def _names(per: str) -> str:
    names = {"gpu": "GPU(s)", "cpu": "CPU core(s)", "node": "node(s)", "billing": "billing units"}
    return names[per]


def _number(count: Decimal) -> str:
    """A count without a fraction of zeros."""
    return f"{count.normalize():f}"


def _notes(options: Options) -> Iterator[str]:
    yield "low and likely: one attempt that uses its whole time limit"
    if _attempts(options) > 1:
        yield "worst: every restart that slurm.restarts allows, each with its whole time limit"
