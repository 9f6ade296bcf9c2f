"""A job as the estimator of the SageMaker SDK 2.x that a user's own code holds or sends.

The only file that uses the SDK. The SDK itself chooses the image and the launcher, and makes its
own request: the tests prove for many jobs that it is that of `request.py`.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from deploykit.backends.base import LAUNCH
from deploykit.backends.sagemaker import aws, catalog, request
from deploykit.backends.sagemaker.options import Options
from deploykit.job.model import JobSpec, Plan
from deploykit.lib.errors import BackendUnavailable, SubmitRefused, UsageError

REFUSALS = (ValueError, RuntimeError)
"""What the SDK raises for arguments that it refuses."""
SETTINGS = {
    "SchemaVersion": "1.0",
    "SageMaker": {"PythonSDK": {"Modules": {"TelemetryOptOut": True}}},
}
"""Replaces the SDK's configuration files, which would silently change requests."""
_MAX_QUOTED_VALUE = 200
"""Characters of a value that a message quotes."""
_FIELDS = {
    "role": "RoleArn",
    "container_entry_point": "AlgorithmSpecification.ContainerEntrypoint",
    "container_arguments": "AlgorithmSpecification.ContainerArguments",
    "metric_definitions": "AlgorithmSpecification.MetricDefinitions",
    "instance_count": "ResourceConfig.InstanceCount",
    "instance_type": "ResourceConfig.InstanceType",
    "volume_size": "ResourceConfig.VolumeSizeInGB",
    "volume_kms_key": "ResourceConfig.VolumeKmsKeyId",
    "keep_alive_period_in_seconds": "ResourceConfig.KeepAlivePeriodInSeconds",
    "training_plan": "ResourceConfig.TrainingPlanArn",
    "max_run": "StoppingCondition.MaxRuntimeInSeconds",
    "max_wait": "StoppingCondition.MaxWaitTimeInSeconds",
    "use_spot_instances": "EnableManagedSpotTraining",
    "max_retry_attempts": "RetryStrategy.MaximumRetryAttempts",
    "subnets": "VpcConfig.Subnets",
    "security_group_ids": "VpcConfig.SecurityGroupIds",
    "encrypt_inter_container_traffic": "EnableInterContainerTrafficEncryption",
    "enable_network_isolation": "EnableNetworkIsolation",
    "enable_infra_check": "InfraCheckConfig.EnableInfraCheck",
    "enable_sagemaker_metrics": "AlgorithmSpecification.EnableSageMakerMetricsTimeSeries",
    "enable_remote_debug": "RemoteDebugConfig.EnableRemoteDebug",
    "output_path": "OutputDataConfig.S3OutputPath",
    "output_kms_key": "OutputDataConfig.KmsKeyId",
    "checkpoint_s3_uri": "CheckpointConfig.S3Uri",
    "checkpoint_local_path": "CheckpointConfig.LocalPath",
    "disable_profiler": "ProfilerConfig.DisableProfiler",
    "environment": "Environment",
    "tags": "Tags",
}
"""Argument of the estimator -> path of its value in the request."""


def _arguments(job: JobSpec, options: Options, planned: Mapping[str, Any]) -> dict[str, Any]:
    """The estimator's arguments, as a user of the SDK would write them."""
    debugger: Any = importlib.import_module("sagemaker.debugger")
    instances: Any = importlib.import_module("sagemaker.instance_group")
    python, pytorch = options.py_version, options.framework_version
    if python is None and pytorch is not None:
        if options.distribution == "smdistributed.modelparallel":
            python = catalog.SMP_IMAGES.get(pytorch, ("py311",))[0]
        else:
            python = catalog.VERSIONS.get(pytorch)
    groups = {
        group.name: instances.InstanceGroup(group.name, group.instance_type, group.instance_count)
        for group in options.instance_groups
    }
    arguments: dict[str, Any] = {
        "entry_point": LAUNCH,
        "source_dir": options.code(planned["Environment"]["DEPLOYKIT_BUNDLE"]),
        "framework_version": pytorch,
        "py_version": python,
        "image_uri": options.image_uri,
        "distribution": _distribution(job, options, groups.get(options.distribution_group or "")),
        "instance_groups": list(groups.values()) or None,
        "hyperparameters": request.user_hyperparameters(job),
        "disable_output_compression": options.output_compression == "none",
        "debugger_hook_config": None if options.debugger else False,
    }
    for argument, path in _FIELDS.items():
        value: Any = planned
        for name in path.split("."):
            value = value.get(name, {})
        if value != {}:
            arguments[argument] = value
    if options.profiler_interval is not None:
        interval = options.profiler_interval
        profiler = debugger.ProfilerConfig(system_monitor_interval_millis=interval)
        arguments["profiler_config"] = profiler
    if board := planned.get("TensorBoardOutputConfig"):
        config = debugger.TensorBoardOutputConfig(board["S3OutputPath"], board["LocalPath"])
        arguments["tensorboard_output_config"] = config
    return arguments


