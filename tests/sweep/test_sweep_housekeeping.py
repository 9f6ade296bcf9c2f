"""`prune`, `rm` and `disk` beside sweeps: no result is lost, and no trial runs again."""

from __future__ import annotations

import json
import os

import pytest

from deploykit.cli import main as cli
from deploykit.lib import paths
from deploykit.run import registry
from tests.sweep import plain
from tests.sweep.test_sweep import SLEEP, deploykit, priced, wait_for


def run(capsys, *words, code=0):
    capsys.readouterr()
    assert cli.main(list(words)) == code
    return capsys.readouterr()


@pytest.fixture
def interrupted(write, toy, capsys):
    """A sweep `s` of two trials; the first has ended after its controller was killed."""
    write(sampler="grid", parameters=SLEEP)
    with deploykit("start", "--sweep", "s") as controller:
        wait_for((paths.run_folder("s-0") / "starts").exists)
        controller.kill()
    (paths.state() / "runs/go").touch()
    run(capsys, "wait", "s-0")


@pytest.mark.slow
def test_what_a_dead_controller_has_not_recorded_is_not_pruned(interrupted, sweep, capsys):
    shown = run(capsys, "prune", "--keep-last", "0", "--yes")
    assert "the unfinished sweep s keeps its runs; `deploykit rm s`" in shown.err
    shown = run(capsys, "rm", "s-0", code=64)
    assert "s-0 is a trial of the unfinished sweep s" in shown.err
    assert "`deploykit sweep resume s` continues the sweep; `deploykit rm s` removes" in shown.err
    assert sweep("resume", "s", "--json")["counts"] == {"succeeded": 2}
    assert plain.started(paths.state()) == {"s-0": 1, "s-1": 1}


@pytest.mark.slow
def test_the_source_of_an_interrupted_sweep_stays(interrupted, toy, sweep, capsys):
    registry.remove("s-0")  # as if it had been killed before the first submit
    (archive,) = paths.bundles().iterdir()
    os.utime(archive, (0, 0))
    run(capsys, "prune", "--yes")
    (toy / "train.py").unlink()
    assert sweep("resume", "s", "--json")["state"] == "finished"


def test_the_journal_keeps_results_and_cost_of_removed_runs(write, toy, sweep, capsys):
    priced(toy, billed=20)
    write(trials=2, max_cost="130 USD")
    before = sweep("start", "--json", "--sweep", "s")
    run(capsys, "prune", "--state", "succeeded", "--yes")
    assert registry.every() == []
    after = sweep("status", "--json")
    assert after["cost"] == before["cost"] == {"amount": 40.0, "currency": "USD"}
    assert [one["cost"]["amount"] for one in after["trials"]] == [20.0, 20.0]
    assert after["best"]["value"] == before["best"]["value"]
    (kind,) = [json.loads(run(capsys, "disk", "--json").out)["kinds"]["sweeps"]]
    assert (kind["count"], kind["bytes"] > 0) == (1, True)


def test_a_removed_run_gives_no_money_back(write, toy, sweep, capsys):
    priced(toy, billed=20)
    write(trials=9, max_cost="70 USD")
    assert sweep("start", "--json", "--sweep", "s")["state"] == "capped"
    run(capsys, "prune", "--keep-last", "0", "--yes")
    assert len(sweep("resume", "s", "--json")["trials"]) == 1


def test_old_sweeps_without_runs_are_pruned(write, sweep, capsys):
    for name in ("s", "t"):
        write(trials=1)
        sweep("start", "--sweep", name)
        file = paths.state() / "sweeps" / name / "sweep.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "created": 9}))
    run(capsys, "rm", "s-0")
    shown = run(capsys, "prune", "--older", "1d", "--yes")
    assert "\tsweep\t\ts\n" in shown.out
    assert sweep("list").startswith("t\tfinished")
    (paths.state() / "sweeps/u").mkdir()
    os.utime(paths.state() / "sweeps/u", (0, 0))
    run(capsys, "prune", "--yes")
    assert [path.name for path in (paths.state() / "sweeps").iterdir()] == ["t"]


def test_rm_removes_a_sweep_and_its_runs(write, toy, sweep, capsys):
    write(sampler="grid", parameters=SLEEP)
    sweep("start", "--grid", "lr=1,2", "--metric", "loss", "--sweep", "s-1")
    with deploykit("start", "--sweep", "s") as controller:
        wait_for((paths.run_folder("s-0") / "starts").exists)
        assert "s-0 is running" in run(capsys, "rm", "s", code=64).err
        sweep("stop", "s")
        assert controller.wait() == 0
    shown = run(capsys, "rm", "s").out
    assert shown.startswith("s-0: removed, ")
    assert shown.endswith("s: sweep removed\n")
    assert sweep("list").startswith("s-1\tfinished\t2/2")
    assert {row.run for row in registry.every()} == {"s-1-0", "s-1-1"}
    assert run(capsys, "rm", "s-1", "--json").out.endswith('"sweep": "s-1"\n  }\n]\n')
