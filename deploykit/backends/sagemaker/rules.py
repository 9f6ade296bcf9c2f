"""The oracle: what SageMaker does with a job. It runs as requested, runs differently, is refused,
or the outcome cannot be known.

The rules are data, in `rules.toml`, which documents every key. Each names the setting, the reason,
the nearest setting that works and a source. The reference page is generated from them, with
examples that the tests check against the real SDK. Pure: nothing is queried.

`check` adds what the service's own description says of the request: enums, patterns and ranges.
"""

from __future__ import annotations

import datetime as dt
import enum
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from deploykit.backends import base as backend
from deploykit.backends.base import SettingRule
from deploykit.backends.sagemaker import catalog, deployment, hardware, request, service_model
from deploykit.backends.sagemaker.options import (
    DATA_PARALLEL,
    MPIRUN,
    S3,
    Channel,
    Options,
    channel_location,
    channel_names,
    has_group,
    launched,
    local_data,
    preferred,
    region,
)
from deploykit.backends.sagemaker.request import argument_vector
from deploykit.bundle import data_folder
from deploykit.doctor.requirements import IMPOSSIBLE_BUCKET, REGION
from deploykit.job import checks, environments
from deploykit.job.model import DataFolder, JobSpec, Problem
from deploykit.job.spelling import did_you_mean
from deploykit.lib import units
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
_REQUEST = "CreateTrainingJobRequest"
_KEYS = {
    "Environment": "env",
    "RoleArn": "sagemaker.role",
    "AlgorithmSpecification.TrainingImage": "sagemaker.image_uri",
    "AlgorithmSpecification.ContainerArguments": "sagemaker.image_entrypoint",
    "ResourceConfig.InstanceType": "sagemaker.instance_type",
    "ResourceConfig.InstanceGroups": "sagemaker.instance_groups",
    "ResourceConfig.InstancePreferences": "sagemaker.instance_preferences",
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
    "StoppingCondition.MaxPendingTimeInSeconds": "sagemaker.max_pending",
    "InfraCheckConfig": "sagemaker.infra_check",
    "AlgorithmSpecification.EnableSageMakerMetricsTimeSeries": "sagemaker.metrics_time_series",
    "VpcConfig.Subnets": "sagemaker.subnets",
    "VpcConfig.SecurityGroupIds": "sagemaker.security_group_ids",
    "RetryStrategy.MaximumRetryAttempts": "retries",
    "InputDataConfig": "data",
    "OutputDataConfig.S3OutputPath": "output",
    "CheckpointConfig.S3Uri": "checkpoints",
    "EnableManagedSpotTraining": "sagemaker.spot",
    "EnableNetworkIsolation": "sagemaker.network_isolation",
    "EnableInterContainerTrafficEncryption": "sagemaker.encrypt_inter_container_traffic",
    "RemoteDebugConfig": "sagemaker.remote_debug",
    "ProfilerConfig": "sagemaker.profiler_interval",
    "AlgorithmSpecification.ContainerEntrypoint": "sagemaker.image_entrypoint",
    "OutputDataConfig.CompressionType": "sagemaker.output_compression",
    "CheckpointConfig": "checkpoints",
    "TrainingJobName": "--run",
    "HyperParameters": "entrypoint.args",
    "Tags": "sagemaker.tags",
}
"""Path in the request -> key of the job file."""
_COMBINED = {
    "Environment.DEPLOYKIT_SECRETS": "the JSON of all secret references",
    "Environment.DEPLOYKIT_ENV": "the JSON of all NCCL_, FI_, GLOO_ and RDMAV_ variables",
}
"""Path in the request -> the values of the job file that are combined there."""
_USUAL_REGION, _USUAL_TYPE = "us-east-1", "ml.g5.12xlarge"
"""Those that the hints for missing ones name, so that all hints together give a job that works."""
_WITHOUT_SMDDP = (2, 4)
"""AWS's images from this PyTorch on do not include SMDDP; 2.3 is the last that does."""
_LONGEST_ARGUMENTS = 50_000
"""Characters. AWS's toolkit passes them in single variables of at most 128 KiB."""
_INTERVALS = (100, 200, 500, 1000, 5000, 60000)
"""Milliseconds between two samples of the profiler that the service accepts."""
_WITHOUT_PROFILER = (
    *("us-iso-east-1", "us-isob-east-1", "ap-southeast-3", "ap-southeast-4", "eu-south-2"),
    *("me-central-1", "ap-south-2", "eu-central-2", "us-gov-east-1"),
)
"""Regions for which the SDK knows neither profiler nor debugger."""
_SECRETS = ("ssm", "secretsmanager")
"""Kinds of secrets that a container can look up."""
_OVERWRITTEN = re.compile(r"(NCCL|FI|RDMAV)_\w+")


