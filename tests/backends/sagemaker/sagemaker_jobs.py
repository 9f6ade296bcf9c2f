"""A valid job for SageMaker, and variations of it."""

from __future__ import annotations

from dataclasses import replace

from deploykit.backends import sagemaker
from deploykit.job.model import Entrypoint, InputChannel, JobSpec, Resources

JOB = JobSpec(
    name="digits",
    entrypoint=Entrypoint(script="train.py", args=("--epochs", "5")),
    resources=Resources(time_limit=1800, nodes=2, processes_per_node=2),
)
OPTIONS = sagemaker.Options(
    role="arn:aws:iam::123456789012:role/training",
    instance_type="ml.g5.12xlarge",
    bucket="my-bucket",
    region="us-east-1",
    framework_version="2.8.0",
)
RESOURCES = ("time_limit", "nodes", "processes_per_node", "gpus_per_node", "memory")


def vary(**changes):
    """The job and its options with some fields changed: of resources, options or the job.

    `profile` is that of the options, and `job_profile` that of the job.
    """
    resources = {name: changes.pop(name) for name in RESOURCES if name in changes}
    options = {name: changes.pop(name) for name in list(changes) if hasattr(OPTIONS, name)}
    if "job_profile" in changes:
        changes["profile"] = changes.pop("job_profile")
    if "data" in changes:
        changes["data"] = {
            name: InputChannel(channel) if isinstance(channel, str) else channel
            for name, channel in changes["data"].items()
        }
    if "args" in changes:
        changes["entrypoint"] = Entrypoint(script="train.py", args=tuple(changes.pop("args")))
    job = replace(JOB, resources=replace(JOB.resources, **resources), **changes)
    return job, replace(OPTIONS, **options)
