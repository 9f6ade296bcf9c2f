"""Checks for SageMaker jobs: account, subnets, security groups, network ACLs, routes, quotas.

`collect.py` collects AWS's responses, `inventory.py` parses them, the other modules judge.
"""

from __future__ import annotations

from collections.abc import Iterator

from deploykit.doctor.aws import (
    account,
    acls,
    endpoints,
    permissions,
    routes,
    security_groups,
    subnets,
)
from deploykit.doctor.aws.inventory import Inventory
from deploykit.doctor.aws.requirements import Requirements
from deploykit.lib.finding import Finding


def findings(requirements: Requirements, inventory: Inventory) -> Iterator[Finding]:
    """Everything that would stop or slow a job with these requirements. Pure."""
    for module in (permissions, account, subnets, security_groups, acls, routes, endpoints):
        yield from module.findings(requirements, inventory)
