"""A job as the CreateTrainingJob request that the SageMaker SDK 2.257.7 would send. No SDK here.

Where the SDK has habits, such as writing every hyperparameter as JSON, they are kept: `sdk.py`
compares the two before anything is sent.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Iterator
from typing import Any

from deploykit import contract
from deploykit.backends.sagemaker import images
from deploykit.backends.sagemaker.options import Options
from deploykit.backends.sagemaker.options import region as region_of
from deploykit.model import JobSpec

OUTPUT = "/opt/ml/output/data"
"""Folder in the container that SageMaker uploads, as output.tar.gz, when the job ends."""
CHECKPOINTS = "/opt/ml/checkpoints"
"""Folder in the container that SageMaker copies to `checkpoints` while the job runs."""
DATA = "/opt/ml/input/data"

ARGUMENT = "deploykit_argv_"
PROCESSES = "sagemaker_mpi_num_of_processes_per_host"
"""The toolkit reads it for torchrun too, in spite of its name."""

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
        "AlgorithmSpecification": _algorithm(options),
        "ResourceConfig": _resources(job, options),
        "StoppingCondition": _stopping(job, options),
        "HyperParameters": {
            name: json.dumps(value)
            for name, value in _hyperparameters(job, options, run, bundle).items()
        },
        "Environment": environment(job, run),
    }
    if job.data:
        request["InputDataConfig"] = [_channel(*item) for item in job.data.items()]
    request["OutputDataConfig"] = {"S3OutputPath": output(job, options)}
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


def environment(job: JobSpec, run: str) -> dict[str, str]:
    """Variables of the containers.

    The container's launcher overwrites some network variables after it has read these, so they
    travel a second time in ``DEPLOYKIT_ENV``, and the node plane restores them last.
    """
    variables = contract.environment(
        job,
        backend="sagemaker",
        run=run,
        output=OUTPUT,
        checkpoints=CHECKPOINTS,
        data={name: f"{DATA}/{name}" for name in job.data},
    )
    kept = {name: value for name, value in job.env.items() if _OVERWRITTEN.fullmatch(name)}
    kept = {name: value for name, value in kept.items() if not contract.is_secret(value)}
    if kept:
        variables["DEPLOYKIT_ENV"] = json.dumps(dict(sorted(kept.items())))
    return dict(sorted(variables.items()))


def user_hyperparameters(job: JobSpec) -> dict[str, Any]:
    """What an SDK user would have to pass as `hyperparameters`."""
    return {**pieces(contract.command(job)), PROCESSES: job.resources.processes}


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
    return {
        **user_hyperparameters(job),
        "sagemaker_program": contract.LAUNCH,
        "sagemaker_submit_directory": code(options, bundle),
        "sagemaker_job_name": run,
        "sagemaker_region": region_of(options),
        "sagemaker_container_log_level": _LOG_LEVEL,
        **_launcher(options),
    }


def _launcher(options: Options) -> dict[str, Any]:
    """What makes the container start one process for each rank."""
    if options.distribution == "none":
        return {}
    kind = {"sagemaker_instance_type": options.instance_type}
    if options.distribution == "torch_distributed":
        return {"sagemaker_torch_distributed_enabled": True, **kind}
    return {
        "sagemaker_distributed_dataparallel_enabled": True,
        "sagemaker_distributed_dataparallel_custom_mpi_options": "",
        **kind,
    }


def _algorithm(options: Options) -> dict[str, Any]:
    algorithm: dict[str, Any] = {"TrainingInputMode": "File", "TrainingImage": options.image_uri}
    version = options.framework_version
    if options.image_uri is None and version is not None:
        algorithm["TrainingImage"] = images.uri(
            region_of(options) or "",
            version,
            options.py_version or images.VERSIONS[version],
            options.instance_type,
        )
        algorithm["EnableSageMakerMetricsTimeSeries"] = True
    return algorithm


def _resources(job: JobSpec, options: Options) -> dict[str, Any]:
    resources: dict[str, Any] = {
        "InstanceCount": job.resources.nodes,
        "InstanceType": options.instance_type,
        "VolumeSizeInGB": options.volume_size,
    }
    if options.keep_alive is not None:
        resources["KeepAlivePeriodInSeconds"] = options.keep_alive
    return resources


def _stopping(job: JobSpec, options: Options) -> dict[str, int]:
    stopping = {"MaxRuntimeInSeconds": job.resources.time_limit}
    if options.max_wait is not None:
        stopping["MaxWaitTimeInSeconds"] = options.max_wait
    return stopping


def _channel(name: str, place: str) -> dict[str, Any]:
    source = {
        "S3DataType": "S3Prefix",
        "S3Uri": place,
        "S3DataDistributionType": "FullyReplicated",
    }
    return {"ChannelName": name, "DataSource": {"S3DataSource": source}}


def _extras(job: JobSpec, options: Options) -> dict[str, Any]:
    """The parts that stand in a request only where they were asked for."""
    extras: dict[str, Any] = {"ProfilerConfig": {"DisableProfiler": True}}
    if options.subnets:
        extras["VpcConfig"] = {
            "Subnets": list(options.subnets),
            "SecurityGroupIds": list(options.security_group_ids),
        }
    if options.encrypt_inter_container_traffic:
        extras["EnableInterContainerTrafficEncryption"] = True
    if options.spot:
        extras["EnableManagedSpotTraining"] = True
    if job.retries:
        extras["RetryStrategy"] = {"MaximumRetryAttempts": job.retries}
    if options.tags:
        extras["Tags"] = [{"Key": key, "Value": value} for key, value in options.tags.items()]
    return extras
