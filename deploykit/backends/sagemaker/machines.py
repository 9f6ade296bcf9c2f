"""What instance types have: GPUs, disks, EFA.

https://aws.amazon.com/sagemaker/ai/pricing/
"""

from __future__ import annotations

import re

_EIGHT = "ml.(p3.16xlarge|p3dn.24xlarge|p4de?.24xlarge|p5e?n?.48xlarge|p6-b[23]00.48xlarge)"
_ONE = "ml.(p3.2xlarge|p5.4xlarge|g4dn.(|2|4|8|16)xlarge|g[56]e?.(|2|4|8|16)xlarge)"
_GPUS = (
    (1, _ONE),
    (4, "ml.(p3.8xlarge|g4dn.12xlarge|g[56]e?.(12|24)xlarge)"),
    (8, f"{_EIGHT}|ml.g[56]e?.48xlarge"),
)
_EFA = re.compile(r"ml\.(p3dn|p4de?|p5e?n?|p6-b[23]00|trn1n?|trn2)\.\w+")

SMDDP = ("ml.p3.16xlarge", "ml.p3dn.24xlarge", "ml.p4d.24xlarge", "ml.p4de.24xlarge")
"""The types that the SDK lists for SageMaker's data parallel library."""
SMP = re.compile(r"ml\.(p4d|p4de|p5|p5e|p5en)\.\w+")
"""Types with the network that the model parallel library is made for."""


def gpus(instance_type: str) -> int | None:
    """GPUs of one machine, 0 where it has none; None where we do not know how many."""
    if not instance_type.startswith(("ml.g", "ml.p")):
        return 0
    found = (count for count, types in _GPUS if re.fullmatch(_dots(types), instance_type))
    return next(found, None)


def own_disk(instance_type: str) -> bool:
    """Whether the type has NVMe disks, and so takes no volume: the SDK's rule.

    The API's words: https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_ResourceConfig.html
    """
    family = instance_type.split(".")[1]
    return "d" in family or family.startswith(("g5", "g6", "p5", "trn1"))


def efa(instance_type: str) -> bool:
    """Whether the type has an Elastic Fabric Adapter, as far as we know."""
    return _EFA.fullmatch(instance_type) is not None


def _dots(types: str) -> str:
    return types.replace(".", r"\.")
