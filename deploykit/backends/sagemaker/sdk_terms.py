"""A job in the terms of the SageMaker SDK (2.x): the arguments of its PyTorch estimator.

Written apart from `request.py`, in the SDK's words, so that comparing the two says something.
"""

from __future__ import annotations

from typing import Any

from deploykit.backends.sagemaker import channels, images, request
from deploykit.backends.sagemaker.options import Options, region
from deploykit.contract import LAUNCH
from deploykit.model import JobSpec


def arguments(job: JobSpec, options: Options, *, run: str, bundle: str) -> dict[str, Any]:
    """What a person would write for this job in terms of the SDK, as plain data.

    Where the SDK takes an object, its keyword arguments stand here, and `sdk.py` makes it.
    """
    estimator = {
        **_program(job, options, bundle),
        **_machines(job, options),
        **_places(job, options),
        **_switches(options),
        "environment": request.environment(job, options, run, bundle),
    }
    return {
        "region": region(options),
        "bucket": options.bucket,
        "estimator": estimator,
        "inputs": {name: _input(job, options, name) for name in channels.names(job, options)},
        "run": run,
        "source_is_a_channel": options.source_is_a_channel,
    }


def _program(job: JobSpec, options: Options, bundle: str) -> dict[str, Any]:
    version = options.framework_version
    python = options.py_version
    if python is None and version is not None:
        smp = options.distribution == "smdistributed.modelparallel"
        python = images.SMP.get(version, ("py311",))[0] if smp else images.VERSIONS.get(version)
    start = request.entry(options, bundle)
    return {
        "container_entry_point": start.get("ContainerEntrypoint"),
        "container_arguments": start.get("ContainerArguments"),
        "entry_point": LAUNCH,
        "source_dir": request.code(options, bundle),
        "role": options.role,
        "framework_version": version,
        "py_version": python,
        "image_uri": options.image_uri,
        "distribution": _distribution(job, options),
        "hyperparameters": request.user_hyperparameters(job),
    }


def _distribution(job: JobSpec, options: Options) -> dict[str, Any] | None:
    """The `distribution` argument; `instance_groups` holds names."""
    kind, extra = options.distribution, {}
    if options.mpi_options is not None:
        extra["custom_mpi_options"] = options.mpi_options
    parameters = options.model_parallel.parameters() if options.model_parallel else {}
    on: dict[str, Any] = {"enabled": True}
    found: dict[str, Any] = {
        "torch_distributed": {"torch_distributed": on},
        "pytorchddp": {"pytorchddp": on | extra},
        "smdistributed.dataparallel": {"smdistributed": {"dataparallel": on | extra}},
        "smdistributed.modelparallel": {
            "torch_distributed": on,
            "smdistributed": {"modelparallel": on | {"parameters": parameters}},
        },
        "mpi": {"mpi": on | {"processes_per_host": job.resources.processes} | extra},
        "none": {},
    }[kind]
    if found and options.distribution_group is not None:
        found["instance_groups"] = [options.distribution_group]
    return found or None


def _machines(job: JobSpec, options: Options) -> dict[str, Any]:
    groups = [
        {
            "instance_group_name": group.name,
            "instance_type": group.instance_type,
            "instance_count": group.instance_count,
        }
        for group in options.instance_groups
    ]
    return {
        "instance_count": None if groups else job.resources.nodes,
        "instance_type": options.instance_type,
        "instance_groups": groups or None,
        "volume_size": options.volume_size,
        "volume_kms_key": options.volume_kms_key,
        "keep_alive_period_in_seconds": options.keep_alive,
        "training_plan": options.training_plan,
        "max_run": job.resources.time_limit,
        "use_spot_instances": options.spot,
        "max_wait": options.max_wait,
        "max_retry_attempts": job.retries or None,
        "subnets": list(options.subnets) or None,
        "security_group_ids": list(options.security_group_ids) or None,
    }


def _places(job: JobSpec, options: Options) -> dict[str, Any]:
    board = None
    if options.tensorboard_output is not None:
        board = {
            "s3_output_path": options.tensorboard_output,
            "container_local_output_path": request.TENSORBOARD,
        }
    return {
        "output_path": request.output(job, options),
        "output_kms_key": options.output_kms_key,
        "disable_output_compression": options.output_compression == "none",
        "checkpoint_s3_uri": job.checkpoints,
        "checkpoint_local_path": request.CHECKPOINTS if job.checkpoints else None,
        "tensorboard_output_config": board,
    }


def _switches(options: Options) -> dict[str, Any]:
    interval = options.profiler_interval
    profiler = None if interval is None else {"system_monitor_interval_millis": interval}
    return {
        "encrypt_inter_container_traffic": options.encrypt_inter_container_traffic,
        "enable_network_isolation": options.network_isolation,
        "enable_remote_debug": options.remote_debug or None,
        "tags": dict(options.tags) or None,
        "metric_definitions": request.metrics(options) or None,
        "debugger_hook_config": None if options.debugger else False,
        "disable_profiler": profiler is None,
        "profiler_config": profiler,
    }


def _input(job: JobSpec, options: Options, name: str) -> dict[str, Any]:
    """Arguments of TrainingInput or FileSystemInput, without those that are not chosen."""
    how = channels.chosen(options, name)
    if how.file_system_id is not None:
        found: dict[str, Any] = {
            "file_system_id": how.file_system_id,
            "file_system_type": how.file_system_type,
            "directory_path": how.directory_path,
            "file_system_access_mode": how.file_system_access,
            "content_type": how.content_type,
        }
    else:
        found = {
            "s3_data": channels.place(job, options, name),
            "s3_data_type": how.s3_data_type,
            "distribution": how.s3_distribution,
            "input_mode": None if how.input_mode == "File" else how.input_mode,
            "content_type": how.content_type,
            "compression": None if how.compression == "None" else how.compression,
            "record_wrapping": None if how.record_wrapping == "None" else how.record_wrapping,
            "attribute_names": list(how.attribute_names) or None,
            "instance_groups": list(how.instance_groups) or None,
            "shuffle_config": None if how.shuffle_seed is None else {"seed": how.shuffle_seed},
        }
    return {key: value for key, value in found.items() if value is not None}
