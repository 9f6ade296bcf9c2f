"""The known GPUs, read from gpus.toml, which documents the keys."""

from __future__ import annotations

import dataclasses
import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

STAND_IN = "a100-40gb"
"""The GPU whose speed is assumed for an unknown one."""
_FILE = Path(__file__).parent / "gpus.toml"


@dataclass(frozen=True)
class Gpu:
    """One GPU: bytes, operations per second, bytes per second in one direction.

    `matmul` and `attention`: the shares of `flops` that large matrix products and fused attention
    reach.
    """

    name: str
    label: str
    memory: int
    flops: Mapping[str, float]
    matmul: float
    attention: float
    bandwidth: float
    nvlink: float
    pcie: float
    prices: str
    source: str

    @property
    def is_cpu(self) -> bool:
        """Whether this is the entry for training without a GPU."""
        return self.name == "cpu"

    @property
    def link(self) -> Literal["nvlink", "pcie"]:
        """The default link between the GPUs of one node."""
        return "nvlink" if self.nvlink else "pcie"


@functools.cache
def known() -> Mapping[str, Gpu]:
    """Every GPU of gpus.toml, by name, in bytes and operations per second."""
    gpus = {}
    for name, values in tomllib.loads(_FILE.read_text(encoding="utf-8")).items():
        for link in ("bandwidth", "nvlink", "pcie"):
            values[link] *= 10**9
        values["memory"] = int(values["memory"] * 1024**3)
        flops = {precision: rate * 10**12 for precision, rate in values.pop("tflops").items()}
        gpus[name] = Gpu(name, flops=flops, **values)
    return gpus


def find(name: str) -> Gpu | None:
    """Look up a GPU, ignoring case and punctuation: ``a100-40gb``, ``A100 40GB``."""
    letters = "".join(filter(str.isalnum, name.lower()))
    return next((gpu for key, gpu in known().items() if key.replace("-", "") == letters), None)


def unknown(name: str) -> Gpu:
    """A GPU that is not in the file; the speed of an A100 is assumed."""
    label = " ".join(name.split())  # one line: it goes into a comment in the job file
    return dataclasses.replace(known()[STAND_IN], name=name, label=label)
