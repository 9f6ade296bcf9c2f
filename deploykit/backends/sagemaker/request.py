"""A job as the CreateTrainingJob request that the SageMaker SDK 2.257.7 would send. No SDK here.

Where the SDK has habits, such as writing every hyperparameter as JSON, they are kept: `sdk.py`
compares the two before anything is sent.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Iterator, Mapping
from typing import Any

from deploykit import contract
from deploykit.backends.sagemaker import channels, images, launchers
from deploykit.backends.sagemaker.options import Options
from deploykit.backends.sagemaker.options import region as region_of
from deploykit.model import JobSpec

OUTPUT = "/opt/ml/output/data"
"""Folder in the container that SageMaker uploads, as output.tar.gz, when the job ends."""
CHECKPOINTS = "/opt/ml/checkpoints"
"""Folder in the container that SageMaker copies to `checkpoints` while the job runs."""
DATA = "/opt/ml/input/data"
TENSORBOARD = f"{OUTPUT}/tensorboard"
"""Where our own trainer writes TensorBoard's files."""
CODE_CHANNEL = f"{DATA}/code/sourcedir.tar.gz"
"""Where the source lies when it comes as a channel."""
_VERIFY = (
    f'f={CODE_CHANNEL}; [ "$(gzip -dc $f | sha256sum)" = "$0  -" ] && exec "$@"; '
    'echo "deploykit: $f is not the source that was submitted ($0)" '
    "| tee /opt/ml/output/failure >&2; exit 78"
)
"""For `sh -c`, with the bundle's hash and the command: of 256 characters at most."""

ARGUMENT = "deploykit_argv_"
_PIECE = 2000
_VALUE = 2500
"""The service's longest hyperparameter. The JSON of a piece is longer than the piece."""
_LOG_LEVEL = 20
_OVERWRITTEN = re.compile(r"(NCCL|FI|GLOO|RDMAV)_\w+|OMP_NUM_THREADS", re.ASCII)
_SAFE = frozenset(string.ascii_letters + string.digits + "_@%+=:,./-")


def render(job: JobSpec, options: Options, *, run: str, bundle: str) -> dict[str, Any]:
    """The request; `bundle` is the hash of the source. The job must have passed `checks`."""
    request: dict[str, Any] = {
        "TrainingJobName": run,
        "RoleArn": options.role,
        "AlgorithmSpecification": _algorithm(options) | entry(options, bundle),
        "ResourceConfig": _resources(job, options),
        "StoppingCondition": _stopping(job, options),
        "HyperParameters": {
            name: json.dumps(value)
            for name, value in _hyperparameters(job, options, run, bundle).items()
        },
        "Environment": environment(job, options, run, bundle),
    }
    found = [*channels.render(job, options), *_code_channel(options, bundle)]
    if found:
        request["InputDataConfig"] = found
    request["OutputDataConfig"] = _output(job, options)
    if job.checkpoints is not None:
        request["CheckpointConfig"] = {"S3Uri": job.checkpoints, "LocalPath": CHECKPOINTS}
    return request | _extras(job, options)


def code(options: Options, bundle: str) -> str:
    """Where the source of a job lies: named by its content, so that it is uploaded once."""
    return f"s3://{options.bucket}/{code_key(options, bundle)}"


def code_key(options: Options, bundle: str) -> str:
    return f"{options.prefix}/bundles/{bundle}/sourcedir.tar.gz"


def output(job: JobSpec, options: Options) -> str:
    """The S3 prefix below which SageMaker puts ``<run>/output/``."""
    return job.output or f"s3://{options.bucket}/{options.prefix}/runs"


def results(job: Mapping[str, Any]) -> str:
    """Where the output folder will be, of a request or of DescribeTrainingJob's answer."""
    place = job["OutputDataConfig"]
    folder = f"{place['S3OutputPath'].rstrip('/')}/{job['TrainingJobName']}/output/"
    return folder if place.get("CompressionType") == "NONE" else f"{folder}output.tar.gz"


def environment(job: JobSpec, options: Options, run: str, bundle: str) -> dict[str, str]:
    """Variables of the containers.

    The container's launcher overwrites some network variables after it has read these, so they
    travel a second time in ``DEPLOYKIT_ENV``, and the node plane restores them last. By
    ``DEPLOYKIT_BUNDLE`` it knows the source that was planned.
    """
    variables = contract.environment(
        job,
        backend="sagemaker",
        run=run,
        output=OUTPUT,
        checkpoints=CHECKPOINTS,
        data={name: f"{DATA}/{name}" for name in channels.names(job, options)},
    )
    variables["DEPLOYKIT_BUNDLE"] = bundle
    kept = {name: value for name, value in job.env.items() if _OVERWRITTEN.fullmatch(name)}
    kept = {name: value for name, value in kept.items() if not contract.is_secret(value)}
    if kept:
        variables["DEPLOYKIT_ENV"] = json.dumps(dict(sorted(kept.items())))
    return dict(sorted(variables.items()))


def user_hyperparameters(job: JobSpec) -> dict[str, Any]:
    """What an SDK user would have to pass as `hyperparameters`."""
    return {**pieces(contract.command(job)), launchers.PROCESSES: job.resources.processes}


def pieces(argv: list[str]) -> dict[str, str]:
    """An argument vector as hyperparameters: one JSON text, cut into pieces.

    Toolkits up to 5.1.1 put hyperparameters on a shell's command line without quotes, so each
    character that a shell could act upon stands as a JSON escape. `json.loads` of the joined
    pieces gives `argv` back.
    """
    text = "[" + ",".join(f'"{"".join(map(_escape, word))}"' for word in argv) + "]"
    return {f"{ARGUMENT}{number}": piece for number, piece in enumerate(_cut(text))}


