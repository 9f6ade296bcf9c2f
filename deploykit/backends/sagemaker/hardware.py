"""The hardware of SageMaker's instance types, read from hardware.csv.

`benchmarks/hardware.py` writes the file. `check`, `cost`, `when` and `doctor` all read this table.
What a row leaves empty is unknown: a warning, never a reason to refuse a job.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

_EC2 = (
    "https://github.com/aws/karpenter-provider-aws/blob/{}/website/content/en/preview/reference/"
    "instance-types.md"
)
"""EC2's answers to DescribeInstanceTypes, as a project of AWS publishes them."""
SOURCES = {
    "ec2": ("2026-07-11", _EC2.format("692ccdd0629e488300821443f0fa0bc3c3e08047")),
    "previous": ("2025-03-04", _EC2.format("e8279c5ec59803eb28b4f28830846bdbc2b20a82")),
    "accelerated": ("2026-11-29", "https://docs.aws.amazon.com/ec2/latest/instancetypes/ac.html"),
}
"""Source of a row -> the day of its figures, and the page."""
ARM = "arm64"


class Hardware(NamedTuple):
    """One instance type; None and an empty text for what is not known."""

    gpu: str = ""
    """As `deploykit advise --gpu` names it, where it knows it; empty also without GPUs."""
    gpus: int | None = None
    capability: tuple[int, int] | None = None
    """Compute capability of its GPUs; also None without GPUs."""
    architecture: str = ""
    """Of its CPUs: ``x86_64`` or ``arm64``."""
    efa: bool | None = None
    """Whether training jobs use EFA on it. None if unknown: EC2 offers EFA on some types that
    SageMaker's launcher and documentation do not mention."""
    nvme: int | None = None
    """GB of local NVMe; with 0, the job gets an EBS volume."""
    source: str = ""
    """One of `SOURCES`."""


UNKNOWN = Hardware()


@cache
def table() -> Mapping[str, Hardware]:
    """Every row, by type, such as ``ml.g5.xlarge``."""
    text = Path(__file__).with_name("hardware.csv").read_text(encoding="utf-8")
    return {row.pop("type"): _hardware(**row) for row in csv.DictReader(text.splitlines())}


def _hardware(  # noqa: PLR0913 - the columns
    *, gpu: str, gpus: str, capability: str, architecture: str, efa: str, nvme: str, source: str
) -> Hardware:
    major, _, minor = capability.partition(".")
    return Hardware(
        gpu,
        int(gpus) if gpus else None,
        (int(major), int(minor)) if capability else None,
        architecture,
        {"yes": True, "no": False}.get(efa),
        int(nvme) if nvme else None,
        source,
    )


def of(instance_type: str) -> Hardware:
    return table().get(instance_type, UNKNOWN)
