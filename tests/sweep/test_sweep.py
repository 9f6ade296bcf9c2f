"""Sweeps from start to best, with real processes: samplers, failures, stop and resume, cost."""

from __future__ import annotations

import ast
import json
import random
import signal
import subprocess
import sys
import time
from itertools import count
from pathlib import Path

import pytest

from deploykit.backends import local
from deploykit.cli import main as cli
from deploykit.job import machine
from deploykit.job.model import Entrypoint, JobSpec, Resources
from deploykit.lib import paths
from tests.sweep import plain

SAMPLERS = {
    "grid": "{lr: {choice: [0.01, 0.03, 0.05]}}",
    "random": "{lr: {range: [0.01, 0.05]}}",
    "sobol": "{lr: {range: [0.01, 0.05]}, n: {range: [1, 8], int: true, log: true}}",
    "tpe": "{lr: {range: [0.01, 0.05], log: true}, n: {choice: [a, b]}}",
    "cma-es": "{lr: {range: [0.01, 0.05]}, n: {range: [1, 9], int: true}}",
}


@pytest.mark.slow
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_sampler_finds_a_best_trial(write, sweep, sampler):
    write(sampler=sampler, trials=5, parallel=3, parameters=SAMPLERS[sampler])
    found = sweep("start", "--json")
    trials = 3 if sampler == "grid" else 5
    assert (found["state"], found["counts"]) == ("finished", {"succeeded": trials})
    assert found["best"]["value"] == min(one["value"] for one in found["trials"])
    for one in found["trials"]:
        lr = float(one["parameters"]["lr"])
        assert one["value"] == pytest.approx((lr - 0.03) ** 2 + 1 / 3, abs=1e-8)
        passed = eval((paths.run_folder(one["runs"][0]["run"]) / "args").read_text())
        assert passed == [
            word for name, text in one["parameters"].items() for word in (f"--{name}", text)
        ]
    assert len({json.dumps(one["parameters"]) for one in found["trials"]}) == trials
    assert set(plain.started(paths.state()).values()) == {1}


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["grid", "random", "sobol"])
def test_the_same_seed_chooses_the_same_values(write, sweep, sampler):
    write(sampler=sampler, parallel=3, parameters=SAMPLERS[sampler])
    first, second = sweep("start", "--json"), sweep("start", "--json")
    assert first["sweep"] != second["sweep"]
    chosen = [[one["parameters"] for one in found["trials"]] for found in (first, second)]
    assert chosen[0] == chosen[1]


def test_from_the_grid_to_a_job_file_that_submits(toy, sweep):
    grid = ["--grid", "lr=0.01,0.030,0.05", "--metric", "loss", "--sweep", "g", "--parallel", "3"]
    shown = sweep("start", *grid)
    assert "g: finished\n  trials  3 of 3: 3 succeeded\n  best    trial 1: loss" in shown
    assert sweep("best", "g", "--write", "best.yaml").startswith("g: trial 1: loss 0.333333")
    text = Path("best.yaml").read_text()
    assert "args: [--lr, 0.030]" in text
    assert cli.main(["submit", "best.yaml", "--run", "again", "--wait"]) == 0
    assert eval((paths.run_folder("again") / "args").read_text()) == ["--lr", "0.030"]
    assert sweep("list") == "g\tfinished\t3/3\tplain\n"
    assert len(sweep("status").splitlines()) == 3 + 3
    best = sweep("best", "--json")
    assert (best["parameters"], best["run"]) == ({"lr": "0.030"}, "g-1")
    sweep("best", "g", "--write", "best.yaml", code=64)
    assert "already exists" in sweep.notes


def test_a_variable_and_the_greatest_value(write, sweep):
    write(
        parameters='{lr: {choice: [1, 2]}, e: {choice: [x], as: "env:FROM_ENV"}}',
        objective="{metric: top, direction: maximize, value: best}",
        sampler="grid",
    )
    best = sweep("start", "--json")["best"]
    assert (best["parameters"], best["value"]) == ({"lr": "2", "e": "x"}, 6)
    sweep("best", "--write", "best.yaml")
    assert "env:\n  FROM_ENV: x\n" in Path("best.yaml").read_text()


