"""Billing units: a job's resources by the weights that a site gives them (TRESBillingWeights).

https://slurm.schedmd.com/tres.html, https://slurm.schedmd.com/slurm.conf.html#OPT_TRESBillingWeights
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal

from deploykit.job.model import Resources

_WEIGHT = re.compile(r"([A-Za-z]+(?:/[\w:.-]+)?)=([0-9]{1,9}(?:\.[0-9]{1,9})?)([KMGTP]?)")
_POWERS = "KMGTP"


def weights(text: str) -> dict[str, Decimal]:
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


def units(by_name: Mapping[str, Decimal], resources: Resources, *, largest: bool) -> Decimal:
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