def _escape(letter: str) -> str:
    if letter in _SAFE:
        return letter
    units = letter.encode("utf-16-be")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))


def _cut(text: str) -> Iterator[str]:
    while text:
        end = _PIECE
        while len(json.dumps(text[:end])) > _VALUE:
            end -= 100
        yield text[:end]
        text = text[end:]


def _hyperparameters(job: JobSpec, options: Options, run: str, bundle: str) -> dict[str, Any]:
    place = CODE_CHANNEL if options.source_is_a_channel else code(options, bundle)
    return {
        **user_hyperparameters(job),
        "sagemaker_program": contract.LAUNCH,
        "sagemaker_submit_directory": place,
        "sagemaker_job_name": run,
        "sagemaker_region": region_of(options),
        "sagemaker_container_log_level": _LOG_LEVEL,
        **launchers.hyperparameters(job, options),
    }


def _code_channel(options: Options, bundle: str) -> Iterator[dict[str, Any]]:
    if options.source_is_a_channel:
        yield channels.s3("code", code(options, bundle))


def _algorithm(options: Options) -> dict[str, Any]:
    algorithm: dict[str, Any] = {"TrainingInputMode": "File", "TrainingImage": image(options)}
    if options.image_uri is None:
        algorithm["EnableSageMakerMetricsTimeSeries"] = True
    if options.metric_definitions:
        algorithm["MetricDefinitions"] = metrics(options)
    return algorithm


def entry(options: Options, bundle: str) -> dict[str, list[str]]:
    """What the container starts in the place of its image's entrypoint, which comes next.

    It is part of the request, so write access to the bucket is not enough to change it.
    """
    if not options.image_entrypoint:
        return {}
    return {
        "ContainerEntrypoint": ["sh", "-c", _VERIFY, bundle],
        "ContainerArguments": [*options.image_entrypoint, "train"],
    }


def metrics(options: Options) -> list[dict[str, str]]:
    return [{"Name": name, "Regex": regex} for name, regex in options.metric_definitions.items()]


def image(options: Options) -> str:
    """The container: the one that is named, else AWS's own for the framework version."""
    if options.image_uri is not None:
        return options.image_uri
    place, version = region_of(options) or "", options.framework_version or ""
    kind = leading_type(options)
    if options.distribution == "smdistributed.modelparallel":
        return images.smp(place, version, kind)
    return images.uri(place, version, options.py_version or images.VERSIONS[version], kind)


def leading_type(options: Options) -> str:
    """The instance type that chooses the image: the first group's with GPUs, as in the SDK."""
    if options.instance_type is not None:
        return options.instance_type
    types = [group.instance_type for group in options.instance_groups]
    return next(filter(images.has_gpu, types), types[0])


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
        resources["InstanceType"] = options.instance_type
    chosen = {
        "VolumeKmsKeyId": options.volume_kms_key,
        "KeepAlivePeriodInSeconds": options.keep_alive,
        "TrainingPlanArn": options.training_plan,
    }
    return resources | {name: value for name, value in chosen.items() if value is not None}


def _output(job: JobSpec, options: Options) -> dict[str, str]:
    place = {"S3OutputPath": output(job, options)}
    if options.output_kms_key is not None:
        place["KmsKeyId"] = options.output_kms_key
    if options.output_compression == "none":
        place["CompressionType"] = "NONE"
    return place


def _stopping(job: JobSpec, options: Options) -> dict[str, int]:
    stopping = {"MaxRuntimeInSeconds": job.resources.time_limit}
    if options.max_wait is not None:
        stopping["MaxWaitTimeInSeconds"] = options.max_wait
    return stopping


def _extras(job: JobSpec, options: Options) -> dict[str, Any]:
    """The parts that stand in a request only where they were asked for."""
    extras = {**_switches(options), **_watching(job, options)}
    if options.subnets:
        extras["VpcConfig"] = {
            "Subnets": list(options.subnets),
            "SecurityGroupIds": list(options.security_group_ids),
        }
    if job.retries:
        extras["RetryStrategy"] = {"MaximumRetryAttempts": job.retries}
    if options.tags:
        extras["Tags"] = [{"Key": key, "Value": value} for key, value in options.tags.items()]
    return extras


def _switches(options: Options) -> dict[str, Any]:
    switches = {
        "EnableInterContainerTrafficEncryption": options.encrypt_inter_container_traffic,
        "EnableManagedSpotTraining": options.spot,
        "EnableNetworkIsolation": options.network_isolation,
    }
    return {name: True for name, on in switches.items() if on}


def _watching(job: JobSpec, options: Options) -> dict[str, Any]:
    """What looks into the job while it runs. The profiler is on unless it is switched off."""
    place = output(job, options)
    found: dict[str, Any] = {"ProfilerConfig": {"DisableProfiler": True}}
    if options.profiler_interval is not None:
        found["ProfilerConfig"] = {
            "S3OutputPath": place,
            "DisableProfiler": False,
            "ProfilingIntervalInMilliseconds": options.profiler_interval,
        }
    if options.debugger:
        found["DebugHookConfig"] = {"S3OutputPath": place, "CollectionConfigurations": []}
    if options.tensorboard_output is not None:
        found["TensorBoardOutputConfig"] = {
            "S3OutputPath": options.tensorboard_output,
            "LocalPath": TENSORBOARD,
        }
    if options.remote_debug:
        found["RemoteDebugConfig"] = {"EnableRemoteDebug": True}
    return found
