"""What a job may cost on a cluster that charges for its resources, by the time they are allocated.

Slurm knows no money. The job file or the user's defaults say what the site charges
(`slurm.price`), and for which resource. Billing units are a job's resources by the weights that a
site gives them:
https://slurm.schedmd.com/tres.html, https://slurm.schedmd.com/slurm.conf.html#OPT_TRESBillingWeights
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from decimal import Decimal

from deploykit.backends.slurm import site
from deploykit.backends.slurm.options import Options, Restarts
from deploykit.cost import money
from deploykit.cost.estimate import Charge, Estimate, Seconds, attempts
from deploykit.job.model import JobSpec, Resources
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
        weights = billing_weights(partition.billing_weights)
        return billing_units(weights, job.resources, largest=profile.max_tres)
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
    return f"{attempts(_attempts(options))} of {limit} and {units.exact_span(_LATE)} to end"


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


_WEIGHT = re.compile(r"([A-Za-z]+(?:/[\w:.-]+)?)=([0-9]{1,9}(?:\.[0-9]{1,9})?)([KMGTP]?)")
_POWERS = "KMGTP"


def billing_weights(text: str) -> dict[str, Decimal]:
    """The weights by resource in lower case; that of memory per MiB. Raises ValueError."""
    by_resource: dict[str, Decimal] = {}
    for part in text.split(","):
        match = _WEIGHT.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"the weight {part[:40]!r} cannot be parsed")
        name, number, unit = match[1].lower(), Decimal(match[2]), match[3]
        size = Decimal(1024) ** (_POWERS.index(unit) - 1) if unit else Decimal(1)
        by_resource[name] = number / size
    return by_resource


def billing_units(
    by_name: Mapping[str, Decimal], resources: Resources, *, largest: bool
) -> Decimal:
    """The billing units of a job. With `largest`, only each node's largest product counts.

    Raises ValueError where the job does not say how much it gets of a resource with a weight.
    """
    amounts = {
        "cpu": resources.cpus_per_node,
        "mem": None if resources.memory is None else -(-resources.memory // 1024**2),
        "gres/gpu": resources.gpus_per_node,
        "node": 1,
    }
    products = []
    for name, weight in by_name.items():
        if not weight:
            continue
        if name not in amounts:
            raise ValueError(f"the partition charges for {name}, which the job file does not set")
        amount = amounts[name]
        if amount is None:
            key = "cpus_per_node" if name == "cpu" else "memory"
            raise ValueError(f"set resources.{key}, which the site charges for")
        products.append(weight * amount)
    each = max(products, default=Decimal(0)) if largest else sum(products, Decimal(0))
    return each * resources.nodes
