"""A deployment on any backend: a package, the requests that serve it, and a record.

A deployment is one state of an endpoint: the model and the settings that it serves. Deploying
again, with another model or other settings, adds a deployment; `rollback` returns to the one
before. A batch job is an endpoint that ends.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from deploykit.cost.estimate import Estimate
from deploykit.lib import units
from deploykit.observe.trackers.contract import Registration


class Package(NamedTuple):
    """A folder that `deploykit export` wrote."""

    folder: Path
    hash: str
    """SHA-256 of the names and contents of its files."""
    run: str
    torch: str
    """The PyTorch version that loaded it; empty if the manifest has none."""


class Request(NamedTuple):
    """One request of a plan, as it is sent."""

    service: str
    """As boto3 names it."""
    operation: str
    """As the API names it, such as ``CreateEndpoint``."""
    parameters: Mapping[str, Any]
    later: bool = False
    """Sent once the endpoint is in service."""


class Machines(NamedTuple):
    """The machines behind one variant of an endpoint."""

    instance_type: str
    """Empty for an endpoint without instances."""
    instances: int
    """Instances at the start; without instances, the requests for which it stays loaded."""
    most: int
    """Instances at most; without instances, the requests at the same time."""
    memory: int = 0
    """MB of an endpoint without instances."""


class Phase(Enum):
    """The state of an endpoint, or of a batch job."""

    SENDING = "sending"
    CREATING = "creating"
    UPDATING = "updating"
    IN_SERVICE = "in service"
    RUNNING = "running"
    COMPLETED = "completed"
    STOPPED = "stopped"
    FAILED = "failed"
    REPLACED = "replaced"
    """The endpoint serves another deployment."""
    DELETING = "deleting"
    DELETED = "deleted"
    """The endpoint is gone; its model and configuration may remain."""
    REMOVED = "removed"
    """Nothing remains."""
    UNKNOWN = "unknown"

    @property
    def settled(self) -> bool:
        """Return whether it stays in this phase until someone changes it."""
        return self is Phase.IN_SERVICE or self.ended or self is Phase.FAILED

    @property
    def ended(self) -> bool:
        """Return whether it has ended."""
        return self in _ENDED


_ENDED = {Phase.COMPLETED, Phase.STOPPED, Phase.REPLACED, Phase.DELETED, Phase.REMOVED}


class Condition(NamedTuple):
    """The state of an endpoint, as the target reports it."""

    phase: Phase
    native: str = ""
    reason: str = ""
    config: str = ""
    """The configuration that it serves, or is changing to."""
    details: Mapping[str, Any] = {}
    """Instances and weights of its variants, by their names."""


class Scale(NamedTuple):
    """Changes to a running endpoint; None and empty leave a setting as it is."""

    instances: int | None = None
    """Of its first variant."""
    least: int | None = None
    most: int | None = None
    """Limits of autoscaling."""
    weights: Mapping[str, int] = {}
    """Share of the requests, by variant."""


class ScalePlan(NamedTuple):
    """An endpoint after a `Scale`."""

    machines: tuple[Machines, ...]
    estimate: Estimate
    """Its cost from now over `seconds`, or over a month."""
    seconds: int | None
    """Until a schedule deletes it; None: never."""

    @property
    def cost(self) -> str:
        """The cost, in one line."""
        return _rate(self.estimate, self.seconds)


def _rate(estimate: Estimate, seconds: int | None) -> str:
    return estimate.rate("a month" if seconds is None else f"in {units.exact_span(seconds)}")


class Deployment(NamedTuple):
    """A row of the registry: what was deployed, and its last known state."""

    name: str
    """Of the endpoint, or of the batch job."""
    config: str
    """Of the endpoint's configuration, which no other deployment has."""
    backend: str
    target: str
    """Its location, such as a region."""
    account: str
    """The account that pays for it."""
    mode: str
    """``real-time``, ``serverless``, ``asynchronous`` or ``batch``."""
    run: str
    """The run whose model it serves."""
    model: str
    """The model's name at the target."""
    package: str
    """The hash of the package."""
    archive: str
    """The address of the package."""
    machines: str
    """JSON; see `machine_list`."""
    requests: str
    """JSON; see `request_list`."""
    settings: str
    """JSON: what the backend needs to ask about it, such as a profile."""
    created: float
    """When it was sent first, in seconds since the epoch."""
    activated: float
    """When the endpoint was last told to serve it; the largest is the current one."""
    phase: str = Phase.SENDING.value
    native: str = ""
    reason: str = ""
    pending: int = 0
    """1: the requests that are sent later have not been sent."""
    ended: float | None = None
    """When the endpoint was found to be gone, or the batch job to have ended."""

    @property
    def is_batch(self) -> bool:
        return self.mode == "batch"

    @property
    def machine_list(self) -> list[Machines]:
        """The machines of each variant."""
        return [Machines(*each) for each in json.loads(self.machines)]

    @property
    def request_list(self) -> list[Request]:
        """The requests as they were planned."""
        return [Request(*each) for each in json.loads(self.requests)]

    @property
    def given(self) -> dict[str, Any]:
        """The backend's settings."""
        return dict(json.loads(self.settings))


