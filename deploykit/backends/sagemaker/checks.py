"""Settings that do not go together on SageMaker, or that do something other than they say.

Each was measured or documented; what the service itself describes is left to `validate.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from deploykit import contract
from deploykit.backends.sagemaker import images
from deploykit.backends.sagemaker import request as rendering
from deploykit.backends.sagemaker.options import REGION, Options, region
from deploykit.backends.sagemaker.validate import Fault, faults
from deploykit.model import JobSpec, Problem

if TYPE_CHECKING:
    from deploykit.bundle import Bundle

_S3 = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[^\x00-\x1f\x7f]*)?")
_LONGEST_RUN = 28 * 24 * 3600
_LONGEST_KEEP_ALIVE = 3600
_LONGEST_ARGUMENTS = 50_000
"""Characters; the container's toolkit puts them into single variables of at most 128 KiB."""
_SECRETS = ("ssm", "secretsmanager")
_SMDDP_TYPES = ("ml.p3.16xlarge", "ml.p3dn.24xlarge", "ml.p4d.24xlarge", "ml.p4de.24xlarge")


def check(job: JobSpec, options: Options) -> Iterator[Problem]:
    """Every problem of a job on SageMaker. Pure."""
    found = [
        *_region(options),
        *_image(options),
        *_distribution(job, options),
        *_places(job),
        *_secrets(job),
    ]
    found += [*_spot(job, options), *_pool(options), *_network(job, options), *_sizes(job, options)]
    yield from found
    if all(problem.severity == "warning" for problem in found):
        yield from described(rendering.render(job, options, run=job.name, bundle="0" * 64))


def bundled(options: Options, bundle: Bundle) -> Iterator[Problem]:
    """What in the source would make the container start something else."""
    names = {entry.path for entry in bundle.entries}
    if "setup.py" in names and options.distribution == "torch_distributed":
        yield Problem(
            "source",
            "holds a setup.py, which the container takes for a package to install, and refuses "
            "to run with torch_distributed",
            "name setup.py in .deploykitignore, or make another folder the source",
        )


def described(request: Mapping[str, Any]) -> Iterator[Problem]:
    """What the service's own description says against a request, in the job file's words."""
    for fault in faults("CreateTrainingJob", request):
        yield _translated(fault)


_PLACES = {
    "Environment": "env",
    "RoleArn": "sagemaker.role",
    "AlgorithmSpecification.TrainingImage": "sagemaker.image_uri",
    "ResourceConfig.InstanceType": "sagemaker.instance_type",
    "ResourceConfig.InstanceCount": "resources.nodes",
    "ResourceConfig.VolumeSizeInGB": "sagemaker.volume_size",
    "ResourceConfig.KeepAlivePeriodInSeconds": "sagemaker.keep_alive",
    "StoppingCondition.MaxRuntimeInSeconds": "resources.time_limit",
    "StoppingCondition.MaxWaitTimeInSeconds": "sagemaker.max_wait",
    "VpcConfig.Subnets": "sagemaker.subnets",
    "VpcConfig.SecurityGroupIds": "sagemaker.security_group_ids",
    "RetryStrategy.MaximumRetryAttempts": "retries",
    "InputDataConfig": "data",
    "OutputDataConfig.S3OutputPath": "output",
    "CheckpointConfig.S3Uri": "checkpoints",
    "HyperParameters": "entrypoint.args",
    "Tags": "sagemaker.tags",
}
"""Place in the request, place in the job file."""


_TOGETHER = {
    "Environment.DEPLOYKIT_SECRETS": "the references of all secrets, together as JSON,",
    "Environment.DEPLOYKIT_ENV": "all NCCL_, FI_, GLOO_ and RDMAV_ variables, together as JSON,",
}


def _translated(fault: Fault) -> Problem:
    if fault.path in _TOGETHER:
        hint = "shorten or drop some"
        return Problem("env", f"SageMaker: {_TOGETHER[fault.path]} {fault.message}", hint)
    for place, ours in _PLACES.items():
        if fault.path == place or fault.path.startswith((f"{place}.", f"{place}[")):
            rest = fault.path[len(place) :] if ours == "env" else ""
            where = "" if rest or fault.path == place else f"{fault.path[len(place) :]} "
            return Problem(ours + rest, f"SageMaker: {where}{fault.message}", fault.hint)
    return Problem("sagemaker", f"SageMaker: {fault.path} {fault.message}", fault.hint)


