"""Ways to spread a model over processes: one file each, read beside `single.py`."""

from __future__ import annotations

import argparse
import importlib
from typing import TYPE_CHECKING

from trainer.group import Place

if TYPE_CHECKING:
    from trainer.strategies.single import Single

TABLE = {
    "single": ("single", "Single"),
    "dp": ("dp", "DP"),
    "ddp": ("ddp", "DDP"),
    "manual": ("manual", "Manual"),
    "zero1": ("zero1", "Zero1"),
    "zero2": ("fsdp", "Zero2"),
    "zero3": ("fsdp", "Zero3"),
    "fsdp": ("fsdp", "Zero3"),
    "hsdp": ("fsdp", "HSDP"),
    "tp": ("tp", "TP"),
    "tp-dp": ("tp_dp", "TPDP"),
    "fsdp-tp": ("fsdp_tp", "FSDPTP"),
    "pp": ("pp", "PP"),
    "pp-dp": ("pp_dp", "PPxDDP"),
    "pp-fsdp": ("pp_dp", "PPxFSDP"),
}
"""Name to file and class; a file is imported when its strategy is chosen."""


def find(options: argparse.Namespace, place: Place) -> Single:
    """The strategy that `options` name, for this rank."""
    module, name = TABLE[options.strategy]
    found = importlib.import_module(f"trainer.strategies.{module}")
    strategy: Single = getattr(found, name)(options, place)
    shares, cut = strategy.share.of, options.micro_batches
    if options.batch_size % (shares * cut):
        raise ValueError(
            f"--batch-size {options.batch_size} must be a multiple of {shares * cut}: "
            f"{shares} share(s) times {cut} micro-batch(es)"
        )
    return strategy
