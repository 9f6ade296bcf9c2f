"""Deployments: models behind endpoints, from the plan to the removal. Nothing here prints.

The registry has a row for each deployment, written before anything is sent and kept until all that
it created is deleted. So after an interruption the same command completes what is missing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from deploykit.backends import base as backend
from deploykit.backends.deployment import (
    Billed,
    Condition,
    Deployment,
    DeploymentPlan,
    Machines,
    Package,
    Phase,
    Scale,
    ScalePlan,
    recorded,
)
from deploykit.cost import cap, money
from deploykit.cost.estimate import Estimate
from deploykit.job import file as jobfile
from deploykit.job.file import JobFile, Overrides, Source
from deploykit.job.model import Problem
from deploykit.lib import paths
from deploykit.lib.deadline import within
from deploykit.lib.errors import (
    BackendUnavailable,
    DeploykitError,
    JobFileError,
    NotFound,
    TimedOut,
    TryAgain,
    UsageError,
)
from deploykit.run import budgets, export, lifecycle, registry
from deploykit.run import state as run_state
from deploykit.run.registry import Run

_TABLE = """
CREATE TABLE IF NOT EXISTS deployments (
    name      TEXT NOT NULL,
    config    TEXT NOT NULL,
    backend   TEXT NOT NULL,
    target    TEXT NOT NULL,
    account   TEXT NOT NULL,
    mode      TEXT NOT NULL,
    run       TEXT NOT NULL,
    model     TEXT NOT NULL,
    package   TEXT NOT NULL,
    archive   TEXT NOT NULL,
    machines  TEXT NOT NULL,
    requests  TEXT NOT NULL,
    settings  TEXT NOT NULL,
    created   REAL NOT NULL,
    activated REAL NOT NULL,
    phase     TEXT NOT NULL,
    native    TEXT NOT NULL,
    reason    TEXT NOT NULL,
    pending   INTEGER NOT NULL,
    ended     REAL,
    PRIMARY KEY (backend, target, account, name, config, created)
)
"""
"""What each column holds: `Deployment`."""
NO_ENDPOINT = (
    "`deploykit deploy RUN -b BACKEND` creates one; call a server on this machine with curl"
)
"""The hint if there is no endpoint."""
_POLL_INTERVAL = 10.0
"""Seconds between two questions whether an endpoint is in service, which takes minutes."""
_MAX_OUTAGE = 900.0
"""Seconds without an answer after which waiting ends."""
_OUTLIVED = "outlived"
"""The setting of an endpoint that was seen after its schedule should have deleted it."""
_DEPLOYED = "machines"
"""The setting of an endpoint that was scaled: its machines as its configuration has them."""
_WITHOUT_ENDPOINT = {Phase.SENDING, Phase.DELETED, Phase.REMOVED}


def package(folder: Path) -> Package:
    """A package of `export`, with the hash of its content. Raises NotFound for another folder."""
    run, torch = origin(folder)
    digest = hashlib.sha256(json.dumps(export.checksums(folder)).encode())
    return Package(folder, digest.hexdigest(), run, torch)


def origin(folder: Path) -> tuple[str, str]:
    """The run of a package of `export`, and the PyTorch that loaded it. Raises NotFound."""
    try:
        manifest = json.loads((folder / export.MANIFEST).read_bytes())
        run, versions = str(manifest["run"]), manifest.get("versions") or {}
        torch = str(versions.get("torch", ""))
    except (OSError, ValueError) as error:
        raise _not_a_package(folder, f"{export.MANIFEST}: {error}") from error
    except (AttributeError, LookupError, TypeError) as error:  # that of another program
        why = f"{export.MANIFEST} was not written by `deploykit export`"
        raise _not_a_package(folder, why) from error
    code = f"code/{export.INFERENCE}"
    if not (folder / code).is_file():
        raise _not_a_package(folder, f"{code} is missing")
    return run, torch


def _not_a_package(folder: Path, why: str) -> NotFound:
    message = f"{folder} is not a package: {why}"
    return NotFound(message, hint="create one with `deploykit export RUN --to FOLDER`")


def every() -> list[Deployment]:
    """All deployments that the registry knows, the newest first."""
    return _select("1", ())


def current(*, removed: bool = False) -> list[Deployment]:
    """The current deployment of each endpoint and batch job, the newest first."""
    newest: dict[tuple[str, str, str, str], Deployment] = {}
    for row in every():
        if removed or row.phase != Phase.REMOVED.value:
            newest.setdefault((row.backend, row.target, row.account, row.name), row)
    return list(newest.values())


def history(backend_name: str, target: str, account: str, name: str) -> list[Deployment]:
    """All deployments of an endpoint that have not been removed, the current one first."""
    return _select(
        "backend = ? AND target = ? AND account = ? AND name = ? AND phase != 'removed'",
        (backend_name, target, account, name),
    )


def get(name: str) -> Deployment:
    """The current deployment of an endpoint. Raises NotFound, also if there are several.

    The target may precede the name, and the account the target: ``us-east-1/digits``.
    """
    rows = [row for row in current() if f"/{_address(row)}".endswith(f"/{name}")]
    if len(rows) == 1:
        return rows[0]
    if rows:
        targets = {row.target for row in rows}
        short = 1 if len(targets) == len(rows) else 0
        names = [_address(row).split("/", short)[-1] for row in rows]
        raise NotFound(f"several endpoints are named {name}", hint=f"use one of {', '.join(names)}")
    known = ", ".join(row.name for row in current())
    hint = f"endpoints: {known}" if known else NO_ENDPOINT
    raise NotFound(f"no endpoint {name!r} was deployed from here", hint=hint)


def _address(row: Deployment) -> str:
    return f"{row.account}/{row.target}/{row.name}"


def _select(condition: str, values: tuple[str, ...]) -> list[Deployment]:
    table = "SELECT count(*) FROM sqlite_master WHERE name = 'deployments'"
    if not any(row[0] for row in registry.query([(table, ())])):
        return []
    text = f"SELECT * FROM deployments WHERE {condition} ORDER BY activated DESC, config"  # noqa: S608 - ours
    return [
        Deployment(*(row[name] for name in Deployment._fields))
        for row in registry.query([(text, values)])
    ]


def _put(*rows: Deployment) -> None:
    """Write rows, each in place of the same one."""
    if not rows:
        return
    columns, marks = ", ".join(Deployment._fields), ", ".join("?" * len(Deployment._fields))
    statement = f"INSERT OR REPLACE INTO deployments ({columns}) VALUES ({marks})"  # noqa: S608 - ours
    with registry.writing() as database:
        database.execute(_TABLE)
        database.executemany(statement, rows)


class Settings(NamedTuple):
    """The settings of a deployment, from a job file or from the job of a run."""

    file: JobFile
    backend: str
    name: str
    """Of the endpoint."""

    @property
    def options(self) -> Any:
        """The backend's section."""
        return self.file.sections[self.backend]

    def check_cost(self, plan: DeploymentPlan) -> list[Problem]:
        """As `check`, for the job's `max_cost` and `budget`."""
        limits = (self.file.job.max_cost, self.file.job.budget)
        return self.file.raise_on(cap.endpoint_problems(*limits, plan.estimate, plan.seconds))

    def check(self, packed: Package | None = None) -> list[Problem]:
        """The warnings. Raises JobFileError with every problem."""
        engine = backend.require(self.backend, "check_deployment")
        return self.file.raise_on(engine.check_deployment(self.options, packed))


