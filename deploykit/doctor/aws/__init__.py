"""Where a SageMaker job runs: account, subnets, security groups, network ACLs, routes, quotas.

`ask.py` collects the services' answers, `facts.py` reads them, the other files judge.
"""

from __future__ import annotations

from collections.abc import Iterator

from deploykit.doctor.aws import account, acls, endpoints, groups, routes, subnets, unseen
from deploykit.doctor.aws.facts import Facts
from deploykit.doctor.aws.needs import Needs
from deploykit.doctor.finding import Finding


def findings(needs: Needs, facts: Facts) -> Iterator[Finding]:
    """Everything that is wrong for a job with these needs. Pure."""
    for part in (unseen, account, subnets, groups, acls, routes, endpoints):
        yield from part.check(needs, facts)
