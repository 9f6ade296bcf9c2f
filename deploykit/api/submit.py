"""deploykit from Python: `deploykit.submit`, `plan`, `check`, `runs`, `get`, `attach`.

The command line calls the same functions (lifecycle, log_selection, run_diagnosis). Nothing here
prints, exits, or changes the environment, the signals or the current folder of the process, so it
works in threads and in notebooks, whose event loop it does not use.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal, TypeVar, overload

from deploykit.api import functions
from deploykit.api.run import Plan, Run, Runs
from deploykit.job import job as jobs
from deploykit.job.job import Argument, Job, ResourcesKeys
from deploykit.job.model import LogLine, Problem, State
from deploykit.lib.errors import UsageError
from deploykit.run import lifecycle, registry
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
    strict: bool = False,
) -> Plan:
    """What `submit` would send, as ``deploykit submit --dry-run`` shows it. Only reads files.

    The arguments and errors are those of `submit`.
    """
    return _plan(job, backend, args, set, run, strict=strict)


def submit(  # noqa: PLR0913 - the command's options
    job: JobLike = "job.yaml",
    *,
    backend: str | None = None,
    args: Iterable[Argument] = (),
    set: Mapping[str, Any] | None = None,  # noqa: A002 - as --set
    run: str | None = None,
    strict: bool = False,
) -> Run:
    """Run a job on a backend, and return at once; `Run.warnings` has the warnings about it.

    `job` is a job file, a script or a `Job`. `backend` defaults to the job's, else the user's
    default, else local. `args` go to the trainer after those of the job. `set` overrides keys by
    their path: ``{"resources.nodes": 2}``. `run` is the run id: the same id never starts a second
    job. `strict` treats warnings as errors.

    Raises NotFound (no such file), JobFileError (with every problem), UsageError (an argument is
    wrong), and what the backend raises: SubmitRefused, BackendUnavailable, NotPermitted and
    TryAgain where nothing was started, Uncertain where the job may exist.
    """
    return _plan(job, backend, args, set, run, strict=strict, pack=True).submit()


def _plan(  # noqa: PLR0913 - as submit
    job: JobLike,
    backend: str | None,
    args: Iterable[Argument],
    changes: Mapping[str, Any] | None,
    run: str | None,
    *,
    strict: bool,
    pack: bool = False,
) -> Plan:
    """The plan; `pack` says that it will be sent."""
    source, overrides = jobs.source(job), jobs.overrides(changes)
    prepared = lifecycle.prepare(source, overrides, backend, run, jobs.arguments(args), pack=pack)
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
    """Call ``function(*args)`` on every rank of a job; return what each returned, by rank.

    The ranks are torchrun's: `torch.distributed.init_process_group` works in them. The run is an
    ordinary one, with a state, logs and a diagnosis. `keys` are keys of the section `resources` or
    of the job, and sections of backends: ``gpus_per_node=8, env={...}, slurm={...}``. Arguments by
    name: ``functools.partial(function, lr=0.1)``.

    `on_line` is called with each line of the logs, for example `print`. Interrupting the call
    cancels the run. With ``wait=False`` the run is returned at once; `Run.results` has the values.

    The function is pickled by cloudpickle; what it imports must be installed on the nodes, with the
    same version of Python. It runs in the current folder, where the nodes have that.

    Raises FunctionFailed with the remote traceback where the function raised an exception on a
    rank, RunFailed where the run ended otherwise, TimedOut after `timeout` seconds (the run
    continues), UsageError where the function cannot be pickled, and otherwise as `submit`.
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
    """The warnings about a job, found without network or credentials.

    `backend` is one name or several; the default is the job's `backend` and each backend
    that has a section in it, else the user's default.

    Raises JobFileError with every error; with `strict` also where there are only warnings.
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
    """The runs with their current state, the newest first; one query to each backend.

    `state` is one or several; `name` is that of the job; `limit` the greatest number.
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
    """The run with that id, or with a unique beginning of it, of at least four characters.

    Raises NotFound.
    """
    return Run(registry.get_to_stop(run))


def attach(run: str, backend: str | None = None, *, target: str | None = None) -> Run:
    """The run that another machine submitted, by its whole id. From now on it is known here.

    `target` is where it runs, such as a region; the default is the environment's. Raises NotFound,
    and UsageError where the backend does not offer this.
    """
    return Run(run_state.attach(run, lifecycle.chosen(backend), target))
