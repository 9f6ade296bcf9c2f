"""The oracle: what SageMaker does with a job. It runs as asked, runs as something else, is refused,
or the outcome cannot be known.

The rules are data, in the TOML files of this folder; 01-launchers.toml documents every key. Each
names the setting, the reason, the nearest setting that works and a source. The reference page is
generated from them, with examples that the tests check against the real SDK. Pure: nothing is
queried.

`check` adds what the service's own description says of the request. botocore checks required
fields, names, types and minima, and leaves patterns, enums and maxima to the service. The
description is read as data, which is faster than importing botocore.
"""

from __future__ import annotations

import datetime as dt
import difflib
import enum
import gzip
import importlib.util
import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple

from deploykit.backends import base as backend
from deploykit.backends.sagemaker import catalog, request
from deploykit.backends.sagemaker.options import (
    DATA_PARALLEL,
    MPIRUN,
    S3,
    Channel,
    InstanceGroup,
    Options,
    channel_location,
    channel_names,
    has_group,
    launched,
    region,
)
from deploykit.backends.sagemaker.request import argument_vector
from deploykit.doctor import aws_names
from deploykit.job import checks
from deploykit.job.model import JobSpec, Problem
from deploykit.job.spelling import did_you_mean
from deploykit.lib.errors import BackendUnavailable

