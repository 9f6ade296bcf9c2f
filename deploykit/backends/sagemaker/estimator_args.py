"""A job as the arguments of the SageMaker SDK's PyTorch estimator (SDK 2.x).

Written independently of `request.py`, in the SDK's terms, so that comparing the two requests is a
real check.
"""

from __future__ import annotations

from typing import Any

from deploykit.backends.sagemaker import catalog, request
from deploykit.backends.sagemaker.options import (
    Options,
    channel_location,
    channel_names,
    region,
)
from deploykit.contract import LAUNCH
from deploykit.model import JobSpec


def estimator_arguments(job: JobSpec, options: Options, *, run: str, bundle: str) -> dict[str, Any]:
    """What a user of the SDK would write for this job, as plain data for `sdk.py`.

    Where the SDK takes an object, the keyword arguments of its class are given. `bundle` is the
    hash of the source.
    """
    estimator = {
        **_program(job, options, bundle),
        **_instances(job, options),
        **_locations(job, options),
        **_switches(options),
        "environment": request.environment(job, options, run, bundle),
    }
    return {
        "region": region(options),
        "bucket": options.bucket,
        "estimator": estimator,
        "inputs": {name: _input(job, options, name) for name in channel_names(job, options)},
        "run": run,
        "source_is_a_channel": options.source_is_a_channel,
    }


def _program(job: JobSpec, options: Options, bundle: str) -> dict[str, Any]:
    version = options.framework_version
    python = options.py_version
    if python is None and version is not None:
        if options.distribution == "smdistributed.modelparallel":
            python = catalog.SMP_IMAGES.get(version, ("py311",))[0]
        else:
            python = catalog.VERSIONS.get(version)
    command = request.entrypoint(options, bundle)
    return {
        "container_entry_point": command.get("ContainerEntrypoint"),
        "container_arguments": command.get("ContainerArguments"),
        "entry_point": LAUNCH,
        "source_dir": options.code(bundle),
        "role": options.role,
        "framework_version": version,
        "py_version": python,
        "image_uri": options.image_uri,
        "distribution": _distribution(job, options),
        "hyperparameters": request.user_hyperparameters(job),
    }


def _distribution(job: JobSpec, options: Options) -> dict[str, Any] | None:
    """The `distribution` argument; `instance_groups` holds names."""
    extra = {}
    if options.mpi_options is not None:
        extra["custom_mpi_options"] = options.mpi_options
    parameters = options.model_parallel.parameters() if options.model_parallel else {}
    on: dict[str, Any] = {"enabled": True}
    distribution: dict[str, Any] = {
        "torch_distributed": {"torch_distributed": on},
        "pytorchddp": {"pytorchddp": on | extra},
        "smdistributed.dataparallel": {"smdistributed": {"dataparallel": on | extra}},
        "smdistributed.modelparallel": {
            "torch_distributed": on,
            "smdistributed": {"modelparallel": on | {"parameters": parameters}},
        },
        "mpi": {"mpi": on | {"processes_per_host": job.resources.processes} | extra},
        "none": {},
    }[options.distribution]
    if distribution and options.distribution_group is not None:
        distribution["instance_groups"] = [options.distribution_group]
    return distribution or None


def _instances(job: JobSpec, options: Options) -> dict[str, Any]:
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


def _locations(job: JobSpec, options: Options) -> dict[str, Any]:
    tensorboard = None
    if options.tensorboard_output is not None:
        tensorboard = {
            "s3_output_path": options.tensorboard_output,
            "container_local_output_path": request.TENSORBOARD,
        }
    return {
        "output_path": request.output(job, options),
        "output_kms_key": options.output_kms_key,
        "disable_output_compression": options.output_compression == "none",
        "checkpoint_s3_uri": job.checkpoints,
        "checkpoint_local_path": request.CHECKPOINTS if job.checkpoints else None,
        "tensorboard_output_config": tensorboard,
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
    """Arguments of TrainingInput or FileSystemInput, without those that are not set."""
    channel = options.channel(name)
    if channel.file_system_id is not None:
        arguments: dict[str, Any] = {
            "file_system_id": channel.file_system_id,
            "file_system_type": channel.file_system_type,
            "directory_path": channel.directory_path,
            "file_system_access_mode": channel.file_system_access,
            "content_type": channel.content_type,
        }
    else:
        arguments = {
            "s3_data": channel_location(job, options, name),
            "s3_data_type": channel.s3_data_type,
            "distribution": channel.s3_distribution,
            "input_mode": _unless(channel.input_mode, "File"),
            "content_type": channel.content_type,
            "compression": _unless(channel.compression, "None"),
            "record_wrapping": _unless(channel.record_wrapping, "None"),
            "attribute_names": list(channel.attribute_names) or None,
            "instance_groups": list(channel.instance_groups) or None,
            "shuffle_config": None
            if channel.shuffle_seed is None
            else {"seed": channel.shuffle_seed},
        }
    return {key: value for key, value in arguments.items() if value is not None}


def _unless(value: str, default: str) -> str | None:
    return None if value == default else value
