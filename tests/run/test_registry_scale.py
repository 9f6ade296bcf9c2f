"""The registry with many runs: what is asked for is found by an index, in few statements."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from deploykit.backends import local
from deploykit.cli import main as cli
from deploykit.job.model import State, Status
from deploykit.lib import paths
from deploykit.lib.errors import NotFound
from deploykit.run import registry, storage
from deploykit.run import state as run_state
from deploykit.run.registry import Search
from tests.run.test_runs import OLDER, row

MANY = 3000
ACTIVE = 1200
"""More than two statements take."""


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A registry of runs, of which the newest have not ended."""
    state = tmp_path_factory.mktemp("many")
    code = f"from tests.run.test_registry_scale import fill; fill({MANY}, {ACTIVE})"
    env = {**os.environ, "DEPLOYKIT_HOME": str(state)}
    subprocess.run([sys.executable, "-c", code], env=env, check=True, cwd=Path(__file__).parents[2])
    return state / "runs.sqlite"


def fill(count, active):
    """Write a registry in one transaction; the newest `active` runs run."""
    registry.add(row("first-0000", created=0.0))
    registry.add(row("first-2-0", created=0.5))
    values = [
        (
            *(f"exp-{number % 7}-{number:06}", "job", "local", "here", "/f", "a", f"b{number}"),
            *(float(number), "/out", str(number)),
            "running" if number >= count - active else "failed",
        )
        for number in range(1, count)
    ]
    columns = "run, name, backend, target, folder, plan, bundle, created, output, id, state"
    for name in ("first-0000", "first-2-0"):
        registry.update(name, Status(State.UNSENT))
    with registry.writing() as database:
        marks = ", ".join("?" * 11)
        database.executemany(f"INSERT INTO runs ({columns}) VALUES ({marks})", values)


@pytest.fixture
def statements(filled, monkeypatch):
    """A copy of the registry, and the statements that are executed on it from now on."""
    paths.private_folder(paths.state())
    (paths.state() / "runs.sqlite").write_bytes(filled.read_bytes())
    executed = []
    connect = sqlite3.connect

    def traced(*args, **kwargs):
        database = connect(*args, **kwargs)
        database.set_trace_callback(executed.append)
        return database

    monkeypatch.setattr(sqlite3, "connect", traced)
    return executed


def plans(statements):
    """How SQLite finds the rows of each statement on `runs`."""
    found = []
    with contextlib.closing(sqlite3.connect(paths.state() / "runs.sqlite")) as database:
        database.set_trace_callback(None)
        for text in statements:
            if " runs " in text and text.startswith(("SELECT", "UPDATE", "DELETE")):
                steps = database.execute(f"EXPLAIN QUERY PLAN {text}").fetchall()
                found += [detail for *_, detail in steps]
    return found


def newest(number):
    return f"exp-{(MANY - number) % 7}-{MANY - number:06}"


ONE = newest(1)


@pytest.mark.parametrize(
    "ask",
    [
        lambda: registry.get(ONE),
        lambda: registry.get("first-0"),
        lambda: registry.get(ONE[-6:]),
        lambda: registry.get(None),
        lambda: registry.get_to_stop("first-00"),
        lambda: registry.known(ONE),
        lambda: registry.update(ONE, Status(State.RUNNING)),
        lambda: registry.remove(ONE),
        lambda: registry.release("b77", lambda: None),
        registry.unfinished,
        lambda: registry.select(limit=20),
        lambda: run_state.search(Search(pattern="exp-3-*"), 5),
        storage.tidy,
    ],
)
def test_nothing_that_is_asked_for_is_searched_in_the_whole_table(statements, ask):
    ask()
    found = plans(statements)
    assert found
    # with LIMIT, the index by time is read only until enough rows are found
    scans = [step for step in found if step.startswith("SCAN") and "runs_by_time" not in step]
    small = ("runs_unfinished", "runs_to_reduce")
    assert [step for step in scans if not step.endswith(small)] == []
    if any("runs_by_time" in step for step in found):
        assert all("LIMIT" in text for text in statements if "created DESC" in text)


def test_a_short_end_is_searched_in_an_index_only(statements):
    assert registry.get("2-0").run == "first-2-0"
    assert not [step for step in plans(statements) if step == "SCAN runs"]


@pytest.mark.usefixtures("statements")
def test_ambiguous_names_are_counted_and_the_newest_shown():
    with pytest.raises(NotFound, match=f"'exp-' matches {MANY - 1} runs") as caught:
        registry.get("exp-")
    assert caught.value.hint.split("; ") == [newest(number) for number in range(1, 6)]