def settings(engine_name: str, job: Path | None, run: Run | None, overrides: Overrides) -> Settings:
    """The settings in a job file, by default ``job.yaml`` if it is here, else in the run's job.

    Raises NotFound, UsageError, or JobFileError with every problem.
    """
    default = Path(jobfile.DEFAULT)
    source: Source | None = job or (default if default.exists() else run and run.job_data())
    if not source:
        raise UsageError(
            f"{default} not found, and this machine has no record of the package's run",
            hint="pass the job file with the settings as --job FILE",
        )
    engine = backend.require(engine_name, "check_deployment")
    file = jobfile.load(
        lifecycle.with_defaults(jobfile.read(source, overrides)),
        options={engine_name: engine.Options},
        backends=backend.names,
        check=lambda file: (
            engine.check_deployment(file.sections[engine_name])
            if engine_name in file.sections
            else ()
        ),
    )
    deploy = getattr(file.sections[engine_name], "deploy", None)
    chosen = Settings(file, engine_name, (deploy and deploy.name) or file.job.name)
    chosen.check()
    return chosen


def prepare(chosen: Settings, packed: Package, *, update: bool, ask: bool) -> DeploymentPlan:
    """The plan that serves a package.

    Whether the endpoint exists is as the registry knows it, or with `ask` as its target says;
    `update` says that it does, though it was not deployed from here.
    """
    engine = backend.require(chosen.backend, "plan_deployment")
    options, name = chosen.options, chosen.name
    plan = engine.plan_deployment(options, packed, name=name)
    rows = history(plan.backend, plan.target, plan.account, plan.name)
    if ask and rows:
        rows = refresh(rows)
    earlier = next((row for row in rows if Phase(row.phase) not in _WITHOUT_ENDPOINT), None)
    if plan.mode != "batch" and (earlier or update):
        plan = engine.plan_deployment(options, packed, name=name, exists=True, earlier=earlier)
    limits = {"max_cost": chosen.file.job.max_cost, "budget": chosen.file.job.budget}
    plan = plan._replace(settings={**plan.settings, **limits})
    kept = [until for row in rows if (until := row.given.get("until") or 0) > registry.now()]
    if kept and plan.seconds is None:  # the schedule of an earlier deployment stays
        plan = plan._replace(settings={**plan.settings, "until": max(kept)})
    if earlier and _was_scaled(earlier, plan):
        plan = _as_scaled(plan, engine.plan_scale(earlier, Scale(), plan.seconds))
    return plan


