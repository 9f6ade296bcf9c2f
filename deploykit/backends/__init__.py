"""Backends: each module here meets `deploykit.backends.base.Backend`, which mypy proves below.

What each defines of `base.Capabilities` is held to that table by tests/backends/test_contract.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deploykit.backends import local, sagemaker, slurm
    from deploykit.backends.base import Backend

    _COMPLETE: tuple[Backend, ...] = (local, slurm, sagemaker)
