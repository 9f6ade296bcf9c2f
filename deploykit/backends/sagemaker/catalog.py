"""AWS's PyTorch images for training and inference, and the hardware on which each can start.

`framework_version` selects one of the images that the SageMaker SDK 2.257.7 knows. Later images
have other names and need `image_uri`. What an instance type has is in `hardware`.
"""

from __future__ import annotations

import datetime as dt
import re
from dataclasses import dataclass

from deploykit.backends.sagemaker import hardware
from deploykit.backends.sagemaker.hardware import Hardware

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

INFERENCE = {
    "2.0.0": "py310",
    "2.0.1": "py310",
    "2.1.0": "py310",
    "2.2.0": "py310",
    "2.3.0": "py311",
    "2.4.0": "py311",
    "2.5.1": "py311",
    "2.6.0": "py312",
}
"""The only Python version of each inference image; PyTorch after 2.6.0 has no such image."""

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
CUDA = {
    "2.0": (11, 8),
    "2.1": (12, 1),
    "2.2": (12, 1),
    "2.3": (12, 1),
    "2.4": (12, 4),
    "2.5": (12, 4),
    "2.6": (12, 6),
    "2.7": (12, 8),
    "2.8": (12, 9),
    "2.9": (13, 0),
    "2.10": (13, 0),
    "2.11": (13, 0),
    "2.12": (13, 0),
    "2.13": (13, 3),
    "2.14": (13, 3),
}
"""Minor version -> CUDA of AWS's image, on 2026-08-21 (2.14: by the tag of its image):
https://github.com/aws/deep-learning-containers/tree/main/docs/src/data"""
_FIRST_FOR_BLACKWELL = (2, 7)
"""The first PyTorch whose packages have code for compute capability 10.0 and 12.0:
https://pytorch.org/blog/pytorch-2-7/"""
_OLDEST_GPUS = (((13, 0), (7, 5)), ((11, 8), (5, 0)))
"""CUDA of an image -> the lowest compute capability, from that version on:
https://docs.nvidia.com/cuda/cuda-toolkit-release-notes/ (13.0 and 12.0, removed architectures). The
SDK also refuses the one type below 5.0, P2, from PyTorch 1.13 on."""
_PERHAPS_WITHOUT_VOLTA = ((12, 8), (13, 0))
"""CUDA versions that support 7.0, and PyTorch packages of which may have no code for it:
https://github.com/pytorch/pytorch/issues/157517"""
VOLTA, TURING, BLACKWELL = (7, 0), (7, 5), (10, 0)
_AWS_REPOSITORIES = ("pytorch-training", "pytorch", "huggingface-pytorch-training", _SMP_REPOSITORY)
_NAME = re.compile(
    r"(?:\d{12}\.dkr\.ecr\.(?P<region>[a-z0-9-]+)\.amazonaws\.com(?:\.cn)?|public\.ecr\.aws/"
    r"deep-learning-containers)/(?P<repository>[a-z0-9-]+):(?P<tag>[A-Za-z0-9_.-]+)"
)
_ECR = re.compile(
    r"(\d{12}\.dkr[.-]ecr(-fips)?\.(?P<region>[a-z0-9-]+)\.[a-z0-9.-]+|public\.ecr\.aws)/"
)
_MINOR = re.compile(r"(\d+\.\d+)")
_CUDA_TAG = re.compile(r"-cu(\d\d)(\d)(?!\d)")

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


_COMMON = ("ml.g5.12xlarge", "ml.g5.48xlarge", "ml.p4d.24xlarge")
"""Types that hints name."""
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
    cuda: tuple[int, int] | None
    """None for a CPU image, or if its CUDA version is unknown."""

    @property
    def smp(self) -> bool:
        return self.repository == _SMP_REPOSITORY


def parse_image(name: str) -> Image | None:
    """Parse the name of an AWS image; None for any other image, about which nothing is known."""
    match = _NAME.fullmatch(name)
    if match is None or match["repository"] not in _AWS_REPOSITORIES:
        return None
    version, cuda = _MINOR.match(match["tag"]), _CUDA_TAG.search(match["tag"])
    number = version[1] if version else ""
    cpu = "-cpu-" in f"{match['tag']}-"
    return Image(
        repository=match["repository"],
        minor=number,
        cpu=cpu,
        region=match["region"],
        cuda=None if cpu else (int(cuda[1]), int(cuda[2])) if cuda else CUDA.get(number),
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


def inference_image_for(region: str, version: str, instance_type: str) -> str:
    """The inference image that the SDK would choose; one for CPUs without an instance type."""
    kind = "gpu" if has_gpu(instance_type) else "cpu"
    return (
        f"{account(region)}.dkr.ecr.{region}.{_domain(region)}/"
        f"pytorch-inference:{version}-{kind}-{INFERENCE[version]}"
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


def is_too_new(kind: Hardware, number: str) -> bool:
    """Whether this PyTorch version is too old for the GPUs; False if unknown."""
    if not number or kind.capability is None or kind.capability < BLACKWELL:
        return False
    return tuple(map(int, number.split("."))) < _FIRST_FOR_BLACKWELL


def is_too_old(kind: Hardware, cuda: tuple[int, int] | None) -> bool:
    """Whether this CUDA version has dropped the GPUs; False if unknown."""
    if cuda is None or kind.capability is None:
        return False
    return any(cuda >= first and kind.capability < oldest for first, oldest in _OLDEST_GPUS)


def may_be_too_old(kind: Hardware, cuda: tuple[int, int] | None) -> bool:
    """Whether AWS's image with this CUDA version may lack code for the GPUs."""
    first, end = _PERHAPS_WITHOUT_VOLTA
    return kind.capability == VOLTA and cuda is not None and first <= cuda < end


def can_start(version: str, instance_type: str) -> bool:
    """Whether AWS's image of a PyTorch version can use an instance type; True if unknown."""
    kind, number = hardware.of(instance_type), minor(version)
    unusable = is_too_new(kind, number) or is_too_old(kind, CUDA.get(number))
    return not unusable and kind.architecture != hardware.ARM


def image_hint(version: str, region: str | None, instance_type: str) -> str:
    """The image to choose on an instance type: the one for PyTorch `version` if it can start there.

    Never one that cannot start there, nor one of which that is unknown.
    """
    kind = hardware.of(instance_type)
    if kind.architecture == hardware.ARM:
        return "set image_uri to your own arm64 image, or choose ml.p6-b200.48xlarge, which is x86"
    if kind.capability is None or kind.capability >= TURING:
        return f"image_uri: {later_image(version, region, instance_type)}"
    if kind.capability >= VOLTA:
        return "framework_version: 2.6.0; or a type with newer GPUs, such as ml.g5.12xlarge"
    return "a type with newer GPUs, such as ml.g5.12xlarge"


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


def types_with_gpus(count: int) -> str:
    """Common instance types with at least `count` GPUs, in words; empty where none has so many."""
    return " or ".join(name for name in _COMMON if (hardware.of(name).gpus or 0) >= count)


def _domain(region: str) -> str:
    return "amazonaws.com.cn" if region.startswith("cn-") else "amazonaws.com"


NEWEST_IMAGE = later_image(LATEST, "us-east-1", "ml.g5.12xlarge")
"""AWS's image of the newest PyTorch, as the job file that `init` writes names it."""
