"""Write the hardware table of SageMaker's instance types, backends/sagemaker/hardware.csv.

The types are those of the installed botocore. Their hardware is EC2's own description of the same
types, which moto ships; `BY_HAND` has those that EC2 no longer describes, or not to everyone.
Run it when botocore has new types: a test fails for a type without a row.
"""

from __future__ import annotations

import csv
import gzip
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import moto
from botocore.loaders import Loader

FILE = Path(__file__).parents[1] / "deploykit/backends/sagemaker/hardware.csv"
COLUMNS = ("type", "gpu", "gpus", "capability", "architecture", "efa", "nvme", "source")
GPUS = {
    ("A100", 40960): ("a100-40gb", "8.0"),
    ("A100", 81920): ("a100-80gb", "8.0"),
    ("A10G", 22888): ("a10g", "8.6"),
    ("B200", 183359): ("b200", "10.0"),
    ("B300", 275040): ("b300", "10.3"),
    ("H100", 81920): ("h100", "9.0"),
    ("H200", 144384): ("h200", "9.0"),
    ("L4", 22888): ("l4", "8.9"),
    ("L40S", 45776): ("l40s", "8.9"),
    ("RTX PRO 4500", 32768): ("rtx-pro-4500", "12.0"),
    ("RTX PRO Server 6000", 98304): ("rtx-pro-6000", "12.0"),
    ("T4", 16384): ("t4", "7.5"),
    ("V100", 32768): ("v100-32gb", "7.0"),
}
"""EC2's name and MiB of a GPU -> its name in deploykit, and its compute capability:
https://developer.nvidia.com/cuda-gpus"""
EFA_IN_TRAINING = (
    *("ml.g4dn.8xlarge", "ml.g4dn.12xlarge", "ml.g5.48xlarge", "ml.p3dn.24xlarge"),
    *("ml.p4d.24xlarge", "ml.p4de.24xlarge", "ml.p5.4xlarge", "ml.p5.48xlarge", "ml.p5e.48xlarge"),
    *("ml.p5en.48xlarge", "ml.p6-b200.48xlarge", "ml.p6-b300.48xlarge", "ml.trn1.32xlarge"),
    *("ml.trn1n.32xlarge", "ml.trn2.48xlarge"),
)
"""Types whose EFA SageMaker's launcher or its documentation uses. With others that have EFA in EC2,
it is unknown: https://github.com/aws/sagemaker-training-toolkit (params.py)."""
BY_HAND = {
    "ml.p2.xlarge": ("k80", 1, "3.7", "x86_64", "no", 0, "previous"),
    "ml.p2.8xlarge": ("k80", 8, "3.7", "x86_64", "no", 0, "previous"),
    "ml.p2.16xlarge": ("k80", 16, "3.7", "x86_64", "no", 0, "previous"),
    "ml.p3.2xlarge": ("v100", 1, "7.0", "x86_64", "no", 0, "previous"),
    "ml.p3.8xlarge": ("v100", 4, "7.0", "x86_64", "no", 0, "previous"),
    "ml.p3.16xlarge": ("v100", 8, "7.0", "x86_64", "no", 0, "previous"),
    "ml.p6e-gb200.36xlarge": ("gb200", 4, "10.0", "arm64", "", 22500, "accelerated"),
}
"""Type -> its row: an empty text for what is not known."""


def rows() -> list[tuple[str, ...]]:
    text = gzip.decompress(
        (Path(moto.__file__).parent / "ec2/resources/instance_types.json.gz").read_bytes()
    )
    described = json.loads(text)
    model = Loader().load_service_model("sagemaker", "service-2")
    return [
        _row(name, described) for name in sorted(model["shapes"]["TrainingInstanceType"]["enum"])
    ]


def _row(name: str, described: Mapping[str, Any]) -> tuple[str, ...]:
    if name in BY_HAND:
        return (name, *map(str, BY_HAND[name]))
    ec2 = described.get(name.removeprefix("ml."))
    if ec2 is None:  # nothing is known
        return (name, "", "", "", "", "", "", "")
    gpus = ec2.get("GpuInfo", {}).get("Gpus", [])
    gpu, capability = ("", "")
    if gpus:
        gpu, capability = GPUS[gpus[0]["Name"], gpus[0]["MemoryInfo"]["SizeInMiB"]]
    (architecture,) = set(ec2["ProcessorInfo"]["SupportedArchitectures"]) - {"i386"}
    efa = "" if ec2["NetworkInfo"].get("EfaSupported") else "no"
    return (
        *(name, gpu, str(sum(gpu["Count"] for gpu in gpus)), capability, architecture),
        "yes" if name in EFA_IN_TRAINING else efa,
        str(ec2.get("InstanceStorageInfo", {}).get("TotalSizeInGB", 0)),
        "ec2",
    )


def main() -> None:
    with FILE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(rows())
    sys.stdout.write(f"{FILE}: {len(rows())} types\n")


if __name__ == "__main__":
    main()
