"""The known GPUs, read from gpus.toml, which documents the keys."""

from __future__ import annotations

import dataclasses
import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

STAND_IN = "a100-40gb"
"""The GPU whose speed is assumed for an unknown one."""
_FILE = Path(__file__).parent / "gpus.toml"
_GIB = 1024**3
_GIGA = 10**9
_TERA = 10**12


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
    """Every GPU of gpus.toml, by name."""
    tree = tomllib.loads(_FILE.read_text(encoding="utf-8"))
    return {name: _gpu(name, values) for name, values in tree.items()}


def _gpu(name: str, values: dict[str, Any]) -> Gpu:
    """A GPU from the units of the file."""
    rates = {link: values.pop(link) * _GIGA for link in ("bandwidth", "nvlink", "pcie")}
    memory = int(values.pop("memory") * _GIB)
    flops = {precision: rate * _TERA for precision, rate in values.pop("tflops").items()}
    return Gpu(name, memory=memory, flops=flops, **rates, **values)


def find(name: str) -> Gpu | None:
    """Look up a GPU, ignoring case and punctuation: ``a100-40gb``, ``A100 40GB``."""

    def normalized(text: str) -> str:
        return "".join(letter for letter in text.lower() if letter.isalnum())

    matches = (gpu for key, gpu in known().items() if normalized(key) == normalized(name))
    return next(matches, None)


def unknown(name: str) -> Gpu:
    """A GPU that is not in the file; the speed of an A100 is assumed."""
    label = " ".join(name.split())  # one line: it goes into a comment in the job file
    return dataclasses.replace(known()[STAND_IN], name=name, label=label)
