"""`deploykit cost`, the cap at submit, and what a run has cost, as a user types it."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from deploykit.api import submit as api
from deploykit.cli import main as cli
from deploykit.job.model import State, Status
from deploykit.lib import paths
from deploykit.run import registry
from tests.aws_server import SECTION

PRICE = ["--set", "slurm.price=2.10 USD/gpu-hour", "--set", "resources.gpus_per_node=4"]
ONCE = "slurm.restarts={time_limit: 0, preemption: 0, node_failure: 0, transient: 0}"


@pytest.fixture
def section(project):
    """The job file, with a section for SageMaker too: 5 minutes on one ml.g5.xlarge."""
    with (project / "job.yaml").open("a") as file:
        file.write(SECTION)
    return project


def run(capsys, *argv, code=0):
    assert cli.main(list(argv)) == code, capsys.readouterr()
    return capsys.readouterr()


def test_the_three_cases_as_text_and_as_json(section, capsys):
    shown = run(capsys, "cost", "--backend", "sagemaker")
    assert shown.out.splitlines() == [
        "low     0.12 USD",
        "likely  0.12 USD",
        "worst   0.16 USD",
        "spot: 0.01 USD to 0.16 USD",
        "prices: AWS prices as of 2026-09-24",
    ]
    assert "days old; run `deploykit cost --refresh`" in shown.err
    sent = run(capsys, "submit", "--backend", "sagemaker", "--dry-run").err
    assert "(AWS prices as of 2026-09-24)" in sent
    assert "days old" not in sent
    data = json.loads(run(capsys, "cost", "--backend", "sagemaker", "--json").out)
    assert (data["low"], data["likely"], data["worst"]) == (0.12, 0.12, 0.16)
    assert (data["currency"], data["backend"]) == ("USD", "sagemaker")
    assert data["others"]["spot"] == {"low": 0.01, "likely": 0.12, "worst": 0.16}


def test_each_sum_is_explained(section, capsys):
    warm = ["--set", "sagemaker.keep_alive=10m", "--set", "retries=1"]
    shown = run(capsys, "cost", "--backend", "sagemaker", "--explain", *warm).out
    assert (
        "  1 x ml.g5.xlarge, on-demand: 1.408 USD/h x 840 s (2 attempts of 5m plus 2m to stop) "
        "/ 3600 = 0.33 USD\n"
        "  1 x ml.g5.xlarge, warm pool: 1.408 USD/h x 600 s (10m keep_alive) / 3600 = 0.23 USD\n"
    ) in shown
    assert "not included: S3, CloudWatch" in shown


def test_what_is_unknown_is_said_and_never_guessed(section, capsys):
    unknown = {
        "sagemaker.instance_type=ml.p5en.48xlarge": "no price is known for ml.p5en.48xlarge",
        "sagemaker.region=sa-east-1": "no price is known for ml.g5.xlarge in sa-east-1",
        "sagemaker.training_plan=arn:aws:sagemaker:us-east-1:123456789012:training-plan/p": (
            "a training plan is paid in advance"
        ),
    }
    for setting, text in unknown.items():
        argv = ["--backend", "sagemaker", "--set", setting]
        shown = run(capsys, "cost", *argv).out
        assert text in shown
        assert "worst   unknown" in shown
        assert json.loads(run(capsys, "cost", *argv, "--json").out)["worst"] is None
        shown = run(capsys, "submit", "--dry-run", "--max-cost", "9999 USD", *argv, code=65)
        assert f"argument --max-cost: cannot be enforced: {text}" in shown.err


def test_this_machine_and_a_cluster_without_a_price_bill_nothing(project, capsys):
    shown = run(capsys, "cost")
    assert shown.out == "local: nothing is billed (local.price is not set)\n"
    data = json.loads(run(capsys, "cost", "--backend", "slurm", "--json").out)
    assert (data["worst"], data["free"]) == (0, "slurm.price is not set")
    shown = run(capsys, "submit", "--dry-run", "--max-cost", "5 USD")
    assert "warning: argument --max-cost: has no effect: local.price is not set" in shown.err
    assert "cost: " not in run(capsys, "submit", "--dry-run").err


def test_a_cluster_with_a_price(project, capsys):
    shown = run(capsys, "cost", "--backend", "slurm", *PRICE, "--explain").out
    assert (
        "  4 GPU(s): 8.40 USD/h x 79560 s (221 attempts of 5m and 1m to end) / 3600 = 185.64 USD\n"
    ) in shown
    assert "worst: every restart that slurm.restarts allows" in shown
    shown = run(capsys, "cost", "--backend", "slurm", *PRICE, "--set", ONCE).out
    assert "worst   0.84 USD\n" in shown


def test_a_line_in_each_dry_run_of_what_is_billed(section, capsys):
    shown = run(capsys, "submit", "--backend", "sagemaker", "--dry-run")
    line = "cost: at most 0.16 USD: 1 x ml.g5.xlarge, on-demand x 1 attempt of 5m plus 2m to stop"
    assert line in shown.err
    assert "DEPLOYKIT_CAP" not in shown.out
    data = json.loads(run(capsys, "submit", "--backend", "sagemaker", "--dry-run", "--json").out)
    assert data["cost"]["worst"] == 0.16


@pytest.mark.parametrize("verb", ["check", "submit", "python"])
def test_a_job_over_its_cap_is_refused_with_the_sum(section, capsys, verb):
    text = (
        "max_cost: the job may cost 0.16 USD, more than 0.15 USD: 1 x ml.g5.xlarge, on-demand: "
        "1.408 USD/h x 420 s (1 attempt of 5m plus 2m to stop) / 3600 = 0.16 USD"
    )
    if verb == "python":
        with pytest.raises(Exception, match="the job may cost"):
            api.submit(backend="sagemaker", set={"max_cost": "0.15 USD"})
        return
    argv = [verb, "--backend", "sagemaker", "--set", "max_cost=0.15 USD"]
    shown = run(capsys, *argv, code=65)
    assert text in shown.err
    assert "--stop-at-cap" in shown.err
    assert registry.every() == []
    run(capsys, "check", "--backend", "sagemaker", "--set", "max_cost=0.17 USD")


def test_with_stop_at_cap_the_plan_tells_the_launchers_the_seconds(section, capsys):
    argv = ["submit", "--backend", "sagemaker", "--dry-run", "--max-cost", "0.10 USD"]
    shown = run(capsys, *argv, "--stop-at-cap")
    assert "the run will be stopped after 4m 15s, before it costs more than 0.10 USD\n" in shown.err
    plan = json.loads(shown.out)
    told = json.loads(plan["Environment"]["DEPLOYKIT_CAP"])
    assert told == {"seconds": 255, "cap": "0.10 USD", "hourly": "1.408 USD"}
    argv[-1] = "5 USD"  # it cannot cost so much
    assert "DEPLOYKIT_CAP" not in run(capsys, *argv, "--stop-at-cap").out


REFUSED = {
    "max_cost=5 EUR": "max_cost: is in EUR, but the prices are in USD",
    "max_cost=0.01 USD stop_at_cap=true": "0.01 USD pays for 25 s at 1.408 USD an hour",
    "stop_at_cap=true": "stop_at_cap: requires max_cost",
    "max_cost=50": "max_cost: expected an amount of money such as 50 USD; got '50'",
    "max_cost=lots": "expected an amount of money",
}


@pytest.mark.parametrize("settings", REFUSED)
def test_a_cap_that_means_nothing_is_refused(section, capsys, settings):
    words = settings.replace(" EUR", "EUR").replace(" USD", "USD").split()
    argv = [word for setting in words for word in ("--set", setting)]
    shown = run(capsys, "check", "--backend", "sagemaker", *argv, code=65)
    assert REFUSED[settings].replace("0.01USD", "0.01 USD") in shown.err


def test_the_users_default_caps_each_job(section, capsys):
    path = paths.config()
    path.parent.mkdir(parents=True)
    path.write_text('max_cost = "0.15 USD"\n')
    path.chmod(0o600)
    shown = run(capsys, "submit", "--backend", "sagemaker", "--dry-run", code=65)
    assert f"set in {path}, line 1" in shown.err
    argv = ["submit", "--backend", "sagemaker", "--dry-run", "--max-cost", "1 USD"]
    run(capsys, *argv)


def test_cost_says_whether_the_cap_is_enough_and_refuses_nothing(section, capsys):
    argv = ["cost", "--backend", "sagemaker", "--max-cost"]
    shown = run(capsys, *argv, "0.15 USD").out
    assert "could cost more than 0.15 USD, so `submit` would refuse it" in shown
    assert "cannot cost more than 0.17 USD" in run(capsys, *argv, "0.17 USD").out
    assert "max_cost is in EUR" in run(capsys, *argv, "9 EUR").out


def a_run(state, **times):
    """A run with a price, in the registry."""
    folder = Path(paths.state(), "runs", "one")
    folder.mkdir(parents=True)
    price = {"hourly": "14.18", "currency": "USD", "source": "AWS prices as of 2026-04-21"}
    (folder / "price.json").write_text(json.dumps(price))
    row = ("one", "one", "none", "t", str(folder), "a", "b", None, time.time(), "")
    registry.add(registry.Run(*row))
    registry.confirm("one", "one")
    registry.update("one", Status(state, **times))
    return folder


def test_what_a_run_did_cost(project, capsys):
    a_run(State.SUCCEEDED, billed=1800.2)
    shown = run(capsys, "status", "one").out
    assert "  cost    7.09 USD: 1800 s at 14.18 USD/h (AWS prices as of 2026-04-21)\n" in shown
    (row,) = json.loads(run(capsys, "list", "--json").out)
    assert row["cost"] == {
        "amount": 7.09,
        "currency": "USD",
        "billed_seconds": 1800.2,
        "hourly": "14.18",
        "source": "AWS prices as of 2026-04-21",
    }
    assert run(capsys, "list", "--cost").out.split("\t")[6] == "7.09 USD"
    assert "7.09" not in run(capsys, "list").out


@pytest.mark.torch
@pytest.mark.slow
def test_a_submit_keeps_the_price_of_its_day(project, capsys):
    rented = ["--set", "local.price=2.50 USD"]
    shown = run(capsys, "submit", "--run", "one", *rented)
    assert "cost: at most 0.21 USD: this machine x 1 attempt of 5m" in shown.err
    kept = json.loads(Path(paths.run_folder("one"), "price.json").read_text())
    assert kept == {
        "hourly": "2.50",
        "currency": "USD",
        "source": "local.price, 2.50 USD an hour",
        "worst": "0.21",
    }
    run(capsys, "wait", "one")
    assert "  cost    0.0" in run(capsys, "status", "one").out
