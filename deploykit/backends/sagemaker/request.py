"""Render a job as the CreateTrainingJob request that the SageMaker SDK 2.257.7 would send.

Does not import the SDK. The SDK's conventions, such as hyperparameters in JSON, are kept, so that
`estimator.py` gives the same request, which the tests prove.

Which launcher the hyperparameters select: sagemaker_pytorch_container/training.py of
sagemaker-pytorch-training 3.0.0, https://github.com/aws/sagemaker-pytorch-training-toolkit
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from deploykit.backends import base as backend
from deploykit.backends.sagemaker import catalog, offers
from deploykit.backends.sagemaker.options import (
    METRICS,
    Options,
    channel_location,
    channel_names,
)
from deploykit.backends.sagemaker.options import region as region_of
from deploykit.cost import cap
from deploykit.job import checks, environments
from deploykit.job.model import DataFolder, InputChannel, JobSpec

OUTPUT = "/opt/ml/output/data"
"""Folder in the container that SageMaker uploads as output.tar.gz when the job ends."""
CHECKPOINTS = "/opt/ml/checkpoints"
"""Folder in the container that SageMaker copies to `checkpoints` while the job runs."""
_DATA = "/opt/ml/input/data"
TENSORBOARD = f"{OUTPUT}/tensorboard"
"""Folder in the container to which deploykit's trainer writes TensorBoard files."""
_CODE_CHANNEL = f"{_DATA}/code/sourcedir.tar.gz"
"""The source in the container, if it is provided as a channel."""
_VERIFY = (
    f'f={_CODE_CHANNEL}; [ "$(gzip -dc $f | sha256sum)" = "$0  -" ] && exec "$@"; '
    'echo "deploykit: $f is not the source that was submitted ($0)" '
    "| tee /opt/ml/output/failure >&2; exit 78"
)
"""Script for `sh -c HASH COMMAND...`; the service allows 256 characters."""

ARGUMENT = "deploykit_argv_"
"""Prefix of the hyperparameters that carry the argument vector; the node plane knows it too."""
_CHUNK = 2000
_LONGEST_VALUE = 2500
"""The service's limit for a hyperparameter. The JSON of a chunk is longer than the chunk."""
PROCESSES = "sagemaker_mpi_num_of_processes_per_host"
"""The toolkit reads it for torchrun and SMDDP too, in spite of its name."""
_LOG_LEVEL = 20
_OVERWRITTEN = re.compile(r"(NCCL|FI|GLOO|RDMAV)_\w+|OMP_NUM_THREADS", re.ASCII)
_SAFE = frozenset(string.ascii_letters + string.digits + "_@%+=:,./-")


def render(
    job: JobSpec, options: Options, *, run: str, bundle: str, data: Sequence[DataFolder] = ()
) -> dict[str, Any]:
    """The request. `bundle` is the hash of the source, `data` has the folders that are uploaded.

    The job must have passed `check`.
    """
    uploaded = {folder.channel: InputChannel(folder.target) for folder in data}
    job = replace(job, data={**job.data, **uploaded})
    source = _CODE_CHANNEL if options.source_is_a_channel else options.code(bundle)
    hyperparameters = {
        **user_hyperparameters(job),
        "sagemaker_program": backend.LAUNCH,
        "sagemaker_submit_directory": source,
        "sagemaker_job_name": run,
        "sagemaker_region": region_of(options),
        "sagemaker_container_log_level": _LOG_LEVEL,
        **_launcher(job, options),
    }
    request: dict[str, Any] = {
        "TrainingJobName": run,
        "RoleArn": options.role,
        "AlgorithmSpecification": _algorithm(options) | entrypoint(options, bundle),
        "ResourceConfig": _resources(job, options),
        "StoppingCondition": {"MaxRuntimeInSeconds": job.resources.time_limit},
        "HyperParameters": {name: json.dumps(value) for name, value in hyperparameters.items()},
        "Environment": environment(job, options, run, bundle, data),
    }
    if options.max_wait is not None:
        request["StoppingCondition"]["MaxWaitTimeInSeconds"] = options.max_wait
    if options.max_pending is not None:
        request["StoppingCondition"]["MaxPendingTimeInSeconds"] = options.max_pending
    inputs = [_channel(job, options, name) for name in channel_names(job, options)]
    if options.source_is_a_channel:
        inputs.append(_s3_channel("code", options.code(bundle)))
    if inputs:
        request["InputDataConfig"] = inputs
    request["OutputDataConfig"] = {"S3OutputPath": output(job, options)}
    if options.output_kms_key is not None:
        request["OutputDataConfig"]["KmsKeyId"] = options.output_kms_key
    if options.output_compression == "none":
        request["OutputDataConfig"]["CompressionType"] = "NONE"
    if job.checkpoints is not None:
        request["CheckpointConfig"] = {"S3Uri": job.checkpoints, "LocalPath": CHECKPOINTS}
    return merge(request | _extras(job, options), options.request)


