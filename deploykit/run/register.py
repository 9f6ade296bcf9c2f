"""Register a packaged model with what it comes from: its run, checkpoint, commit, data, metrics.

The tracker of the run is one registry, if it has one; a backend may offer another.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploykit.backends import base as backend
from deploykit.backends.deployment import Package, RegistrationPlan
from deploykit.job import file as jobfile
from deploykit.job.decode import decode, read_json
from deploykit.lib.errors import NotFound, UsageError
from deploykit.observe.trackers.contract import ModelVersion, Registration
from deploykit.run import evaluation, export, lifecycle, registry, tracking
from deploykit.run.registry import Run

APPROVALS = ("pending", "approved", "rejected")
_NAME = re.compile(registry.RUN_ID)
"""What every registry takes as a name."""
_OFFER = "plan_registration"


@dataclass(frozen=True)
class Registrations:
    """A model, and the registries that get it. Nothing has been sent."""

    model: Registration
    row: Run | None
    """Its run, if its tracker gets the model."""
    plan: RegistrationPlan | None

    def data(self) -> Iterator[dict[str, Any]]:
        """What is sent where, as JSON."""
        if self.row is not None:
            kind = tracking.model_registry(self.row)
            yield {"registry": kind, **tracking.registration(self.row, self.model)}
        if self.plan is not None:
            where = {"registry": self.plan.backend, "target": self.plan.target}
            yield {**where, "package": self.plan.archive, "requests": self.plan.data}

    def send(self) -> Iterator[ModelVersion]:
        """Register the model in each registry. What one has already is not sent again."""
        if self.row is not None:
            yield tracking.register(self.row, self.model)
        if self.plan is not None:
            engine = backend.require(self.plan.backend, _OFFER)
            with export.archived(self.model.package) as archive:
                yield engine.register(self.plan, archive)


def prepare(
    package: Package,
    name: str | None,
    approval: str | None,
    *,
    backend_name: str | None = None,
    job: Path | None = None,
) -> Registrations:
    """What will be sent where: to the tracker of the run, and to a backend's registry.

    The backend is `backend_name`, else that of the run, if it has a registry. Its section is that
    of the job file `job`, else of the run, else of the default job file. Raises UsageError if there
    is no registry, and JobFileError for problems of the section.
    """
    row = run_of(package)
    if name is not None and _NAME.fullmatch(name) is None:
        hint = "use up to 63 letters and digits, with single hyphens between them"
        raise UsageError(f"invalid name {name!r}", hint=hint)
    model = _registration(package, row, name, approval)
    tracked = row if row is not None and tracking.model_registry(row) else None
    chosen = backend_name
    if chosen is None and row is not None and backend.offers(backend.find(row.backend), _OFFER):
        chosen = row.backend
    plan = None
    if chosen is not None:
        engine = backend.require(chosen, _OFFER)
        plan = engine.plan_registration(_options(chosen, row, job), package, model)
    if plan is None and tracked is None:
        engines = (each for each in backend.names() if backend.offers(backend.find(each), _OFFER))
        raise UsageError(
            f"no registry found for the model of {package.run}: its job has no tracker with a "
            "registry",
            hint="add track: {mlflow: https://...} to the job file, or choose a backend: "
            + ", ".join(f"--backend {each}" for each in engines),
        )
    return Registrations(model, tracked, plan)


def _options(name: str, row: Run | None, job: Path | None) -> Any:
    """The section of a backend."""
    own = row.job_data().get(name) if row is not None and row.backend == name else None
    if own is not None and job is None:
        options, problems = decode(backend.find(name).Options, own, name)
        if not problems:
            return options
    return lifecycle.load(job or Path(jobfile.DEFAULT), [], [name]).sections[name]


def run_of(package: Package) -> Run | None:
    """The run of a package, if it is in the registry of this machine."""
    return registry.lookup(package.run).get(package.run)


def _registration(
    package: Package, row: Run | None, name: str | None, approval: str | None
) -> Registration:
    """What is registered: by default under the name of the run's job.

    Raises NotFound for a package of an unknown run without a name.
    """
    manifest = read_json(package.folder / export.MANIFEST)
    if name is None and row is None:
        raise NotFound(
            f"this machine has no record of {package.run}, the run of this package",
            hint="set the model's name with --name NAME",
        )
    versions = manifest.get("versions") or {}
    facts = {
        "run": package.run,
        "checkpoint": manifest.get("checkpoint"),
        "backend": manifest.get("backend"),
        "job": str(row.handle) if row and row.handle else None,
        "submitted": manifest.get("submitted"),
        "commit": manifest.get("commit"),
        "source": (manifest.get("bundle") or "")[:12],
        "package": package.hash,
        "deploykit": manifest.get("deploykit"),
        **{f"version.{key}": number for key, number in versions.items()},
    }
    metrics = {}
    if row is not None:
        data = row.job_data().get("data") or {}
        facts |= {f"data.{key}": export.data_path(channel) for key, channel in data.items()}
        points = export.results(row)
        metrics = _evaluated(row, manifest.get("checkpoint"))
        metrics |= {point.name: point.value for point in points if math.isfinite(point.value)}
    return Registration(
        name=name or str(row and row.name),
        package=Path(package.folder),
        hash=package.hash,
        approval=approval or "",
        facts={key: str(fact) for key, fact in facts.items() if fact},
        metrics=metrics,
        job=row.handle if row else None,
    )


def _evaluated(row: Run, checkpoint: str | None) -> dict[str, float]:
    """The numbers of the newest evaluation of a checkpoint, named as `compare` names them."""
    for each in evaluation.of(row):
        if evaluation.parent(each) == (row.run, checkpoint) and (known := evaluation.result(each)):
            return {f"evaluation {name}": value for name, value in known.numbers.items()}
    return {}
