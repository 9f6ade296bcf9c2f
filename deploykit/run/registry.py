"""The registry of runs: one SQLite file, safe with many concurrent writers.

A row is written before anything is sent, and the job's id after, so that a crash in between stays
visible. It uses a rollback journal instead of a write-ahead log, since homes are often on NFS.

A read takes no write lock.
"""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from deploykit.backends.base import JOB, PRICE
from deploykit.cost import prices
from deploykit.job.decode import read_json
from deploykit.job.model import Handle, State, Status
from deploykit.job.spelling import did_you_mean
from deploykit.lib import paths, progress
from deploykit.lib.errors import CannotWrite, NotFound, UsageError

_HIGHEST = "\U0010ffff"
"""Sorts after every other character."""
_CANDIDATES_SHOWN = 5
"""Runs that an ambiguous name may mean, in the hint."""
_TRIED = 1000
"""Newest runs among whose ids that of a misspelled name is looked for."""
_CHUNK = 500
"""Ids in one statement: SQLite before 3.32 takes 999 values at most."""
_LARGEST_INTEGER = 2**63 - 1
"""Of SQLite."""
_STATES = {state.value for state in State}
RUN_ID = r"(?=.{1,63}\Z)[a-zA-Z0-9](-?[a-zA-Z0-9])*"
_ALPHABET = "23456789abcdefghjkmnpqrstvwxyz"
_MIN_PREFIX = 4
"""Characters of the beginning of an id by which a run can be stopped."""
LAST_KNOWN = "last known;"
"""Begins the reason of a run whose backend does not answer."""
IN_FLIGHT = 300
"""Seconds after a submit in which its job may still appear."""
_FIRST_WAIT, _LONG_WAIT = 2, 60
"""Seconds to wait for another process's lock silently, and after a warning."""

UNFINISHED = "state NOT IN ('cancelled', 'failed', 'succeeded', 'unsent')"
"""SQLite uses a partial index only for a query with the same condition, word for word."""
_TABLE = """
CREATE TABLE runs (
    run       TEXT PRIMARY KEY,
    name      TEXT NOT NULL,
    backend   TEXT NOT NULL,
    target    TEXT NOT NULL,
    folder    TEXT NOT NULL,
    plan      TEXT NOT NULL,  -- SHA-256 of the plan's text
    bundle    TEXT NOT NULL,  -- SHA-256 of the bundle
    revision  TEXT,           -- git commit of the source
    created   REAL NOT NULL,  -- seconds since the epoch
    output    TEXT NOT NULL,  -- location of the results
    id        TEXT,           -- of the job at its target, once known
    state     TEXT NOT NULL,
    native    TEXT NOT NULL DEFAULT '',
    reason    TEXT NOT NULL DEFAULT '',
    exit_code INTEGER,
    started   REAL,           -- seconds since the epoch, as the target reports
    finished  REAL,
    billed    REAL            -- seconds
)
"""
_INDEXES = (
    "CREATE INDEX runs_by_time ON runs (created, run, state)",
    f"CREATE INDEX runs_unfinished ON runs (created, run) WHERE {UNFINISHED}",
)


class Run(NamedTuple):
    """A row: what was submitted, and its last known status."""

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
    started: float | None = None
    finished: float | None = None
    billed: float | None = None

    @property
    def handle(self) -> Handle | None:
        """The job's address; None until the target has confirmed the job."""
        if self.id is None:
            return None
        return Handle(self.backend, self.target, self.id, self.run, self.folder)

    @property
    def status(self) -> Status:
        started, finished = (
            None if seconds is None else datetime.fromtimestamp(seconds, UTC)
            for seconds in (self.started, self.finished)
        )
        return Status(
            state=State(self.state),
            native=self.native,
            reason=self.reason,
            exit_code=self.exit_code,
            started=started,
            finished=finished,
            billed=self.billed,
        )

    def seconds(self, at: float) -> float | None:
        """Seconds from the start to the end, or to `at`; None if the start is unknown."""
        if self.started is None or self.state == State.QUEUED.value:
            return None
        if self.finished is None and State(self.state).final:
            return None
        return max(0.0, (self.finished or at) - self.started)

    def spent(self) -> prices.Spent | None:
        """What the run has cost, so far or in all; None if nothing is billed or known."""
        path = Path(self.folder, PRICE)
        if not path.exists():
            return None
        seconds = self.billed if State(self.state).final else self.seconds(now())
        return prices.spent(path, seconds)

    def job_data(self) -> dict[str, Any]:
        """The job as it was submitted, as data; empty if it was not kept."""
        try:
            data = read_json(Path(self.folder, JOB))
        except (OSError, ValueError):
            return {}
        return data if isinstance(data, dict) else {}


