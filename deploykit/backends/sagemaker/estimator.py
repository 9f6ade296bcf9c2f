"""A job in the terms of the SageMaker SDK (2.x), and the request that the SDK would send for it.

The only file that uses the SDK. The arguments of its estimator are written independently of
`request.py`, in the SDK's terms, so that comparing the two requests is a real check.

`main` runs in a process of its own, which `submission.py` starts. Importing the SDK probes the
instance metadata service, reads configuration files, prints, and takes seconds; its `fit` sends
telemetry to AWS. The process has home folders without configuration, no credentials, and sockets
that refuse to connect.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args, get_origin

from deploykit.backends.base import LAUNCH
from deploykit.backends.sagemaker import catalog, request
from deploykit.backends.sagemaker.options import (
    Options,
    channel_location,
    channel_names,
    region,
)
from deploykit.job import decode
from deploykit.job.model import JobSpec

REFUSALS = (ValueError, RuntimeError)
"""What the SDK raises for arguments that it refuses."""
SETTINGS = {
    "SchemaVersion": "1.0",
    "SageMaker": {"PythonSDK": {"Modules": {"TelemetryOptOut": True}}},
}
"""Configuration of a user's session, instead of the SDK's configuration files, which would silently
change requests. `main` needs none: it has no such files, and reading this takes seconds."""
_NETWORK_EVENTS = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto")


def estimator_arguments(job: JobSpec, options: Options, *, run: str, bundle: str) -> dict[str, Any]:
    """What a user of the SDK would write for this job, as plain data.

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
        "inputs": {name: _channel(job, options, name) for name in channel_names(job, options)},
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


def _channel(job: JobSpec, options: Options, name: str) -> dict[str, Any]:
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


def session(arguments: Mapping[str, Any]) -> Any:
    """An SDK session with the user's credentials, without telemetry and configuration files."""
    import boto3
    from sagemaker.session import Session

    connection: Any = boto3.Session(region_name=arguments["region"])
    return Session(connection, default_bucket=arguments["bucket"], sagemaker_config=SETTINGS)


def estimator(
    arguments: Mapping[str, Any], sagemaker_session: Any, upload: Callable[[], None]
) -> Any:
    """The `PyTorch` estimator for a job; its `fit()` sends the request of the plan.

    `fit()` calls `upload` for the source, because the SDK would drop the entry point's folder.
    """
    from sagemaker.fw_utils import UploadedCode
    from sagemaker.pytorch.estimator import PyTorch

    class Planned(PyTorch):
        def _stage_user_code_in_s3(self) -> Any:
            upload()
            return UploadedCode(s3_prefix=self.source_dir, script_name=self.entry_point)

        def _script_mode_hyperparam_update(self, code_dir: str, script: str) -> None:
            if arguments["source_is_a_channel"]:  # the SDK does so for isolated containers only
                self.code_uri = arguments["estimator"]["source_dir"]
                code_dir = self.CONTAINER_CODE_CHANNEL_SOURCEDIR_PATH
            super()._script_mode_hyperparam_update(code_dir, script)

        def fit(
            self,
            inputs: Any = None,
            wait: bool = True,  # noqa: FBT001, FBT002
            logs: Any = "All",
            job_name: str | None = None,
            experiment_config: Any = None,
        ) -> Any:
            name = job_name or arguments["run"]
            self.environment = {**self.environment, "DEPLOYKIT_RUN": name}
            return super().fit(
                inputs or _inputs(arguments) or None, wait, logs, name, experiment_config
            )

    return Planned(sagemaker_session=sagemaker_session, **_objects(arguments["estimator"]))


def _objects(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The estimator's arguments, with the SDK's objects where it requires them."""
    debugger: Any = importlib.import_module("sagemaker.debugger")
    instances: Any = importlib.import_module("sagemaker.instance_group")
    groups = [instances.InstanceGroup(**group) for group in arguments["instance_groups"] or ()]
    objects: dict[str, Any] = {"instance_groups": groups or None}
    distribution = arguments["distribution"]
    if distribution and "instance_groups" in distribution:
        by_name = {group.instance_group_name: group for group in groups}
        training = [by_name[name] for name in distribution["instance_groups"]]
        objects["distribution"] = {**distribution, "instance_groups": training}
    for name, kind in (
        ("profiler_config", debugger.ProfilerConfig),
        ("tensorboard_output_config", debugger.TensorBoardOutputConfig),
    ):
        if arguments[name] is not None:
            objects[name] = kind(**arguments[name])
    return {**arguments, **objects}


def _inputs(arguments: Mapping[str, Any]) -> dict[str, Any]:
    classes: Any = importlib.import_module("sagemaker.inputs")
    inputs = {}
    for name, options in arguments["inputs"].items():
        settings = dict(options)
        if "shuffle_config" in settings:
            settings["shuffle_config"] = classes.ShuffleConfig(**settings["shuffle_config"])
        s3 = "file_system_id" not in settings
        inputs[name] = (classes.TrainingInput if s3 else classes.FileSystemInput)(**settings)
    return inputs


def intercepted_request(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The request that `PyTorch(...).fit()` would send. Raises one of `REFUSALS`."""
    import boto3
    from sagemaker.session import Session

    requests: list[dict[str, Any]] = []
    unconnected: Any = Session(
        boto3.Session("none", "none", region_name=arguments["region"]),
        default_bucket=arguments["bucket"],
    )
    unconnected._intercept_create_request = lambda request, *_: requests.append(request)  # noqa: SLF001
    estimator(arguments, unconnected, lambda: None).fit(wait=False)
    return requests[0]


def disable_network() -> None:
    """Make every further connection of this process fail. Cannot be undone."""

    def refuse(event: str, _: Any) -> None:
        if event in _NETWORK_EVENTS:
            raise OSError("the SageMaker SDK runs without network here")

    sys.addaudithook(refuse)


def main(question: str, answer: str) -> None:
    """Write the SDK's request for the job in the file `question`, or its refusal, to `answer`."""
    disable_network()
    os.umask(0o077)  # only the user may read what this process writes
    content = json.loads(Path(question).read_text())
    job, options = restored(JobSpec, content["job"]), restored(Options, content["options"])
    arguments = estimator_arguments(job, options, run=content["run"], bundle=content["bundle"])
    result: dict[str, Any]
    try:
        result = {"request": intercepted_request(arguments)}
    except REFUSALS as error:
        result = {"refused": str(error)}
    Path(answer).write_text(json.dumps(result))


def restored(hint: Any, data: Any) -> Any:
    """What `dataclasses.asdict` and JSON made `data` of, by its type."""
    kind, _, _ = decode.split(hint)
    if get_origin(kind) is tuple:
        return tuple(restored(get_args(kind)[0], item) for item in data)
    if get_origin(kind) is Mapping:
        return {name: restored(get_args(kind)[1], item) for name, item in data.items()}
    if isinstance(data, Mapping):
        hints = decode.hints(kind)
        return kind(**{name: restored(hints[name], value) for name, value in data.items()})
    return data
