"""What AWS offers for training: its PyTorch images, and the hardware of its instance types.

`framework_version` selects one of the images that the SageMaker SDK 2.257.7 knows. Later images
have other names and need `image_uri`.

Instance types: https://aws.amazon.com/sagemaker/ai/pricing/
"""

from __future__ import annotations

import datetime as dt
import re
from dataclasses import dataclass

VERSIONS = {
    "2.0.0": "py310",
    "2.0.1": "py310",
    "2.1.0": "py310",
    "2.2.0": "py310",
    "2.3.0": "py311",
    "2.4.0": "py311",
    "2.5.1": "py311",
    "2.6.0": "py312",
    "2.7.1": "py312",
    "2.8.0": "py312",
}
"""PyTorch version -> its only Python. 1.x is left out: its Python is too old for the node plane."""

NOT_TORCHRUN = ("2.4.0",)
"""Versions with an image that the SDK refuses for torch_distributed. Its list for torch_distributed
names 2.4.1 instead, which has no image."""
SMDDP_VERSIONS = ("2.0.0", "2.0.1", "2.1.0", "2.2.0")
"""PyTorch versions for which the SDK accepts SageMaker's data parallel library."""

SMP_IMAGES = {
    "2.0.1": ("py310", "cu118"),
    "2.1.2": ("py310", "cu121"),
    "2.2.0": ("py310", "cu121"),
    "2.3.0": ("py310", "cu121"),
    "2.3.1": ("py311", "cu121"),
    "2.4.1": ("py311", "cu121"),
    "2.5.1": ("py311", "cu124"),
}
"""PyTorch version -> Python and CUDA of the image with SageMaker's model parallel library 2."""
_SMP_ACCOUNT = "658645717510"
_SMP_REPOSITORY = "smdistributed-modelparallel"

PATCHED_UNTIL = {
    "2.0": dt.date(2024, 3, 15),
    "2.1": dt.date(2024, 10, 4),
    "2.2": dt.date(2025, 1, 30),
    "2.3": dt.date(2025, 4, 24),
    "2.4": dt.date(2025, 7, 24),
    "2.5": dt.date(2025, 11, 24),
    "2.6": dt.date(2026, 1, 29),
    "2.7": dt.date(2026, 4, 23),
    "2.8": dt.date(2026, 8, 6),
    "2.9": dt.date(2026, 10, 15),
    "2.10": dt.date(2027, 1, 21),
    "2.11": dt.date(2027, 4, 30),
    "2.12": dt.date(2027, 7, 2),
    "2.13": dt.date(2027, 7, 20),
    "2.14": dt.date(2027, 9, 28),
}
"""Minor version -> AWS's end-of-patch date, a year after the release (2.5 and earlier: the date of
the machine images): https://aws.github.io/deep-learning-containers/reference/support_policy"""

_LATER = {
    "2.9": ("pytorch-training:2.9.0-{kind}-py312", "gpu", "cpu"),
    "2.10": ("pytorch-training:2.10.0-{kind}-py313", "gpu", "cpu"),
    "2.11": ("pytorch:2.11-{kind}-amzn2023-sagemaker", "cu130", "cpu"),
    "2.12": ("pytorch:2.12-{kind}-amzn2023-sagemaker", "cu130", "cpu"),
    "2.13": ("pytorch:2.13-{kind}-amzn2023-sagemaker", "cu133", "cpu"),
    "2.14": ("pytorch:2.14-{kind}-amzn2023-sagemaker", "cu133", "cpu"),
}
"""Minor version -> image that the SDK does not know, and its tag for GPUs and for CPUs:
https://github.com/aws/deep-learning-containers/tree/main/docs/src/data"""