def _region(options: Options) -> Iterator[Problem]:
    place = region(options)
    if place is None:
        yield Problem("sagemaker.region", "no region is chosen", "set it here, or in AWS_REGION")
    elif re.fullmatch(REGION.regex, place) is None:
        yield Problem(
            "sagemaker.region",
            f"AWS_REGION or AWS_DEFAULT_REGION is {place!r}, which is no region",
            f"{REGION.meaning}, here or there",
        )


def _image(options: Options) -> Iterator[Problem]:
    version = options.framework_version
    if options.image_uri is not None:
        if version is not None or options.py_version is not None:
            yield Problem(
                "sagemaker.image_uri",
                "an image and a framework version contradict each other",
                "keep image_uri alone, or framework_version with py_version",
            )
        return
    if version is None:
        yield Problem(
            "sagemaker.framework_version",
            "no container is chosen",
            f"framework_version: {images.NEWEST}, or for later versions image_uri: "
            f"{images.PATTERN}",
        )
        return
    yield from _version(options, version, region(options))


def _version(options: Options, version: str, place: str | None) -> Iterator[Problem]:
    python = images.VERSIONS.get(version)
    if python is None:
        yield Problem(
            "sagemaker.framework_version",
            f"the SageMaker SDK knows no image of PyTorch {version}",
            f"one of {', '.join(images.VERSIONS)}; later ones need image_uri, such as "
            f"{images.PATTERN}",
        )
    elif options.py_version not in {None, python}:
        yield Problem(
            "sagemaker.py_version", f"the image of PyTorch {version} has only {python}", python
        )
    if place is not None and images.account(place) is None:
        yield Problem(
            "sagemaker.region",
            f"we do not know where AWS keeps its images in {place}",
            "name the image in full, with image_uri",
        )
    if images.has_neuron(options.instance_type):
        yield Problem(
            "sagemaker.instance_type",
            "Trainium and Inferentia need a Neuron image",
            "name it with image_uri",
        )


def _distribution(job: JobSpec, options: Options) -> Iterator[Problem]:
    kind = options.distribution
    if kind == "none":
        if job.resources.world_size > 1:
            yield Problem(
                "sagemaker.distribution",
                f"the job asks for {job.resources.world_size} processes, and `none` starts one "
                "on each machine that knows nothing of the others",
                "torch_distributed",
            )
    elif kind == "torch_distributed":
        yield from _torchrun(options)
    else:
        yield from _smddp(options)


def _torchrun(options: Options) -> Iterator[Problem]:
    if options.image_uri is not None:
        return
    if not images.has_gpu(options.instance_type):
        yield Problem(
            "sagemaker.instance_type",
            f"{options.instance_type} has no GPU, and without image_uri the SDK allows "
            "torch_distributed only with GPUs",
            "choose a type such as ml.g5.12xlarge, or name a CPU image with image_uri",
        )
    if options.framework_version in images.NOT_TORCHRUN:
        yield Problem(
            "sagemaker.framework_version",
            f"the SDK refuses torch_distributed with PyTorch {options.framework_version}",
            "2.3.0 or 2.5.1",
        )


def _smddp(options: Options) -> Iterator[Problem]:
    kind = options.distribution
    if kind == "pytorchddp":
        yield Problem(
            "sagemaker.distribution",
            "pytorchddp runs as SageMaker's data parallel library (smdistributed), not as "
            "PyTorch's DDP: the SDK has rewritten it since 2.221.1",
            "torch_distributed starts plain PyTorch DDP",
            severity="warning",
        )
    if options.image_uri is None and options.framework_version not in images.SMDDP:
        yield Problem(
            "sagemaker.framework_version",
            f"{kind} exists up to PyTorch {images.SMDDP[-1]}, not for {options.framework_version}",
            f"framework_version: {images.SMDDP[-1]}, or distribution: torch_distributed",
        )
    if options.instance_type in _SMDDP_TYPES:
        return
    refused = options.instance_type == "ml.p5.48xlarge" or not images.has_gpu(options.instance_type)
    yield Problem(
        "sagemaker.instance_type",
        f"{kind} is made for {', '.join(_SMDDP_TYPES)}; {options.instance_type} is none of them",
        "one of these types, or distribution: torch_distributed",
        severity="error" if refused else "warning",
    )


