"""A job as the estimator of the SageMaker SDK 2.x that a user's own code holds or sends.

The only file that uses the SDK. The arguments of its estimator are written independently of
`request.py`, in the SDK's terms; the tests prove for many jobs that both give the same request.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from deploykit.backends.base import LAUNCH
from deploykit.backends.sagemaker import catalog, request
from deploykit.backends.sagemaker.options import (
    Options,
    channel_location,
    channel_names,
    region,
)
from deploykit.job.model import JobSpec, Plan
from deploykit.lib.errors import BackendUnavailable, SubmitRefused

REFUSALS = (ValueError, RuntimeError)
"""What the SDK raises for arguments that it refuses."""
_SETTINGS = {
    "SchemaVersion": "1.0",
    "SageMaker": {"PythonSDK": {"Modules": {"TelemetryOptOut": True}}},
}
"""Replaces the SDK's configuration files, which would silently change requests."""
_MAX_QUOTED_VALUE = 200
"""Characters of a value that a message quotes."""


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
    pytorch, python = options.framework_version, options.py_version
    if python is None and pytorch is not None:
        if options.distribution == "smdistributed.modelparallel":
            python = catalog.SMP_IMAGES.get(pytorch, ("py311",))[0]
        else:
            python = catalog.VERSIONS.get(pytorch)
    command = request.entrypoint(options, bundle)
    return {
        "container_entry_point": command.get("ContainerEntrypoint"),
        "container_arguments": command.get("ContainerArguments"),
        "entry_point": LAUNCH,
        "source_dir": options.code(bundle),
        "role": options.role,
        "framework_version": pytorch,
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
            "input_mode": None if channel.input_mode == "File" else channel.input_mode,
            "content_type": channel.content_type,
            "compression": None if channel.compression == "None" else channel.compression,
            "record_wrapping": None if channel.record_wrapping == "None" else "RecordIO",
            "attribute_names": list(channel.attribute_names) or None,
            "instance_groups": list(channel.instance_groups) or None,
            "shuffle_config": None
            if channel.shuffle_seed is None
            else {"seed": channel.shuffle_seed},
        }
    return {key: value for key, value in arguments.items() if value is not None}


def require() -> None:
    """Raise BackendUnavailable unless a version of the SDK with estimators is installed."""
    try:
        installed = version("sagemaker")
    except PackageNotFoundError:
        installed = "none"
    if installed.split(".")[0] != "2":
        raise BackendUnavailable(
            f"this needs the SageMaker SDK 2.x; installed: {installed}",
            hint="install 'sagemaker<3' into an environment of its own, beside deploykit; "
            "`deploykit submit` with sagemaker.sender: boto3 needs no SDK",
        )


def session(arguments: Mapping[str, Any], client: Any = None) -> Any:
    """An SDK session with the user's credentials, without telemetry and configuration files.

    `client` is boto3's for SageMaker; default: one that the SDK makes.
    """
    import boto3
    from sagemaker.session import Session

    connection: Any = boto3.Session(region_name=arguments["region"])
    return Session(
        connection,
        sagemaker_client=client,
        default_bucket=arguments["bucket"],
        sagemaker_config=_SETTINGS,
    )


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


def intercept(
    arguments: Mapping[str, Any], sagemaker_session: Any
) -> tuple[dict[str, Any], Callable[[dict[str, Any]], None]]:
    """The request of the estimator's `fit()`, and the SDK's function that sends it.

    Raises one of `REFUSALS`.
    """
    calls: list[Any] = []
    sagemaker_session._intercept_create_request = lambda *call: calls.append(call)  # noqa: SLF001
    estimator(arguments, sagemaker_session, lambda: None).fit(wait=False)
    sent, create, *_ = calls[0]
    return sent, create


def sender(plan: Plan, client: Any) -> Callable[[], Mapping[str, Any]]:
    """The function with which the user's SDK sends the request of `plan`, through `client`.

    The source must have been uploaded by then. Raises BackendUnavailable without the SDK, and
    SubmitRefused if the SDK refuses the job, or if its request is not that of the plan.
    """
    require()
    arguments = estimator_arguments(
        plan.job, plan.options, run=plan.run, bundle=plan.bundle.hash
    ) | {"region": plan.target}
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # the SDK prints when it is imported
            sent, create = intercept(arguments, session(arguments, client))
    except REFUSALS as error:
        raise SubmitRefused(f"the SageMaker SDK refuses this job: {error}") from error
    if different := list(differences(json.loads(plan.text), sent)):
        raise SubmitRefused(
            "the SageMaker SDK would send a different request: " + "; ".join(different),
            hint="please report this; sagemaker.sender: boto3 sends the plan without the SDK",
        )

    def send() -> Mapping[str, Any]:
        answers: list[Mapping[str, Any]] = []
        client.meta.events.register(
            "after-call.sagemaker.CreateTrainingJob", lambda parsed, **_: answers.append(parsed)
        )
        with contextlib.redirect_stdout(io.StringIO()):
            create(sent)
        return answers[-1]

    return send


def differences(planned: Any, sent: Any, path: str = "") -> Iterator[str]:
    """Each field that differs between the plan and the SDK's request, with both values."""
    if isinstance(planned, dict) and isinstance(sent, dict):
        for name in dict.fromkeys([*planned, *sent]):
            field = f"{path}.{name}" if path else name
            yield from differences(planned.get(name), sent.get(name), field)
    elif planned != sent:
        yield f"{path}: planned {_shortened(planned)}, the SDK {_shortened(sent)}"


def _shortened(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _MAX_QUOTED_VALUE else f"{text[:_MAX_QUOTED_VALUE]}..."
