"""The classes that the Python API returns: a run, a list of runs, a plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from deploykit.api import functions
from deploykit.job import job
from deploykit.job.job import Argument
from deploykit.job.model import LogLine, Problem, State, Status
from deploykit.lib import render
from deploykit.lib.errors import JobMissing, NeverStarts, TimedOut, UsageError
from deploykit.observe.metrics.points import Point
from deploykit.observe.metrics.progress import Progress
from deploykit.run import diagnosis as run_diagnosis
from deploykit.run import evaluation, export, lifecycle, log_selection, rerun
from deploykit.run import state as run_state
from deploykit.run import tracking as run_tracking
from deploykit.run.diagnosis import RunDiagnosis
from deploykit.run.log_selection import Selection
from deploykit.run.metrics import RunMetrics
from deploykit.run.registry import Run as Row


class Run:
    """A submitted run, returned by `submit`, `get`, `runs` and `attach`.

    It keeps the last known status; `status()` queries the backend. Two runs are equal if they have
    the same id.
    """

    def __init__(self, row: Row, warnings: Sequence[Problem] = ()) -> None:
        self._row = row
        self.warnings: tuple[Problem, ...] = tuple(warnings)
        """Warnings about the job, if the run was just submitted."""

    @property
    def id(self) -> str:
        """The run id."""
        return self._row.run

    @property
    def name(self) -> str:
        """The job's name."""
        return self._row.name

    @property
    def backend(self) -> str:
        """The backend's name."""
        return self._row.backend

    @property
    def handle(self) -> str | None:
        """The job's address, such as ``slurm://prod/4242``; None if no job was sent."""
        return str(self._row.handle) if self._row.handle else None

    @property
    def folder(self) -> Path:
        """The run folder: plan, source, logs, output, checkpoints."""
        return Path(self._row.folder)

    @property
    def output(self) -> str:
        """The location of the results: a folder or an ``s3://`` prefix."""
        return self._row.output

    @property
    def created(self) -> datetime:
        """The time of submission, in UTC."""
        return datetime.fromtimestamp(self._row.created, UTC)

    @property
    def commit(self) -> str | None:
        """The git commit of the source, if it is in a repository."""
        return self._row.revision

    @property
    def state(self) -> State:
        """The last known state; does not query the backend."""
        return State(self._row.state)

    def status(self) -> Status:
        """Query the backend for the state, the reason and the exit code.

        If the backend cannot be reached, the state is the last known one, and the reason says so.
        """
        (self._row,) = run_state.refresh([self._row])
        return self._row.status

    def wait(self, timeout: float | None = None, *, check: bool = False) -> Status:
        """Wait until the run has ended, at most `timeout` seconds.

        Raises TimedOut after that (the run continues), NeverStarts if the run is queued but can
        never start, and JobMissing if the target has no job for this run. With `check`, raises
        RunFailed unless the run succeeded.
        """
        for (row,) in run_state.wait_all([self.id], timeout):
            self._row = row
        if self.state is State.BLOCKED:
            raise NeverStarts(f"{self.id} is queued, but {self._row.reason}")
        if run_state.is_missing(self._row):
            raise JobMissing(f"{self.id}: {self._row.reason}")
        if not self.state.final:
            raise TimedOut(f"{self.id} is {self.state.value} after {timeout:g} s")
        if check and self.state is not State.SUCCEEDED:
            raise functions.failure(self._row)
        return self._row.status

    def results(self, timeout: float | None = None) -> dict[int, Any]:
        """Wait for a run started by `launch`, and return the results of its function by rank.

        Raises FunctionFailed if the function raised an exception, RunFailed if the run ended in any
        other way, NotFound if `launch` did not start this run, and the errors of `wait`.
        """
        self.wait(timeout)
        return functions.results(self._row)

    def logs(  # noqa: PLR0913 - what can be selected
        self,
        *,
        follow: bool = False,
        rank: int | None = None,
        node: int | None = None,
        task: int | None = None,
        attempt: int | None = None,
        since: datetime | None = None,
        first_error: bool = False,
    ) -> Iterator[LogLine]:
        """Yield the lines of all ranks, oldest first; with `follow`, until the run has ended.

        Select lines by `rank`, `node`, `task` (of a job array), `attempt` (from 0) and `since`, a
        datetime with a time zone. `first_error` selects the first traceback or error of any rank.
        ``str(line)`` is safe to print.

        Raises NotFound if the run has no logs, UsageError if it has no such task.
        """
        if since is not None and since.tzinfo is None:
            raise UsageError("since: expected a time with a time zone", hint="datetime.now(UTC)")
        wanted = Selection(rank, node, task, attempt, since, first_error)
        (self._row,) = run_state.refresh([self._row])
        return log_selection.of_run(self._row, wanted, follow=follow)

    def metrics(self, *names: str, task: int | None = None) -> list[Point]:
        """Return all metrics that the script has written or printed, one point per step.

        `names` select metrics, with ``*`` for any text; `task` selects a task of a job array, by
        default the first. A point has `name`, `value`, `step`, `epoch`, `time` (seconds since
        1970), `attempt` and `source`; unknown values are None.
        """
        (self._row,) = run_state.refresh([self._row])
        return list(RunMetrics(self._row, task=task).whole(names))

    def progress(self) -> Progress:
        """Return the run's progress, from everything its script has written or printed."""
        (self._row,) = run_state.refresh([self._row])
        read = RunMetrics(self._row)
        read.refresh()
        return read.progress()

    def sync(self) -> int:
        """Send missing values to the job's trackers; return how many were sent.

        Raises NotFound if the job has no tracker. If a tracker fails, values are still sent to the
        others before the error is raised.
        """
        sent, _ = run_tracking.sync(self._row)
        for tracker in sent:
            if tracker.error is not None:
                raise tracker.error
        return sum(tracker.values for tracker in sent)

    def cancel(self) -> Status:
        """Stop the run unless it has ended. Raises NotFound if no job was sent."""
        self._row = run_state.cancel(self._row)
        return self._row.status

    def diagnose(self) -> RunDiagnosis:
        """Find why the run failed, from the logs of all ranks. Raises NotFound without logs."""
        (self._row,) = run_state.refresh([self._row])
        return run_diagnosis.of_run(self._row)

    def rerun(
        self,
        *,
        args: Iterable[Argument] = (),
        set: Mapping[str, Any] | None = None,  # noqa: A002 - as --set
        backend: str | None = None,
        run: str | None = None,
    ) -> Run:
        """Submit this run's job and source again, as a new run.

        `args` are appended to the job's, `set` overrides keys of the job, `backend` selects another
        backend, and `run` is the new run's id. Raises NotFound if the job or source was not kept,
        and the errors of `submit`.
        """
        changes, arguments = job.overrides(set), job.arguments(args)
        with rerun.prepare(self._row, changes, run, arguments, backend) as prepared:
            return Run(lifecycle.submit(prepared.plan), prepared.warnings)

    def reproduce(
        self, *, backend: str | None = None, run: str | None = None, new_launcher: bool = False
    ) -> Run:
        """Submit exactly the same bytes as a new run: bundle, job and arguments.

        `backend` selects another backend, and `run` is the new run's id. `new_launcher` accepts a
        launcher that differs from this run's. Raises NotFound if the bundle was not kept,
        UsageError if anything would differ.
        """
        with rerun.reproduce(self._row, run, backend, new_launcher=new_launcher) as same:
            return Run(same.submit(), same.prepared.warnings)

    def export(
        self,
        to: str | Path,
        *,
        checkpoint: int | str | None = None,
        inference: str | Path | None = None,
        python: str | None = None,
    ) -> str:
        """Package the run's model, and return `to`: a new folder, a .tar.gz file, or s3://.

        `checkpoint` is a step or ``best``; the default is the last one. `inference` is your own
        inference.py, and `python` is a Python with torch to load the model. Raises NotFound without
        a checkpoint, CannotPackage if the model cannot be rebuilt.
        """
        export.prepare(
            self._row,
            str(to),
            checkpoint=None if checkpoint is None else str(checkpoint),
            inference=None if inference is None else Path(inference),
            python=python,
        ).write()
        return str(to)

    def evaluate(  # noqa: PLR0913 - the command's options
        self,
        *,
        checkpoint: int | str | None = None,
        split: str | None = None,
        slice_by: str | None = None,
        script: str | Path | None = None,
        args: Iterable[Argument] = (),
        set: Mapping[str, Any] | None = None,  # noqa: A002 - as --set
        backend: str | None = None,
        run: str | None = None,
    ) -> Run:
        """Start an evaluation of the run's model, and return the new run at once.

        `checkpoint` is a step or ``best``; the default is the last one. `split` selects the data,
        by default the test data, and `slice_by` one of its columns. `script` is your own evaluation
        program, and `args` are appended to its arguments. The other parameters are as for `rerun`.
        Raises NotFound without a checkpoint or a program, and the errors of `submit`.
        """
        with evaluation.prepare(
            self._row,
            checkpoint=None if checkpoint is None else str(checkpoint),
            split=split,
            slice_by=slice_by,
            script=None if script is None else Path(script),
            overrides=job.overrides(set),
            arguments=job.arguments(args),
            backend=backend,
            run=run,
        ) as planned:
            return Run(planned.submit(), planned.prepared.warnings)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Run) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        return f"<Run {self.id} on {self.backend}: {self.state.value}>"

    def _repr_html_(self) -> str:
        status = self.status()
        code = "" if status.exit_code is None else f", exit code {status.exit_code}"
        facts = {
            "reason": status.reason,
            "job": self.handle or "",
            "sent": f"{self.created:%F %T} UTC",
            "folder": str(self.folder),
            "output": self.output,
            "cause": run_diagnosis.brief(self._row) or "",
        }
        card = render.card(f"{self.id}: {status.state.value}{code}", facts.items())
        return card + render.notes(map(str, self.warnings))