def _places(job: JobSpec) -> Iterator[Problem]:
    for path, place in contract.places(job).items():
        if _S3.fullmatch(place) is None:
            yield Problem(
                path,
                f"SageMaker's machines cannot see {place!r}",
                "an S3 prefix, such as s3://bucket/folder",
            )


def _secrets(job: JobSpec) -> Iterator[Problem]:
    for name, value in job.env.items():
        if contract.is_secret(value) and value.split(":")[1] not in _SECRETS:
            yield Problem(
                f"env.{name}",
                f"{value}: SageMaker's machines cannot see it",
                f"a secret of kind {' or '.join(_SECRETS)}",
            )


def _spot(job: JobSpec, options: Options) -> Iterator[Problem]:
    limit = job.resources.time_limit
    if options.spot and (options.max_wait is None or options.max_wait < limit):
        yield Problem(
            "sagemaker.max_wait",
            f"a spot job needs it, at least resources.time_limit ({limit} s)",
            "time_limit and the patience to wait for machines, together",
        )
    if options.max_wait is not None and not options.spot:
        yield Problem("sagemaker.max_wait", "has a meaning only with spot: true", "remove it")
    if job.retries:
        yield Problem(
            "retries",
            "SageMaker starts a job again only after a fault of its own, never after the program's",
            severity="warning",
        )
    if (options.spot or job.retries) and job.checkpoints is None:
        yield Problem(
            "checkpoints",
            "without it a job that is interrupted or retried begins again from nothing",
            f"checkpoints: s3://{options.bucket}/{options.prefix}/checkpoints/{job.name}",
            severity="warning",
        )


def _pool(options: Options) -> Iterator[Problem]:
    if options.keep_alive is None:
        return
    if options.spot:
        yield Problem("sagemaker.keep_alive", "spot machines cannot be kept", "drop one of the two")
    if options.keep_alive > _LONGEST_KEEP_ALIVE:
        yield Problem("sagemaker.keep_alive", "machines can be kept for 1h at most", "1h")


def _network(job: JobSpec, options: Options) -> Iterator[Problem]:
    if bool(options.subnets) != bool(options.security_group_ids):
        missing = "security_group_ids" if options.subnets else "subnets"
        yield Problem(
            f"sagemaker.{missing}", "subnets and security groups go together", "give both or none"
        )
    if options.encrypt_inter_container_traffic and job.resources.nodes == 1:
        yield Problem(
            "sagemaker.encrypt_inter_container_traffic",
            "has nothing to encrypt on one machine",
            severity="warning",
        )


def _sizes(job: JobSpec, options: Options) -> Iterator[Problem]:
    if job.resources.time_limit > _LONGEST_RUN:
        yield Problem("resources.time_limit", "SageMaker runs a job for 28 days at most", "28d")
    length = sum(map(len, rendering.pieces(contract.command(job)).values()))
    if length > _LONGEST_ARGUMENTS:
        yield Problem(
            "entrypoint.args",
            f"take {length} characters as JSON; a container takes {_LONGEST_ARGUMENTS}",
            "put them into a file that travels with the source",
        )
    if job.resources.gpus_per_node and not images.has_gpu(options.instance_type):
        yield Problem(
            "sagemaker.instance_type",
            f"{options.instance_type} has no GPU, and the job asks for "
            f"{job.resources.gpus_per_node} on each machine",
            "choose a type with GPUs, such as ml.g5.12xlarge",
        )
    for name in ("cpus_per_node", "memory"):
        if getattr(job.resources, name) is not None:
            yield Problem(
                f"resources.{name}",
                "SageMaker gives what the instance type has, whatever stands here",
                severity="warning",
            )