def _was_scaled(earlier: Deployment, plan: DeploymentPlan) -> bool:
    """Whether an endpoint that serves a plan already has other machines; autoscaling sets its own.

    The plan's limits of autoscaling are sent again.
    """
    if any(each.later for each in (*plan.requests, *earlier.request_list)):
        return False
    return earlier.config == plan.config and earlier.machine_list != list(plan.machines)


def _as_scaled(plan: DeploymentPlan, scaled: ScalePlan) -> DeploymentPlan:
    """The plan of an endpoint that serves it already, and was scaled since: it stays as it is."""
    return plan._replace(
        machines=scaled.machines,
        estimate=scaled.estimate,
        settings={
            **plan.settings,
            _DEPLOYED: plan.machines,
            "price": _price(scaled.estimate),
        },
        summary=f"{plan.summary}; changes made by `endpoint scale` are kept",
    )


def _price(estimate: Estimate) -> str | None:
    """The price of an hour of an endpoint, as its settings have it."""
    return None if estimate.unknown else money.exact(estimate.always)


def refresh(rows: Sequence[Deployment]) -> list[Deployment]:
    """The rows with what their targets say, which is recorded too. Raises as `conditions`."""
    return [row for row, _ in with_conditions(rows)]


def with_conditions(rows: Sequence[Deployment]) -> list[tuple[Deployment, Condition]]:
    """As `refresh`, and what the targets say."""
    by_engine: dict[str, list[Deployment]] = {}
    for row in rows:
        by_engine.setdefault(row.backend, []).append(row)
    fresh: dict[Deployment, tuple[Deployment, Condition]] = {}
    for name, own in by_engine.items():
        engine = backend.require(name, "conditions")
        for row, condition in zip(own, engine.conditions(own), strict=True):
            fresh[row] = _with(row, condition), condition
    _update([(row, new) for row, (new, _) in fresh.items() if new != row])
    return [fresh[row] for row in rows]


def _update(changes: Sequence[tuple[Deployment, Deployment]]) -> None:
    """Record new states of rows, unless another process has changed them meanwhile."""
    if not changes:
        return
    statement = (
        "UPDATE deployments SET phase = ?, native = ?, reason = ?, ended = ?, settings = ? "
        "WHERE backend = ? AND target = ? AND account = ? AND name = ? AND config = ? "
        "AND created = ? AND phase = ? AND settings = ?"
    )
    values = [
        (
            *(new.phase, new.native, new.reason, new.ended, new.settings),
            *(row.backend, row.target, row.account, row.name, row.config, row.created, row.phase),
            row.settings,
        )
        for row, new in changes
    ]
    with registry.writing() as database:
        database.executemany(statement, values)


