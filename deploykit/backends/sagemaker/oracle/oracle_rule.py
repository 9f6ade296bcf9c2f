"""`OracleRule`, and the facts about a job that its predicate reads."""

from __future__ import annotations

import datetime as dt
import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from deploykit.backends.sagemaker import catalog, channels
from deploykit.backends.sagemaker.options import DATA_PARALLEL, MPIRUN, Options, region
from deploykit.backends.sagemaker.sections import InstanceGroup
from deploykit.model import JobSpec, Problem


class Verdict(enum.Enum):
    """What SageMaker does with a setting."""

    ASKED = "runs as asked"
    OTHER = "runs as something else"
    REFUSED = "refused"
    UNKNOWN = "cannot know"


class Case:
    """A job and the facts derived from it, computed once for all rules.

    `today` decides which images still receive patches. Where `instance_groups` are set, the facts
    about hardware are those of the group that trains.
    """

    def __init__(self, job: JobSpec, options: Options, today: dt.date) -> None:
        self.job = job
        self.options = options
        self.today = today
        self.region = region(options)
        self.channels = channels.names(job, options)
        self.ranks_per_node = job.resources.processes
        self.world_size = job.resources.nodes * self.ranks_per_node
        self._read_distribution(options.distribution)
        self._read_hardware(options)
        self._read_image(options)

    def _read_distribution(self, distribution: str) -> None:
        self.distribution = distribution
        self.data_parallel = distribution in DATA_PARALLEL
        """Whether SageMaker's data parallel library (SMDDP) starts the ranks."""
        self.model_parallel = distribution == "smdistributed.modelparallel"
        self.mpirun = distribution in MPIRUN
        self.torchrun = distribution == "torch_distributed" or self.model_parallel

    def _read_hardware(self, options: Options) -> None:
        self.group: InstanceGroup | None = None
        """The instance group that trains; None without groups, or if none has its name."""
        self.types = [options.instance_type] if options.instance_type else []
        """The instance types of all nodes."""
        self.instance_type = options.training_type
        """The instance type of the nodes that train; empty if it is not determined."""
        if options.instance_groups:
            self.types = [group.instance_type for group in options.instance_groups]
            named = [g for g in options.instance_groups if g.name == options.distribution_group]
            self.group = named[0] if named else None
        accelerators = catalog.accelerators(self.instance_type)
        self.gpus = accelerators.gpus if self.instance_type else None
        """GPUs of each node that trains; None if unknown."""
        self.has_gpu = accelerators.has_gpu
        self.has_neuron = accelerators.has_neuron
        self.has_efa = accelerators.has_efa

    def _read_image(self, options: Options) -> None:
        named = options.image_uri
        self.version = "" if named is not None else options.framework_version or ""
        """PyTorch of AWS's own image, as chosen; empty with `image_uri`."""
        self.image = catalog.parse_image(named) if named else None
        """What the name of `image_uri` says; None if it is not an AWS image."""
        self.unknown_image = named is not None and self.image is None
        self.minor = self.image.minor if self.image else catalog.minor(self.version)
        """PyTorch's version such as ``2.8``; empty if unknown."""
        self.release = tuple(map(int, self.minor.split("."))) if self.minor else ()
        """`minor` as numbers to compare; empty if unknown."""
        self.patched_until = catalog.PATCHED_UNTIL.get(self.minor)
        self.later_image = catalog.later_image(self.version, self.region, self.instance_type)
        """An `image_uri` for `version`, or for the latest PyTorch if the SDK knows `version`."""

    @property
    def ranks(self) -> str:
        """The ranks that the job asks for, in words."""
        nodes, ranks = self.job.resources.nodes, self.ranks_per_node
        return f"{ranks} rank{'s' * (ranks > 1)} on " + (
            f"each of {nodes} nodes" if nodes > 1 else "one node"
        )


@dataclass(frozen=True, kw_only=True)
class OracleRule:
    """One fact about SageMaker. Texts are formats of `case`, `job`, `options` and `item`."""

    id: str
    path: str
    """Key of the job file."""
    verdict: Verdict
    when: Callable[[Case], bool | list[str]] | None
    """Whether the rule applies, or to which items. None: the job file's decoder already refuses
    the setting, and the rule is there for the reference only."""
    reason: str
    nearest: str | None = None
    """The nearest setting that works."""
    source: str
    quiet: bool = False
    """Listed in the reference, but not worth a warning."""

    @property
    def severity(self) -> Literal["error", "warning"] | None:
        """Severity of the problem that `check` reports; None if it reports none."""
        if self.verdict is Verdict.REFUSED:
            return "error"
        return None if self.quiet else "warning"

    def apply(self, case: Case) -> Iterator[Consequence]:
        """One consequence for each item that the rule applies to."""
        applies = self.when(case) if self.when else False
        for item in [""] if applies is True else applies or []:
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
