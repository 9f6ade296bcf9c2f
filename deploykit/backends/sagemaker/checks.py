"""All that is wrong or doubtful with a job on SageMaker, in the job file's words.

The oracle knows what settings do; what the service itself describes is left to `validate.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from deploykit.backends.sagemaker import oracle
from deploykit.backends.sagemaker import request as rendering
from deploykit.backends.sagemaker.options import Options
from deploykit.backends.sagemaker.validate import Fault, faults
from deploykit.model import JobSpec, Problem

if TYPE_CHECKING:
    from deploykit.model import Bundle


def check(job: JobSpec, options: Options) -> Iterator[Problem]:
    """Every problem of a job on SageMaker: the oracle's, then those of the service's description.

    Pure, but for today's date.
    """
    found = [problem for finding in oracle.ask(job, options) if (problem := finding.problem())]
    yield from found
    if all(problem.severity == "warning" for problem in found):
        yield from described(rendering.render(job, options, run=job.name, bundle="0" * 64))


def bundled(options: Options, bundle: Bundle) -> Iterator[Problem]:
    """What in the source would make the container start something else."""
    names = {entry.path for entry in bundle.entries}
    if "setup.py" in names and options.by_torchrun:
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
    "AlgorithmSpecification.ContainerArguments": "sagemaker.image_entrypoint",
    "ResourceConfig.InstanceType": "sagemaker.instance_type",
    "ResourceConfig.InstanceGroups": "sagemaker.instance_groups",
    "ResourceConfig.VolumeKmsKeyId": "sagemaker.volume_kms_key",
    "ResourceConfig.TrainingPlanArn": "sagemaker.training_plan",
    "AlgorithmSpecification.MetricDefinitions": "sagemaker.metric_definitions",
    "OutputDataConfig.KmsKeyId": "sagemaker.output_kms_key",
    "TensorBoardOutputConfig.S3OutputPath": "sagemaker.tensorboard_output",
    "HyperParameters.mp_parameters": "sagemaker.model_parallel",
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