def billed() -> tuple[list[Billed], list[DeploykitError]]:
    """All endpoints that exist, the newest first, also those that other machines deployed.

    Also returns why a location could not be asked.
    """
    rows = [row for row in current() if not row.is_batch]
    endpoints: list[Billed] = []
    errors: list[DeploykitError] = []
    for name in backend.names():
        engine = backend.find(name)
        if not backend.offers(engine, "billed_endpoints"):
            continue
        existing, failures = engine.billed_endpoints([row for row in rows if row.backend == name])
        endpoints += existing
        errors += failures
    for row in rows:  # they end in the registry, too
        with contextlib.suppress(DeploykitError):
            refresh([row])
    return sorted(endpoints, key=lambda one: one.created, reverse=True), errors


def ask_overdue() -> None:
    """Ask about the endpoints whose schedule should have deleted them: until they are found to be
    gone, budgets count them.

    Asks for at most `PATIENCE` seconds, and ignores targets that cannot be reached.
    """
    now = registry.now()
    overdue = [
        row
        for row in current()
        if row.ended is None and not row.is_batch and (row.given.get("until") or now) < now
    ]

    def ask() -> None:
        for row in overdue:
            with contextlib.suppress(DeploykitError):
                refresh([row])

    if overdue:
        with contextlib.suppress(TimeoutError):
            within(run_state.PATIENCE, ask)


def _with(row: Deployment, condition: Condition) -> Deployment:
    """The row in the condition of its endpoint, if the endpoint serves this deployment.

    One that is gone ended when its schedule was due, unless it was seen after that.
    """
    phase, reason = condition.phase, condition.reason
    if condition.config not in ("", row.config):
        if row.phase != Phase.UPDATING.value or phase is Phase.UPDATING:
            return row
        phase, reason = Phase.FAILED, reason or f"the endpoint still serves {condition.config}"
    if phase is Phase.DELETED and row.phase == Phase.SENDING.value:
        return row  # the endpoint was never created
    given, now = row.given, registry.now()
    until = given.get("until") or math.inf
    if not phase.ended and phase is not Phase.DELETING and now > until:
        given[_OUTLIVED] = True
    ended = row.ended or (now if given.get(_OUTLIVED) else min(now, until))
    return row._replace(
        phase=phase.value,
        native=condition.native,
        reason=reason,
        ended=ended if phase.ended else None,
        settings=json.dumps(given) if given != row.given else row.settings,
    )


@contextlib.contextmanager
def _alone(name: str) -> Iterator[None]:
    """Keep other processes from changing the endpoint. Raises TryAgain."""
    with paths.submitting(paths.private_folder(paths.state() / "endpoints" / name), name):
        yield


def deploy(plan: DeploymentPlan, *, update: bool = False) -> Deployment:
    """Send a plan. The same plan again completes what is missing, and creates nothing twice.

    `update`: the endpoint may serve what was not deployed from here. Raises UsageError if its
    budget has too little left, SubmitRefused for a name that belongs to something else, and what
    the backend raises.
    """
    engine = backend.require(plan.backend, "deploy")
    with _alone(plan.name):
        rows = history(plan.backend, plan.target, plan.account, plan.name)
        own = None if update else {plan.config, *(row.config for row in rows)}
        engine.may_deploy(plan, own)
        ask_overdue()
        budget = plan.settings.get("budget")
        falls = budgets.reserve_endpoint(plan, plan.estimate, budget)
        row = _claim(plan, rows)
        try:
            with export.archived(plan.package.folder) as archive:
                engine.deploy(plan, archive, own)
        except DeploykitError as error:
            _put(row._replace(reason=error.message))
            raise
        if falls:
            budgets.lower_endpoint(plan, plan.estimate, budget)
        return _activated(row, rows)


def _claim(plan: DeploymentPlan, rows: Sequence[Deployment]) -> Deployment:
    """The row of a plan, which is written: a new one, or that of the same configuration."""
    row = recorded(plan, registry.now())
    same = next((each for each in rows if each.config == plan.config), None)
    if same is not None:
        row = row._replace(created=same.created)
        if same == rows[0]:  # the current one
            row = row._replace(phase=same.phase, pending=same.pending, activated=same.activated)
    _put(*(_unscaled(each) for each in rows[:1] if each != same), row)
    return row


def _unscaled(row: Deployment) -> Deployment:
    """The row of an endpoint whose autoscaling may have ended: `settled` starts it again."""
    return row._replace(pending=int(any(each.later for each in row.request_list)))