def _status(handles):
    return {handle: Status(State.RUNNING, "R", "on n1") for handle in handles}


def test_many_active_runs_are_read_in_chunks_and_written_at_once(statements, monkeypatch):
    monkeypatch.setattr(local, "status", _status)
    rows = run_state.refresh(registry.selected(()))
    assert {one.native for one in rows} == {"R"}
    assert len(rows) == ACTIVE
    reads = [text for text in statements if text.startswith("SELECT * FROM runs")]
    assert len(reads) == 1 + 2 * 3
    assert sum(text.startswith("BEGIN IMMEDIATE") for text in statements) == 1
    del statements[:]
    run_state.refresh(rows)
    assert not [text for text in statements if text.startswith("BEGIN")]  # nothing has changed


def test_a_poll_of_wait_reads_the_rows_of_its_runs(statements, monkeypatch):
    monkeypatch.setattr(local, "status", _status)
    names = [newest(number) for number in range(1, 11)]
    (rows,) = run_state.wait_all(names, timeout=0)
    assert [one.run for one in rows] == names
    assert not [step for step in plans(statements) if step.startswith("SCAN")]
    assert sum(text.startswith("SELECT * FROM runs") for text in statements) == 3


def test_the_end_of_a_run_looks_at_few_others(statements, monkeypatch):
    """Each ended run once, instead of all of them at each end."""
    looked = []
    monkeypatch.setattr(storage, "_is_whole", lambda one: looked.append(one.run))
    storage.tidy()
    storage.tidy()
    first = MANY - ACTIVE - 1
    assert looked == [f"exp-{number % 7}-{number:06}" for number in range(first, first - 10, -1)]
    assert sum(text.startswith("SELECT") and " runs " in text for text in statements) <= 8


def test_list_reads_what_it_shows(statements, monkeypatch, capsys):
    read, make = [], registry._run
    monkeypatch.setattr(local, "status", _status)
    monkeypatch.setattr(registry, "_run", lambda values: read.append(1) or make(values))
    assert cli.main(["list", "-n", "3"]) == 0
    out, err = capsys.readouterr()
    assert [line.split("\t")[0] for line in out.splitlines()] == list(map(newest, (1, 2, 3)))
    assert f"the newest 3 of {MANY + 1} runs; all: -n {MANY + 1}" in err
    assert len(read) == 3 * 3
    assert not [step for step in plans(statements) if step == "SCAN runs"]


@pytest.mark.parametrize(
    ("pattern", "found"),
    [("exp-[!0-5]-*", 1), ("exp-[^6]-*9", 1), ("exp-[", 0), ("*-00001?", 3), ("FIRST", 0)],
)
@pytest.mark.usefixtures("statements")
def test_patterns_are_those_of_the_shell(pattern, found):
    import fnmatch

    expected = [one.run for one in registry.every() if fnmatch.fnmatchcase(one.run, pattern)]
    search = Search(pattern=pattern)
    assert [one.run for one in registry.select(*search.sql)] == (expected if found else [])
    assert bool(expected) == bool(found)


def test_a_limit_beyond_every_integer_is_all_of_them():
    registry.add(row("a"))
    assert len(registry.select(limit=10**30)) == 1


def test_an_older_registry_is_read_as_it_is_and_gets_indexes_with_the_next_write():
    paths.private_folder(paths.state())
    file = paths.state() / "runs.sqlite"
    with contextlib.closing(sqlite3.connect(file)) as database:
        database.execute(OLDER)
        database.execute("PRAGMA user_version = 1")
        columns = "run, name, backend, target, folder, plan, bundle, created, output, state"
        values = [(f"old-{n:04}", *"jlhfpb", float(n), "/o", "failed") for n in range(50)]
        with database:
            marks = ", ".join("?" * 10)
            database.executemany(f"INSERT INTO runs ({columns}) VALUES ({marks})", values)
    before = file.read_bytes()
    assert registry.get("0033").run == registry.get("old-0033").run == "old-0033"
    assert len(registry.select(limit=7)) == 7
    assert registry.unfinished() == []
    assert file.read_bytes() == before
    rows = registry.every()
    registry.add(row("new", created=99.0))
    assert registry.every()[1:] == rows
    with contextlib.closing(sqlite3.connect(file)) as database:
        made = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
        assert {"runs_by_time", "runs_by_end", "runs_unfinished"} <= made
        assert database.execute("PRAGMA user_version").fetchone() == (1,)
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
