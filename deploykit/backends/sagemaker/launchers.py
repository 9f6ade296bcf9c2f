"""What makes the container start the ranks: the hyperparameters that its launcher reads.

The launcher's choice: sagemaker_pytorch_container/training.py of sagemaker-pytorch-training 3.0.0.
https://github.com/aws/sagemaker-pytorch-training-toolkit
"""

from __future__ import annotations

from typing import Any

from deploykit.backends.sagemaker.options import Options
from deploykit.model import JobSpec

DATA_PARALLEL = ("pytorchddp", "smdistributed.dataparallel")
"""Two names for one thing: the SDK rewrites the first into the second."""
MPIRUN = (*DATA_PARALLEL, "mpi")
"""Distributions under which mpirun starts the ranks, and that keep their instance group."""

PROCESSES = "sagemaker_mpi_num_of_processes_per_host"
"""The toolkit reads it for torchrun and SMDDP too, in spite of its name."""
_GROUPS = "sagemaker_distribution_instance_groups"
_DATA_PARALLEL = "sagemaker_distributed_dataparallel_enabled"
_TORCHRUN = "sagemaker_torch_distributed_enabled"
_TYPE = "sagemaker_instance_type"


def hyperparameters(job: JobSpec, options: Options) -> dict[str, Any]:
    """The SDK's own words for a distribution."""
    kind = options.distribution
    if kind == "none":
        return {}
    if kind == "torch_distributed":
        return {_TORCHRUN: True, **_type(options)}
    if kind == "smdistributed.modelparallel":
        return {_TORCHRUN: True, **_model_parallel(options)}
    found = _mpi(job, options) if kind == "mpi" else _data_parallel(options)
    if options.distribution_group is not None:
        found[_GROUPS] = [options.distribution_group]
    return found


def _mpi(job: JobSpec, options: Options) -> dict[str, Any]:
    return {
        "sagemaker_mpi_enabled": True,
        PROCESSES: job.resources.processes,
        "sagemaker_mpi_custom_mpi_options": options.mpi_options or "",
    }


def _data_parallel(options: Options) -> dict[str, Any]:
    return {
        _DATA_PARALLEL: True,
        "sagemaker_distributed_dataparallel_custom_mpi_options": options.mpi_options or "",
        _TYPE: options.instance_type,
    }


def _model_parallel(options: Options) -> dict[str, Any]:
    chosen = options.model_parallel.parameters() if options.model_parallel else {}
    found = {_DATA_PARALLEL: False, _TYPE: options.instance_type}
    return {"mp_parameters": chosen, **found} if chosen else found


def _type(options: Options) -> dict[str, Any]:
    return {} if options.instance_type is None else {_TYPE: options.instance_type}