_SOURCES = {
    "sdk": "https://github.com/aws/sagemaker-python-sdk/blob/v2.257.7/src/sagemaker",
    "api": "https://docs.aws.amazon.com/sagemaker/latest/APIReference",
    "guide": "https://docs.aws.amazon.com/sagemaker/latest/dg",
    "toolkit": "https://github.com/aws/sagemaker-training-toolkit/tree/master/"
    "src/sagemaker_training",
    "launcher": "https://github.com/aws/sagemaker-pytorch-training-toolkit/blob/master/"
    "src/sagemaker_pytorch_container/training.py",
}
"""Beginnings of the sources that rules cite."""
_ANY_RUN, _ANY_BUNDLE = "r" * 63, "0" * 64
"""As long as a run id and a hash can be: a request that is valid with these is valid with any."""
_ANY_IMAGE, _ANY_REGION, _ANY_TYPE = "image", "us-east-1", "ml.g5.12xlarge"
_TYPES: dict[str, Any] = {
    "structure": Mapping,
    "map": Mapping,
    "list": list,
    "string": str,
    "boolean": bool,
    "integer": int,
    "long": int,
    "float": (int, float),
}
_CLASSES = {r"\p{Alnum}": "a-zA-Z0-9", r"\p{L}": r"\w", r"\p{N}": r"\d", r"\p{Z}": r"\s"}
"""Character classes of Java that the patterns use, always inside brackets."""
_MANY = 5
"""Choices that a message lists."""
_KEYS = {
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
"""Path in the request -> key of the job file."""
_COMBINED = {
    "Environment.DEPLOYKIT_SECRETS": "all secret references together, as JSON,",
    "Environment.DEPLOYKIT_ENV": "all NCCL_, FI_, GLOO_ and RDMAV_ variables together, as JSON,",
}
"""Path in the request -> the values of the job file that are combined there."""


class Verdict(enum.Enum):
    """What SageMaker does with a setting."""

    ASKED = "runs as asked"
    OTHER = "runs as something else"
    REFUSED = "refused"
    UNKNOWN = "cannot know"


@dataclass(frozen=True, kw_only=True)
class OracleRule:
    """One fact about SageMaker. Its fields are the keys of ``[[rule]]``."""

    id: str
    path: str
    verdict: Verdict
    when: Sequence[str] | None = None
    """None: the rule never applies, and is there for the reference only."""
    reason: str
    nearest: str | None = None
    source: str
    quiet: bool = False

    @property
    def severity(self) -> Literal["error", "warning"] | None:
        """Severity of the problem that `check` reports; None if it reports none."""
        if self.verdict is Verdict.REFUSED:
            return "error"
        return None if self.quiet else "warning"

    def apply(self, case: Case) -> Iterator[Consequence]:
        """One consequence for each item that the rule applies to."""
        items = [] if self.when is None else case.items(self.when)
        for item in items:
            values = {"case": case, "job": case.job, "options": case.options, "item": item}
            nearest = self.nearest and self.nearest.format(**values)
            path, reason = self.path.format(**values), self.reason.format(**values)
            yield Consequence(self, path, reason, nearest)


@dataclass(frozen=True)
class Consequence:
    """A rule that applies to a job, with its texts filled in."""

    rule: OracleRule
    path: str
    reason: str
    nearest: str | None

    def problem(self) -> Problem | None:
        """The problem that `check` reports; None if the job simply runs as asked."""
        severity = self.rule.severity
        if severity is None:
            return None
        source = self.rule.source
        return Problem(self.path, self.reason, self.nearest, severity=severity, source=source)


def check(job: JobSpec, options: Options) -> Iterator[Problem]:
    """Every problem of a job: the oracle's, then those of the request that would be sent.

    Pure, except that the date decides which images still receive patches. Raises
    BackendUnavailable if botocore is not installed and nothing else is wrong.
    """
    options = launched(job, options)
    yield from backend.check_program(job)
    yield from _check_plain(job, options)
    yield from _check_profile(job, options)
    yield from _check_debugger(job)
    yield from _check_log_limit(job)
    known = [problem for one in consequences(job, options) if (problem := one.problem())]
    yield from known
    errors = {problem.path for problem in known if problem.severity == "error"}
    try:
        problems = _request_problems(job, options if not errors else _completed(options))
    except BackendUnavailable:
        if not errors:
            raise
        return
    yield from (problem for problem in problems if problem.path not in errors)


def _check_plain(job: JobSpec, options: Options) -> Iterator[Problem]:
    """Whether a script that starts its own processes gets a node without another launcher."""
    if job.entrypoint.launcher != "python":
        return
    if options.distribution != "none":
        message = f"{options.distribution} starts the ranks, and `launcher: python` the script"
        yield Problem("sagemaker.distribution", message, "distribution: none")
    if job.preflight and job.resources.nodes > 1:
        message = "the nodes cannot test the network before a plain process of each"
        yield Problem("preflight", message, "remove it, or use launcher: torchrun")


def _check_profile(job: JobSpec, options: Options) -> Iterator[Problem]:
    """Nsight Systems stands above a rank, which only deploykit's own torchrun allows."""
    if (job.profile or "").startswith("nsys") and options.distribution != "none":
        message = "nsys needs ranks that deploykit starts, and here SageMaker's toolkit starts them"
        yield Problem("profile", message, "torch:20:25, which PyTorch's own profiler records")


def _check_debugger(job: JobSpec) -> Iterator[Problem]:
    if checks.DEBUGGER in job.env:
        message = "no editor can connect to a container of SageMaker"
        yield Problem(f"env.{checks.DEBUGGER}", message, "remove --debugger, or run it locally")


def _check_log_limit(job: JobSpec) -> Iterator[Problem]:
    if job.log_limit != backend.LOG_LIMIT:
        message = "is not enforced on SageMaker: CloudWatch takes all output, and bills it"
        yield Problem("log_limit", message, severity="warning")


def _completed(options: Options) -> Options:
    """The options with an image, a type and a region, so that a request can be rendered."""
    return replace(
        options,
        image_uri=options.image_uri or _ANY_IMAGE,
        region=region(options) or _ANY_REGION,
        instance_type=options.instance_type or (None if options.instance_groups else _ANY_TYPE),
    )


def _request_problems(job: JobSpec, options: Options) -> list[Problem]:
    """What the service's own description says of the request."""
    rendered = request.render(job, options, run=_ANY_RUN, bundle=_ANY_BUNDLE)
    return request_problems(rendered)


def consequences(job: JobSpec, options: Options, today: dt.date | None = None) -> list[Consequence]:
    """The consequences of every rule that applies, in the order of `rules`.

    `today` decides which images still receive patches; the default is today's date in UTC.
    """
    case = Case(job, options, today or dt.datetime.now(tz=dt.UTC).date())
    return [one for group in rules().values() for rule in group for one in rule.apply(case)]


@cache
def rules() -> Mapping[str, tuple[OracleRule, ...]]:
    """All rules, under the headings of the reference."""
    files = sorted(Path(__file__).with_name("rules").glob("*.toml"))
    return dict(read(path.read_text(encoding="utf-8")) for path in files)


def read(text: str) -> tuple[str, tuple[OracleRule, ...]]:
    """The heading and the rules of a file.

    Raises TypeError for an unknown or missing key, ValueError for an unknown verdict, and KeyError
    for an unknown beginning of a source.
    """
    return _group(**tomllib.loads(text))


def _group(*, heading: str, rule: list[dict[str, Any]]) -> tuple[str, tuple[OracleRule, ...]]:
    return heading, tuple(_rule(**table) for table in rule)


def _rule(*, verdict: str, source: str, **texts: Any) -> OracleRule:
    return OracleRule(verdict=Verdict(verdict), source=source.format(**_SOURCES), **texts)


class Violation(NamedTuple):
    """A breach of the service's description. `path` is the dotted path in the request."""

    path: str
    message: str
    hint: str | None = None


def request_problems(request: Mapping[str, Any]) -> list[Problem]:
    """Everything in a CreateTrainingJob request that the service would refuse.

    Paths are those of the job file. Raises BackendUnavailable if botocore is not installed.
    """
    return [_problem(violation) for violation in violations("CreateTrainingJob", request)]


def violations(operation: str, request: Mapping[str, Any]) -> Iterator[Violation]:
    """Every violation of the operation's description. Raises as `request_problems` does."""
    model = _model()
    shape = model["operations"][operation]["input"]["shape"]
    yield from _check(model["shapes"], shape, request, "")


def _problem(violation: Violation) -> Problem:
    path, message, hint = violation
    if path in _COMBINED:
        return Problem("env", f"SageMaker: {_COMBINED[path]} {message}", "shorten or remove some")
    for field, key in _KEYS.items():
        if path == field or path.startswith((f"{field}.", f"{field}[")):
            inner = path[len(field) :]
            if key == "env":
                return Problem(key + inner, f"SageMaker: {message}", hint)
            return Problem(key, f"SageMaker: {inner}{' ' * bool(inner)}{message}", hint)
    return Problem("sagemaker", f"SageMaker: {path} {message}", hint)


@cache
def _model() -> Any:
    """The newest description of SageMaker in the installed botocore."""
    spec = importlib.util.find_spec("botocore")
    if spec is None or spec.origin is None:
        raise BackendUnavailable(
            "the Python package botocore is not installed", hint="pip install boto3"
        )
    versions = (Path(spec.origin).parent / "data" / "sagemaker").glob("*/service-2.json*")
    newest = max(versions, key=lambda path: path.parent.name)
    data = newest.read_bytes()
    return json.loads(gzip.decompress(data) if newest.suffix == ".gz" else data)


def _check(shapes: Any, name: str, value: Any, path: str) -> Iterator[Violation]:
    shape = shapes[name]
    kind = shape["type"]
    expected: Any = _TYPES[kind]
    if not isinstance(value, expected) or (isinstance(value, bool) and kind != "boolean"):
        yield Violation(path, f"must be of type {kind}, not {type(value).__name__}")
        return
    yield from _check_size(shape, kind, value, path)
    if kind == "string":
        yield from _check_text(shape, value, path)
    elif kind == "structure":
        yield from _check_structure(shapes, shape, value, path)
    elif kind == "list":
        for number, item in enumerate(value):
            yield from _check(shapes, shape["member"]["shape"], item, f"{path}[{number}]")
    elif kind == "map":
        for key, item in value.items():
            yield from _check(shapes, shape["key"]["shape"], key, f"{path}.{key}")
            yield from _check(shapes, shape["value"]["shape"], item, f"{path}.{key}")


def _check_structure(shapes: Any, shape: Any, value: Any, path: str) -> Iterator[Violation]:
    for name in shape.get("required", ()):
        if name not in value:
            yield Violation(_join(path, name), "is required")
    for name, item in value.items():
        if name in shape["members"]:
            yield from _check(shapes, shape["members"][name]["shape"], item, _join(path, name))
        else:
            near = difflib.get_close_matches(name, shape["members"], n=1)
            hint = f"did you mean {near[0]!r}?" if near else None
            yield Violation(_join(path, name), "is unknown", hint)


def _check_size(shape: Any, kind: str, value: Any, path: str) -> Iterator[Violation]:
    if kind in {"structure", "boolean"}:
        return
    if kind in {"integer", "long", "float"}:
        size, unit = value, ""
    else:
        size, unit = len(value), " characters" if kind == "string" else " entries"
    has = f"has {size}{unit}" if unit else f"is {size}"
    low, high = shape.get("min"), shape.get("max")
    if low is not None and size < low:
        yield Violation(path, f"{has}; the minimum is {low}")
    if high is not None and size > high:
        yield Violation(path, f"{has}; the maximum is {high}")


def _check_text(shape: Any, value: str, path: str) -> Iterator[Violation]:
    choices = shape.get("enum")
    if choices and value not in choices:
        known = ", ".join(choices) if len(choices) <= _MANY else f"{len(choices)} are known"
        hint = did_you_mean(value, choices) or known
        yield Violation(path, f"{value!r} is not one of the accepted values", hint)
    pattern = shape.get("pattern")
    longest = shape.get("max") or len(value)
    if pattern and len(value) <= longest and _compiled(pattern).fullmatch(value) is None:
        yield Violation(path, f"{value!r} does not match {pattern}")


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    translated = pattern
    for java, python in _CLASSES.items():
        translated = translated.replace(java, python)
    return re.compile(translated, 0 if translated != pattern else re.ASCII)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


_P5 = "ml.p5.48xlarge"
_USUAL_REGION, _USUAL_TYPE = "us-east-1", "ml.g5.12xlarge"
"""Those that the hints for missing ones name, so that all hints together give a job that works."""
_WITHOUT_SMDDP = (2, 4)
"""AWS's images from this PyTorch on do not include SMDDP; 2.3 is the last that does."""
_CUDA_121 = "2.0.1-gpu-py310-cu121"
_DEFAULT_VOLUME = 30
_LONGEST_RUN = 28 * 24 * 3600
_LONGEST_KEEP_ALIVE = 3600
_LONGEST_ARGUMENTS = 50_000
"""Characters. AWS's toolkit passes them in single variables of at most 128 KiB."""
_INTERVALS = (100, 200, 500, 1000, 5000, 60000)
"""Milliseconds between two samples of the profiler that the service accepts."""
_WITHOUT_PROFILER = (
    *("us-iso-east-1", "us-isob-east-1", "ap-southeast-3", "ap-southeast-4", "eu-south-2"),
    *("me-central-1", "ap-south-2", "eu-central-2", "us-gov-east-1"),
)
"""Regions for which the SDK knows neither profiler nor debugger."""
_OVERWRITTEN = re.compile(r"(NCCL|FI|RDMAV)_\w+")
_REACHABLE_SECRETS = ("ssm", "secretsmanager")
"""Kinds of secrets that a container can look up."""


class Case:
    """A job and the facts about it.

    `today` decides which images still receive patches. Where `instance_groups` are set, the facts
    about hardware are those of the group that trains.
    """

    def __init__(self, job: JobSpec, options: Options, today: dt.date) -> None:
        self.job = job
        self.options = options
        self.today = today
        self.region = region(options)
        self.ranks_per_node = job.resources.processes
        self.world_size = job.resources.world_size
        self.many_nodes = job.resources.nodes > 1
        self.many_ranks = self.world_size > 1
        self.plain = job.entrypoint.launcher == "python"
        self._read_distribution(options.distribution)
        self._read_instances(options)
        self._read_hardware(self.instance_type)
        self._read_image(options.image_uri)
        self._read_version(options)
        self._read_service(job, options)

    def items(self, conditions: Sequence[str]) -> list[str]:
        """The items that a rule applies to: none unless all conditions hold, `[""]` without a list.

        A condition is the path of a fact from here, such as ``mpirun`` or ``options.spot``, after
        ``not`` if the fact must be false or empty.
        """
        items = [""]
        for condition in conditions:
            path = condition.removeprefix("not ")
            fact = attrgetter(path)(self)
            if bool(fact) is (path != condition):
                return []
            if fact and isinstance(fact, list):
                items = fact
        return items

    # What starts the ranks

    def _read_distribution(self, distribution: str) -> None:
        self.distribution = distribution
        self.torch_distributed = distribution == "torch_distributed"
        self.mpi = distribution == "mpi"
        self.no_launcher = distribution == "none"
        self.pytorchddp = distribution == "pytorchddp"
        self.data_parallel = distribution in DATA_PARALLEL
        """Whether SageMaker's data parallel library (SMDDP) starts the ranks."""
        self.model_parallel = distribution == "smdistributed.modelparallel"
        """Whether the job uses SageMaker's model parallel library (SMP)."""
        self.mpirun = distribution in MPIRUN
        self.torchrun = self.torch_distributed or self.model_parallel

    @property
    def ranks(self) -> str:
        """The ranks that the job asks for, in words."""
        nodes, ranks = self.job.resources.nodes, self.ranks_per_node
        return f"{ranks} rank{'s' * (ranks > 1)} on " + (
            f"each of {nodes} nodes" if nodes > 1 else "one node"
        )

    @property
    def uneven_degrees(self) -> list[str]:
        """Degrees of the model parallel library that do not divide the world size."""
        chosen = self.options.model_parallel
        degrees = chosen.parameters().items() if chosen else ()
        return [
            name
            for name, degree in degrees
            if name.endswith("_degree") and degree and self.world_size % degree
        ]

    @property
    def overwritten_variables(self) -> list[str]:
        """Variables of `env` that AWS's launchers may overwrite."""
        return list(filter(_OVERWRITTEN.fullmatch, self.job.env))

    # Instances

    def _read_instances(self, options: Options) -> None:
        self.types = [options.instance_type] if options.instance_type else []
        """The instance types of all nodes."""
        self.instance_type = options.training_type
        """The instance type of the nodes that train; empty if it is not determined."""
        self.group: InstanceGroup | None = None
        """The instance group that trains; None without groups, or if none has its name."""
        self.several_groups = len(options.instance_groups) > 1
        if options.instance_groups:
            self.types = [group.instance_type for group in options.instance_groups]
            named = [g for g in options.instance_groups if g.name == options.distribution_group]
            self.group = named[0] if named else None

    def _read_hardware(self, instance_type: str) -> None:
        accelerators = catalog.accelerators(instance_type)
        self.gpus = accelerators.gpus if instance_type else None
        """GPUs of each node that trains; None if unknown."""
        self.has_gpu = accelerators.has_gpu
        self.has_neuron = accelerators.has_neuron
        self.has_efa = accelerators.has_efa
        self.without_gpus = bool(instance_type) and not self.has_gpu
        self.trainium = instance_type.startswith("ml.trn")
        self.too_few_gpus = bool(self.gpus) and self.job.resources.gpus_per_node > (self.gpus or 0)
        self.shared_gpus = bool(self.gpus) and self.ranks_per_node > (self.gpus or 0)
        self.type_with_smddp = instance_type in catalog.SMDDP_TYPES
        self.type_without_smddp = instance_type == _P5
        self.type_with_smp = catalog.SMP_TYPES.fullmatch(instance_type) is not None
        self.other_volume_size = self.options.volume_size != _DEFAULT_VOLUME

    @property
    def gpus_instead(self) -> str:
        """As many GPUs as the type has, or a type that has enough."""
        types = catalog.types_with_gpus(self.job.resources.gpus_per_node)
        return f"gpus_per_node: {self.gpus}" + (f", or instance_type: {types}" if types else "")

    @property
    def types_with_nvme(self) -> list[str]:
        """Instance types with NVMe disks, which get no volume."""
        return [kind for kind in dict.fromkeys(self.types) if catalog.has_nvme(kind)]

    @property
    def group_of_other_size(self) -> bool:
        """Whether the group that trains has more or fewer instances than the job has nodes."""
        return self.group is not None and self.group.instance_count != self.job.resources.nodes

    @property
    def other_groups(self) -> list[str]:
        """The groups that do not train."""
        return [group.name for group in self.options.instance_groups if group != self.group]

    @property
    def errors_of_the_group_name(self) -> list[str]:
        """What is wrong with `distribution_group`, in words."""
        names = [group.name for group in self.options.instance_groups]
        wanted = self.options.distribution_group
        if not names or wanted in names:
            return []
        if wanted is None:
            return ["is required with instance_groups: it names the group that trains"]
        hint = did_you_mean(wanted, names)
        return [f"is {wanted}, which is not in instance_groups{f' ({hint})' if hint else ''}"]

    @property
    def duplicate_groups(self) -> list[str]:
        """Names that several groups have."""
        names = [group.name for group in self.options.instance_groups]
        return sorted({name for name in names if names.count(name) > 1})

    @property
    def cpus_and_memory(self) -> list[str]:
        """Keys of `resources` that the instance type determines."""
        resources = self.job.resources
        return [
            name for name in ("cpus_per_node", "memory") if getattr(resources, name) is not None
        ]

    # Images

    def _read_image(self, named: str | None) -> None:
        self.image = catalog.parse_image(named) if named else None
        """What the name of `image_uri` says; None if it is not an AWS image."""
        self.unknown_image = named is not None and self.image is None
        self.image_with_cuda_121 = _CUDA_121 in (named or "")
        """Whether it is the image without SMDDP of a version that has it."""
        self.image_without_mpi4py = self.image is not None and self.image.repository == "pytorch"
        self.image_region = catalog.ecr_region(named or "")
        self.image_outside_ecr = named is not None and self.image_region is None
        self.image_in_other_region = bool(self.image_region) and self.image_region != self.region

    def _read_version(self, options: Options) -> None:
        self.version_or_python = bool(options.framework_version or options.py_version)
        self.version = "" if options.image_uri is not None else options.framework_version or ""
        """PyTorch of AWS's own image, as chosen; empty with `image_uri`."""
        self.known_version = self.version in catalog.VERSIONS
        self.version_with_smddp = self.version in catalog.SMDDP_VERSIONS
        self.version_with_smp = self.version in catalog.SMP_IMAGES
        self.version_without_torchrun = self.version in catalog.NOT_TORCHRUN
        self.minor = self.image.minor if self.image else catalog.minor(self.version)
        """PyTorch's version such as ``2.8``; empty if unknown."""
        release = tuple(map(int, self.minor.split("."))) if self.minor else ()
        self.release_without_smddp = release >= _WITHOUT_SMDDP
        self.patched_until = catalog.PATCHED_UNTIL.get(self.minor)
        self.later_image = catalog.later_image(
            self.version, self.region or _USUAL_REGION, self.instance_type or _USUAL_TYPE
        )
        """An `image_uri` for `version`, or for the latest PyTorch if the SDK knows `version`."""

    @property
    def pythons_instead(self) -> list[str]:
        """The only Python of the chosen image, if `py_version` names another."""
        python = catalog.VERSIONS.get(self.version)
        if self.model_parallel:
            python = catalog.SMP_IMAGES.get(self.version, (None, None))[0]
        return [python] if python and self.options.py_version not in {None, python} else []

    @property
    def keys_of_unpatched_images(self) -> list[str]:
        """The key that chooses an image whose patches have ended."""
        if self.patched_until is None or self.patched_until >= self.today:
            return []
        return [f"sagemaker.{'framework_version' if self.version else 'image_uri'}"]

    @property
    def region_with_images(self) -> bool:
        """Whether the account of AWS's images in the region is known."""
        where = self.region or ""
        return catalog.has_smp(where) if self.model_parallel else bool(catalog.account(where))

    # Time, network and profiling

    def _read_service(self, job: JobSpec, options: Options) -> None:
        self.valid_region = re.fullmatch(aws_names.REGION.regex, self.region or "") is not None
        self.long_time_limit = job.resources.time_limit > _LONGEST_RUN
        self.long_keep_alive = (options.keep_alive or 0) > _LONGEST_KEEP_ALIVE
        self.sufficient_wait = (options.max_wait or 0) >= job.resources.time_limit
        """Whether a spot job may wait for as long as it may run."""
        self.may_restart = options.spot or job.retries > 0
        self.profiler = options.profiler_interval is not None
        self.known_interval = options.profiler_interval in _INTERVALS
        self.region_without_profiler = self.region in _WITHOUT_PROFILER

    @property
    def lengths_over_the_limit(self) -> list[str]:
        """The length of the arguments as JSON, if it is too long."""
        length = sum(map(len, argument_vector(backend.command(self.job)).values()))
        return [str(length)] if length > _LONGEST_ARGUMENTS else []

    @property
    def missing_network_keys(self) -> list[str]:
        """The key of the network that is not set although the other one is."""
        if bool(self.options.subnets) == bool(self.options.security_group_ids):
            return []
        return ["security_group_ids" if self.options.subnets else "subnets"]

    @property
    def arns_of_other_regions(self) -> list[str]:
        """The keys of the section that name a KMS key or a training plan of another region."""
        names = ("volume_kms_key", "output_kms_key", "training_plan")
        arns = {name: (getattr(self.options, name) or "").split(":") for name in names}
        return [n for n, arn in arns.items() if arn[0] == "arn" and arn[3:4] != [self.region]]

    @property
    def reserved_tags(self) -> list[str]:
        """Tags that only AWS may set."""
        return [name for name in self.options.tags if name.lower().startswith("aws:")]

    @property
    def unusable_metrics(self) -> list[str]:
        """Metrics whose pattern cannot give a value."""
        patterns = self.options.metric_definitions
        return [name for name in patterns if not has_group(patterns[name])]

    @property
    def profiler_keys(self) -> list[str]:
        """The keys that ask for the profiler or the debugger."""
        return ["profiler_interval"] * self.profiler + ["debugger"] * self.options.debugger

    # Data and secrets

    @property
    def locations_outside_s3(self) -> list[str]:
        """Locations that the nodes cannot reach, by their path in the job file."""
        elsewhere = self._channels(lambda c: c.s3 is not None or c.file_system_id is not None)
        replaced = {f"data.{name}" for name in elsewhere}
        return [
            path
            for path, location in backend.locations(self.job).items()
            if re.fullmatch(S3.regex, location) is None and path not in replaced
        ]

    @property
    def impossible_buckets(self) -> list[str]:
        """The paths in the job file of buckets that S3 refuses to create."""
        locations = backend.addresses(self.job).items()
        named = {path: location.split("/")[2] for path, location in locations}
        named["sagemaker.bucket"] = self.options.bucket
        return [path for path, bucket in named.items() if aws_names.IMPOSSIBLE.search(bucket)]

    @property
    def channels_without_location(self) -> list[str]:
        """Channels that name no data."""
        return [
            name
            for name in self._channels(lambda channel: channel.file_system_id is None)
            if channel_location(self.job, self.options, name) is None
        ]

    @property
    def channels_with_the_same_variable(self) -> list[str]:
        """Channels whose environment variables would have the same name."""
        upper = [name.upper() for name in channel_names(self.job, self.options)]
        return [name for name in self.options.channels if upper.count(name.upper()) > 1]

    @property
    def code_channel(self) -> bool:
        """Whether a channel has the name that the service may need for the source."""
        return "code" in channel_names(self.job, self.options)

    @property
    def pipes(self) -> list[str]:
        """Channels in Pipe mode."""
        return self._channels(lambda channel: channel.input_mode == "Pipe")

    @property
    def pipe_settings_without_pipe(self) -> list[str]:
        """Channels with settings that have an effect in Pipe mode only."""
        wrapped = self._channels(lambda c: c.compression != "None" or c.record_wrapping != "None")
        return [name for name in wrapped if name not in self.pipes]

    @property
    def manifests_without_pipe(self) -> list[str]:
        """Channels of augmented manifests in another mode."""
        manifests = self._channels(lambda c: c.s3_data_type == "AugmentedManifestFile")
        return [name for name in manifests if name not in self.pipes]

    @property
    def channels_with_wrong_attributes(self) -> list[str]:
        """Channels with attributes but no augmented manifest, or the reverse."""
        return self._channels(
            lambda c: (c.s3_data_type == "AugmentedManifestFile") != bool(c.attribute_names)
        )

    @property
    def file_systems(self) -> list[str]:
        """Channels whose data is in a file system."""
        return self._channels(lambda channel: channel.file_system_id is not None)

    @property
    def file_systems_with_wrong_keys(self) -> list[str]:
        """Channels with a file system and keys that exclude it, or without those it requires."""
        usable = self._channels(
            lambda c: c.s3 is None and c.input_mode == "File" and c.directory_path is not None
        )
        return [name for name in self.file_systems if name not in usable]

    @property
    def channels_of_unknown_groups(self) -> list[str]:
        """Channels for an instance group that does not exist."""
        known = {group.name for group in self.options.instance_groups}
        return self._channels(lambda channel: set(channel.instance_groups) - known)

    def _channels(self, matches: Callable[[Channel], object]) -> list[str]:
        """The names of the channels that match."""
        return [name for name, channel in self.options.channels.items() if matches(channel)]

    @property
    def secrets(self) -> list[str]:
        """Variables whose values are references to secrets."""
        return [name for name, value in self.job.env.items() if checks.is_secret(value)]

    @property
    def unreachable_secrets(self) -> list[str]:
        """Those that a container cannot look up."""
        kinds = {name: self.job.env[name].split(":")[1] for name in self.secrets}
        return [name for name, kind in kinds.items() if kind not in _REACHABLE_SECRETS]
