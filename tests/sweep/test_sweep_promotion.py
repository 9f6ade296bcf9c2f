"""`promote: true`: trials pause at their rung, and resume their checkpoints when they go on."""

from __future__ import annotations

import math
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from deploykit.lib import paths
from deploykit.sweep import promotion, samplers
from deploykit.sweep.file import from_data
from deploykit.sweep.promotion import Ladder
from tests.aws_server import SECTION
from tests.sweep.halving import LENGTHS, STEPS, counts
from tests.sweep.test_sweep import deploykit, priced, wait_for


def test_a_promotion_trains_no_step_twice(halving, sweep):
    halving()
    found = sweep("start", "--json", "--sweep", "s")
    assert counts(found) == LENGTHS
    assert found["counts"] == {"pruned": 8, "succeeded": 1}
    best = found["best"]
    assert (best["parameters"]["lr"], best["value"]) == ("0.03", pytest.approx(1 / 27))
    number = best["trial"]
    assert [one["run"] for one in best["runs"]] == [
        *(f"s-{number}", f"s-{number}-r1", f"s-{number}-r2")
    ]
    assert f"trial {number}: paused at step 9" in sweep.notes
    assert f"trial {number}: goes on to its end" in sweep.notes
    sweep("report")
    assert (
        Path("report-s.html").read_text().count("<title>trial ") == 1 + 3
    )  # curves with two points or more


@pytest.mark.slow
def test_paused_trials_are_shown_and_go_on_after_a_stop(halving, sweep):
    halving(parallel=3)
    hold = paths.state() / "runs/hold"
    hold.parent.mkdir(parents=True)
    hold.touch()
    with deploykit("start", "--sweep", "s") as controller:
        wait_for((paths.state() / "sweeps/s/journal.log").exists)
        wait_for(lambda: sweep("status", "--json")["counts"] == {"running": 1, "paused": 8})
        assert "trials  9 of 9: 8 paused, 1 running" in sweep("watch", "--once")
        sweep("stop", "s")
        assert controller.wait() == 0
    stopped = sweep("status", "s", "--json")
    assert (stopped["state"], stopped["total"]) == ("stopped", 9)
    paused = [one for one in stopped["trials"] if one["state"] == "paused"]
    assert {one["reason"] for one in paused} == {"paused at step 1", "paused at step 3"}
    assert all(one["value"] > 0 for one in paused)
    hold.unlink()
    found = sweep("resume", "s", "--json")
    assert found["counts"] == {"pruned": 8, "succeeded": 1}
    assert counts(found)["0.03"] == STEPS


@pytest.mark.slow
def test_what_a_script_trains_again_is_counted(halving, sweep, toy):
    halving()
    job = "name: toy\nentrypoint: {script: train.py}\nenv: {FORGETS: 'yes'}\n"
    (toy / "job.yaml").write_text(job)
    found = sweep("start", "--json", "--sweep", "s")
    best = found["best"]
    assert best["reason"] == "trained 12 steps again after a pause"  # 3 and 9
    assert f"(lr=0.03); {best['reason']}" in sweep.notes


@pytest.mark.slow
def test_if_the_best_fails_the_next_one_goes_on(halving, sweep, toy):
    halving()
    job = "name: toy\nentrypoint: {script: train.py}\nenv: {FAILS: '0.03'}\n"
    (toy / "job.yaml").write_text(job)
    found = sweep("start", "--json", "--sweep", "s")
    assert found["counts"] == {"failed": 1, "pruned": 7, "succeeded": 1}
    assert found["best"]["parameters"]["lr"] in {"0.02", "0.04"}
    lengths = counts(found)
    assert (lengths["0.03"], lengths[found["best"]["parameters"]["lr"]]) == (10, STEPS)


@pytest.mark.slow
def test_the_cap_leaves_money_for_one_trial_to_end(halving, sweep, toy):
    """A run may cost 60 USD and does cost 20: five, the best of them to its end, and two more."""
    priced(toy, billed=20)
    halving(max_cost="200 USD")
    found = sweep("start", "--json", "--sweep", "s")
    assert (found["state"], found["cost"]["amount"]) == ("capped", 160)
    assert found["counts"]["succeeded"] == 1
    assert "paused" not in found["counts"]
    assert sweep("resume", "s", "--json")["cost"]["amount"] == 160


