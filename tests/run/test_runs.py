"""The registry: nothing is lost under many writers, and names find runs."""

from __future__ import annotations

import contextlib
import multiprocessing
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import pytest

from deploykit.cli import main as cli
from deploykit.job.model import State, Status
from deploykit.lib import paths
from deploykit.lib.errors import CannotWrite, DeploykitError, NotFound
from deploykit.run import registry
from tests.model_package import package


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
    with pytest.raises(NotFound, match="no run matches 'x'") as caught:
        registry.get("x")
    assert caught.value.hint.startswith("`deploykit list` shows all runs")
    registry.add(row("digits-large", created=4))
    with pytest.raises(NotFound, match="no run matches 'digist-large'") as caught:
        registry.get("digist-large")
    assert caught.value.hint == "did you mean 'digits-large'?"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("deploy ./modle", "./modle does not exist\n  did you mean 'model'?"),
        ("register ./typo", "./typo does not exist\n  expected a run, or a package made by"),
        ("deploy ./file -b sagemaker", "./file is not a folder on this machine\n"),
        ("deploy model.tar.gz", "model.tar.gz does not exist\n  expected a run, or a package"),
        ("register s3://bucket/a", "s3://bucket/a is not a folder on this machine\n"),
        ("export file", "no run matches 'file'\n  expected the name of a run, not a path"),
        ("evaluate ./typo", "no run matches './typo'\n  expected the name of a run, not a path"),
        ("evaluate folder", "no run matches 'folder'\n  expected the name of a run, not a path"),
        ("evaluate model", "model is a package, not a run\n  evaluate its run: deploykit evaluate"),
    ],
)
def test_a_path_where_a_run_is_expected(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    package(tmp_path / "model", "exp-1")
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    assert cli.main(words.split()) == NotFound.exit_code
    assert f"error: {message}" in capsys.readouterr().err


def test_no_runs_yet_creates_no_file():
    with pytest.raises(NotFound, match="no runs yet"):
        registry.get(None)
    assert not paths.state().exists()


def test_an_unusable_registry_is_explained():
    paths.state().mkdir(parents=True)
    (paths.state() / "runs.sqlite").write_text("this is no database, and long enough to tell" * 20)
    with pytest.raises(DeploykitError, match="cannot use the registry of runs") as caught:
        registry.every()
    assert "DEPLOYKIT_HOME" in caught.value.hint
    assert isinstance(caught.value.__cause__, sqlite3.Error)


def test_reading_waits_for_no_writer():
    registry.add(row("a"))
    with contextlib.closing(sqlite3.connect(paths.state() / "runs.sqlite")) as database:
        database.execute("BEGIN IMMEDIATE")
        assert registry.lookup("a")["a"].run == registry.get(None).run == "a"
        assert len(registry.every()) == 1


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
        with pytest.raises(NotFound, match="is not a run id") as caught:
            registry.get_to_stop(name)
        assert caught.value.hint == f"did you mean {near}?"
    with pytest.raises(NotFound, match="matches 2 runs"):
        registry.get_to_stop("exp-")


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


def test_a_state_of_a_newer_version_is_named():
    registry.add(row("a"))
    with registry.writing() as database:
        database.execute("UPDATE runs SET state = 'paused'")
    with pytest.raises(CannotWrite, match="the run a has an unknown state, 'paused'") as caught:
        registry.every()
    assert "a newer deploykit" in caught.value.hint
