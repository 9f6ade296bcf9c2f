"""EC2's instance types, as far as they can be known offline."""

from __future__ import annotations

import functools
import re

_EFA = re.compile(
    r"c5n\.(9xlarge|18xlarge|metal)|hpc\w+\.\w+|gr6\.8xlarge"
    r"|g4dn\.(8xlarge|12xlarge|16xlarge|metal)|g[567]e?\.(8|12|16|24|48)xlarge"
    r"|p3dn\.24xlarge|p4de?\.24xlarge|p5\.4xlarge|p5e?n?\.48xlarge|p6-b[23]00\.48xlarge"
    r"|trn1n?\.32xlarge|trn2u?\.\w+"
)
_JUDGED = re.compile(r"(c5n|hpc\w+|gr6|g[34567]\w*|p[3456][\w-]*|trn\w+|t[234]\w*)\..*")


@functools.cache
def names() -> frozenset[str]:
    """Every type in the description of EC2 that comes with botocore. Raises ImportError."""
    from botocore.loaders import Loader

    described = Loader().load_service_model("ec2", "service-2")
    return frozenset(described["shapes"]["InstanceType"]["enum"])


def efa(name: str) -> bool | None:
    """Whether the type has an Elastic Fabric Adapter; None where only EC2 can tell.

    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-acc-inst-types.html
    """
    if _EFA.fullmatch(name):
        return True
    return False if _JUDGED.fullmatch(name) else None