class Runs(list[Run]):
    """A list of runs, newest first; a notebook displays it as a table."""

    def _repr_html_(self) -> str:
        rows = (
            (run.id, run.backend, run.state.value, f"{run.created:%F %H:%M}", run._row.reason)  # noqa: SLF001
            for run in self
        )
        return render.table(["run", "backend", "state", "submitted (UTC)", "reason"], rows)


class Plan:
    """Exactly what `submit` will send, with `warnings`; ``str(plan)`` is its text."""

    def __init__(self, prepared: lifecycle.Prepared) -> None:
        self._plan = prepared.plan
        self.warnings: tuple[Problem, ...] = tuple(prepared.warnings)

    @property
    def text(self) -> str:
        """The script or request that will be sent."""
        return self._plan.text

    @property
    def language(self) -> str:
        """The language of `text`: ``sh`` or ``json``."""
        return self._plan.language

    @property
    def run(self) -> str:
        """The id of the future run."""
        return self._plan.run

    @property
    def backend(self) -> str:
        """The backend's name."""
        return self._plan.backend

    @property
    def target(self) -> str:
        """Where the job will run: a host, a cluster, a region."""
        return self._plan.target

    @property
    def files(self) -> tuple[str, ...]:
        """The files to send, relative to the source folder."""
        return tuple(entry.path for entry in self._plan.bundle.entries)

    @property
    def size(self) -> int:
        """The total size of `files`, in bytes."""
        return self._plan.bundle.size

    def submit(self, *, yes: bool = False) -> Run:
        """Send the plan; a second call returns the same run. Raises the errors of `submit`.

        `yes` confirms an upload of more than 10 GB of data.
        """
        return Run(lifecycle.submit(self._plan, yes=yes), self.warnings)

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"<Plan {self.run} for {self.backend}: {len(self.warnings)} warnings>"

    def _repr_html_(self) -> str:
        facts = {
            "backend": self.backend,
            "target": self.target,
            "source": f"{len(self.files)} files, {self.size} bytes",
        }
        card = render.card(self.run, facts.items())
        return card + render.notes(map(str, self.warnings)) + render.block(self.text)