def _activated(row: Deployment, rows: Sequence[Deployment]) -> Deployment:
    """Record that an endpoint was told to serve a deployment, and no other one of `rows`."""
    now, others = registry.now(), [each for each in rows if each.config != row.config]
    phase = Phase.UPDATING if others else Phase.CREATING
    if not Phase(row.phase).settled:
        row = row._replace(phase=phase.value, reason="", ended=None)
    live = (each for each in others if each.phase not in {one.value for one in _WITHOUT_ENDPOINT})
    replaced = Phase.REPLACED.value
    _put(row, *(each._replace(phase=replaced, ended=each.ended or now) for each in live))
    with contextlib.suppress(BackendUnavailable, TryAgain):  # the next question tells
        return refresh([row])[0]
    return row


def settled(row: Deployment, timeout: float | None = None) -> Iterator[Deployment]:
    """Yield the row again and again until the endpoint is in service or has failed.

    Starts its autoscaling then, which needs an endpoint in service. Raises TimedOut after `timeout`
    seconds, NotFound if the endpoint was never created or is removed. An outage after the first
    answer is waited for, but not longer than `_MAX_OUTAGE`.
    """
    until = None if timeout is None else time.monotonic() + timeout
    answered: float | None = None
    while True:
        known = next(each for each in [*_rows_of(row), row] if each.config == row.config)
        try:
            (row,) = refresh([known])
            answered = time.monotonic()
        except (BackendUnavailable, TryAgain):
            if answered is None or time.monotonic() - answered > _MAX_OUTAGE:
                raise
        if row.phase == Phase.SENDING.value:
            message = f"{row.name} was only partly sent" + (f": {row.reason}" * bool(row.reason))
            raise NotFound(message, hint="deploy it again to send the rest")
        if row.phase == Phase.IN_SERVICE.value and row.pending:
            with _alone(row.name):
                backend.require(row.backend, "deploy_later").deploy_later(row)
                row = row._replace(pending=0)
                _put(row)
        yield row
        if Phase(row.phase).settled:
            return
        left = _POLL_INTERVAL if until is None else until - time.monotonic()
        if left <= 0:
            message = f"{row.name} is still {row.phase}"
            raise TimedOut(message, hint="the deployment continues; wait again")
        time.sleep(min(left, _POLL_INTERVAL))


def plan_rollback(row: Deployment, to: str | None = None) -> tuple[Deployment, ScalePlan]:
    """The deployment that an endpoint serves after a rollback, and what it will cost.

    It is the one before the current one, or that of the configuration `to`. The limits of cost and
    the schedule of the endpoint stay. Raises NotFound without such a deployment, and JobFileError
    as `plan_scale`.
    """
    current, *others = _rows_of(row)
    earlier = [each for each in others if each.phase != Phase.SENDING.value]
    chosen = next((each for each in earlier if to in (None, each.config)), None)
    if to == current.config:  # after an interruption, or a failed update
        chosen = current
    if chosen is None:
        known = ", ".join(each.config for each in earlier)
        missing = f"{row.name} was never deployed with the configuration {to}"
        message = missing if to else f"{row.name} has no earlier deployment"
        raise NotFound(message, hint=f"earlier: {known}" if known else None)
    if chosen != current:  # what `scale` changed does not come back
        machines = chosen.given.get(_DEPLOYED) or chosen.machine_list
        chosen = chosen._replace(machines=json.dumps(machines))
    engine = backend.require(row.backend, "plan_scale")
    plan = engine.plan_scale(chosen, Scale(), _seconds_left(current))
    _check_cost(plan, current, "use a cheaper configuration with --to, or a higher {}")
    kept = {name: current.given.get(name) for name in ("max_cost", "budget", "until", _OUTLIVED)}
    settings = {**chosen.given, **kept, "price": _price(plan.estimate)}
    return chosen._replace(settings=json.dumps(settings)), plan


def rollback(row: Deployment, to: str | None = None) -> Deployment:
    """Let an endpoint serve its earlier deployment again, or that of the configuration `to`.

    Raises as `plan_rollback`, and UsageError as `deploy`.
    """
    with _alone(row.name):
        rows = _rows_of(row)
        chosen, plan = plan_rollback(row, to)
        with _in_budget(plan, rows[0]):
            _put(_unscaled(rows[0]))
            backend.require(row.backend, "switch").switch(chosen, rows[0])
        again = _unscaled(chosen)._replace(
            phase=Phase.UPDATING.value, activated=registry.now(), ended=None
        )
        return _activated(again, rows)