def new_id(name: str) -> str:
    """A run id: the job's name, the time in UTC, and four random characters."""
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    return f"{name}-{stamp}-{''.join(_ALPHABET[byte % len(_ALPHABET)] for byte in os.urandom(4))}"


def checked_id(run: str) -> str:
    """A run id that the user chose. Raises UsageError for one that is not valid."""
    if re.fullmatch(RUN_ID, run) is None:
        raise UsageError(
            f"invalid run id {run!r}",
            hint="use up to 63 letters and digits, with single hyphens between them",
        )
    return run


def known(run: str) -> Run:
    """The row of a run. Raises NotFound if it is gone."""
    row = lookup(run).get(run)
    if row is None:
        raise NotFound(f"the run {run} is no longer in the registry")
    return row


def add(*runs: Run) -> bool:
    """Insert the rows of new runs in one transaction; False if an id already exists."""
    columns, marks = ", ".join(Run._fields), ", ".join("?" * len(Run._fields))
    return _write(f"INSERT OR IGNORE INTO runs ({columns}) VALUES ({marks})", runs) == len(runs)  # noqa: S608 - our names


def confirm(run: str, identity: str, status: Status | None = None) -> None:
    """Record the id of the job at its target, and its status; without one it is queued."""
    confirm_all({run: identity}, status)


def confirm_all(jobs: Mapping[str, str], status: Status | None = None) -> None:
    """`confirm` for many runs, with the id of each, in one transaction."""
    known = status or Status(State.QUEUED)
    _write(
        "UPDATE runs SET id = ?, state = ?, native = ?, reason = ? WHERE run = ?",
        [(job, known.state.value, known.native, known.reason, run) for run, job in jobs.items()],
    )


def update(run: str, status: Status) -> None:
    """Record the current status of a run. Times that are no longer reported stay."""
    update_all({run: status})


def update_all(status_by_run: Mapping[str, Status]) -> None:
    """Record the current status of many runs in one transaction."""
    if not status_by_run:
        return
    _write(
        "UPDATE runs SET state = ?, native = ?, reason = ?, exit_code = ?, "
        "started = coalesce(?, started), finished = coalesce(?, finished), "
        "billed = coalesce(?, billed), "
        "output = coalesce(nullif(?, ''), output) WHERE run = ?",
        [
            (
                *(status.state.value, status.native, status.reason, status.exit_code),
                *(time and time.timestamp() for time in (status.started, status.finished)),
                *(status.billed, status.output, run),
            )
            for run, status in status_by_run.items()
        ],
    )


def remove(*runs: str) -> None:
    _write("DELETE FROM runs WHERE run = ?", [(run,) for run in runs])


def release(bundle: str, then: Callable[[], None]) -> None:
    """Call `then` if no run refers to this bundle; until it returns, no new run can.

    A submit inserts its row before it stores its bundle, so one that comes later stores it again.
    """
    with writing() as database:
        users = database.execute("SELECT count(*) FROM runs WHERE bundle = ?", (bundle,))
        if not users.fetchone()[0]:
            then()


