"""AWS's own PyTorch training images: which exist, what is in them, until when they get patches.

`framework_version` reaches those that the SageMaker SDK 2.257.7 knows; later ones have other names,
and need `image_uri`.
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
"""Each version's only Python. 1.x is left out: its Python is too old for the node plane."""

NOT_TORCHRUN = ("2.4.0",)
"""There is an image, but the SDK's list for torch_distributed holds 2.4.1, which has none."""
SMDDP = ("2.0.0", "2.0.1", "2.1.0", "2.2.0")
"""Versions with which the SDK takes SageMaker's data parallel library."""

SMP = {
    "2.0.1": ("py310", "cu118"),
    "2.1.2": ("py310", "cu121"),
    "2.2.0": ("py310", "cu121"),
    "2.3.0": ("py310", "cu121"),
    "2.3.1": ("py311", "cu121"),
    "2.4.1": ("py311", "cu121"),
    "2.5.1": ("py311", "cu124"),
}
"""PyTorch of the images with SageMaker's model parallel library 2: their Python and CUDA."""
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
"""AWS's end of patch for each minor version, a year after its release (2.5 and earlier: those of
its machine images): https://aws.github.io/deep-learning-containers/reference/support_policy"""

_LATER = {
    "2.9": ("pytorch-training:2.9.0-{kind}-py312", "gpu", "cpu"),
    "2.10": ("pytorch-training:2.10.0-{kind}-py313", "gpu", "cpu"),
    "2.11": ("pytorch:2.11-{kind}-amzn2023-sagemaker", "cu130", "cpu"),
    "2.12": ("pytorch:2.12-{kind}-amzn2023-sagemaker", "cu130", "cpu"),
    "2.13": ("pytorch:2.13-{kind}-amzn2023-sagemaker", "cu133", "cpu"),
    "2.14": ("pytorch:2.14-{kind}-amzn2023-sagemaker", "cu133", "cpu"),
}
"""Images that the SDK does not know, for GPUs and for CPUs:
https://github.com/aws/deep-learning-containers/tree/main/docs/src/data"""

LATEST = "2.14"
_AWS_REPOSITORIES = ("pytorch-training", "pytorch", "huggingface-pytorch-training", _SMP_REPOSITORY)
_NAME = re.compile(
    r"(?:\d{12}\.dkr\.ecr\.(?P<region>[a-z0-9-]+)\.amazonaws\.com(?:\.cn)?|public\.ecr\.aws/"
    r"deep-learning-containers)/(?P<repository>[a-z0-9-]+):(?P<tag>[A-Za-z0-9_.-]+)"
)
_MINOR = re.compile(r"(\d+\.\d+)")


@dataclass(frozen=True)
class Image:
    """What the name of an image says, where it is built like those of AWS."""

    repository: str
    minor: str
    """PyTorch's version, such as ``2.10``; empty where the tag begins otherwise."""
    cpu: bool
    region: str | None
    """None for the public registry."""

    @property
    def smp(self) -> bool:
        return self.repository == _SMP_REPOSITORY


def read(name: str) -> Image | None:
    """An image of AWS, by its name; None for any other, of which nothing is known."""
    match = _NAME.fullmatch(name)
    if match is None or match["repository"] not in _AWS_REPOSITORIES:
        return None
    minor = _MINOR.match(match["tag"])
    return Image(
        repository=match["repository"],
        minor=minor[1] if minor else "",
        cpu="-cpu-" in f"{match['tag']}-",
        region=match["region"],
    )


def minor(version: str) -> str:
    """``2.8`` for ``2.8.0``."""
    return ".".join(version.split(".")[:2])


def later(version: str, region: str | None, instance_type: str) -> str:
    """What `image_uri` must say for PyTorch `version`, or for the latest where it is not known."""
    name, gpu, cpu = _LATER.get(minor(version), _LATER[LATEST])
    kind = gpu if has_gpu(instance_type) else cpu
    place = region if region and account(region) else "REGION"
    host = f"{account(place) or _USUAL}.dkr.ecr.{place}.{_domain(place)}"
    return f"{host}/{name.format(kind=kind)}"


def smp(region: str, version: str, instance_type: str) -> str:
    """The image with SageMaker's model parallel library. Raises KeyError for another version."""
    python, cuda = SMP[version]
    cuda = max(cuda, "cu121") if "p5" in instance_type else cuda
    host = f"{_SMP_ACCOUNT}.dkr.ecr.{region}.{_domain(region)}"
    return f"{host}/{_SMP_REPOSITORY}:{version}-gpu-{python}-{cuda}"


def has_smp(region: str) -> bool:
    """Whether the SDK knows an image with the model parallel library in `region`."""
    return region in _USUAL_REGIONS or region == "ap-northeast-3"


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


def has_gpu(instance_type: str) -> bool:
    """Whether the type's family has GPUs, by the same rule as the SDK."""
    return instance_type.startswith(("ml.g", "ml.p"))


def has_neuron(instance_type: str) -> bool:
    return instance_type.startswith(("ml.trn", "ml.inf"))


def account(region: str) -> str | None:
    """The AWS account that holds the images in `region`; None where we know of none."""
    return _USUAL if region in _USUAL_REGIONS else _ACCOUNTS.get(region)


def uri(region: str, framework_version: str, py_version: str, instance_type: str) -> str:
    """The image for a training job. The arguments must have passed `checks`."""
    kind = "gpu" if has_gpu(instance_type) else "cpu"
    return (
        f"{account(region)}.dkr.ecr.{region}.{_domain(region)}/"
        f"pytorch-training:{framework_version}-{kind}-{py_version}"
    )


def _domain(region: str) -> str:
    return "amazonaws.com.cn" if region.startswith("cn-") else "amazonaws.com"