LATEST = "2.14"
_AWS_REPOSITORIES = ("pytorch-training", "pytorch", "huggingface-pytorch-training", _SMP_REPOSITORY)
_NAME = re.compile(
    r"(?:\d{12}\.dkr\.ecr\.(?P<region>[a-z0-9-]+)\.amazonaws\.com(?:\.cn)?|public\.ecr\.aws/"
    r"deep-learning-containers)/(?P<repository>[a-z0-9-]+):(?P<tag>[A-Za-z0-9_.-]+)"
)
_ECR = re.compile(
    r"(\d{12}\.dkr[.-]ecr(-fips)?\.(?P<region>[a-z0-9-]+)\.[a-z0-9.-]+|public\.ecr\.aws)/"
)
_MINOR = re.compile(r"(\d+\.\d+)")

_USUAL = "763104351884"
_USUAL_REGIONS = frozenset(
    (
        *("ap-northeast-1", "ap-northeast-2", "ap-south-1", "ap-southeast-1"),
        *("ap-southeast-2", "ca-central-1", "eu-central-1", "eu-north-1"),
        *("eu-west-1", "eu-west-2", "eu-west-3", "sa-east-1"),
        *("us-east-1", "us-east-2", "us-west-1", "us-west-2"),
    )
)
_ACCOUNTS = {
    "af-south-1": "626614931356",
    "ap-east-1": "871362719292",
    "ap-east-2": "975050140332",
    "ap-northeast-3": "364406365360",
    "ap-south-2": "772153158452",
    "ap-southeast-3": "907027046896",
    "ap-southeast-4": "457447274322",
    "ap-southeast-5": "550225433462",
    "ap-southeast-6": "633930458069",
    "ap-southeast-7": "590183813437",
    "ca-west-1": "204538143572",
    "cn-north-1": "727897471807",
    "cn-northwest-1": "727897471807",
    "eu-central-2": "380420809688",
    "eu-south-1": "692866216735",
    "eu-south-2": "503227376785",
    "il-central-1": "780543022126",
    "me-central-1": "914824155844",
    "me-south-1": "217643126080",
    "mx-central-1": "637423239942",
    "us-gov-east-1": "446045086412",
    "us-gov-west-1": "442386744353",
}


_GPUS = (
    (1, r"ml\.(p3\.2xlarge|p5\.4xlarge|g4dn\.(|2|4|8|16)xlarge|g[56]e?\.(|2|4|8|16)xlarge)"),
    (4, r"ml\.(p3\.8xlarge|g4dn\.12xlarge|g[56]e?\.(12|24)xlarge)"),
    (8, r"ml\.(p3\.16xlarge|p3dn\.24xlarge|p4de?\.24xlarge|p5e?n?\.48xlarge|g[56]e?\.48xlarge)"),
    (8, r"ml\.p6-b[23]00\.48xlarge"),
)
"""GPUs of one instance, and a pattern of the types that have so many."""
_COMMON = (("ml.g5.12xlarge", 4), ("ml.g5.48xlarge", 8), ("ml.p4d.24xlarge", 8))
"""Types that hints name, with their GPUs."""
_EFA = re.compile(
    r"ml\.((p3dn|p4de?|p5e?n?|p6-b[23]00|trn1n?|trn2)\.\w+|g5\.48xlarge|g4dn\.(8|12)xlarge)"
)
"""Types whose EFA SageMaker's launcher or its documentation uses; EC2 offers it with more:
https://github.com/aws/sagemaker-training-toolkit (params.py)."""
SMDDP_TYPES = ("ml.p3.16xlarge", "ml.p3dn.24xlarge", "ml.p4d.24xlarge", "ml.p4de.24xlarge")
"""Instance types that the SDK lists for SageMaker's data parallel library."""
SMP_TYPES = re.compile(r"ml\.(p4d|p4de|p5|p5e|p5en)\.\w+")
"""Instance types with the network that the model parallel library is made for."""


@dataclass(frozen=True)
class Image:
    """What an image name says, if it follows the scheme of AWS's own images."""

    repository: str
    minor: str
    """PyTorch's version, such as ``2.10``; empty if the tag does not begin with a version."""
    cpu: bool
    region: str | None
    """None for the public registry."""

    @property
    def smp(self) -> bool:
        return self.repository == _SMP_REPOSITORY