class Verdict(enum.Enum):
    """How SageMaker treats a setting; `rules.toml` uses the names in lower case."""

    ASKED = "runs as requested"
    OTHER = "runs differently"
    REFUSED = "refused"
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class OracleRule:
    """One fact about SageMaker. Its fields are those of a table in `rules.toml`."""

    id: str
    path: str
    verdict: Verdict
    when: Sequence[str] | None = None
    """None: the rule never applies, and is there for the reference only."""
    reason: str
    suggestion: str | None = None
    source: str
    quiet: bool = False

    @property
    def severity(self) -> Literal["error", "warning"] | None:
        """None if `check` reports no problem."""
        if self.verdict is Verdict.REFUSED:
            return "error"
        return None if self.quiet else "warning"

    def apply(self, known: Mapping[str, Any]) -> Iterator[Consequence]:
        """Yield a consequence for each item to which the rule applies, by the `facts` of a job.

        Raises KeyError for the name of a fact that does not exist.
        """
        if self.when is None:
            return
        items = [""]
        for condition in self.when:
            name = condition.removeprefix("not ")
            fact = known[name]
            if bool(fact) is (name != condition):
                return
            if fact and isinstance(fact, list):
                items = fact
        for item in items:
            values = {**known, "item": item}
            suggestion = self.suggestion and self.suggestion.format(**values)
            path, reason = self.path.format(**values), self.reason.format(**values)
            yield Consequence(self, path, reason, suggestion)


@dataclass(frozen=True)
class Consequence:
    """A rule that applies to a job, with its texts filled in."""

    rule: OracleRule
    path: str
    reason: str
    suggestion: str | None

    def problem(self) -> Problem | None:
        """The problem that `check` reports; None if the job simply runs as requested."""
        severity, source = self.rule.severity, self.rule.source
        if severity is None:
            return None
        problem = Problem(self.path, self.reason, self.suggestion, severity=severity)
        return problem._replace(source=source, rule=self.rule.id)


def check(job: JobSpec, options: Options) -> Iterator[Problem]:
    """Every problem of a job: the oracle's, then those of the request that would be sent.

    Pure, except that the date decides which images still receive patches. Raises
    BackendUnavailable if botocore is not installed and nothing else is wrong.
    """
    options = launched(job, options)
    yield from backend.check_program(job)
    yield from _check_features(job, options)
    problems = [consequence.problem() for consequence in consequences(job, options)]
    for other in preferred(options)[1:]:  # the first is that of `facts`
        alone = replace(other, max_pending=None)
        problems += [consequence.problem() for consequence in consequences(job, alone)]
    reported = list(dict.fromkeys(problem for problem in problems if problem))
    yield from reported
    errors = {problem.path for problem in reported if problem.severity == "error"}
    if errors:  # which may be that one of these is missing: without them nothing can be rendered
        several = options.instance_groups or options.instance_preferences
        kind = options.instance_type or (None if several else _USUAL_TYPE)
        image, where = options.image_uri or "image", region(options) or _USUAL_REGION
        options = replace(options, image_uri=image, region=where, instance_type=kind)
    rendered = request.render(
        job, options, run=_ANY_RUN, bundle=_ANY_BUNDLE, data=_any_data(job, options)
    )
    yield from _check_request(job, options)
    if options.deploy is not None:
        yield from deployment.check_deployment(options)
    try:
        lines = service_model.type_errors(_REQUEST, rendered) if options.request else ()
        wrong = [Problem("sagemaker.request", line) for line in lines]
        refused = wrong or request_problems(rendered)
    except BackendUnavailable:
        if not errors:
            raise
        return
    yield from (problem for problem in refused if problem.path not in errors)


def _any_data(job: JobSpec, options: Options) -> list[DataFolder]:
    """The folders of data that would be uploaded, without reading them."""
    target = options.data_location(_ANY_BUNDLE)
    return [
        DataFolder(name, Path(location), target=target)
        for name, location in local_data(job, options).items()
    ]