def test_failed_trials_do_not_end_the_sweep(write, sweep):
    write(sampler="grid", parameters="{do: {choice: ['raise ValueError', 'pass', 'print(1)']}}")
    found = sweep("start", "--json")
    assert found["counts"] == {"failed": 1, "succeeded": 2}
    assert found["trials"][0]["reason"].startswith("user_code_error: exit code 1")
    assert plain.started(paths.state())[f"{found['sweep']}-0"] == 1


def test_failed_trials_are_run_again_with_their_values(write, sweep, toy, capsys, hook):
    with (toy / "job.yaml").open("a") as file:
        file.write(f"notify: {{to: ['{hook.url}']}}\n")
    fails = f"open('{toy.parent}/works').read()"
    write(sampler="grid", parameters=f'{{do: {{choice: [pass, "{fails}", print(1)]}}}}')
    name = sweep("start", "--json")["sweep"]
    assert cli.main(["rerun", name, "--failed"]) == 0
    shown = capsys.readouterr()
    assert f"{name}: retrying trials 1\n" in shown.err
    assert "4 of 4: 2 failed, 2 succeeded" in shown.out
    (toy.parent / "works").touch()
    assert cli.main(["rerun", name, "--failed", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["state"] for one in found["trials"]] == [
        *("succeeded", "failed", "succeeded", "failed", "succeeded")
    ]
    assert {one["parameters"]["do"] for one in found["trials"] if one["trial"] in {1, 3, 4}} == {
        fails
    }
    assert (found["state"], found["total"]) == ("finished", 5)
    assert set(plain.started(paths.state()).values()) == {1}, "no trial is started twice"
    assert sweep("resume", name, "--json")["total"] == 5
    ends = [message["cause"].partition(";")[0] for message in hook.messages]
    assert [end.partition("of ")[2] for end in ends] == ["3 trials", "4 trials", "5 trials"]
    assert cli.main(["rerun", name, "--failed"]) == 64
    assert "all failed trials were already retried" in capsys.readouterr().err
    assert cli.main(["rerun", name, "--failed", "--set", "env.A=1"]) == 64
    assert "--set does not apply to a sweep" in capsys.readouterr().err


def test_without_any_success_the_code_says_so(write, sweep):
    write(objective="{metric: acuracy}", trials=1)
    found = sweep("start", "--json", code=1)
    assert found["best"] is None
    assert (
        "metric 'acuracy' not found; metrics of the run: loss, top" in found["trials"][0]["reason"]
    )
    sweep("best", code=66)
    assert "no trial" in sweep.notes


LOST = (
    "import os; print('slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-01-01T00:00:00 "
    "DUE TO PREEMPTION ***', flush=True); os._exit(1)"
)
MEMORY = "print('torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB'); 1/0"


@pytest.mark.slow
def test_what_the_machines_broke_is_tried_again_and_what_the_script_broke_is_not(write, sweep):
    once = f"if not os.path.exists('../../seen'): open('../../seen', 'w'); {LOST}"
    choices = json.dumps([once, LOST, MEMORY])
    write(sampler="grid", parameters=f"{{do: {{choice: {choices}}}}}", retries=1)
    found = sweep("start", "--json")
    assert [one["state"] for one in found["trials"]] == ["succeeded", "failed", "failed"]
    assert [len(one["runs"]) for one in found["trials"]] == [2, 2, 1]
    assert found["trials"][1]["reason"].startswith("slurm_preempted")
    assert found["trials"][2]["reason"].startswith("cuda_oom")
    name = found["sweep"]
    assert set(plain.started(paths.state())) == {
        f"{name}-{run}" for run in ("0", "0-r1", "1", "1-r1", "2")
    }


def test_repeats_have_seeds_and_a_mean(write, sweep):
    write(trials=2, repeat=3, parallel=4, repeat_as="--lr {value}", parameters="{n: {choice: [1]}}")
    found = sweep("start", "--json")
    mean = sum((seed - 0.03) ** 2 for seed in range(3)) / 3 + 1 / 3
    assert [one["value"] for one in found["trials"]] == pytest.approx([mean, mean])
    spread = found["best"]["spread"]
    assert spread["values"] == pytest.approx([(seed - 0.03) ** 2 + 1 / 3 for seed in range(3)])
    assert spread["mean"] == pytest.approx(mean)
    assert found["not_clearly_worse"] == [1]
    assert "not clearly worse, because the intervals overlap: trials 1" in sweep("best")
    runs = [f"{found['sweep']}-1-s{seed}" for seed in range(3)]
    assert [one["run"] for one in found["trials"][1]["runs"]] == runs
    assert eval((paths.run_folder(runs[2]) / "args").read_text()) == ["--n", "1", "--lr", "2"]


def wait_for(condition):
    """Until something is true; the test's own time limit ends it."""
    while not condition():
        time.sleep(0.05)


def deploykit(*words):
    return subprocess.Popen(
        [sys.executable, "-m", "deploykit", "sweep", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


SLEEP = "{do: {choice: ['while not os.path.exists(\"../../go\"): time.sleep(0.05)', 'pass']}}"


def test_stop_cancels_and_resume_goes_on(write, sweep, toy, capsys):
    write(sampler="grid", parameters=SLEEP)
    with deploykit("start", "--sweep", "s") as controller:
        wait_for((paths.run_folder("s-0") / "starts").exists)
        assert sweep("status", "s", "--json")["state"] == "running"
        sweep("resume", "s", code=75)
        assert "another process is controlling" in sweep.notes
        assert cli.main(["rerun", "s", "--failed"]) == 75
        assert sweep("stop", "s", "--json")["state"] == "stopped"
        assert controller.wait() == 0
    capsys.readouterr()
    assert cli.main(["rerun", "s", "--failed"]) == 64, "it would run the other trials too"
    shown = capsys.readouterr().err
    assert "0 of 2 trials of s have ended" in shown
    assert "`deploykit sweep resume s` first" in shown
    assert not (paths.run_folder("s-0") / "code").exists()
    (paths.state() / "runs/go").touch()
    found = sweep("resume", "s", "--json")
    assert (found["state"], found["counts"]) == ("finished", {"succeeded": 2})
    assert cli.main(["rerun", "s", "--failed"]) == 64
    assert "s: no trial has failed" in capsys.readouterr().err
    assert plain.started(paths.state()) == {"s-0": 1, "s-0-r1": 1, "s-1": 1}
    plan = (paths.run_folder("s-0-r1") / "job.json").read_text()
    assert json.loads(plan)["checkpoints"] == str(paths.run_folder("s-0") / "checkpoints")


def test_in_the_background(write, sweep, toy):
    """Not by a `deploykit` of the working folder."""
    write(trials=2)
    (toy / "deploykit").mkdir()
    (toy / "deploykit/__init__.py").write_text("raise SystemExit('the wrong one')")
    started = sweep("start", "--sweep", "b", "--detach", "--json")
    assert started["sweep"] == "b"
    wait_for(lambda: sweep("status", "b", "--json")["state"] == "finished")
    assert "trial 1: loss" in Path(started["log"]).read_text()


@pytest.mark.slow
def test_a_source_that_changes_changes_no_trial(write, sweep, toy):
    write(sampler="grid", parameters=SLEEP)
    with deploykit("start", "--sweep", "s") as controller:
        wait_for((paths.run_folder("s-0") / "starts").exists)
        controller.kill()
    (toy / "train.py").write_text("raise SystemExit('changed')")
    (toy / "job.yaml").unlink()
    (paths.state() / "runs/go").touch()
    assert sweep("resume", "s", "--json")["counts"] == {"succeeded": 2}


@pytest.mark.slow
def test_jobs_that_are_refused_wait_for_those_that_run(write, sweep, toy):
    refuse = toy / "full"
    refuse.touch()
    job = {"name": "toy", "entrypoint": {"script": "train.py"}, "plain": {"refuse": str(refuse)}}
    (toy / "job.yaml").write_text(json.dumps(job))
    write()
    (toy / "full").touch()
    sweep("start", "--sweep", "s", code=76)
    assert "the queue is full" in sweep.notes
    assert "then resume the sweep with `deploykit sweep resume s`" in sweep.notes
    refuse.unlink()
    assert sweep("resume", "--json")["counts"] == {"succeeded": 3}
    assert set(plain.started(paths.state()).values()) == {1}


def priced(toy, billed=1):
    section = {"price": "3600 USD", "billed": billed}
    job = {"name": "toy", "entrypoint": {"script": "train.py"}, "plain": section}
    (toy / "job.yaml").write_text(json.dumps({**job, "resources": {"time_limit": "60s"}}))


def test_the_cap_is_kept_with_running_trials_at_their_worst(write, sweep, toy):
    """A run may cost 60 USD and does cost 20: with 130 USD two run, and six are all."""
    priced(toy, billed=20)
    write(trials=20, parallel=4, max_cost="130 USD")
    found = sweep("start", "--json")
    assert found["cost"] == {"amount": 80.0, "currency": "USD"}
    assert found["counts"] == {"succeeded": 4}
    assert (found["state"], found["total"]) == ("capped", 20)
    assert (
        "not starting more trials, because the next could exceed max_cost (130.00 USD)"
        in sweep.notes
    )


@pytest.mark.parametrize(
    ("cap", "said"),
    [
        ("59 USD", "max_cost: 59.00 USD is less than the 60.00 USD that one trial could cost"),
        ("99 EUR", "max_cost: is in EUR, but the prices are in USD"),
    ],
)
def test_a_cap_that_is_too_low_is_refused(write, sweep, toy, cap, said):
    priced(toy)
    write(max_cost=cap)
    sweep("start", code=65)
    assert said in sweep.notes
    assert not (paths.state() / "sweeps").exists()


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({}, "cost: at most 120.00 USD: 2 trials x 60.00 USD\n  `max_cost` in the sweep file"),
        (
            {"repeat": 2, "retries": 1},
            "cost: at most 480.00 USD: 2 trials x 60.00 USD x 2 repeats x 2 attempts\n",
        ),
        ({"max_cost": "100 USD"}, "cost: at most 100.00 USD (max_cost); without it, 120.00 USD: 2"),
    ],
)
def test_the_worst_case_is_said_before_the_first_trial(write, sweep, toy, keys, said):
    priced(toy)
    write(trials=2, retries=keys.pop("retries", 0), **keys)
    sweep("start", "--dry-run")
    assert said in sweep.notes
    assert not (paths.state() / "sweeps").exists()
    sweep("start")
    assert said in sweep.notes
    assert sweep.notes.index("cost: at most") < sweep.notes.index("trial 0")


def test_what_bills_names_the_budget_that_alerts(write, sweep, toy):
    image = "763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch:2.14-cu133-amzn2023-sagemaker"
    with (toy / "job.yaml").open("a") as file:
        file.write(
            "resources: {time_limit: 1h}\nsagemaker: {role: 'arn:aws:iam::123456789012:role/r', "
            f"bucket: b-1, region: us-east-1, instance_type: ml.g5.xlarge, image_uri: '{image}'}}\n"
        )
    write(trials=3)
    text = sweep("sweep.yaml", "--dry-run", "-b", "sagemaker")
    assert '"TrainingJobName"' in text
    assert "cost: at most" in sweep.notes
    assert ": 3 trials x " in sweep.notes
    assert "`deploykit infra` can add an account budget with email alerts" in sweep.notes


def test_a_dry_run_shows_the_first_trial_and_starts_nothing(write, sweep, toy):
    write(sampler="grid", parameters="{lr: {choice: [0.02, 0.03]}}")
    shown = sweep("start", "--dry-run", "--json", "--sweep", "s", "--", "--do", "1 + 1")
    assert (shown["sweep"], shown["run"], shown["backend"]) == ("s", "s-0", "plain")
    assert (shown["trials"], shown["cost"]) == (2, None)
    assert "train.py --do '1 + 1' --lr 0.02" in shown["text"]
    assert "train.py --lr 0.02" in sweep("--grid", "lr=0.02,1", "--metric", "loss", "--dry-run")
    assert not (paths.state() / "sweeps").exists()
    assert not paths.bundles().exists()
    assert not (toy.parent / "starts").exists()


def test_arguments_of_every_trial(write, sweep, toy):
    """Those of the job come first; a resumed sweep and its best job file have them too."""
    (toy / "job.yaml").write_text("name: toy\nentrypoint: {script: train.py, args: [--a, 1]}\n")
    write(trials=1)
    found = sweep("start", "--json", "--", "--b", "it's x")
    run = found["trials"][0]["runs"][0]["run"]
    words = ast.literal_eval((paths.run_folder(run) / "args").read_text())
    assert words[:4] == ["--a", "1", "--b", "it's x"]
    assert words[4] == "--lr"
    sweep("best", "--write", "best.yaml")
    best = (toy / "best.yaml").read_text()
    assert """args: [--a, 1, --b, "it's x", --lr, """ in best.replace('"1"', "1").replace('"', '"')


def test_a_cap_without_prices_has_no_effect_and_says_so(write, sweep, toy):
    write(max_cost="1 USD", trials=1)
    sweep("start")
    assert "warning: max_cost: has no effect: plain.price is not set" in sweep.notes


def test_a_variable_of_the_launcher_is_refused(write, sweep):
    write(parameters='{lr: {choice: [1], as: "env:RANK"}}', sampler="grid")
    sweep("start", code=65)
    assert "env.RANK: is set by the launcher" in sweep.notes


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([], 64, "an action is required"),
        (["strat"], 64, "did you mean 'start'?"),
        (["nope.yaml"], 66, "sweep file nope.yaml not found"),
        (["--grid", "lr=1"], 64, "--grid requires --metric"),
        (["start"], 66, "sweep file sweep.yaml not found"),
        (["start", "--grid", "lr=1"], 64, "--grid requires --metric"),
        (["start", "x.yaml", "--grid", "lr=1", "--metric", "m"], 64, "cannot be used together"),
        (["status", "--grid", "lr=1"], 64, "--grid applies only to `deploykit sweep start`"),
        (
            ["stop", "--detach"],
            64,
            "--detach applies only to `deploykit sweep start` and `deploykit",
        ),
        (["best", "-b", "local"], 64, "--backend applies only to `deploykit sweep start`"),
        (["start", "--write", "x"], 64, "--write applies only to `deploykit sweep best`"),
        (
            ["status", "--", "x"],
            64,
            "an argument after `--` applies only to `deploykit sweep start`",
        ),
        (["stop", "--dry-run"], 64, "--dry-run applies only to `deploykit sweep start`"),
        (["status"], 66, "no sweeps yet"),
        (["stop", "nope"], 66, "no sweep matches 'nope'"),
    ],
)
def test_wrong_command_lines(toy, sweep, words, code, said):
    sweep(*words, code=code)
    assert said in sweep.notes


