"""EC2 instance types, as far as they are known offline."""

from __future__ import annotations

import functools
import re

_WITH_EFA = re.compile(
    r"c5n\.(9xlarge|18xlarge|metal)|hpc\w+\.\w+|gr6\.8xlarge"
    r"|g4dn\.(8xlarge|12xlarge|16xlarge|metal)|g[567]e?\.(8|12|16|24|48)xlarge"
    r"|p3dn\.24xlarge|p4de?\.24xlarge|p5\.4xlarge|p5e?n?\.48xlarge|p6-b[23]00\.48xlarge"
    r"|trn1n?\.32xlarge|trn2u?\.\w+"
)
_KNOWN_FAMILIES = re.compile(r"(c5n|hpc\w+|gr6|g[34567]\w*|p[3456][\w-]*|trn\w+|t[234]\w*)\..*")


@functools.cache
def instance_types() -> frozenset[str]:
    """Every type in botocore's model of EC2. Raises ImportError without botocore."""
    from botocore.loaders import Loader

    model = Loader().load_service_model("ec2", "service-2")
    return frozenset(model["shapes"]["InstanceType"]["enum"])


def has_efa(name: str) -> bool | None:
    """Whether an instance type has an Elastic Fabric Adapter; None if only EC2 knows.

    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-acc-inst-types.html
    """
    if _WITH_EFA.fullmatch(name):
        return True
    return False if _KNOWN_FAMILIES.fullmatch(name) else None