def _check_features(job: JobSpec, options: Options) -> Iterator[Problem]:
    """Report what other backends offer, and SageMaker does not with these options."""
    if job.entrypoint.launcher == "python":
        if options.distribution != "none":
            message = "conflicts with `launcher: python`, which starts no ranks"
            yield Problem("sagemaker.distribution", message, "distribution: none")
        if job.preflight and job.resources.nodes > 1:
            message = "the network test requires torchrun, which `launcher: python` does not use"
            yield Problem("preflight", message, "remove it, or use launcher: torchrun")
    for name, channel in backend.staged(job).items():
        key = f"sagemaker.channels.{name}"
        hint = {
            "node": "remove `stage`: SageMaker copies each channel to every node",
            "shard": f"remove `stage`, and set {key}.s3_distribution: ShardedByS3Key",
            "shared": f"remove `stage`, and set {key}.input_mode: FastFile, which copies nothing",
        }[channel.stage or ""]
        yield Problem(f"data.{name}.stage", "SageMaker copies the data to the nodes itself", hint)
    if (job.profile or "").startswith("nsys") and options.distribution != "none":
        message = "nsys needs ranks started by deploykit, but here SageMaker's toolkit starts them"
        yield Problem("profile", message, "use PyTorch's own profiler: torch:20:25")
    yield from _check_packages(job, options)
    if checks.DEBUGGER in job.env:
        message = "editors cannot connect to SageMaker's containers"
        yield Problem(
            f"env.{checks.DEBUGGER}", message, "remove --debugger, or run the job locally"
        )
    local = {name: job.data[name] for name in local_data(job, options)}
    yield from backend.missing_data(replace(job, data=local))
    for name, channel in local.items():
        yield from data_folder.errors(name, channel.path)
    if job.log_limit != backend.LOG_LIMIT:
        message = "is not enforced on SageMaker: CloudWatch stores all output, which AWS bills for"
        yield Problem("log_limit", message, severity="warning")
    if job.keep_checkpoints is not None:
        message = "has no effect on SageMaker, which copies every checkpoint to S3"
        yield Problem("keep_checkpoints", message, severity="warning")


def _check_packages(job: JobSpec, options: Options) -> Iterator[Problem]:
    """Report a uv project that does not travel, and another PyTorch in it than the image's."""
    installed, project = request.installed(job), job.environment and job.environment.uv
    if project and not (installed and "project" in installed):
        message = f"{project} is not in the source folder {job.source}, so it is not sent"
        yield Problem("environment.uv", message, "set source to a folder that contains it")
    if installed is None:
        return
    yield from environments.on_nodes_problems(job, installed)
    if options.network_isolation:
        message = "an isolated container cannot download the packages that the job needs"
        hint = "set network_isolation: false, or use an image with the packages"
        yield Problem("sagemaker.network_isolation", message, hint)
    image = catalog.parse_image(options.image_uri or "")
    own = image.minor if image else catalog.minor(options.framework_version or "")
    locked = environments.locked_torch(job, installed)
    if locked and own and catalog.minor(locked) != own:
        message = f"the lock file has PyTorch {locked}, but the image has {own}"
        hint = f"run `uv lock --upgrade-package 'torch=={own}.*'`, or use an image with {locked}"
        key = "image_uri" if image else "framework_version"
        yield Problem(f"sagemaker.{key}", message, hint, severity="warning")


def _check_request(job: JobSpec, options: Options) -> Iterator[Problem]:
    """Report fields of `request` that another key sets."""
    if not options.request:
        return
    planned = replace(options, request={})
    data = _any_data(job, planned)
    own = dict(request.leaves(request.render(job, planned, run="", bundle="", data=data)))
    for path, value in request.leaves(options.request):
        keys = {key for field, key in _KEYS.items() if f"{path}.".startswith(f"{field}.")}
        if keys:
            yield Problem(f"sagemaker.request.{path}", f"is set by deploykit; use {keys.pop()}")
        elif path in own:
            yield Problem(f"sagemaker.request.{path}", f"is set by deploykit to {own[path]!r}")
        elif isinstance(value, Mapping):
            yield Problem(f"sagemaker.request.{path}", "is empty", "remove it")