def test_a_cap_that_is_too_low_for_a_second_run_is_refused(halving, sweep, toy):
    priced(toy)
    halving(max_cost="119 USD")
    sweep("start", code=65)
    assert "max_cost: 119.00 USD is less than one trial may cost, 120.00 USD" in sweep.notes


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"pruner": "median"}, "promote: applies to `asha` only"),
        ({"repeat": 2}, "repeat: cannot be combined with a pruner"),
        ({"sampler": "cma-es"}, "promote: cannot be combined with `cma-es`"),
    ],
)
def test_what_does_not_go_together(halving, sweep, keys, said):
    halving(**keys)
    sweep("start", code=65)
    assert said in sweep.notes


def test_where_a_run_cannot_see_the_last_one_a_folder_is_required(halving, sweep, toy, monkeypatch):
    """On SageMaker, of which no service is asked."""
    halving()
    monkeypatch.setenv("DEPLOYKIT_BACKEND", "sagemaker")
    job = "name: toy\nentrypoint: {script: train.py}\nresources: {time_limit: 5m}\n" + SECTION
    (toy / "job.yaml").write_text(job)
    sweep("start", code=65)
    assert "promote: requires `checkpoints` in the job file" in sweep.notes


SPACE = {"lr": {"range": [0.01, 0.1]}, "n": {"range": [1, 64], "int": True}}


def journaled(state):
    """Twenty trials that have reached their first rung: paused, or pruned there."""
    study = optuna.create_study(pruner=optuna.pruners.NopPruner())
    lr, n = optuna.distributions.FloatDistribution(0.01, 0.1), optuna.distributions.IntDistribution
    for number in range(20):
        values = {"lr": 0.01 + number / 250, "n": 1 + number}
        trial = optuna.trial.create_trial(
            state=state,
            params=values,
            distributions={"lr": lr, "n": n(1, 64)},
            intermediate_values={1: (values["lr"] - 0.03) ** 2},
            user_attrs={promotion.PAUSED: 0},
        )
        study.add_trial(trial)
    return study


def test_a_sampler_learns_from_paused_trials_as_from_pruned_ones():
    data = {"parameters": SPACE, "objective": {"metric": "loss"}, "trials": 40, "pruner": "asha"}
    sweep = from_data(Path("s"), {**data, "promote": True}, Path()).sweep
    chosen = []
    for state in (TrialState.RUNNING, TrialState.PRUNED):
        study = journaled(state)
        study.sampler = samplers.sampler(sweep, 20)
        chosen.append(samplers.suggest(sweep, study.ask()))
    assert chosen[0] == chosen[1]
    assert 0.01 < float(chosen[0]["lr"]) < 0.05


def ladder(direction, *values, reduction=2):
    """The ladder of trials that have paused at their first rung with these values."""
    study = optuna.create_study(direction=direction)
    for value in values:
        trial = study.ask()
        trial.report(value, 5)
        trial.set_user_attr(promotion.PAUSED, 0)
    data = {"parameters": SPACE, "objective": {"metric": "loss", "direction": direction}}
    keys = {"trials": 9, "pruner": "asha", "promote": True, "reduction": reduction, "min_steps": 4}
    return Ladder(from_data(Path("s"), {**data, **keys}, Path()).sweep, study), study


@pytest.mark.parametrize(
    ("direction", "values", "expected"),
    [
        ("minimize", [3, 1, 2], 1),
        ("maximize", [3, 1, 2], 0),
        ("minimize", [3], None),
        ("minimize", [2, 2], 0),
        ("minimize", [math.nan, 7], 1),
        ("maximize", [math.nan, math.nan], None),
        ("minimize", [math.inf, math.inf], None),
        ("maximize", [-math.inf, 1], 1),
    ],
)
def test_which_trial_goes_on(direction, values, expected):
    known, _ = ladder(direction, *values)
    assert known.next() == expected


def test_the_highest_rung_comes_first_and_failed_trials_do_not_count():
    known, study = ladder("minimize", 1, 2, 3, 4)
    for number, value in ((0, 9), (1, 8)):
        trial = optuna.Trial(study, number)
        trial.report(value, 8)
        trial.set_user_attr(promotion.RUNG, 1)
        trial.set_user_attr(promotion.PAUSED, 1)
    assert (known.next(), known.finalist()) == (1, 1)
    study.tell(1, state=TrialState.FAIL)
    assert (known.next(), known.finalist()) == (None, 0)  # trial 0 is the best of three below
    study.tell(0, 1.0)
    assert (known.finalist(), known.has_ended) == (None, True)
