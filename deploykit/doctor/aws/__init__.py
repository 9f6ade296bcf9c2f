"""Checks for SageMaker jobs: account, subnets, security groups, network ACLs, routes, quotas.

`collect.py` collects AWS's responses, `network.py` parses them, the other modules judge.
"""

from __future__ import annotations

from collections.abc import Iterator

from deploykit.doctor.aws import account, collect, endpoints, firewall, routes
from deploykit.doctor.aws.network import Network
from deploykit.lib.finding import Finding


def findings(network: Network) -> Iterator[Finding]:
    """Everything that would stop or slow the job in this network. Pure."""
    yield from collect.findings(network)
    yield from account.findings(network)
    yield from routes.subnet_findings(network)
    yield from firewall.group_findings(network)
    yield from firewall.acl_findings(network)
    yield from routes.route_findings(network)
    yield from endpoints.findings(network)