def consequences(job: JobSpec, options: Options, today: dt.date | None = None) -> list[Consequence]:
    """The consequences of every rule that applies, in the order of `rules`.

    `today` decides which images still receive patches; the default is today's date in UTC.
    """
    known = facts(job, options, today or dt.datetime.now(tz=dt.UTC).date())
    every_rule = (rule for group in rules().values() for rule in group)
    return [consequence for rule in every_rule for consequence in rule.apply(known)]


@cache
def rules() -> Mapping[str, tuple[OracleRule, ...]]:
    """All rules, under the headings of the reference."""
    return read(Path(__file__).with_name("rules.toml").read_text(encoding="utf-8"))


def setting_rules() -> Iterator[SettingRule]:
    """Every rule by its id; see `base.Capabilities.setting_rules`."""
    for rule in (rule for group in rules().values() for rule in group):
        yield SettingRule(
            rule.id, rule.path, rule.verdict.value, rule.reason, rule.suggestion, rule.source
        )


def read(text: str) -> Mapping[str, tuple[OracleRule, ...]]:
    """The rules of a file.

    Raises TypeError for an unknown or missing key, ValueError for a rule without one verdict, and
    KeyError for an unknown beginning of a source.
    """
    groups = tomllib.loads(text).values()
    return {
        group.pop("heading"): tuple(_rule(name, **table) for name, table in group.items())
        for group in groups
    }


def _rule(name: str, *, source: str, **table: Any) -> OracleRule:
    (verdict,) = (verdict for verdict in Verdict if verdict.name.lower() in table)
    reason, source = table.pop(verdict.name.lower()), source.format(**_SOURCES)
    return OracleRule(id=name, verdict=verdict, reason=reason, source=source, **table)


def request_problems(rendered: Mapping[str, Any]) -> list[Problem]:
    """What in a CreateTrainingJob request the service would refuse, by keys of the job file.

    Raises BackendUnavailable if botocore is not installed.
    """
    return [_problem(*each) for each in service_model.violations(_REQUEST, rendered)]


def _problem(path: str, message: str, hint: str) -> Problem:
    """The problem of a violation, by the key of the job file that it comes from."""
    if path in _COMBINED:
        return Problem(
            "env", f"SageMaker: {_COMBINED[path]} {message}", "shorten or remove some of them"
        )
    for field, key in _KEYS.items():
        if path == field or path.startswith((f"{field}.", f"{field}[")):
            inner = path[len(field) :]
            if key == "env":
                return Problem(key + inner, f"SageMaker: {message}", hint or None)
            return Problem(key, f"SageMaker: {inner}{' ' * bool(inner)}{message}", hint or None)
    return Problem("sagemaker", f"SageMaker: {path} {message}", hint or None)


def facts(job: JobSpec, options: Options, today: dt.date) -> dict[str, Any]:
    """What the rules ask about a job, by the names that they use.

    The settings of the job file by their keys, and what follows from them. A list has an item for
    each part of the job to which a rule applies. `today` decides which images still receive
    patches. With `instance_groups`, facts about hardware are those of the group that trains; with
    `instance_preferences`, those of the first.
    """
    where, kind = region(options), options.training_type
    return {
        **vars(job),
        **vars(job.resources),
        **vars(options),
        "region": where,
        "training_type": kind,
        **_launch_facts(job, options),
        **_instance_facts(job, options),
        **_hardware_facts(job, kind),
        **_image_facts(options.image_uri or "", where),
        **_version_facts(options, where or "", today),
        **_service_facts(job, options, where),
        **_data_facts(job, options),
    }


def _launch_facts(job: JobSpec, options: Options) -> dict[str, Any]:
    distribution, world_size = options.distribution, job.resources.world_size
    nodes, ranks = job.resources.nodes, job.resources.processes
    torch_distributed = distribution == "torch_distributed"
    smp = distribution == "smdistributed.modelparallel"
    parameters = options.model_parallel.parameters() if options.model_parallel else {}
    return {
        "ranks_per_node": ranks,
        "ranks": f"{units.plural(ranks, 'rank')} on "
        + (f"each of {nodes} nodes" if nodes > 1 else "one node"),
        "world_size": world_size,
        "many_nodes": nodes > 1,
        "many_ranks": world_size > 1,
        "plain": job.entrypoint.launcher == "python",
        "torch_distributed": torch_distributed,
        "mpi": distribution == "mpi",
        "no_launcher": distribution == "none",
        "pytorchddp": distribution == "pytorchddp",
        "smddp": distribution in DATA_PARALLEL,
        "smp": smp,
        "mpirun": distribution in MPIRUN,
        "launched_by_type": distribution in DATA_PARALLEL or smp,
        "torchrun": torch_distributed or smp,
        "uneven_degrees": [
            name
            for name, degree in parameters.items()
            if name.endswith("_degree") and degree and world_size % degree
        ],
        "overwritten_variables": list(filter(_OVERWRITTEN.fullmatch, job.env)),
    }


