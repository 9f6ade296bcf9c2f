"""The registry: nothing is lost under many writers, and names find runs."""

from __future__ import annotations

import contextlib
import multiprocessing
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import pytest

from deploykit.job.model import State, Status
from deploykit.lib import paths
from deploykit.lib.errors import CannotWrite, DeploykitError, NotFound
from deploykit.run import registry


def row(name, created=1.0):
    return registry.Run(name, "job", "local", "here", "/f", "a", "b", None, created, "/out")


def _add_many(number):
    return [registry.add(row(f"run-{number}-{n}")) for n in range(5)] + [registry.add(row("same"))]


@pytest.mark.slow
def test_fifty_writers_lose_nothing_and_one_wins_each_id():
    with multiprocessing.get_context("fork").Pool(50) as pool:
        results = pool.map(_add_many, range(50), chunksize=1)
    assert all(all(result[:5]) for result in results)
    assert sum(result[5] for result in results) == 1
    assert len(registry.every()) == 251


def _add_in_threads(number):
    with ThreadPoolExecutor(8) as threads:
        return all(threads.map(lambda n: registry.add(row(f"run-{number}-{n}")), range(50)))


def test_processes_with_threads_lose_nothing():
    """As notebooks do: opening the file for its mode would drop the locks of other threads."""
    registry.add(row("first"))
    with multiprocessing.get_context("fork").Pool(4) as pool:
        assert all(pool.map(_add_in_threads, range(4), chunksize=1))
    assert len(registry.every()) == 201


def test_states_are_kept():
    registry.add(row("a"))
    assert registry.get("a").handle is None
    registry.confirm("a", "77")
    registry.update("a", Status(State.FAILED, "F", "why", 3))
    found = registry.get("a")
    assert str(found.handle) == "local://here/77"
    assert found.status == Status(State.FAILED, "F", "why", 3)


def test_names_find_runs():
    for number, name in enumerate(["ab-1", "ab-2", "c-3"]):
        registry.add(row(name, created=number))
    assert [registry.get(name).run for name in ("ab-1", "c", "-2", None)] == [
        "ab-1",
        "c-3",
        "ab-2",
        "c-3",
    ]
    with pytest.raises(NotFound, match="matches 2 runs") as caught:
        registry.get("ab")
    assert caught.value.hint == "ab-2; ab-1"
    with pytest.raises(NotFound, match="no run matches 'x'"):
        registry.get("x")


def test_no_runs_yet_creates_no_file():
    with pytest.raises(NotFound, match="there are no runs yet"):
        registry.get(None)
    assert not paths.state().exists()


def test_an_unusable_registry_is_explained():
    paths.state().mkdir(parents=True)
    (paths.state() / "runs.sqlite").write_text("this is no database, and long enough to tell" * 20)
    with pytest.raises(DeploykitError, match=r"registry of runs .* cannot be used") as caught:
        registry.every()
    assert "DEPLOYKIT_HOME" in caught.value.hint
    assert isinstance(caught.value.__cause__, sqlite3.Error)


def test_a_registry_of_an_older_layout_is_named():
    paths.state().mkdir(parents=True)
    with contextlib.closing(sqlite3.connect(paths.state() / "runs.sqlite")) as database:
        database.execute("CREATE TABLE runs (run TEXT PRIMARY KEY, place TEXT)")
    for use in (registry.every, lambda: registry.get("a"), lambda: registry.add(row("a"))):
        with pytest.raises(CannotWrite, match="another version of deploykit wrote") as caught:
            use()
        assert "move the file away" in caught.value.hint


def test_a_state_of_a_newer_version_is_named():
    registry.add(row("a"))
    with registry.writing() as database:
        database.execute("UPDATE runs SET state = 'paused'")
    with pytest.raises(CannotWrite, match="the run a has an unknown state, 'paused'") as caught:
        registry.every()
    assert "a newer deploykit" in caught.value.hint


def test_reading_waits_for_no_writer():
    registry.add(row("a"))
    with contextlib.closing(sqlite3.connect(paths.state() / "runs.sqlite")) as database:
        database.execute("BEGIN IMMEDIATE")
        assert registry.lookup("a")["a"].run == registry.get(None).run == "a"
        assert len(registry.every()) == 1