class DeploymentPlan(NamedTuple):
    """Everything that `deploy` will send. A dry run prints `text`."""

    backend: str
    target: str
    account: str
    name: str
    config: str
    mode: str
    model: str
    package: Package
    archive: str
    """The address to which the package is uploaded."""
    requests: tuple[Request, ...]
    machines: tuple[Machines, ...]
    options: Any
    settings: Mapping[str, Any]
    """Settings that later commands need."""
    estimate: Estimate
    """Its cost over `seconds`, or over a month."""
    seconds: int | None
    """After which a schedule deletes it; None: never."""
    summary: str = ""
    """A one-line summary of what will be billed."""

    @property
    def cost(self) -> str:
        """The cost, in one line."""
        return _rate(self.estimate, self.seconds)

    @property
    def text(self) -> str:
        """The requests in the order in which they are sent, as JSON."""
        return json.dumps(self.data, indent=2) + "\n"

    @property
    def data(self) -> list[dict[str, Any]]:
        """The requests as plain data."""
        return [
            {"service": each.service, "operation": each.operation, "request": each.parameters}
            | ({"when": "in service"} if each.later else {})
            for each in self.requests
        ]


def recorded(plan: DeploymentPlan, now: float) -> Deployment:
    """The row of a plan that is sent now."""
    return Deployment(
        name=plan.name,
        config=plan.config,
        backend=plan.backend,
        target=plan.target,
        account=plan.account,
        mode=plan.mode,
        run=plan.package.run,
        model=plan.model,
        package=plan.package.hash,
        archive=plan.archive,
        machines=json.dumps(plan.machines),
        requests=json.dumps(plan.requests),
        settings=json.dumps(plan.settings),
        created=now,
        activated=now,
        pending=int(any(each.later for each in plan.requests)),
    )


class RegistrationPlan(NamedTuple):
    """Everything that `register` will send to a registry for what it does not have."""

    backend: str
    target: str
    package: Package
    archive: str
    """The address to which the package is uploaded."""
    requests: tuple[Request, ...]
    options: Any
    model: Registration

    @property
    def data(self) -> list[dict[str, Any]]:
        """The requests as plain data."""
        return [
            {"service": each.service, "operation": each.operation, "request": each.parameters}
            for each in self.requests
        ]


class Billed(NamedTuple):
    """An endpoint that exists, as its target describes it, and what it costs."""

    name: str
    target: str
    account: str
    run: str
    """The run whose model it serves; empty if its tag was removed."""
    native: str
    created: float
    """Seconds since the epoch."""
    machines: tuple[Machines, ...]
    """Those that run now."""
    hourly: Decimal | None
    """The price of an hour of them; None if it is unknown."""
    currency: str
    used: float | None
    """When the last request came, to the hour; None: none, or unknown."""
    used_days: int | None
    """The days in which requests were looked for; None: they are unknown."""
    until: float | None
    """When its schedule deletes it; None: never, or unknown."""
    until_known: bool