def _instance_facts(job: JobSpec, options: Options) -> dict[str, Any]:
    groups = options.instance_groups
    names = [group.name for group in groups]
    training = next((g for g in groups if g.name == options.distribution_group), None)
    types = [options.instance_type] if options.instance_type else []
    if groups:
        types = [group.instance_type for group in groups]
    preferences = [one.instance_type for one in options.instance_preferences]
    types += preferences
    return {
        "types": types,
        "types_with_nvme": [kind for kind in dict.fromkeys(types) if hardware.of(kind).nvme],
        "types_of_unknown_hardware": [
            kind
            for kind in dict.fromkeys(types)
            if kind not in hardware.table() and _is_of_botocore(kind)
        ],
        "group": training,
        "group_size": training.instance_count if training else None,
        "group_of_other_size": training is not None
        and training.instance_count != job.resources.nodes,
        "several_groups": len(groups) > 1,
        "other_groups": [group.name for group in groups if group != training],
        "errors_of_the_group_name": _group_name_errors(options.distribution_group, names),
        "duplicate_preferences": sorted({t for t in preferences if preferences.count(t) > 1}),
        "preferences_with_plans": [
            one.instance_type for one in options.instance_preferences if one.training_plan
        ],
        "conflicts_with_preferences": [
            key for key in ("instance_type", "instance_groups", "spot") if getattr(options, key)
        ],
        "duplicate_groups": sorted({name for name in names if names.count(name) > 1}),
        "cpus_and_memory": [
            key for key in ("cpus_per_node", "memory") if getattr(job.resources, key) is not None
        ],
        "other_volume_size": options.volume_size != Options.volume_size,
    }


def _is_of_botocore(kind: str) -> bool:
    """Whether the service offers the type; any other is an error of its own."""
    try:
        return kind in service_model.shapes()["TrainingInstanceType"]["enum"]
    except BackendUnavailable:
        return False


def _group_name_errors(wanted: str | None, names: Sequence[str]) -> list[str]:
    if not names or wanted in names:
        return []
    if wanted is None:
        return ["is required with instance_groups: it names the group that trains"]
    hint = did_you_mean(wanted, names)
    return [f"{wanted} is not in instance_groups{f' ({hint})' if hint else ''}"]


def _hardware_facts(job: JobSpec, kind: str) -> dict[str, Any]:
    wanted = job.resources.gpus_per_node
    known, has_gpu = hardware.of(kind), catalog.has_gpu(kind)
    gpus = known.gpus
    enough = catalog.types_with_gpus(wanted)
    return {
        "gpus": gpus,
        "has_gpu": has_gpu,
        "has_neuron": catalog.has_neuron(kind),
        "has_efa": known.efa is True,
        "unknown_efa": bool(kind) and known.efa is None,
        "gpu": known.gpu,
        "capability": ".".join(map(str, known.capability or ())),
        "without_gpus": bool(kind) and not has_gpu,
        "too_few_gpus": 0 < (gpus or 0) < wanted,
        "gpus_instead": f"gpus_per_node: {gpus}" + (f", or instance_type: {enough}" * bool(enough)),
        "shared_gpus": 0 < (gpus or 0) < job.resources.processes,
        "trainium": kind.startswith("ml.trn"),
        "type_with_smddp": kind in catalog.SMDDP_TYPES,
        "type_without_smddp": kind == "ml.p5.48xlarge",
        "type_with_smp": catalog.SMP_TYPES.fullmatch(kind) is not None,
    }


