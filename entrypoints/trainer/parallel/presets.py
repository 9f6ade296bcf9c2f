"""The strategies by name: which dimensions of parallelism each combines."""

from __future__ import annotations

from typing import NamedTuple


class Preset(NamedTuple):
    """A combination of dimensions. `layout` says how many ranks each gets."""

    data: str = ""
    """What ranks with different samples do: hold replicas (ddp, manual, dp), divide the optimizer
    state (zero1), or also gradients (zero2) and parameters (zero3), within groups of ranks (hsdp)
    or in groups of one, which hold replicas of what tensor parallelism has sharded (replicate)."""
    tensor: bool = False
    """Whether ranks share the layers of a model."""
    pipeline: bool = False
    """Whether ranks hold different layers."""

    @property
    def sharded(self) -> bool:
        """Whether `fully_shard` holds the parameters."""
        return self.data in {"zero2", "zero3", "hsdp", "replicate"}


STRATEGIES = {
    "single": Preset(),
    "dp": Preset("dp"),
    "ddp": Preset("ddp"),
    "manual": Preset("manual"),
    "zero1": Preset("zero1"),
    "zero2": Preset("zero2"),
    "zero3": Preset("zero3"),
    "fsdp": Preset("zero3"),
    "hsdp": Preset("hsdp"),
    "tp": Preset(tensor=True),
    "tp-dp": Preset("replicate", tensor=True),
    "fsdp-tp": Preset("zero3", tensor=True),
    "hsdp-tp": Preset("hsdp", tensor=True),
    "pp": Preset(pipeline=True),
    "pp-dp": Preset("ddp", pipeline=True),
    "pp-fsdp": Preset("zero3", pipeline=True),
    "pp-tp": Preset(tensor=True, pipeline=True),
    "pp-fsdp-tp": Preset("zero3", tensor=True, pipeline=True),
    "pp-hsdp-tp": Preset("hsdp", tensor=True, pipeline=True),
}
"""Value of --strategy to dimensions."""
