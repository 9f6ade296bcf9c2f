"""What a rule of the oracle is, and what it may look at."""

from __future__ import annotations

import datetime as dt
import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from deploykit.backends.sagemaker import images, launchers, machines
from deploykit.backends.sagemaker.options import Options, region
from deploykit.model import JobSpec


class Verdict(enum.Enum):
    ASKED = "runs as asked"
    OTHER = "runs as something else"
    REFUSED = "refused"
    UNKNOWN = "cannot know"


class Sdk(enum.Enum):
    """What the SDK does with the arguments of a row: `tests/sagemaker` asks the real one."""

    ACCEPTS = "accepts"
    REFUSES = "refuses"
    UNASKED = ""
    """There is nothing to ask: the SDK has no such argument, or never sees it."""


@dataclass(frozen=True)
class Row:
    """A job that shows a rule: changes to a plain one, as ``section.key`` and value."""

    given: Mapping[str, Any]
    sdk: Sdk = Sdk.ACCEPTS
    raw: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the estimator that a job file cannot say, in the place of ours."""
    sends: Mapping[str, Any] = field(default_factory=dict)
    """Hyperparameters of the SDK's request that tell the story; None for one that is not there."""
    says: str = ""
    """Part of what the SDK's refusal says."""
    cure: Mapping[str, Any] | None = None
    """Changes after which the job runs as asked, or nobody can know."""


@dataclass(frozen=True)
class Rule:
    """One thing to know about a job. Texts are formats with `case`, `job`, `options`, `item`."""

    path: str
    """Place in the job file."""
    verdict: Verdict
    when: Callable[[Case], bool | list[str]] | None
    """Whether the rule applies, or to which items; None where the decoder has said it already."""
    reason: str
    nearest: str | None
    """The nearest setting that works."""
    source: str
    rows: tuple[Row, ...]
    quiet: bool = False
    """Not worth a warning, though worth a line in the reference."""

    @property
    def severity(self) -> Literal["error", "warning"] | None:
        if self.verdict is Verdict.REFUSED:
            return "error"
        return None if self.quiet else "warning"


@dataclass(frozen=True)
class Case:
    """A job, and what follows from it."""

    job: JobSpec
    options: Options
    today: dt.date

    @property
    def kind(self) -> str:
        return self.options.distribution

    @property
    def data_parallel(self) -> bool:
        """Whether SageMaker's data parallel library starts the ranks."""
        return self.kind in launchers.DATA_PARALLEL

    @property
    def model_parallel(self) -> bool:
        return self.kind == "smdistributed.modelparallel"

    @property
    def mpirun(self) -> bool:
        return self.kind in launchers.MPIRUN

    @property
    def torchrun(self) -> bool:
        return self.kind == "torch_distributed" or self.model_parallel

    @property
    def types(self) -> list[str]:
        """The instance types of all machines."""
        groups = [group.instance_type for group in self.options.instance_groups]
        return groups or [kind for kind in (self.options.instance_type,) if kind]

    @property
    def type(self) -> str:
        """The instance type of the machines that train; empty where it cannot be told."""
        return self.options.training_type

    @property
    def gpus(self) -> int | None:
        """GPUs of each machine that trains; None where we do not know."""
        return machines.gpus(self.type) if self.type else None

    @property
    def version(self) -> str:
        """PyTorch of AWS's own image, as chosen; empty with `image_uri`."""
        return (self.options.framework_version or "") if self.options.image_uri is None else ""

    @property
    def image(self) -> images.Image | None:
        """What the name of `image_uri` says; None for another's image."""
        return images.read(self.options.image_uri) if self.options.image_uri else None

    @property
    def foreign(self) -> bool:
        """Whether nothing is known of the image."""
        return self.options.image_uri is not None and self.image is None

    @property
    def minor(self) -> str:
        """PyTorch's version such as ``2.8``; empty where it is not known."""
        return self.image.minor if self.image else images.minor(self.version)

    @property
    def release(self) -> tuple[int, ...]:
        """`minor` as numbers to compare; empty where it is not known."""
        return tuple(map(int, self.minor.split("."))) if self.minor else ()

    @property
    def patched_until(self) -> dt.date | None:
        return images.PATCHED_UNTIL.get(self.minor)

    @property
    def region(self) -> str | None:
        return region(self.options)

    @property
    def later(self) -> str:
        """An `image_uri` for a version that the SDK does not know, or the latest."""
        return images.later(self.version, self.region, self.type)

    @property
    def world(self) -> int:
        return self.job.resources.world_size

    @property
    def world_text(self) -> str:
        """The ranks that the job asks for, in words."""
        nodes, ranks = self.job.resources.nodes, self.job.resources.processes
        return f"{ranks} rank{'s' * (ranks > 1)} on " + (
            f"each of {nodes} machines" if nodes > 1 else "one machine"
        )


SDK = "https://github.com/aws/sagemaker-python-sdk/blob/v2.257.7/src/sagemaker"
API = "https://docs.aws.amazon.com/sagemaker/latest/APIReference"
GUIDE = "https://docs.aws.amazon.com/sagemaker/latest/dg"
TOOLKIT = "https://github.com/aws/sagemaker-training-toolkit/tree/master/src/sagemaker_training"
LAUNCHER = (
    "https://github.com/aws/sagemaker-pytorch-training-toolkit/blob/master/"
    "src/sagemaker_pytorch_container/training.py"
)

IMAGE = "763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch-training:2.10.0-gpu-py313"
CPU_IMAGE = "763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch-training:2.10.0-cpu-py313"
PLAIN: dict[str, Any] = {
    "name": "digits",
    "entrypoint.script": "train.py",
    "resources.nodes": 2,
    "resources.processes_per_node": 4,
    "resources.time_limit": "1h",
    "sagemaker.role": "arn:aws:iam::123456789012:role/training",
    "sagemaker.bucket": "my-bucket",
    "sagemaker.region": "us-east-1",
    "sagemaker.instance_type": "ml.g5.12xlarge",
    "sagemaker.image_uri": IMAGE,
}
"""The job that rows change."""


def version(number: str, **sagemaker: Any) -> dict[str, Any]:
    """AWS's own image of PyTorch `number`, and other keys of the section."""
    return sm(framework_version=number, image_uri=None, **sagemaker)


def sm(**sagemaker: Any) -> dict[str, Any]:
    """Keys of the `sagemaker:` section."""
    return {f"sagemaker.{name}": value for name, value in sagemaker.items()}
