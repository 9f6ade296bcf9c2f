"""What a job may cost on a cluster that charges for its resources, by the time they are allocated.

Slurm has no prices. The job file or the user's defaults set what the site charges (`slurm.price`),
and for which resource. Billing units are a job's resources by the weights that a
site gives them:
https://slurm.schedmd.com/tres.html, https://slurm.schedmd.com/slurm.conf.html#OPT_TRESBillingWeights
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal

from deploykit.backends.slurm import site
from deploykit.backends.slurm.options import Options, Restarts
from deploykit.cost import money
from deploykit.cost.estimate import Charge, Estimate, Seconds
from deploykit.job.model import JobSpec, Resources
from deploykit.lib import units
from deploykit.lib.errors import NotFound

_LATE = 60
"""Seconds that a job may exceed its limit: Slurm checks limits every 30 s, then KillWait passes.

https://slurm.schedmd.com/slurm.conf.html#OPT_KillWait
"""
_RESIZE = re.compile(r"(cpus|gpus|mem|ntasks|tres)-per-\w+|gres|mincpus|cores-per-socket|core-spec")
"""Options of `slurm.extra` that change what a job gets."""
_WEIGHT = re.compile(r"([A-Za-z]+(?:/[\w:.-]+)?)=([0-9]{1,9}(?:\.[0-9]{1,9})?)([KMGTP]?)")
_POWERS = "KMGTP"
_UNIT_NAMES = {
    "gpu": "GPU(s)",
    "cpu": "CPU core(s)",
    "node": "node(s)",
    "billing": "billing units",
}


class _Unknown(Exception):
    """What a job gets is not known here; the text says why, and what to do."""


def estimate(job: JobSpec, options: Options) -> Estimate:
    """What the job may cost in its currency."""
    if options.price is None:
        return Estimate(free="slurm.price is not set")
    written, _, unit = options.price.partition("/")
    price, per = money.parse(written), unit.removesuffix("-hour").lower()
    try:
        count = _quantity(job, options, per) * (options.array or 1)
    except _Unknown as error:
        return Estimate(unknown=(str(error),), currency=price.currency)
    allowed: Restarts = options.restarts
    starts = 1 + allowed.time_limit + allowed.preemption + allowed.node_failure + allowed.error
    limit = job.resources.time_limit
    rounded = -(-limit // 60) * 60  # Slurm keeps it in whole minutes
    spans = f"{units.exact_span(rounded)} and {units.exact_span(_LATE)} to end"
    notes = ["low and likely: one attempt that uses its whole time limit"]
    if starts > 1:
        notes.append(
            "worst: every restart that slurm.restarts allows, each with its whole time limit"
        )
    charge = Charge(
        what=f"{count.normalize():f} {_UNIT_NAMES[per]}",
        hourly=count * price.amount,
        seconds=Seconds(limit, limit, starts * (rounded + _LATE)),
        how=f"{units.plural(starts, 'attempt')} of {spans}",
    )
    return Estimate(
        charges=(charge,),
        currency=price.currency,
        source=f"slurm.price, {options.price}",
        notes=tuple(notes),
    )


def _quantity(job: JobSpec, options: Options, per: str) -> Decimal:
    """The GPUs, CPU cores, nodes or billing units of one task of the job. Raises _Unknown."""
    resources = job.resources
    if per == "node":
        return Decimal(resources.nodes)
    changed = [name for name in options.extra if _RESIZE.fullmatch(name)]
    if changed:
        raise _Unknown(f"the number of {_UNIT_NAMES[per]}: slurm.extra sets {changed[0]}")
    if options.exclusive:
        raise _Unknown(
            f"the number of {_UNIT_NAMES[per]}: with slurm.exclusive the job is charged by whole "
            "nodes; set the price of a node-hour"
        )
    if per == "gpu":
        return Decimal(resources.nodes * resources.gpus_per_node)
    if per == "billing":
        return _billing(job, options)
    if resources.cpus_per_node is None:
        raise _Unknown("the number of CPU cores: set resources.cpus_per_node")
    return Decimal(resources.nodes * resources.cpus_per_node)


def _billing(job: JobSpec, options: Options) -> Decimal:
    """The billing units of the job, by the weights of its partition. Raises _Unknown."""
    if options.site is None:
        probe = "`deploykit backends slurm --probe`, then slurm.site"
        raise _Unknown(f"the billing weights of the partition: {probe}")
    try:
        profile = site.load(options.site)
    except NotFound as error:
        raise _Unknown(f"the billing weights of the partition: {error}") from error
    partition = profile.partition(options.partition)
    if partition is None or not partition.billing_weights:
        name = options.partition or "the default partition"
        raise _Unknown(f"the billing weights of {name}: the site profile has none")
    try:
        weights = billing_weights(partition.billing_weights)
        return billing_units(weights, job.resources, largest=profile.max_tres)
    except ValueError as error:
        raise _Unknown(f"the billing units: {error}") from error


def billing_weights(text: str) -> dict[str, Decimal]:
    """The weights by resource in lower case; that of memory per MiB. Raises ValueError."""
    weight_by_name: dict[str, Decimal] = {}
    for part in text.split(","):
        match = _WEIGHT.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"the weight {part[:40]!r} cannot be parsed")
        name, number, unit = match[1].lower(), Decimal(match[2]), match[3]
        size = Decimal(1024) ** (_POWERS.index(unit) - 1) if unit else Decimal(1)
        weight_by_name[name] = number / size
    return weight_by_name


def billing_units(
    weight_by_name: Mapping[str, Decimal], resources: Resources, *, largest: bool
) -> Decimal:
    """The billing units of a job. With `largest`, only each node's largest product counts.

    Raises ValueError where the job file does not set the amount of a resource with a weight.
    """
    amounts = {
        "cpu": resources.cpus_per_node,
        "mem": None if resources.memory is None else -(-resources.memory // 1024**2),
        "gres/gpu": resources.gpus_per_node,
        "node": 1,
    }
    products = [Decimal(0)]
    for name, weight in weight_by_name.items():
        if not weight:
            continue
        if name not in amounts:
            raise ValueError(f"the partition charges for {name}, which the job file does not set")
        amount = amounts[name]
        if amount is None:
            key = "cpus_per_node" if name == "cpu" else "memory"
            raise ValueError(f"set resources.{key}, which the site charges for")
        products.append(weight * amount)
    return (max(products) if largest else sum(products, Decimal(0))) * resources.nodes