def _image_facts(name: str, job_region: str | None) -> dict[str, Any]:
    """`image` is what the name of `image_uri` says; None if it is not an AWS image."""
    image, where = catalog.parse_image(name), catalog.ecr_region(name)
    return {
        "image": image,
        "unknown_image": bool(name) and image is None,
        "smp_image": image is not None and image.smp,
        "cpu_image": image is not None and image.cpu,
        "image_with_cuda_121": "2.0.1-gpu-py310-cu121" in name,
        "image_without_mpi4py": image is not None and image.repository == "pytorch",
        "image_region": where,
        "image_outside_ecr": bool(name) and where is None,
        "image_in_other_region": bool(where) and where != job_region,
    }


def _version_facts(options: Options, where: str, today: dt.date) -> dict[str, Any]:
    """`version` is PyTorch of AWS's own image, as chosen; empty with `image_uri`."""
    version = "" if options.image_uri is not None else options.framework_version or ""
    smp = options.distribution == "smdistributed.modelparallel"
    python = catalog.VERSIONS.get(version)
    if smp:
        python = catalog.SMP_IMAGES.get(version, (None, None))[0]
    image = catalog.parse_image(options.image_uri or "")
    minor = image.minor if image else catalog.minor(version)  # empty if unknown
    cuda = image.cuda if image else _cuda(version, smp=smp)
    kind, type_name = hardware.of(options.training_type), options.training_type
    patched_until = catalog.PATCHED_UNTIL.get(minor)
    unpatched = patched_until is not None and patched_until < today
    return {
        "version": version,
        "version_or_python": options.framework_version or options.py_version,
        "known_version": version in catalog.VERSIONS,
        "version_with_smddp": version in catalog.SMDDP_VERSIONS,
        "version_with_smp": version in catalog.SMP_IMAGES,
        "version_without_torchrun": version in catalog.NOT_TORCHRUN,
        "pythons_instead": [python] if python and options.py_version not in {None, python} else [],
        "minor": minor,
        "release_without_smddp": bool(minor)
        and tuple(map(int, minor.split("."))) >= _WITHOUT_SMDDP,
        "patched_until": patched_until,
        "keys_of_unpatched_images": [f"sagemaker.{'framework_version' if version else 'image_uri'}"]
        * unpatched,
        "key_of_the_image": f"sagemaker.{'image_uri' if image else 'framework_version'}",
        "cuda": ".".join(map(str, cuda or ())),
        "gpu_too_new": catalog.is_too_new(kind, minor),
        "gpu_too_old": catalog.is_too_old(kind, cuda),
        "gpu_may_be_too_old": catalog.may_be_too_old(kind, cuda),
        "arm_host": kind.architecture == hardware.ARM,
        "image_of_aws": bool(version) or image is not None,
        "cpu_image_instead": catalog.later_image(
            version, where or _USUAL_REGION, type_name or _USUAL_TYPE
        ),
        "image_hint": catalog.image_hint(version, where or _USUAL_REGION, type_name or _USUAL_TYPE),
        "patched_hint": "a type with newer GPUs, such as ml.g5.12xlarge"
        if kind.capability and kind.capability < catalog.TURING
        else catalog.image_hint("", where or _USUAL_REGION, type_name or _USUAL_TYPE),
        **_version_hints(type_name),
        "region_with_images": catalog.has_smp(where) if smp else catalog.account(where),
    }


def _cuda(version: str, *, smp: bool) -> tuple[int, int] | None:
    """CUDA of the image that `framework_version` selects; None if that is unknown."""
    if not smp:
        return catalog.CUDA.get(catalog.minor(version)) if version else None
    name = catalog.SMP_IMAGES.get(version, ("", ""))[1].removeprefix("cu")
    return (int(name[:2]), int(name[2:])) if name else None


def _version_hints(kind: str) -> dict[str, str]:
    """For hints: the version to choose for a library, on a type where it can start."""
    usual = {"smddp_version": "2.2.0", "smp_version": "2.5.1", "torchrun_version": "2.5.1"}
    on_type = ", on a type such as ml.p4d.24xlarge"
    return {
        name: f"framework_version: {version}" + on_type * (not catalog.can_start(version, kind))
        for name, version in usual.items()
    }