def merge(planned: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """The planned request with further fields; `check` refuses those that it has already."""
    result = {**more, **planned}
    for name in planned.keys() & more.keys():
        if isinstance(planned[name], Mapping) and isinstance(more[name], Mapping):
            result[name] = merge(planned[name], more[name])
    return result


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The dotted path and the value of everything that is not a mapping with entries."""
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            yield from leaves(item, f"{path}.{name}".lstrip("."))
    else:
        yield path, value


def output(job: JobSpec, options: Options) -> str:
    """S3 prefix below which SageMaker stores ``<run>/output/``."""
    return job.output or f"s3://{options.bucket}/{options.prefix}/runs"


def results(job: Mapping[str, Any]) -> str:
    """S3 location of the output, from a request or a DescribeTrainingJob response."""
    config = job["OutputDataConfig"]
    folder = f"{config['S3OutputPath'].rstrip('/')}/{job['TrainingJobName']}/output/"
    return folder if config.get("CompressionType") == "NONE" else f"{folder}output.tar.gz"


def environment(
    job: JobSpec, options: Options, run: str, bundle: str, uploaded: Sequence[DataFolder] = ()
) -> dict[str, str]:
    """Environment variables of the containers. That of a single file names the file.

    AWS's launcher overwrites some network variables, so ``DEPLOYKIT_ENV`` carries a second copy of
    them that the node plane restores last. ``DEPLOYKIT_BUNDLE`` is the hash of the planned source.
    """
    data = {name: f"{_DATA}/{name}" for name in channel_names(job, options)}
    single = [folder for folder in uploaded if folder.is_file]
    data |= {file.channel: f"{_DATA}/{file.channel}/{file.source.name}" for file in single}
    variables = backend.environment(
        job, backend="sagemaker", run=run, output=OUTPUT, checkpoints=CHECKPOINTS, data=data
    )
    variables["DEPLOYKIT_BUNDLE"] = bundle
    if job.stop_at_cap:
        variables |= cap.variables(job, offers.cost(job, options))
    restored = {
        name: value
        for name, value in job.env.items()
        if _OVERWRITTEN.fullmatch(name) and not checks.is_secret(value)
    }
    if restored:
        variables["DEPLOYKIT_ENV"] = json.dumps(dict(sorted(restored.items())))
    return dict(sorted(variables.items()))


def user_hyperparameters(job: JobSpec) -> dict[str, Any]:
    """The hyperparameters that a user of the SDK would pass to the estimator."""
    words = backend.command(job, installed(job))
    return {**argument_vector(words), PROCESSES: job.resources.processes}


def installed(job: JobSpec) -> dict[str, Any] | None:
    """What each node installs first, beside the PyTorch of its image."""
    return environments.on_nodes(job, elsewhere=True, image=True)


def argument_vector(argv: list[str]) -> dict[str, str]:
    """An argument vector as hyperparameters: its JSON, split into chunks.

    Toolkits up to 5.1.1 put hyperparameters unquoted on a shell's command line, so every character
    with a meaning in the shell is written as a JSON escape. `json.loads` of the joined chunks gives
    `argv` back.
    """
    text = "[" + ",".join(f'"{"".join(map(_escape, word))}"' for word in argv) + "]"
    return {f"{ARGUMENT}{number}": chunk for number, chunk in enumerate(_chunks(text))}


def _escape(letter: str) -> str:
    if letter in _SAFE:
        return letter
    units = letter.encode("utf-16-be")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))


def _chunks(text: str) -> Iterator[str]:
    while text:
        end = _CHUNK
        while len(json.dumps(text[:end])) > _LONGEST_VALUE:
            end -= 100
        yield text[:end]
        text = text[end:]


def _launcher(job: JobSpec, options: Options) -> dict[str, Any]:
    kind, smddp = options.distribution, "sagemaker_distributed_dataparallel"
    instance_type = {"sagemaker_instance_type": options.instance_type}
    torchrun = {"sagemaker_torch_distributed_enabled": True}
    if kind == "none":
        return {}
    if kind == "torch_distributed":
        return torchrun | (instance_type if options.instance_type else {})
    if kind == "smdistributed.modelparallel":
        parameters = options.model_parallel.parameters() if options.model_parallel else {}
        chosen = {"mp_parameters": parameters} if parameters else {}
        return {**torchrun, **chosen, f"{smddp}_enabled": False, **instance_type}
    if kind == "mpi":
        selected: dict[str, Any] = {
            "sagemaker_mpi_enabled": True,
            PROCESSES: job.resources.processes,
            "sagemaker_mpi_custom_mpi_options": options.mpi_options or "",
        }
    else:
        selected = {
            f"{smddp}_enabled": True,
            f"{smddp}_custom_mpi_options": options.mpi_options or "",
            **instance_type,
        }
    if options.distribution_group is not None:
        selected["sagemaker_distribution_instance_groups"] = [options.distribution_group]
    return selected


def _algorithm(options: Options) -> dict[str, Any]:
    algorithm: dict[str, Any] = {"TrainingInputMode": "File", "TrainingImage": _image(options)}
    if options.metrics_time_series is not None or options.image_uri is None:
        algorithm["EnableSageMakerMetricsTimeSeries"] = options.metrics_time_series is not False
    if definitions := metrics(options):
        algorithm["MetricDefinitions"] = definitions
    return algorithm


def entrypoint(options: Options, bundle: str) -> dict[str, list[str]]:
    """The command that verifies the source and then starts the image's own entrypoint.

    Empty without `image_entrypoint`. The command is part of the request, so write access to the
    bucket is not enough to change it.
    """
    if not options.image_entrypoint:
        return {}
    return {
        "ContainerEntrypoint": ["sh", "-c", _VERIFY, bundle],
        "ContainerArguments": [*options.image_entrypoint, "train"],
    }


def metrics(options: Options) -> list[dict[str, str]]:
    """The preset of `metrics` and `metric_definitions`, which wins, in the API's form."""
    preset = METRICS if options.metrics == "deploykit" else {}
    chosen = {**preset, **options.metric_definitions}
    return [{"Name": name, "Regex": regex} for name, regex in chosen.items()]


def _image(options: Options) -> str:
    """The container image: `image_uri`, else AWS's image for `framework_version`.

    Raises KeyError for a version without an image, which `check` refuses.
    """
    if options.image_uri is not None:
        return options.image_uri
    region, version = region_of(options) or "", options.framework_version or ""
    if options.distribution == "smdistributed.modelparallel":
        return catalog.smp_image_for(region, version, options.image_type)
    python = options.py_version or catalog.VERSIONS[version]
    return catalog.image_for(region, version, python, options.image_type)


def _resources(job: JobSpec, options: Options) -> dict[str, Any]:
    resources: dict[str, Any] = {"VolumeSizeInGB": options.volume_size}
    if options.instance_groups:
        resources["InstanceGroups"] = [
            {
                "InstanceGroupName": group.name,
                "InstanceType": group.instance_type,
                "InstanceCount": group.instance_count,
            }
            for group in options.instance_groups
        ]
    else:
        resources["InstanceCount"] = job.resources.nodes
    if options.instance_preferences:
        resources["InstancePreferences"] = [
            {"InstanceType": one.instance_type}
            | ({"TrainingPlanArns": [one.training_plan]} if one.training_plan else {})
            for one in options.instance_preferences
        ]
    elif not options.instance_groups:
        resources["InstanceType"] = options.instance_type
    chosen = {
        "VolumeKmsKeyId": options.volume_kms_key,
        "KeepAlivePeriodInSeconds": options.keep_alive,
        "TrainingPlanArn": options.training_plan,
    }
    return resources | {name: value for name, value in chosen.items() if value is not None}


def _channel(job: JobSpec, options: Options, name: str) -> dict[str, Any]:
    """The entry of an input channel. What equals the service's default is left out, as by the SDK.

    Each key: https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_Channel.html
    """
    channel = options.channel(name)
    if channel.file_system_id is not None:
        source = {
            "FileSystemId": channel.file_system_id,
            "FileSystemType": channel.file_system_type,
            "DirectoryPath": channel.directory_path,
            "FileSystemAccessMode": channel.file_system_access,
        }
        entry: dict[str, Any] = {
            "ChannelName": name,
            "DataSource": {"FileSystemDataSource": source},
        }
        return entry | ({"ContentType": channel.content_type} if channel.content_type else {})
    entry = _s3_channel(name, channel_location(job, options, name) or "")
    lists = {
        "AttributeNames": list(channel.attribute_names),
        "InstanceGroupNames": list(channel.instance_groups),
    }
    entry["DataSource"]["S3DataSource"] |= {
        "S3DataType": channel.s3_data_type,
        "S3DataDistributionType": channel.s3_distribution,
        **{key: names for key, names in lists.items() if names},
    }
    settings = {
        "InputMode": (channel.input_mode, "File"),
        "ContentType": (channel.content_type, None),
        "CompressionType": (channel.compression, "None"),
        "RecordWrapperType": (channel.record_wrapping, "None"),
    }
    entry |= {key: value for key, (value, default) in settings.items() if value != default}
    if channel.shuffle_seed is not None:
        entry["ShuffleConfig"] = {"Seed": channel.shuffle_seed}
    return entry


def _s3_channel(name: str, prefix: str) -> dict[str, Any]:
    """The entry of a channel that copies all objects below `prefix` to every node."""
    source = {
        "S3DataType": "S3Prefix",
        "S3Uri": prefix,
        "S3DataDistributionType": "FullyReplicated",
    }
    return {"ChannelName": name, "DataSource": {"S3DataSource": source}}


def _extras(job: JobSpec, options: Options) -> dict[str, Any]:
    """The parts of a request that are present only if they are requested.

    The service's default profiler is on, so that one is turned off.
    """
    switches = {
        "EnableInterContainerTrafficEncryption": options.encrypt_inter_container_traffic,
        "EnableManagedSpotTraining": options.spot,
        "EnableNetworkIsolation": options.network_isolation,
    }
    extras: dict[str, Any] = {name: True for name, on in switches.items() if on}
    extras["ProfilerConfig"] = {"DisableProfiler": True}
    if options.profiler_interval is not None:
        extras["ProfilerConfig"] = {
            "S3OutputPath": output(job, options),
            "DisableProfiler": False,
            "ProfilingIntervalInMilliseconds": options.profiler_interval,
        }
    if options.debugger:
        config = {"S3OutputPath": output(job, options), "CollectionConfigurations": []}
        extras["DebugHookConfig"] = config
    if options.tensorboard_output is not None:
        config = {"S3OutputPath": options.tensorboard_output, "LocalPath": TENSORBOARD}
        extras["TensorBoardOutputConfig"] = config
    if options.infra_check:
        extras["InfraCheckConfig"] = {"EnableInfraCheck": True}
    if options.remote_debug:
        extras["RemoteDebugConfig"] = {"EnableRemoteDebug": True}
    if options.subnets:
        groups = list(options.security_group_ids)
        extras["VpcConfig"] = {"Subnets": list(options.subnets), "SecurityGroupIds": groups}
    if job.retries:
        extras["RetryStrategy"] = {"MaximumRetryAttempts": job.retries}
    if options.tags:
        extras["Tags"] = [{"Key": key, "Value": value} for key, value in options.tags.items()]
    return extras
