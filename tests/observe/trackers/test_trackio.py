"""A project of Trackio: one run, with every step once, as the package itself reads it."""

from __future__ import annotations

import json

import pytest

from deploykit.cli import main as cli
from tests.observe.trackers.tracked import PYTHON, attempt, loss, python, tracked

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="trackio: make .venv-trackers/.ready"),
]
READ = """\
import json, trackio
from trackio.sqlite_storage import SQLiteStorage
runs = [(run.name, run.config) for run in trackio.Api().runs("digits")]
print(json.dumps({"runs": runs, "rows": SQLiteStorage.get_logs("digits", runs[0][0])}))
"""


def in_store(folder, *words, code=0):
    return python(*words, code=code, TRACKIO_DIR=str(folder), HF_HUB_OFFLINE="1")


def values_sent(folder):
    (one,) = json.loads(in_store(folder, "-m", "deploykit", "sync", "--json"))["trackers"]
    assert (one["error"], one["url"]) == (None, "trackio show --project digits")
    return one["values"]


def test_a_run_that_was_preempted_thrice(live, tmp_path):
    store = tmp_path / "trackio"
    tracked(live, {"trackio": "digits"})
    counts = []
    for number, first in enumerate((0, 20, 40, 60)):
        attempt(live, number, range(first, first + 30))
        counts.append(values_sent(store))
        if number == 1:
            (live.folder / "tracking.json").unlink()  # the database remembers
    live.end()
    counts += [values_sent(store), values_sent(store)]
    assert (sum(counts), counts[-1]) == (180, 0)
    assert min(counts[:4]) > 0  # it gets them while the run lives
    found = json.loads(in_store(store, "-c", READ))
    assert [name for name, _ in found["runs"]] == ["live-run"]
    assert found["runs"][0][1]["--lr"] == "0.1"
    losses = sorted((row["step"], row["loss"]) for row in found["rows"] if "loss" in row)
    assert losses == [(step, pytest.approx(loss(step))) for step in range(90)]
    rates = sorted(row["step"] for row in found["rows"] if "lr" in row)
    assert rates == list(range(90))


def test_values_that_are_sent_twice_are_there_once(tmp_path):
    code = """\
from pathlib import Path
from deploykit.observe.trackers import trackio
from deploykit.observe.trackers.contract import About
from deploykit.observe.metrics.points import Value
one = trackio.make("digits", About("live-run", "job", Path("."), 1.0, {}, {}), {})
values = [Value(one.clean(name), 0.5, 3, 1700000000.0) for name in ("loss", "time", "__odd")]
for _ in range(2):
    one.send(values)
print(dict(one.begin()))
"""
    told = in_store(tmp_path, "-c", code)
    assert told == "{'loss': 3, '__time': 3, '____odd': 3}\n"
    rows = json.loads(in_store(tmp_path, "-c", READ))["rows"]
    assert len(rows) == 3
    assert {row["timestamp"] for row in rows} == {"2023-11-14T22:13:20+00:00"}


def test_a_project_that_trackio_refuses(live, tmp_path):
    tracked(live, {"trackio": "registry-x"})
    out = in_store(tmp_path, "-m", "deploykit", "sync", "--json", code=None)
    (one,) = json.loads(out)["trackers"]
    assert "trackio: ValueError: Project name 'registry-x' is not allowed" in one["error"]


def test_the_package_is_needed(project, capsys):
    assert cli.main(["check", "--backend", "local", "--set", "track.trackio=digits"]) == 65
    assert "track.trackio: the package trackio is not installed" in capsys.readouterr().err