def _distribution(job: JobSpec, options: Options, group: Any) -> dict[str, Any] | None:
    """The `distribution` argument; `group` is the SDK's group that trains, or None."""
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
    if distribution and group is not None:
        distribution["instance_groups"] = [group]
    return distribution or None


def require() -> None:
    """Raise BackendUnavailable unless a version of the SDK with estimators is installed."""
    from importlib import metadata  # 14 ms, for those who use the SDK

    try:
        installed = metadata.version("sagemaker")
    except metadata.PackageNotFoundError:
        installed = "none"
    if installed.split(".")[0] != "2":
        raise BackendUnavailable(
            f"the SageMaker SDK 2.x is required; installed: {installed}",
            hint="install 'sagemaker<3' and deploykit into a separate environment; "
            "`deploykit submit` with sagemaker.sender: boto3 needs no SDK",
        )


def session(plan: Plan, client: Any = None) -> Any:
    """An SDK session with the job's credentials, without telemetry and configuration files.

    `client` is boto3's for SageMaker; default: one that the SDK makes.
    """
    from sagemaker.session import Session

    return Session(
        aws.session(plan.target, plan.options.credentials),
        sagemaker_client=client,
        default_bucket=plan.options.bucket,
        sagemaker_config=SETTINGS,
    )


def estimator(
    job: JobSpec,
    options: Options,
    planned: Mapping[str, Any],
    sagemaker_session: Any,
    upload: Callable[[], None],
    **replaced: Any,
) -> Any:
    """The `PyTorch` estimator for a job; its `fit()` sends the request `planned`.

    `fit()` calls `upload` for the source, because the SDK would drop the entry point's folder.
    `replaced` are arguments of the estimator that differ from those of the job. Raises UsageError
    for keys that the SDK cannot send.
    """
    if keys := [f"sagemaker.{key}" for key in options.beyond_sdk]:
        raise UsageError(
            f"the SageMaker SDK has no argument for {', '.join(keys)}",
            hint=f"remove {' and '.join(keys)}, or use `deploykit submit`",
        )
    from sagemaker.fw_utils import UploadedCode
    from sagemaker.pytorch.estimator import PyTorch

    arguments = _arguments(job, options, planned) | replaced

    class Planned(PyTorch):
        def _stage_user_code_in_s3(self) -> Any:
            upload()
            return UploadedCode(s3_prefix=self.source_dir, script_name=self.entry_point)

        def _script_mode_hyperparam_update(self, code_dir: str, script: str) -> None:
            if options.source_is_a_channel:  # the SDK does so for isolated containers only
                self.code_uri = arguments["source_dir"]
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
            name = job_name or planned["TrainingJobName"]
            self.environment = {**self.environment, "DEPLOYKIT_RUN": name}
            inputs = inputs or _inputs(options, planned) or None
            return super().fit(inputs, wait, logs, name, experiment_config)

    return Planned(sagemaker_session=sagemaker_session, **arguments)


def _inputs(options: Options, planned: Mapping[str, Any]) -> dict[str, Any]:
    """The SDK's inputs, each of which holds its part of the request."""
    classes: Any = importlib.import_module("sagemaker.inputs")
    channels = planned.get("InputDataConfig", [])
    if options.source_is_a_channel:
        channels = channels[:-1]  # the SDK adds the source's itself
    inputs = {}
    for channel in channels:
        inputs[channel["ChannelName"]] = classes.TrainingInput("")
        inputs[channel["ChannelName"]].config = dict(channel)
    return inputs


def intercept(
    job: JobSpec,
    options: Options,
    planned: Mapping[str, Any],
    sagemaker_session: Any,
    **replaced: Any,
) -> tuple[dict[str, Any], Callable[[dict[str, Any]], None]]:
    """The request of the estimator's `fit()`, and the SDK's function that sends it.

    Raises one of `REFUSALS`.
    """
    calls: list[Any] = []
    sagemaker_session._intercept_create_request = lambda *call: calls.append(call)  # noqa: SLF001
    pytorch = estimator(job, options, planned, sagemaker_session, lambda: None, **replaced)
    pytorch.fit(wait=False)
    sent, create, *_ = calls[0]
    return sent, create


def sender(plan: Plan, client: Any) -> Callable[[], Mapping[str, Any]]:
    """The function with which the user's SDK sends the request of `plan`, through `client`.

    The source must have been uploaded by then. Raises BackendUnavailable without the SDK, and
    SubmitRefused if the SDK refuses the job, or if its request is not that of the plan.
    """
    require()
    planned = json.loads(plan.text)
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # the SDK prints when it is imported
            connected = session(plan, client)
            sent, create = intercept(plan.job, plan.options, planned, connected)
    except REFUSALS as error:
        raise SubmitRefused(f"the SageMaker SDK rejected this job: {error}") from error
    if different := list(differences(planned, sent)):
        raise SubmitRefused(
            "the SageMaker SDK would send a different request: " + "; ".join(different),
            hint="please report this; set sagemaker.sender: boto3 to submit without the SDK",
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
        yield f"{path} is {_shortened(sent)}, not {_shortened(planned)}"


def _shortened(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _MAX_QUOTED_VALUE else f"{text[:_MAX_QUOTED_VALUE]}..."