def _service_facts(job: JobSpec, options: Options, where: str | None) -> dict[str, Any]:
    limit = job.resources.time_limit
    words = backend.command(job, request.installed(job))
    arguments = sum(map(len, argument_vector(words).values()))
    network = {"subnets": options.subnets, "security_group_ids": options.security_group_ids}
    arns = {
        key: (getattr(options, key) or "").split(":")
        for key in ("kms_key", "volume_kms_key", "output_kms_key", "training_plan")
    }
    patterns = options.metric_definitions
    secrets = {name: value for name, value in job.env.items() if checks.is_secret(value)}
    profiler = options.profiler_interval is not None
    return {
        "valid_region": re.fullmatch(REGION.regex, where or "") is not None,
        "long_time_limit": limit > 28 * 24 * 3600,
        "keys_beyond_the_sdk": options.beyond_sdk,
        "sent_by_the_sdk": options.sender == "sdk",
        "long_keep_alive": (options.keep_alive or 0) > 60 * 60,
        "sufficient_wait": (options.max_wait or 0) >= limit,
        "may_restart": options.spot or job.retries > 0,
        "lengths_over_the_limit": [str(arguments)] * (arguments > _LONGEST_ARGUMENTS),
        "missing_network_keys": [
            key for key in network if not network[key] and any(network.values())
        ],
        "arns_of_other_regions": [
            key for key, arn in arns.items() if arn[0] == "arn" and arn[3:4] != [where]
        ],
        "reserved_tags": [name for name in options.tags if name.lower().startswith("aws:")],
        "unusable_metrics": [name for name in patterns if not has_group(patterns[name])],
        "profiler": profiler,
        "known_interval": options.profiler_interval in _INTERVALS,
        "region_without_profiler": where in _WITHOUT_PROFILER,
        "profiler_keys": ["profiler_interval"] * profiler + ["debugger"] * options.debugger,
        "source_is_a_channel": options.source_is_a_channel,
        "secrets": list(secrets),
        "environment_elsewhere": job.environment is not None and job.environment.uv is None,
        "unreachable_secrets": [
            name for name, value in secrets.items() if value.split(":")[1] not in _SECRETS
        ],
    }


def _data_facts(job: JobSpec, options: Options) -> dict[str, Any]:
    """The parts of `data` and of `channels` that a rule applies to, by name or by path."""

    def channels(matches: Callable[[Channel], object]) -> list[str]:
        return [name for name, channel in options.channels.items() if matches(channel)]

    pipes = channels(lambda c: c.input_mode == "Pipe")
    file_systems = channels(lambda c: c.file_system_id is not None)
    wrapped = channels(lambda c: c.compression != "None" or c.record_wrapping != "None")
    manifests = channels(lambda c: c.s3_data_type == "AugmentedManifestFile")
    with_attributes = channels(lambda c: c.attribute_names)
    usable = channels(
        lambda c: c.s3 is None and c.input_mode == "File" and c.directory_path is not None
    )
    local = local_data(job, options)
    uploaded = {f"data.{name}" for name in local}
    replaced = {f"data.{name}" for name in [*channels(lambda c: c.s3 is not None), *file_systems]}
    names = channel_names(job, options)
    upper = [name.upper() for name in names]
    buckets = {path: place.split("/")[2] for path, place in backend.addresses(job).items()}
    buckets["sagemaker.bucket"] = options.bucket
    groups = {group.name for group in options.instance_groups}
    return {
        "pipes": pipes,
        "pipe_settings_without_pipe": [name for name in wrapped if name not in pipes],
        "manifests_without_pipe": [name for name in manifests if name not in pipes],
        "channels_with_wrong_attributes": [
            name for name in options.channels if (name in manifests) != (name in with_attributes)
        ],
        "file_systems": file_systems,
        "file_systems_with_wrong_keys": [name for name in file_systems if name not in usable],
        "channels_of_unknown_groups": channels(lambda c: set(c.instance_groups) - groups),
        "channels_without_location": [
            name
            for name in options.channels
            if name not in file_systems and channel_location(job, options, name) is None
        ],
        "channels_with_the_same_variable": [
            name for name in options.channels if upper.count(name.upper()) > 1
        ],
        "code_channel": "code" in names,
        "locations_outside_s3": [
            path
            for path, location in backend.locations(job).items()
            if re.fullmatch(S3.regex, location) is None and path not in replaced | uploaded
        ],
        "folders_read_as_manifests": [
            name for name in local if options.channel(name).s3_data_type != "S3Prefix"
        ],
        "impossible_buckets": [
            path for path, name in buckets.items() if IMPOSSIBLE_BUCKET.search(name)
        ],
    }
