"""Backends: each module here meets `deploykit.backend.Backend`, which mypy proves below."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deploykit.backend import Attach, Backend, Doctor, Preflight, Probe, Tasks
    from deploykit.backends import local, sagemaker, slurm

    _COMPLETE: tuple[Backend, ...] = (local, slurm, sagemaker)
    _DOCTOR: tuple[Doctor, ...] = (local, slurm, sagemaker)
    _ATTACH: tuple[Attach, ...] = (sagemaker,)
    _PROBE: tuple[Probe, ...] = (slurm,)
    _TASKS: tuple[Tasks, ...] = (slurm,)
    _PREFLIGHT: tuple[Preflight, ...] = (local, slurm, sagemaker)
