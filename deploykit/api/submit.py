"""The Python API: `deploykit.submit`, `plan`, `check`, `runs`, `get`, `attach`.

The command line calls the same functions (lifecycle, log_selection, run_diagnosis). Nothing here
prints, exits, or changes the environment, the signals or the current folder of the process, so it
works in threads and in notebooks, whose event loop it does not use.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal, TypeVar, cast, overload

from deploykit.api import functions
from deploykit.api.run import Plan, Run, Runs
from deploykit.job import job as jobs
from deploykit.job.file import Overrides
from deploykit.job.job import Argument, Job, ResourcesKeys
from deploykit.job.model import LogLine, Problem, State
from deploykit.lib.errors import UsageError
from deploykit.run import lifecycle, model_channel, registry
from deploykit.run import state as run_state
from deploykit.run.registry import Search

T = TypeVar("T")
JobLike = str | os.PathLike[str] | Job


def plan(  # noqa: PLR0913 - as submit
    job: JobLike = "job.yaml",
    *,
    backend: str | None = None,
    args: Iterable[Argument] = (),
    set: Mapping[str, Any] | None = None,  # noqa: A002 - as --set
    run: str | None = None,
    init_from: str | os.PathLike[str] | None = None,
    strict: bool = False,
) -> Plan:
    """Return what `submit` would send, like ``deploykit submit --dry-run``. Only reads files.

    Takes the arguments and raises the errors of `submit`.
    """
    return _plan(job, backend, args, set, run, init_from, strict=strict)


def submit(  # noqa: PLR0913 - the command's options
    job: JobLike = "job.yaml",
    *,
    backend: str | None = None,
    args: Iterable[Argument] = (),
    set: Mapping[str, Any] | None = None,  # noqa: A002 - as --set
    run: str | None = None,
    init_from: str | os.PathLike[str] | None = None,
    strict: bool = False,
    yes: bool = False,
) -> Run:
    """Submit a job and return at once; `Run.warnings` lists any warnings.

    `job` is a job file, a script or a `Job`. `backend` defaults to the job's, then your config
    file's, then local. `args` are appended to those of the job. `set` overrides keys by their path:
    ``{"resources.nodes": 2}``. `run` is the run id: the same id never starts a second job.
    `init_from` is a run or a folder with the weights to start from. `strict` treats warnings as
    errors. `yes` confirms an upload of more than 10 GB of data.

    Raises NotFound (no such file), JobFileError (with every problem) or UsageError (an invalid
    argument, or more than 10 GB of data without `yes`). If nothing was started, the backend raises
    SubmitRefused, BackendUnavailable, NotPermitted or TryAgain; if the job may exist, it raises
    Uncertain.
    """
    made = _plan(job, backend, args, set, run, init_from, strict=strict, pack=True)
    return made.submit(yes=yes)


def _plan(  # noqa: PLR0913, PLR0917 - as submit
    job: JobLike,
    backend: str | None,
    args: Iterable[Argument],
    changes: Mapping[str, Any] | None,
    run: str | None,
    init_from: str | os.PathLike[str] | None,
    *,
    strict: bool,
    pack: bool = False,
) -> Plan:
    """The plan; `pack` says that it will be sent."""
    source, overrides = jobs.source(job), cast("Overrides", jobs.overrides(changes))
    if init_from is not None:
        model = os.fspath(init_from)
        overrides = model_channel.init_from(model, source, overrides, backend, fetch=pack)
    prepared = lifecycle.prepare(source, overrides, backend, run, jobs.arguments(args), pack=pack)
    if init_from is not None:
        model_channel.require_init_from(prepared.plan)
    if strict:
        lifecycle.refuse(source, prepared.warnings)
    return Plan(prepared)


@overload
def launch(
    function: Callable[..., T],
    *args: Any,
    backend: str | None = ...,
    nodes: int = ...,
    processes_per_node: int | None = ...,
    time_limit: str | timedelta = ...,
    wait: Literal[True] = ...,
    timeout: float | None = ...,
    on_line: Callable[[LogLine], object] | None = ...,
    **keys: Any,
) -> dict[int, T]: ...


@overload
def launch(
    function: Callable[..., T],
    *args: Any,
    backend: str | None = ...,
    nodes: int = ...,
    processes_per_node: int | None = ...,
    time_limit: str | timedelta = ...,
    wait: Literal[False],
    **keys: Any,
) -> Run: ...


def launch(  # noqa: PLR0913 - the usual keys of a job, by name
    function: Callable[..., T],
    *args: Any,
    backend: str | None = None,
    nodes: int = 1,
    processes_per_node: int | None = None,
    time_limit: str | timedelta = "1h",
    wait: bool = True,
    timeout: float | None = None,
    on_line: Callable[[LogLine], object] | None = None,
    **keys: Any,
) -> dict[int, T] | Run:
    """Call ``function(*args)`` on every rank of a job; return the results by rank.

    torchrun starts the ranks, so `torch.distributed.init_process_group` works. `launch` starts an
    ordinary run, with a state, logs and a diagnosis. `keys` are keys of the job or its `resources`
    section, and backend sections: ``gpus_per_node=8, env={...}, slurm={...}``. To pass keyword
    arguments, use ``functools.partial(function, lr=0.1)``.

    `on_line` is called with each line of the logs, for example `print`. Interrupting the call
    cancels the run. With ``wait=False``, the run is returned at once; use `Run.results` later.

    cloudpickle sends the function. The nodes need the same Python version and the packages that
    the function imports. It runs in the current folder if the nodes can see it.

    Raises FunctionFailed with the remote traceback if the function raises an exception on a rank,
    RunFailed if the run ends in any other way, TimedOut after `timeout` seconds (the run
    continues), UsageError if the function cannot be pickled, and the errors of `submit`.
    """
    own = {name: keys.pop(name) for name in tuple(keys) if name in ResourcesKeys.__annotations__}
    own |= {"nodes": nodes, "processes_per_node": processes_per_node, "time_limit": time_limit}
    run = Run(functions.send(function, args, backend, {**keys, "resources": own}))
    if not wait:
        return run
    try:
        if on_line is not None:
            for line in run.logs(follow=True):
                on_line(line)
        return run.results(timeout)
    except KeyboardInterrupt:
        run.cancel()
        raise


def check(
    job: JobLike = "job.yaml",
    *,
    backend: str | Sequence[str] | None = None,
    args: Iterable[Argument] = (),
    set: Mapping[str, Any] | None = None,  # noqa: A002 - as --set
    strict: bool = False,
) -> list[Problem]:
    """Return the warnings about a job, without using the network or credentials.

    `backend` is one name or several; the default is the job's `backend` and each backend that has a
    section in it, or else the user's default.

    Raises JobFileError with every error; with `strict`, also if there are only warnings.
    """
    source = jobs.source(job)
    named = [backend] if isinstance(backend, str) else backend
    file = lifecycle.load(source, jobs.overrides(set), named or (), jobs.arguments(args))
    warnings = lifecycle.check_all(file)
    if strict:
        lifecycle.refuse(source, warnings)
    return warnings


def runs(
    *,
    state: str | State | Iterable[str | State] | None = None,
    backend: str | None = None,
    name: str | None = None,
    limit: int | None = None,
) -> Runs:
    """Return the runs with their current state, newest first. Queries each backend once.

    `state` is one state or several, `name` is the job's name, and `limit` is the maximum number of
    runs.
    """
    if isinstance(state, str | State):
        state = [state]
    try:
        states = [State(value).value for value in state or ()]
    except ValueError as error:
        known = ", ".join(known.value for known in State)
        raise UsageError(f"state: {error}", hint=f"states: {known}") from None
    if state is not None and not states:
        return Runs([])
    search = Search(states, backend=backend, job=name)
    return Runs([Run(row) for row in run_state.search(search, limit)])


def get(run: str) -> Run:
    """Return the run with this id, or with this unique prefix of at least four characters.

    Raises NotFound.
    """
    return Run(registry.get_to_stop(run))


def attach(run: str, backend: str | None = None, *, target: str | None = None) -> Run:
    """Add a run submitted on another machine to the registry, by its full id, and return it.

    `target` is where the job runs, such as a region; the default comes from the environment. Raises
    NotFound, or UsageError if the backend does not support this.
    """
    return Run(run_state.attach(run, lifecycle.chosen(backend), target))