def get(name: str | None) -> Run:
    """The run with that id, or with a unique beginning or end of one; for None the newest run.

    Raises NotFound; if several runs match, with the candidates.
    """
    if name is None:
        matches = select(limit=1)
    else:
        matches = list(lookup(name).values()) or select(*_like(name), limit=_CANDIDATES_SHOWN)
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise NotFound(
            f"{name!r} matches {count(*_like(name or ''))} runs",
            hint="; ".join(run.run for run in matches),
        )
    message = f"no run matches {name!r}" if name else "no runs yet"
    near = did_you_mean(name, (row.run for row in select(limit=_TRIED))) if name else None
    shown = "`deploykit list` shows all runs; `deploykit submit` starts one"
    if name and ("/" in name or Path(name).exists()):
        shown = "expected the name of a run, not a path; `deploykit list` shows all runs"
    raise NotFound(message, hint=near or shown)


def _like(name: str) -> tuple[str, tuple[str, ...]]:
    """The condition, and its values, of ids that begin or end with `name`."""
    condition = "(run >= ? AND run < ? OR substr(run, -length(?)) = ?)"
    return condition, (name, name + _HIGHEST, name, name)


def get_to_stop(name: str) -> Run:
    """The run with that id, or with a unique beginning of one, of at least four characters.

    A mistyped name must not stop another run. Raises NotFound, with the runs that were near.
    """
    row = get(name)
    if row.run != name and (len(name) < _MIN_PREFIX or not row.run.startswith(name)):
        raise NotFound(
            f"{name!r} is not a run id, or a prefix of one with at least {_MIN_PREFIX} characters",
            hint=f"did you mean {row.run}?",
        )
    return row


def lookup(*ids: str) -> dict[str, Run]:
    """Those of the runs with exactly these ids that exist, by their ids."""
    chunks = [ids[start : start + _CHUNK] for start in range(0, len(ids), _CHUNK)]
    clauses = [(f"run IN ({', '.join('?' * len(some))})", some) for some in chunks]
    return {row.run: row for row in _rows(clauses)}


def every() -> list[Run]:
    return select()


def select(condition: str = "1", values: Sequence[str] = (), limit: int | None = None) -> list[Run]:
    """The runs that meet a condition in SQL, the newest first; at most `limit`."""
    most = -1 if limit is None else min(limit, _LARGEST_INTEGER)
    return _rows([(f"{condition} ORDER BY created DESC, run DESC LIMIT {most}", values)])


def _rows(conditions: Sequence[tuple[str, Sequence[str]]]) -> list[Run]:
    """The rows that meet each condition with its values."""
    queries = [(f"SELECT * FROM runs WHERE {text}", values) for text, values in conditions]  # noqa: S608 - ours
    return [_run(row) for row in query(queries)]


def _run(row: sqlite3.Row) -> Run:
    run = Run(*(row[name] for name in Run._fields))
    if run.state not in _STATES:
        raise CannotWrite(
            f"the run {run.run} has an unknown state, {run.state!r}, in the registry {_file()}",
            hint="a newer deploykit may have written it; upgrade with `pip install -U deploykit`",
        )
    return run


def count(condition: str = "1", values: Sequence[str] = ()) -> int:
    text = f"SELECT count(*) FROM runs WHERE {condition}"  # noqa: S608 - ours
    return next((int(row[0]) for row in query([(text, values)])), 0)


def unfinished(limit: int | None = None) -> list[Run]:
    """The unfinished runs as far as the registry knows, the newest first."""
    return select(UNFINISHED, limit=limit)


def named(names: Sequence[str]) -> list[Run]:
    """The runs of these names, each once. Raises NotFound."""
    exact = lookup(*dict.fromkeys(names))
    rows = (exact.get(name) or get(name) for name in names)
    return list({row.run: row for row in rows}.values())


def selected(names: Sequence[str]) -> list[Run]:
    """The runs of these names; without names all unfinished ones, or else the newest.

    Raises NotFound.
    """
    return named(names) if names else unfinished() or [get(None)]