def test_ids(toy, sweep):
    grid = ["--grid", "lr=1", "--metric", "loss", "--sweep"]
    sweep(*grid, "a-1")
    sweep(*grid, "a-1", code=64)
    assert "sweep a-1 already exists" in sweep.notes
    sweep(*grid, "a b", code=64)
    sweep(*grid, "a-2")
    sweep("status", "a-", code=66)
    assert "'a-' matches 2 sweeps" in sweep.notes
    assert sweep("status", "a-2", "--json")["sweep"] == "a-2"


def test_without_optuna_the_hint_says_what_to_install(toy, sweep, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    sweep("list", code=69)
    assert "pip install 'deploykit[sweep]'" in sweep.notes


REPORTS = """
def report(step): print(f"step {step}/9 loss={(lr - 0.03) ** 2 + 1 / step:.9f}", flush=True)
for step in range(4, 10): report(step)
while lr > 0.1: step += 1; report(step); time.sleep(0.02)
"""
"""A good trial has 9 steps; a bad one goes on until it is killed."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pruner", "good"),
    [("asha", 1), ("hyperband", 12), ("median", 5)],
    ids=str,
)
def test_bad_trials_are_stopped_and_free_their_slots(write, sweep, pruner, good):
    """With a seed for which the two bad ones come last."""
    values = [*(0.03 + number / 1000 for number in range(good)), 0.5, 0.6]
    write(
        parameters=json.dumps({"lr": {"choice": values}, "do": {"choice": [REPORTS]}}),
        sampler="grid",
        trials=good + 2,
        seed=next(seed for seed in count() if shuffled(good + 2, seed)[good:] == [good, good + 1]),
        pruner=pruner,
        max_steps=9,
    )
    found = sweep("start", "--json")
    bad = found["trials"][good:]
    assert [one["state"] for one in bad] == ["pruned", "pruned"]
    assert [one["runs"][0]["state"] for one in bad] == ["cancelled", "cancelled"]
    assert bad[0]["reason"].startswith("stopped early at step ")
    assert found["best"]["parameters"]["lr"] == "0.03"
    assert set(plain.started(paths.state()).values()) == {1}
    sweep("report", "-o", "report.html")  # shows the curves of eight trials, the best first
    assert (", stopped" in Path("report.html").read_text()) is (found["counts"]["succeeded"] < 8)


def shuffled(size, seed):
    """The order of a grid's points with a pruner."""
    numbers = list(range(size))
    random.Random(seed).shuffle(numbers)
    return numbers


def test_with_a_pruner_the_order_of_a_grid_says_nothing(write, sweep):
    """The whole grid, in an order that only the seed decides."""
    values = [0.01, 0.02, 0.03, 0.04]
    parameters = json.dumps({"lr": {"choice": values}})
    write(parameters=parameters, sampler="grid", trials=4, pruner="median", seed=3)
    found = [float(one["parameters"]["lr"]) for one in sweep("start", "--json")["trials"]]
    assert found == [values[number] for number in shuffled(4, 3)] != sorted(found)


ALONE = """
with open(f"../../slot-{args['--env']}", "x"): time.sleep(0.1)
os.remove(f"../../slot-{args['--env']}")
"""
"""Fails where another run has the same slot."""


@pytest.mark.slow
def test_runs_at_the_same_time_have_slots_of_their_own(write, sweep, toy):
    job = {"name": "toy", "entrypoint": {"script": "train.py"}, "plain": {"slots": 2}}
    (toy / "job.yaml").write_text(json.dumps(job))
    parameters = json.dumps({"do": {"choice": [ALONE]}})
    write(parameters=parameters, trials=3, parallel=5, repeat=2, repeat_as="--n {value}")
    found = sweep("start", "--json")
    assert found["counts"] == {"succeeded": 3}
    used = [json.loads(path.read_text())["env"] for path in paths.state().glob("runs/*/job.json")]
    assert {one["FROM_ENV"] for one in used} == {"0", "1"}


@pytest.mark.parametrize(
    ("gpus", "each", "visible", "slots"),
    [
        (4, 1, "", ["0", "1", "2", "3"]),
        (5, 2, "", ["0,1", "2,3"]),
        (4, 1, "2,0", ["2", "0"]),
        (4, 0, "", []),
        (0, 1, "", []),
        (1, 2, "", []),
    ],
)
def test_on_this_machine_each_run_has_gpus_of_its_own(
    tmp_path, monkeypatch, gpus, each, visible, slots
):
    (tmp_path / "root/dev").mkdir(parents=True)
    for number in range(gpus):
        (tmp_path / f"root/dev/nvidia{number}").touch()
    monkeypatch.setattr(machine, "_ROOT", tmp_path / "root")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    env = {"CUDA_VISIBLE_DEVICES": visible} if visible else {}
    job = JobSpec("toy", Entrypoint("train.py"), Resources(gpus_per_node=each), env=env)
    found = local.slots(job, local.Options())
    assert [one["CUDA_VISIBLE_DEVICES"] for one in found] == slots


def test_a_sweep_of_a_newer_deploykit_says_so(write, sweep, toy):
    folder = paths.state() / "sweeps/later-2"
    folder.mkdir(parents=True)
    swept = {"parameters": {"lr": {"choice": [1, 2]}}, "objective": {"metric": "loss"}}
    swept["a_new_key"] = 1
    texts = {"backend": "plain", "source": "", "overrides": [], "bundle": "b"}
    data = {"sweep": swept, "job": {}, "created": 1.0, **texts}
    (folder / "sweep.json").write_text(json.dumps(data))
    for name in ("later-2", "lat"):
        sweep("status", name, code=66)
        assert "error: sweep later-2 was created by a newer deploykit than this" in sweep.notes
        assert "pip install -U deploykit" in sweep.notes
    assert sweep("list") == ""
    assert "not listed: later-2 was created by a newer deploykit than this" in sweep.notes
    (folder / "sweep.json").write_text('{"sweep": 1')
    sweep("status", "later-2", code=66)
    assert "sweep later-2 is not valid JSON" in sweep.notes


@pytest.mark.parametrize(
    "damage", ["x\n{}\n", '{"op_code": 99}\n' * 2, '{"a": 1}\n[]\n', "\x00\n1\n"]
)
def test_a_journal_that_was_damaged_is_named(toy, sweep, damage):
    sweep("start", "--grid", "lr=1", "--metric", "loss", "--sweep", "a")
    journal = paths.state() / "sweeps/a/journal.log"
    journal.write_text(damage + journal.read_text())
    for action in ("status", "resume"):
        sweep(action, "a", code=66)
        assert "journal.log is not a journal that Optuna" in sweep.notes


def test_a_folder_that_others_may_enter_is_closed_before_its_journal_is_used(toy, sweep):
    sweep("start", "--grid", "lr=1", "--metric", "loss", "--sweep", "a")
    folder = paths.state() / "sweeps/a"
    folder.chmod(0o777)
    sweep("resume", "a")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o077 for path in folder.iterdir()} == {0}


