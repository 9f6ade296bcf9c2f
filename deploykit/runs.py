"""The registry of runs: one SQLite file, safe under many writers.

A row is written before anything is sent and the far side's id after, so that a crash between the
two stays visible. A rollback journal rather than a write-ahead log, since homes are often on NFS.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploykit import paths, private
from deploykit.errors import CannotWrite, NotFound
from deploykit.model import Handle, State, Status

if TYPE_CHECKING:
    import sqlite3

_SCHEMA = """
CREATE TABLE IF NOT EXISTS runs (
    run       TEXT PRIMARY KEY,
    name      TEXT NOT NULL,
    backend   TEXT NOT NULL,
    target    TEXT NOT NULL,
    folder    TEXT NOT NULL,
    plan      TEXT NOT NULL,  -- SHA-256 of the plan's text
    bundle    TEXT NOT NULL,  -- SHA-256 of the source that travelled
    revision  TEXT,           -- git commit of the source
    created   REAL NOT NULL,  -- seconds since the epoch
    output    TEXT NOT NULL,  -- where the results will be
    id        TEXT,           -- the far side's id, once it is known
    state     TEXT NOT NULL,
    native    TEXT NOT NULL DEFAULT '',
    reason    TEXT NOT NULL DEFAULT '',
    exit_code INTEGER
)
"""
_EITHER = ("revision", "id")
"""Columns that may be empty; the others hold texts, but for two numbers."""
_TEXTS = (
    *("run", "name", "backend", "target", "folder", "plan", "bundle", "output"),
    *("state", "native", "reason"),
)
_LAST = 253402300799
"""The last second of the year 9999."""
_ALPHABET = "23456789abcdefghjkmnpqrstvwxyz"
_PATIENCE = 60
"""Seconds to wait for other writers."""


@dataclass(frozen=True)
class Run:
    """A row: what was submitted, and what was last known of it."""

    run: str
    name: str
    backend: str
    target: str
    folder: str
    plan: str
    bundle: str
    revision: str | None
    created: float
    output: str
    id: str | None = None
    state: str = State.SUBMITTING.value
    native: str = ""
    reason: str = ""
    exit_code: int | None = None

    @property
    def handle(self) -> Handle | None:
        """None while the far side has not confirmed the job."""
        if self.id is None:
            return None
        return Handle(self.backend, self.target, self.id, self.run, self.folder)

    @property
    def status(self) -> Status:
        """What was last known."""
        return Status(State(self.state), self.native, self.reason, self.exit_code)


def new_id(name: str) -> str:
    """A run id: the job's name, the time in UTC, and four random characters."""
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    return f"{name}-{stamp}-{''.join(secrets.choice(_ALPHABET) for _ in range(4))}"


def add(run: Run) -> bool:
    """Write the row of a new run; False when there is one of that id already."""
    columns = list(run.__dict__)
    marks = ", ".join("?" * len(columns))
    statement = f"INSERT OR IGNORE INTO runs ({', '.join(columns)}) VALUES ({marks})"  # noqa: S608 - our names
    with _open() as database:
        return database.execute(statement, list(run.__dict__.values())).rowcount == 1


def confirm(run: str, identity: str) -> None:
    """Record the far side's id."""
    with _open() as database:
        database.execute(
            "UPDATE runs SET id = ?, state = ?, reason = '' WHERE run = ?",
            (identity, State.QUEUED.value, run),
        )


def update(run: str, status: Status) -> None:
    """Record what is now known of a run."""
    known = (status.state.value, status.native, status.reason, status.exit_code)
    with _open() as database:
        database.execute(
            "UPDATE runs SET state = ?, native = ?, reason = ?, exit_code = ?, "
            "output = coalesce(nullif(?, ''), output) WHERE run = ?",
            (*known, status.output, run),
        )


def get(name: str | None) -> Run:
    """The run with that id, or with a unique beginning or end of it; None: the newest run.

    Raises NotFound, naming the candidates where there are several.
    """
    found = [run for run in every() if name is None or _matches(run.run, name)]
    exact = [run for run in found if run.run == name]
    if exact or len(found) == 1 or (name is None and found):
        return (exact or found)[0]
    if found:
        raise NotFound(
            f"{name!r} could be any of {len(found)} runs",
            hint="; ".join(run.run for run in found[:5]),
        )
    wanted = f"there is no run {name!r}" if name else "there are no runs yet"
    raise NotFound(wanted, hint="`deploykit list` shows all runs; `deploykit submit` starts one")


def lookup(run: str) -> Run | None:
    """The run with exactly that id."""
    return next((row for row in every() if row.run == run), None)


def every() -> list[Run]:
    """All runs, the newest first."""
    if not _file().exists():
        return []
    with _open() as database:
        rows = database.execute("SELECT * FROM runs ORDER BY created DESC, run DESC").fetchall()
    return [_run(dict(row)) for row in rows]


def _run(row: dict[str, Any]) -> Run:
    """A row as a run, whatever stands in it: another version, or another hand, may have written."""
    values: dict[str, Any] = {name: _text(row.get(name)) for name in _TEXTS}
    values |= {name: row.get(name) and _text(row[name]) for name in _EITHER}
    created, code = row.get("created"), row.get("exit_code")
    known = isinstance(created, (int, float)) and 0 <= created <= _LAST
    values["created"] = created if known else 0.0
    values["exit_code"] = code if isinstance(code, int) else None
    if values["state"] not in {state.value for state in State}:
        values["state"] = State.UNKNOWN.value
    return Run(**values)


def _text(value: object) -> str:
    return value if isinstance(value, str) else "" if value is None else repr(value)


def now() -> float:
    """Seconds since the epoch, as `Run.created`."""
    return time.time()


def _matches(run: str, name: str) -> bool:
    return run.startswith(name) or run.endswith(name)


def _file() -> Path:
    return paths.state() / "runs.sqlite"


@contextlib.contextmanager
def _open() -> Iterator[sqlite3.Connection]:
    import sqlite3  # a dry run has no use for it

    path = _file()
    try:
        private.folder(path.parent)
        private.touch(path)
        with contextlib.closing(sqlite3.connect(path, timeout=_PATIENCE)) as database, database:
            database.row_factory = sqlite3.Row
            database.execute("BEGIN IMMEDIATE")
            database.execute(_SCHEMA)
            yield database
    except (OSError, sqlite3.Error) as error:
        raise CannotWrite(
            f"the registry of runs {path} cannot be used: {error}",
            hint="check the folder's permissions and free space, or set DEPLOYKIT_HOME to another",
        ) from error