def parse_image(name: str) -> Image | None:
    """Parse the name of an AWS image; None for any other image, about which nothing is known."""
    match = _NAME.fullmatch(name)
    if match is None or match["repository"] not in _AWS_REPOSITORIES:
        return None
    version = _MINOR.match(match["tag"])
    return Image(
        repository=match["repository"],
        minor=version[1] if version else "",
        cpu="-cpu-" in f"{match['tag']}-",
        region=match["region"],
    )


def ecr_region(name: str) -> str | None:
    """The region of an image in Amazon ECR; empty for its public registry, None elsewhere."""
    match = _ECR.match(name)
    return None if match is None else match["region"] or ""


def minor(version: str) -> str:
    """``2.8`` for ``2.8.0``."""
    return ".".join(version.split(".")[:2])


def image_for(region: str, framework_version: str, py_version: str, instance_type: str) -> str:
    """The training image that the SDK would choose. The arguments must have passed `check`."""
    kind = "gpu" if has_gpu(instance_type) else "cpu"
    return (
        f"{account(region)}.dkr.ecr.{region}.{_domain(region)}/"
        f"pytorch-training:{framework_version}-{kind}-{py_version}"
    )


def smp_image_for(region: str, version: str, instance_type: str) -> str:
    """The image with SageMaker's model parallel library. Raises KeyError for another version."""
    python, cuda = SMP_IMAGES[version]
    cuda = max(cuda, "cu121") if "p5" in instance_type else cuda
    host = f"{_SMP_ACCOUNT}.dkr.ecr.{region}.{_domain(region)}"
    return f"{host}/{_SMP_REPOSITORY}:{version}-gpu-{python}-{cuda}"


def later_image(version: str, region: str | None, instance_type: str) -> str:
    """An `image_uri` for PyTorch `version`; for the latest PyTorch if `version` is unknown."""
    name, gpu, cpu = _LATER.get(minor(version), _LATER[LATEST])
    kind = gpu if has_gpu(instance_type) else cpu
    known = region if region and account(region) else "REGION"
    host = f"{account(known) or _USUAL}.dkr.ecr.{known}.{_domain(known)}"
    return f"{host}/{name.format(kind=kind)}"


def account(region: str) -> str | None:
    """The AWS account that holds the images in `region`; None if it is unknown."""
    return _USUAL if region in _USUAL_REGIONS else _ACCOUNTS.get(region)


def has_smp(region: str) -> bool:
    """Whether the SDK knows an image with the model parallel library in `region`."""
    return region in _USUAL_REGIONS or region == "ap-northeast-3"


def has_gpu(instance_type: str) -> bool:
    """Whether the instance family has GPUs, by the SDK's rule."""
    return instance_type.startswith(("ml.g", "ml.p"))


def has_neuron(instance_type: str) -> bool:
    return instance_type.startswith(("ml.trn", "ml.inf"))


def has_efa(instance_type: str) -> bool:
    return _EFA.fullmatch(instance_type) is not None


def gpus(instance_type: str) -> int | None:
    if not has_gpu(instance_type):
        return 0
    counts = (count for count, types in _GPUS if re.fullmatch(types, instance_type))
    return next(counts, None)


def types_with_gpus(count: int) -> str:
    """Common instance types with at least `count` GPUs, in words; empty where none has so many."""
    return " or ".join(name for name, gpus in _COMMON if gpus >= count)


def has_nvme(instance_type: str) -> bool:
    """Whether the type has NVMe disks, and therefore takes no EBS volume: the SDK's rule.

    API: https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_ResourceConfig.html
    """
    family = instance_type.split(".")[1]
    return "d" in family or family.startswith(("g5", "g6", "p5", "trn1"))


def _domain(region: str) -> str:
    return "amazonaws.com.cn" if region.startswith("cn-") else "amazonaws.com"


NEWEST_IMAGE = later_image(LATEST, "us-east-1", "ml.g5.12xlarge")
"""AWS's image of the newest PyTorch, as the job file that `init` writes names it."""
