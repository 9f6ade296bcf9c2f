"""What a job may cost, beside a calculation that shares no code with it: 200 random jobs."""

from __future__ import annotations

import dataclasses
import random
from decimal import ROUND_HALF_UP, Decimal

import pytest

from deploykit.backends import local, sagemaker, slurm
from deploykit.backends.slurm.options import Restarts
from deploykit.cost import cap, money
from deploykit.job.model import Entrypoint, JobSpec, Resources

JOBS = 200
AWS = {  # USD an hour, copied by hand from the list that ships
    "ml.g5.xlarge": "1.408",
    "ml.g5.48xlarge": "20.36",
    "ml.g6e.12xlarge": "13.12",
    "ml.p4d.24xlarge": "25.2512883",
    "ml.p5.48xlarge": "63.296",
    "ml.trn1.32xlarge": "24.73",
}
IRELAND = {"ml.m5.xlarge": "0.257", "ml.p3.2xlarge": "4.131"}
DISK = "0.154"
ROLE = {"role": "arn:aws:iam::123456789012:role/x", "bucket": "my-bucket"}


def job_of(chance, **resources):
    resources |= {"time_limit": chance.randrange(60, 400_000), "nodes": chance.randint(1, 64)}
    return JobSpec("j", Entrypoint("t.py"), Resources(**resources), retries=chance.randrange(4))


def on_sagemaker(chance):
    job = job_of(chance)
    ireland = chance.random() < 0.3
    kind, price = chance.choice(list((IRELAND if ireland else AWS).items()))
    keep, size = chance.choice([None, 600, 3600]), chance.randint(1, 500)
    spot = chance.random() < 0.4
    wait = job.resources.time_limit + chance.randrange(50_000) if spot else None
    options = sagemaker.Options(
        **ROLE,
        region="eu-west-1" if ireland else "us-east-1",
        instance_type=kind,
        volume_size=size,
        keep_alive=keep,
        spot=spot,
        max_wait=wait,
    )
    limit, nodes = job.resources.time_limit, job.resources.nodes
    machine = nodes * Decimal(price)
    disk = nodes * size * Decimal(DISK) / Decimal(730) if ireland else Decimal(0)
    longest = (limit + 120) * (1 + job.retries)
    if spot:  # max_wait ends it, and the wait itself is not billed
        longest = min(longest, wait + 120)
    usual = (machine + disk) * limit / 3600
    warm = machine * (keep or 0) / 3600
    low = usual if not spot else machine * limit / 36000 + disk * limit / 3600
    return sagemaker, job, options, (low, usual + warm, (machine + disk) * longest / 3600 + warm)


def on_slurm(chance):
    gpus, cpus = chance.randint(0, 8), chance.randint(1, 128)
    job = job_of(chance, gpus_per_node=gpus, cpus_per_node=cpus)
    unit, count = chance.choice([("gpu", gpus), ("node", 1), ("cpu", cpus)])
    price = Decimal(chance.randrange(1, 10**6)) / 1000
    restarts = Restarts(*(chance.randrange(5) for _ in range(4)))
    tasks = chance.choice([None, 1, 12])
    options = slurm.Options(price=f"{price} EUR/{unit}-hour", restarts=restarts, array=tasks)
    limit = job.resources.time_limit
    hourly = job.resources.nodes * count * price * (tasks or 1)
    minutes = limit // 60 + (limit % 60 > 0)
    attempts = 1 + sum(vars(restarts).values())
    usual = hourly * limit / 3600
    return slurm, job, options, (usual, usual, hourly * attempts * (minutes + 1) / 60)


def on_this_machine(chance):
    job, price = job_of(chance), Decimal(chance.randrange(1, 10**5)) / 100
    usual = price * job.resources.time_limit / 3600
    return local, job, local.Options(price=f"{price} USD"), (usual, usual, usual)


def jobs():
    chance = random.Random(16)
    kinds = (on_sagemaker, on_slurm, on_this_machine)
    return [kinds[number % 3](chance) for number in range(JOBS)]


def test_200_jobs_cost_to_the_cent_what_another_calculation_says():
    for engine, job, options, expected in jobs():
        estimate = engine.cost(job, options)
        shown = estimate.data()
        for case, amount in zip(("low", "likely", "worst"), expected, strict=True):
            cents = amount.quantize(Decimal("0.01"), ROUND_HALF_UP)
            assert shown[case] == float(cents), (case, job, options)
        parts = [sum(charge.amount(case) for charge in estimate.charges) for case in shown_cases()]
        assert [float(money.cents(part)) for part in parts] == [shown[one] for one in shown_cases()]


def test_the_wait_for_spot_instances_is_not_billed():
    job = JobSpec("j", Entrypoint("t.py"), Resources(time_limit=3600))
    options = {"region": "us-east-1", "instance_type": "ml.g5.xlarge", "spot": True}
    day = sagemaker.cost(job, sagemaker.Options(**ROLE, **options, max_wait=86400))
    hour = sagemaker.cost(job, sagemaker.Options(**ROLE, **options, max_wait=3600))
    assert day.amount("worst") == hour.amount("worst")
    assert "1 attempt of 1h plus 2m to stop" in next(day.explained())


def shown_cases():
    return ("low", "likely", "worst")


def test_each_of_them_that_may_exceed_its_cap_is_refused_and_no_other():
    refused = 0
    for engine, job, options, (_, _, worst) in jobs():
        estimate = engine.cost(job, options)
        cents = worst.quantize(Decimal("0.000001"), ROUND_HALF_UP)
        below = max(cents - Decimal("0.0001"), Decimal(0))
        for limit in (below, cents + Decimal("0.0001")):
            capped = dataclasses.replace(job, max_cost=f"{limit} {estimate.currency}")
            errors = [one for one in cap.problems(capped, estimate) if one.severity == "error"]
            assert bool(errors) is (limit < worst), (limit, worst)
            refused += bool(errors)
            for problem in errors:
                assert problem.path == "max_cost"
                assert money.text(worst, estimate.currency) in problem.message
    assert refused >= JOBS * 0.9  # a job of 0 GPUs costs nothing


def test_a_stopped_job_stays_below_its_cap():
    """What the launchers are told: seconds that the cap pays for, with all that comes after."""
    for engine, job, options, (_, _, worst) in jobs():
        estimate = engine.cost(job, options)
        limit = money.Money((worst / 3).quantize(Decimal("0.01")), estimate.currency)
        seconds = cap.paid(limit, estimate)
        if seconds is None:
            assert not estimate.hourly
        elif seconds > 0:
            paid = money.for_seconds(estimate.hourly, seconds) + estimate.afterwards
            more = money.for_seconds(estimate.hourly, seconds + 1) + estimate.afterwards
            assert paid <= limit.amount < more


NO_MONEY = ("50", "USD", "50 usd", "-5 USD", "1e9 USD", "5 USDX", "\u0665 USD")


@pytest.mark.parametrize("text", NO_MONEY)
def test_what_is_no_money_is_not_read(text):
    with pytest.raises(ValueError, match="an amount of money"):
        money.parse(text)


def test_money_is_exact():
    assert money.parse("0.10EUR") == (Decimal("0.10"), "EUR")
    assert sum([money.parse("0.10 EUR").amount] * 3) == Decimal("0.3")
    assert str(money.parse("1234567.005 USD")) == "1,234,567.01 USD"
    assert money.exact(Decimal("14.1800")) == "14.18"
    assert money.exact(Decimal(2)) == "2.00"
    assert money.exact(Decimal("25.2512883")) == "25.2512883"
