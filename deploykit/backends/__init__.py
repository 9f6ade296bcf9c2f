"""Backends: each module here meets `deploykit.backends.base.Backend`, which mypy proves below."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deploykit.backends import local, sagemaker, slurm
    from deploykit.backends.base import Backend
    from deploykit.backends.capabilities import (
        Attach,
        Doctor,
        Dump,
        DumpByHand,
        Launch,
        Preflight,
        Probe,
        Ready,
        Remains,
        Tasks,
        Unlimited,
    )

    _COMPLETE: tuple[Backend, ...] = (local, slurm, sagemaker)
    _DOCTOR: tuple[Doctor, ...] = (local, slurm, sagemaker)
    _ATTACH: tuple[Attach, ...] = (sagemaker,)
    _PROBE: tuple[Probe, ...] = (slurm,)
    _TASKS: tuple[Tasks, ...] = (slurm,)
    _PREFLIGHT: tuple[Preflight, ...] = (local, slurm, sagemaker)
    _LAUNCH: tuple[Launch, ...] = (local, slurm)
    _READY: tuple[Ready, ...] = (slurm, sagemaker)
    _UNLIMITED: tuple[Unlimited, ...] = (local,)
    _DUMP: tuple[Dump, ...] = (local, slurm)
    _DUMP_BY_HAND: tuple[DumpByHand, ...] = (sagemaker,)
    _REMAINS: tuple[Remains, ...] = (slurm, sagemaker)
