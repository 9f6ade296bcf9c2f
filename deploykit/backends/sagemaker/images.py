"""AWS's own PyTorch training images, as far as the SageMaker SDK 2.257.7 knows them.

Later ones have other names, and need `image_uri`.
"""

from __future__ import annotations

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

NEWEST = "2.8.0"
NOT_TORCHRUN = ("2.4.0",)
"""There is an image, but the SDK's list for torch_distributed holds 2.4.1, which has none."""
SMDDP = ("2.0.0", "2.0.1", "2.1.0", "2.2.0")

PATTERN = "763104351884.dkr.ecr.REGION.amazonaws.com/pytorch-training:2.10.0-gpu-py313"
"""What an image of a later version looks like."""

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
    domain = "amazonaws.com.cn" if region.startswith("cn-") else "amazonaws.com"
    kind = "gpu" if has_gpu(instance_type) else "cpu"
    return (
        f"{account(region)}.dkr.ecr.{region}.{domain}/"
        f"pytorch-training:{framework_version}-{kind}-{py_version}"
    )