@dataclass(frozen=True)
class Search:
    """What a run must be; an empty part allows all. `job` is the name of its job.

    `pattern` is in its id: a text, or with ``*``, ``?`` or ``[...]`` the whole id.
    """

    states: Collection[str] = ()
    pattern: str | None = None
    backend: str | None = None
    job: str | None = None

    def count(self) -> int:
        """How many runs match as far as the registry knows; the target is not asked."""
        return count(*self.sql)

    @property
    def sql(self) -> tuple[str, tuple[str, ...]]:
        """The condition in SQL, and its values."""
        parts: dict[str, tuple[str, ...]] = {}
        if self.states:
            parts[f"state IN ({', '.join('?' * len(self.states))})"] = tuple(self.states)
        if self.pattern is not None and not any(letter in self.pattern for letter in "*?["):
            parts["instr(run, ?) > 0"] = (self.pattern,)
        elif self.pattern is not None:
            # a set is negated by ! in the shell and by ^ in SQLite; ids hold neither
            negated = {"[!": "[^", "[^": "["}
            pattern = re.sub(r"\[[!^]", lambda match: negated[match[0]], self.pattern)
            parts["run GLOB ?"] = (pattern,)
        if self.backend is not None:
            parts["backend = ?"] = (self.backend,)
        if self.job is not None:
            parts["name = ?"] = (self.job,)
        return " AND ".join(parts) or "1", sum(parts.values(), ())


def may_still_come(row: Run) -> bool:
    """Whether the job may still appear: what sends it can outlive a killed submit."""
    return row.state == State.UNSENT.value and now() - row.created < IN_FLIGHT


def now() -> float:
    """Seconds since the epoch, as `Run.created`."""
    return time.time()


def _file() -> Path:
    return paths.state() / "runs.sqlite"


def query(queries: Sequence[tuple[str, Sequence[str]]]) -> list[sqlite3.Row]:
    """What the queries find, each with its values. Takes no write lock, and makes no file."""
    if not queries or not _file().exists():
        return []
    with _database() as database:
        if _is_new(database):
            return []
        return [row for query, values in queries for row in database.execute(query, values)]


def _write(statement: str, rows: Sequence[Sequence[Any]]) -> int:
    with writing() as database:
        return int(database.executemany(statement, rows).rowcount)


@contextlib.contextmanager
def writing() -> Iterator[sqlite3.Connection]:
    """The open registry, locked; its table is made if need be."""
    with _database(create=True) as database:
        _take(database, "BEGIN IMMEDIATE")
        if _is_new(database):
            for statement in (_TABLE, *_INDEXES):
                database.execute(statement)
        yield database


def _is_new(database: sqlite3.Connection) -> bool:
    return not database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]


@contextlib.contextmanager
def _database(*, create: bool = False) -> Iterator[sqlite3.Connection]:
    """The open registry, as one transaction. Raises CannotWrite if it cannot be used."""
    path = _file()
    try:
        paths.private_folder(path.parent)
        if create:
            paths.touch(path)
        with contextlib.closing(sqlite3.connect(path)) as database, database:
            database.row_factory = sqlite3.Row
            _take(database, "PRAGMA schema_version")  # reads the file
            yield database
    except (OSError, sqlite3.Error) as error:
        raise CannotWrite(
            f"cannot use the registry of runs {path}: {error}",
            hint="check the folder's permissions and free space, or set DEPLOYKIT_HOME to another "
            "folder",
        ) from error


def _take(database: sqlite3.Connection, statement: str) -> None:
    """Execute a statement that takes a lock, and wait for other processes, with a warning."""
    database.execute(f"PRAGMA busy_timeout = {_FIRST_WAIT * 1000}")
    try:
        database.execute(statement).fetchall()
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
            raise
        (_, _, file), *_ = database.execute("PRAGMA database_list")
        what = f"the registry of runs {file}, locked by another process"
        progress.warn(f"waiting up to {_LONG_WAIT} s for {what}")
        database.execute(f"PRAGMA busy_timeout = {_LONG_WAIT * 1000}")
        database.execute(statement).fetchall()
    database.execute(f"PRAGMA busy_timeout = {_LONG_WAIT * 1000}")