def test_a_journal_that_was_cut_off_goes_on(toy, sweep):
    sweep("start", "--grid", "lr=1,2", "--metric", "loss", "--sweep", "a")
    journal = paths.state() / "sweeps/a/journal.log"
    journal.write_text(journal.read_text().rstrip("\n")[:-5])
    found = sweep("resume", "a", "--json")
    assert found["counts"] == {"succeeded": 2}
    assert set(plain.started(paths.state()).values()) == {1}


def test_an_interrupt_ends_the_controller_and_no_run(write, sweep, toy):
    write(sampler="grid", parameters=SLEEP)
    with deploykit("start", "--sweep", "s") as controller:
        wait_for((paths.run_folder("s-0") / "starts").exists)
        controller.send_signal(signal.SIGINT)
        _, told = controller.communicate()
    assert controller.returncode == 130
    assert "the runs continue; `deploykit sweep resume s` resumes the sweep" in told
    found = sweep("status", "--json")
    assert (found["state"], found["trials"][0]["runs"][0]["state"]) == ("interrupted", "running")
    (paths.state() / "runs/go").touch()
    assert sweep("resume", "--json")["counts"] == {"succeeded": 2}
    assert set(plain.started(paths.state()).values()) == {1}


def test_a_trial_that_the_user_cancels_has_failed(write, sweep, toy):
    write(sampler="grid", parameters=SLEEP)
    with deploykit("start", "--sweep", "s") as controller:
        wait_for((paths.run_folder("s-0") / "starts").exists)
        assert cli.main(["cancel", "s-0"]) == 0
        assert controller.wait() == 0
    found = sweep("status", "--json")
    assert [one["state"] for one in found["trials"]] == ["failed", "succeeded"]
    assert found["trials"][0]["reason"] == "cancelled"
