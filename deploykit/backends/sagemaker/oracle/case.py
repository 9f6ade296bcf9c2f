"""A job as facts: what the rules of the oracle ask about it, by the names that they use.

Facts are attributes of `Case`: computed at once where they are cheap and used by several rules,
else when a rule asks. A list has one item for each part of the job that a rule applies to.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable, Sequence
from operator import attrgetter

from deploykit.backends import base as backend
from deploykit.backends.sagemaker import catalog, sections
from deploykit.backends.sagemaker.options import (
    DATA_PARALLEL,
    MPIRUN,
    Options,
    channel_location,
    channel_names,
    region,
)
from deploykit.backends.sagemaker.request import argument_vector
from deploykit.backends.sagemaker.sections import S3, Channel, InstanceGroup
from deploykit.doctor import aws_names
from deploykit.job import checks
from deploykit.job.model import JobSpec
from deploykit.job.spelling import did_you_mean

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
        return [name for name in patterns if not sections.has_group(patterns[name])]

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
