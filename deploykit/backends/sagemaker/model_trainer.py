"""A job as the ModelTrainer of the SageMaker SDK 3, for notebooks and pipelines that use version 3.

The only file that uses version 3. Its ModelTrainer does not use the toolkit of the container: it
sends a launcher of its own, ``sm_train.sh``, as the channel `sm_drivers`, and the source as the
channel `code`. The launcher starts torchrun with ``launch.py``, as the toolkit does, and passes it
the same hyperparameters. All other fields of the request are those of `request.py`; a test compares
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from deploykit.backends.base import LAUNCH
from deploykit.backends.sagemaker import aws
from deploykit.backends.sagemaker.estimator import SETTINGS
from deploykit.backends.sagemaker.options import MPIRUN, Options, channel_names
from deploykit.job.model import JobSpec, Plan, Problem
from deploykit.lib.errors import BackendUnavailable, JobFileError

_CHANNELS = ("code", "sm_drivers")
"""Channels that version 3 adds for the source and its launcher."""
_REQUIREMENTS = "requirements.txt"


def require() -> None:
    """Raise BackendUnavailable unless version 3 of the SDK is installed."""
    from importlib import metadata  # 14 ms, for those who use the SDK

    try:
        metadata.version("sagemaker-train")
    except metadata.PackageNotFoundError:
        raise BackendUnavailable(
            "ModelTrainer requires the SageMaker SDK 3, which is not installed",
            hint="install 'sagemaker>=3' and deploykit into a separate environment; for "
            "version 2, use deploykit.sagemaker.estimator; `deploykit submit` needs no SDK",
        ) from None


def check(job: JobSpec, options: Options) -> None:
    """Raise JobFileError with every setting that version 3 cannot express."""
    if problems := list(_problems(job, options)):
        raise JobFileError("the job for ModelTrainer", problems)


def _problems(job: JobSpec, options: Options) -> Iterator[Problem]:
    other = "remove it, or use `deploykit submit --backend sagemaker`"
    if options.distribution in MPIRUN:
        message = (
            f"{options.distribution} requires mpirun, with which ModelTrainer starts too few ranks"
        )
        yield Problem("sagemaker.distribution", message, "distribution: torch_distributed")
    if options.image_entrypoint:
        message = "ModelTrainer starts its own launcher, which does not verify the source's hash"
        yield Problem("sagemaker.image_entrypoint", message, other)
    if options.request:
        yield Problem("sagemaker.request", "ModelTrainer does not send these fields", other)
    for name in channel_names(job, options):
        if name in _CHANNELS:
            message = f"ModelTrainer reserves the channel name {name}"
            yield Problem(f"data.{name}", message, "choose another name")


def session(plan: Plan) -> Any:
    """A session of the SDK for a plan, without telemetry and configuration files."""
    from sagemaker.core.helper.session_helper import Session

    options: Options = plan.options
    made: Any = Session(
        aws.session(plan.target, options.credentials),
        default_bucket=options.bucket,
        default_bucket_prefix=f"{options.prefix}/sdk",
        sagemaker_config=SETTINGS,
    )
    return made


def model_trainer(
    plan: Plan, planned: Mapping[str, Any], sagemaker_session: Any, upload: Callable[[], None]
) -> Any:
    """The ModelTrainer for a plan; `train()` calls `upload` for the source first.

    `planned` is the plan's request.
    """
    from sagemaker.core.utils.code_injection import codec
    from sagemaker.train import ModelTrainer

    fields = codec.transform(planned, "CreateTrainingJobRequest")
    further = [name for name in ("ProfilerConfig", "DebugHookConfig") if name in planned]

    class Planned(ModelTrainer):  # type: ignore[misc]
        def _create_training_job_args(self, *args: Any, **options: Any) -> dict[str, Any]:
            upload()
            request: dict[str, Any] = super()._create_training_job_args(*args, **options)
            if "training_job_name" in request:
                request["training_job_name"] = plan.run
                snake = map(codec.pascal_to_snake, further)
                return request | {name: fields[name] for name in snake}
            return request | {name: planned[name] for name in further}  # a step of a pipeline

    trainer = Planned(sagemaker_session=sagemaker_session, **_arguments(plan, planned, fields))
    _further(trainer, fields)
    return trainer


def _arguments(plan: Plan, planned: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of ModelTrainer, as a user of the SDK would write them."""
    from sagemaker.core.training import configs
    from sagemaker.train.distributed import Torchrun

    options: Options = plan.options
    networking = {
        name: fields[name]
        for name in ("enable_network_isolation", "enable_inter_container_traffic_encryption")
        if name in fields
    }
    channels = fields.get("input_data_config", [])
    arguments: dict[str, Any] = {
        "role": fields["role_arn"],
        "base_job_name": plan.job.name,
        "training_image": fields["algorithm_specification"]["training_image"],
        "source_code": configs.SourceCode(
            source_dir=options.code(plan.bundle.hash),
            entry_script=LAUNCH,
            requirements=_requirements(plan),
        ),
        "compute": configs.Compute(
            **fields["resource_config"],
            enable_managed_spot_training=fields.get("enable_managed_spot_training"),
        ),
        "networking": configs.Networking(**fields.get("vpc_config", {}), **networking),
        "stopping_condition": configs.StoppingCondition(**fields["stopping_condition"]),
        "output_data_config": configs.OutputDataConfig(**fields["output_data_config"]),
        "input_data_config": [
            configs.Channel(**channel)
            for channel in channels
            if channel["channel_name"] not in _CHANNELS  # the source's, which the SDK adds itself
        ],
        "environment": dict(planned["Environment"]),
        "hyperparameters": dict(planned["HyperParameters"]),
        "tags": [configs.Tag(**tag) for tag in fields.get("tags", [])],
    }
    if options.distribution != "none":
        processes = plan.job.resources.processes
        arguments["distributed"] = Torchrun(process_count_per_node=processes)
    if "checkpoint_config" in fields:
        arguments["checkpoint_config"] = configs.CheckpointConfig(**fields["checkpoint_config"])
    return arguments


def _requirements(plan: Plan) -> str | None:
    paths = {entry.path for entry in plan.bundle.entries}
    return _REQUIREMENTS if _REQUIREMENTS in paths else None


def _further(trainer: Any, fields: Mapping[str, Any]) -> None:
    """Set what ModelTrainer accepts only through methods."""
    from sagemaker.core.training import configs

    if board := fields.get("tensor_board_output_config"):
        trainer.with_tensorboard_output_config(configs.TensorBoardOutputConfig(**board))
    if retries := fields.get("retry_strategy"):
        trainer.with_retry_strategy(configs.RetryStrategy(**retries))
    if check := fields.get("infra_check_config"):
        trainer.with_infra_check_config(configs.InfraCheckConfig(**check))
    if debug := fields.get("remote_debug_config"):
        trainer.with_remote_debug_config(configs.RemoteDebugConfig(**debug))
    if metrics := fields["algorithm_specification"].get("metric_definitions"):
        trainer.with_metric_definitions([configs.MetricDefinition(**metric) for metric in metrics])
