"""Budgets: what all runs under one may cost together, also by two submits at once."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from deploykit.cli import main as cli
from deploykit.cost import cap
from deploykit.lib import paths
from deploykit.run import budgets, registry
from tests.sweep.conftest import site, sweep, toy, write
from tests.sweep.test_sweep import wait_for

__all__ = ["site", "sweep", "toy", "write"]  # fixtures
WAITS = "while not os.path.exists('../../go'): time.sleep(0.05)"


@pytest.fixture
def job(toy):
    """A job of at most 60 USD, which costs 20."""

    def file(limit="130 USD/month", do=WAITS):
        section = {"price": "3600 USD", "billed": 20}
        entry = {"script": "train.py", "args": ["--do", do]}
        data = {"name": "toy", "entrypoint": entry, "resources": {"time_limit": "60s"}}
        data |= {"plain": section} | ({"budget": limit} if limit else {})
        (toy / "job.yaml").write_text(json.dumps(data))

    return file


def run(capsys, *words, code=0):
    capsys.readouterr()
    assert cli.main(list(words)) == code, capsys.readouterr()
    return capsys.readouterr()


def test_a_run_counts_at_its_worst_until_it_has_ended(job, capsys):
    job()
    left = "budget 130.00 USD a month: 130.00 USD left; 0.00 USD spent\n"
    assert left in run(capsys, "submit", "--run", "a").err
    run(capsys, "submit", "--run", "b")
    shown = run(capsys, "submit", "--run", "c", code=64).err
    assert (
        "the job may cost 60.00 USD, more than is left in its budget: budget 130.00 USD a month: "
        "10.00 USD left; 0.00 USD spent, 120.00 USD reserved for 2 unfinished runs"
    ) in shown
    (paths.state() / "runs/go").touch()
    wait_for((paths.run_folder("a") / "code").exists)
    wait_for((paths.run_folder("b") / "code").exists)
    run(capsys, "submit", "--run", "c")  # asks for the states of the others first
    run(capsys, "wait", "c")
    assert "70.00 USD left; 60.00 USD spent\n" in run(capsys, "list", "--cost").err
    run(capsys, "rm", "a", "b")
    use = json.loads(run(capsys, "cost", "--json").out)["budget"]
    assert (use["spent"], use["left"], use["runs"]) == (60.0, 70.0, 0)
    assert "70.00 USD left" in run(capsys, "cost").out


def test_submits_at_once_do_not_share_the_same_money(job):
    job("130 USD for vision")
    argv = [sys.executable, "-m", "deploykit", "submit", "--run"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    submits = [subprocess.Popen([*argv, f"r-{number}"], **quiet) for number in range(4)]
    assert sorted(one.wait() for one in submits) == [0, 0, 64, 64]
    (use,) = budgets.uses()
    assert (use.runs, use.left, use.budget.name) == (2, 10, "vision")
    (paths.state() / "runs/go").touch()


def test_months_and_names(job, capsys):
    job("130 USD for old", do="pass")
    run(capsys, "submit", "--run", "a", "--wait")
    with contextlib.closing(sqlite3.connect(paths.state() / "runs.sqlite")) as file, file:
        file.execute("UPDATE budget_runs SET created = 1")
    assert budgets.of("130 USD for old").left == 110
    assert budgets.of("130 USD/month for old").left == 110  # it has ended in this month
    run(capsys, "rm", "a")
    with contextlib.closing(sqlite3.connect(paths.state() / "runs.sqlite")) as file, file:
        file.execute("UPDATE budget_runs SET ended = 2")
    assert budgets.of("130 USD for old").left == 110
    assert budgets.of("130 USD/month for old").left == 130
    assert budgets.of("130 USD").left == 130


REFUSED = {
    "59 USD": "budget: the job may cost 60.00 USD, more than 59.00 USD",
    "99 EUR/month": "budget: is in EUR, but the prices are in USD",
    "99": "budget: expected an amount of money such as 2000 USD, 500 USD/month or",
    "99 USD/year": "expected an amount of money",
    "99 USD for ": "expected an amount of money",
}


@pytest.mark.parametrize("limit", REFUSED)
def test_a_budget_that_cannot_be_kept_is_refused_offline(job, capsys, limit):
    job(limit)
    assert REFUSED[limit] in run(capsys, "submit", code=65).err
    assert registry.every() == []


def test_the_default_of_the_user_counts_for_each_job(job, capsys):
    job(None, do="pass")
    path = paths.config()
    path.parent.mkdir(parents=True)
    path.write_text('budget = "70 USD"\n')
    path.chmod(0o600)
    run(capsys, "submit", "--run", "a", "--wait")
    assert "50.00 USD left" in run(capsys, "submit", "--dry-run").err
    run(capsys, "submit", code=64)
    run(capsys, "submit", "--set", "plain={}")  # costs nothing


def test_a_sweep_ends_at_the_budget_and_goes_on_with_more(job, write, sweep, toy):
    job("130 USD", do="pass")
    write(trials=6, parallel=4)
    sweep("start", "--sweep", "s", code=64)
    assert "more than is left in its budget" in sweep.notes
    assert sweep("status", "--json")["counts"] == {"running": 2, "succeeded": 4}
    definition = Path(paths.state(), "sweeps/s/sweep.json")
    definition.write_text(definition.read_text().replace("130 USD", "500 USD"))
    assert sweep("resume", "--json")["counts"] == {"succeeded": 6}


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("500 USD/month", "500.00 USD a month"),
        ("2000 USD for v.1", "2,000.00 USD for v.1"),
        ("0.5EUR/month for x", "0.50 EUR a month for x"),
    ],
)
def test_a_budget_as_text(written, shown):
    assert str(cap.parse_budget(written)) == shown
