"""The registry with many runs: read in few statements, and written at once."""

from __future__ import annotations

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
from deploykit.run import registry
from deploykit.run import state as run_state
from deploykit.run.registry import Search
from tests.run.test_runs import row

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


def newest(number):
    return f"exp-{(MANY - number) % 7}-{MANY - number:06}"


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
    assert sum(text.startswith("SELECT * FROM runs") for text in statements) == 3


def test_list_reads_what_it_shows(statements, monkeypatch, capsys):
    read, make = [], registry._run
    monkeypatch.setattr(local, "status", _status)
    monkeypatch.setattr(registry, "_run", lambda values: read.append(1) or make(values))
    assert cli.main(["list", "-n", "3"]) == 0
    out, err = capsys.readouterr()
    assert [line.split("\t")[0] for line in out.splitlines()] == list(map(newest, (1, 2, 3)))
    assert f"the newest 3 of {MANY + 1} runs; -n {MANY + 1} shows all" in err
    assert len(read) == 3 * 3


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