def test_one_row_is_asked_for_by_its_id(monkeypatch):
    for number in range(3):
        registry.add(row(f"run-{number}"))
    read, make = [], registry._run
    monkeypatch.setattr(registry, "_run", lambda values: read.append(values["run"]) or make(values))
    assert list(registry.lookup("run-1")) == ["run-1"]
    assert registry.get("run-2").run == "run-2"
    assert read == ["run-1", "run-2"]


def test_ids_are_the_name_the_time_and_chance():
    made = {registry.new_id("digits") for _ in range(100)}
    assert len(made) > 95
    assert all(len(name) == len("digits-20261121-014608-7kq2") for name in made)


def test_only_a_whole_id_or_a_beginning_of_it_stops_a_run():
    for name in ("exp-x", "exp-x-2", "abc"):
        assert registry.add(row(name))
    assert registry.get_to_stop("exp-x").run == "exp-x"
    assert registry.get_to_stop("exp-x-").run == "exp-x-2"
    assert registry.get_to_stop("abc").run == "abc"
    for name, near in (("x-2", "exp-x-2"), ("ab", "abc"), ("bc", "abc")):
        with pytest.raises(NotFound, match="is not the id of a run") as caught:
            registry.get_to_stop(name)
        assert caught.value.hint == f"{near}?"
    with pytest.raises(NotFound, match="matches 2 runs"):
        registry.get_to_stop("exp-")


OLDER = """
CREATE TABLE runs (
    run TEXT PRIMARY KEY, name TEXT NOT NULL, backend TEXT NOT NULL, target TEXT NOT NULL,
    folder TEXT NOT NULL, plan TEXT NOT NULL, bundle TEXT NOT NULL, revision TEXT,
    created REAL NOT NULL, output TEXT NOT NULL, id TEXT, state TEXT NOT NULL,
    native TEXT NOT NULL DEFAULT '', reason TEXT NOT NULL DEFAULT '', exit_code INTEGER
)
"""
"""The table of version 0.2.0."""


@contextlib.contextmanager
def _older_registry():
    """The open file as version 0.2.0 made it, with the run ``old``."""
    paths.state().mkdir(parents=True, mode=0o700)
    with contextlib.closing(sqlite3.connect(paths.state() / "runs.sqlite")) as database:
        database.execute(OLDER)
        database.execute("PRAGMA user_version = 1")
        _add_as_before(database, "old")
        yield database


def _add_as_before(database, name):
    """What version 0.2.0 does to insert a row."""
    columns = "run, name, backend, target, folder, plan, bundle, created, output, state"
    values = (name, "job", "local", "here", "/f", "a", "b", 1.0, "/out", "running")
    with database:
        database.execute(f"INSERT INTO runs ({columns}) VALUES (?,?,?,?,?,?,?,?,?,?)", values)


def test_an_older_and_this_version_share_a_registry():
    start, end = datetime(2026, 1, 2, 3, tzinfo=UTC), datetime(2026, 1, 2, 4, tzinfo=UTC)
    with _older_registry() as database:
        registry.update("old", Status(State.SUCCEEDED, started=start, finished=end))
        assert registry.get("old").status == Status(State.SUCCEEDED, started=start, finished=end)
        _add_as_before(database, "older writes again")
        assert {one.run for one in registry.every()} == {"old", "older writes again"}
        assert database.execute("PRAGMA user_version").fetchone() == (1,)


def test_a_time_that_is_not_told_any_more_stays():
    start, end = datetime(2026, 1, 2, 3, tzinfo=UTC), datetime(2026, 1, 2, 4, tzinfo=UTC)
    registry.add(row("a"))
    registry.update("a", Status(State.RUNNING, started=start))
    assert registry.get("a").seconds(start.timestamp() + 90) == 90
    registry.update("a", Status(State.FAILED, finished=end))
    found = registry.get("a")
    assert (found.status.started, found.status.finished) == (start, end)
    assert found.seconds(0) == 3600


@pytest.mark.parametrize(
    ("state", "started", "finished"),
    [("queued", 5.0, None), ("running", None, None), ("failed", 5.0, None), ("failed", None, 9.0)],
)
def test_no_duration_is_invented(state, started, finished):
    one = row("a")._replace(state=state, started=started, finished=finished)
    assert one.seconds(10.0) is None