def _rows_of(row: Deployment) -> list[Deployment]:
    """All deployments of the endpoint, the current one first. Raises NotFound if it was removed."""
    rows = history(row.backend, row.target, row.account, row.name)
    if not rows:
        raise NotFound(f"the endpoint {row.name} was removed in the meantime")
    return rows


def plan_scale(row: Deployment, wanted: Scale) -> ScalePlan:
    """An endpoint after a change, and what it will cost.

    Raises UsageError if it cannot be changed so, and JobFileError if it may cost more than the
    `max_cost` or the `budget` that it was deployed with.
    """
    plan = backend.require(row.backend, "plan_scale").plan_scale(row, wanted, _seconds_left(row))
    _check_cost(plan, row, "use fewer instances, or deploy again with a higher {}")
    return plan


def _seconds_left(row: Deployment) -> int | None:
    """Until the schedule of an endpoint deletes it; None: never."""
    until, now = row.given.get("until") or 0, registry.now()
    return int(until - now) if until > now else None


def _check_cost(plan: ScalePlan, row: Deployment, ways: str) -> None:
    """Raise JobFileError if a change may cost more than the limits of an endpoint.

    `ways`: what to do about the limit `{}`. A change that lowers the cost is never refused.
    """
    if not _costs_more(plan, row):
        return
    limits = (row.given.get("max_cost"), row.given.get("budget"))
    problems = list(cap.endpoint_problems(*limits, plan.estimate, plan.seconds, ways))
    if any(problem.severity == "error" for problem in problems):
        raise JobFileError(f"the job of endpoint {row.name}", problems)


def _costs_more(plan: ScalePlan, row: Deployment) -> bool:
    """Whether an hour of an endpoint may cost more after a change.

    Fewer machines of the same kind never do, whatever the prices are; if a price of other machines
    is unknown, they may.
    """
    before, after = row.machine_list, list(plan.machines)
    if [_kind(each) for each in before] == [_kind(each) for each in after]:
        return any(new.most > old.most for new, old in zip(after, before, strict=True))
    engine = backend.require(row.backend, "plan_scale")
    known = engine.plan_scale(row, Scale(), plan.seconds).estimate
    is_known = not (known.unknown or plan.estimate.unknown)
    return not is_known or plan.estimate.hourly > known.hourly


def _kind(one: Machines) -> Machines:
    """The machines without their number."""
    return one._replace(instances=0, most=0) if one.instance_type else one._replace(most=0)


@contextlib.contextmanager
def _in_budget(plan: ScalePlan, row: Deployment) -> Iterator[None]:
    """Reserve what an endpoint may cost before it changes, and release the rest afterwards.

    Raises UsageError if its budget has too little left.
    """
    budget, falls = row.given.get("budget"), list(plan.machines) != row.machine_list
    if _costs_more(plan, row):
        ask_overdue()
        falls = budgets.reserve_endpoint(row, plan.estimate, budget)
    yield
    if falls:
        budgets.lower_endpoint(row, plan.estimate, budget)


def scale(row: Deployment, wanted: Scale) -> Deployment:
    """Change an endpoint as it is. Raises as `plan_scale`, and UsageError as `deploy`."""
    with _alone(row.name):
        row = _rows_of(row)[0]
        plan = plan_scale(row, wanted)
        with _in_budget(plan, row):
            backend.require(row.backend, "scale").scale(row, wanted)
        settings = {
            _DEPLOYED: row.machine_list,
            **row.given,
            "price": _price(plan.estimate) or row.given.get("price"),
        }
        row = row._replace(machines=json.dumps(plan.machines), settings=json.dumps(settings))
        _put(row)
    return row


def remove(row: Deployment) -> list[Deployment]:
    """Delete an endpoint and all that was created for it. Returns its removed deployments."""
    with _alone(row.name):
        rows = _rows_of(row)
        backend.require(row.backend, "remove_deployment").remove_deployment(rows)
        now = registry.now()
        phase = Phase.REMOVED.value
        gone = [each._replace(phase=phase, pending=0, ended=each.ended or now) for each in rows]
        _put(*gone)
    return gone
