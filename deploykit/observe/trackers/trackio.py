"""Trackio, through its own package, which the Python that runs deploykit must have.

Its projects are SQLite databases on this machine: ``trackio show`` serves them, ``trackio sync``
sends them to a Space. Each value is a row with an id of its own, and the database ignores an id
that it has; so nothing is doubled, even if a sending is interrupted. The logger of the package
would give the values the time at which they are sent, and hide its errors; this writes as its
importers do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from deploykit.lib.errors import BackendUnavailable
from deploykit.observe.metrics.points import Value
from deploykit.observe.trackers.contract import About, Ending, Memory

_RESERVED = {"project", "run", "timestamp", "step", "time", "metrics"}
"""What the package calls a row's own fields."""


def make(where: str, about: About, memory: Memory) -> Trackio:  # noqa: ARG001 - its database remembers
    """A run of the project `where`."""
    return Trackio(where, about)


class Trackio:
    """One run of a project; see `deploykit.observe.trackers.contract.Tracker`."""

    def __init__(self, project: str, about: About) -> None:
        self._project, self._about = project, about

    @property
    def url(self) -> str:
        """The command that shows the project."""
        return f"trackio show --project {self._project}"

    def clean(self, name: str) -> str:
        """The name, renamed as the package does if it is that of a field."""
        return f"__{name}" if name in _RESERVED or name.startswith("__") else name

    def begin(self) -> Mapping[str, int]:
        """The last step of each metric in the database. Raises BackendUnavailable."""
        last: dict[str, int] = {}
        with _storage() as storage:
            storage.validate_project_name(self._project)
            for row in storage.get_logs(self._project, self._about.run):
                for name in row.keys() - _RESERVED:
                    last[name] = max(last.get(name, -1), int(row["step"]))
        return last

    def send(self, values: Sequence[Value]) -> None:
        """Write the values. Raises BackendUnavailable."""
        run, now = self._about.run, datetime.now(UTC).timestamp()
        times = (now if one.time is None else one.time for one in values)
        with _storage() as storage:
            storage.bulk_log(
                project=self._project,
                run=run,
                metrics_list=[{one.name: one.value} for one in values],
                steps=[one.step for one in values],
                timestamps=[datetime.fromtimestamp(time, UTC).isoformat() for time in times],
                log_ids=[f"deploykit:{run}:{one.step}:{one.name}" for one in values],
                config=dict(self._about.params),
            )

    def end(self, ending: Ending | None) -> None:
        """Nothing: a run of Trackio has no state."""


@contextlib.contextmanager
def _storage() -> Iterator[Any]:
    """The package's database. Raises BackendUnavailable for any error of the package."""
    try:
        from trackio.sqlite_storage import SQLiteStorage  # few have it

        yield SQLiteStorage
    except Exception as error:
        raise BackendUnavailable(
            f"trackio: {type(error).__name__}: {error}",
            hint="deploykit is tested with trackio 0.43; to retry, run `deploykit sync`",
        ) from error
