"""What a job may cost on Slurm: billing weights, and what cannot be known without the cluster."""

from __future__ import annotations

import dataclasses
import subprocess
from decimal import Decimal

import pytest

from deploykit.backends import slurm
from deploykit.backends.slurm import site, states
from deploykit.backends.slurm.options import Options
from deploykit.job.model import Resources
from tests.backends.slurm.plans import job
from tests.backends.slurm.test_slurm_site import CONFIG, NODES, PARTITIONS

SITE = site.parse(CONFIG.format(select="select/cons_tres"), PARTITIONS, NODES, "", "now")
WEIGHTED = "CPU=1.0,Mem=0.25G,GRES/gpu=2.0"
RESOURCES = Resources(
    time_limit=3600, nodes=2, cpus_per_node=8, memory=16 * 1024**3, gpus_per_node=4
)


def test_the_weights_are_those_of_slurms_own_example():
    weights = site.billing_weights(WEIGHTED)
    assert weights == {"cpu": 1, "mem": Decimal("0.25") / 1024, "gres/gpu": 2}
    assert site.billing_units(weights, RESOURCES, largest=False) == 2 * (8 + 4 + 8)
    assert site.billing_units(weights, RESOURCES, largest=True) == 2 * 8


@pytest.mark.parametrize(
    ("text", "resources", "message"),
    [
        ("CPU=1", {"cpus_per_node": None}, "resources.cpus_per_node, which is not set"),
        ("Mem=1G", {"memory": None}, "resources.memory, which is not set"),
        ("License/matlab=3", {}, "which a job file cannot set"),
        ("CPU=one", {}, "invalid billing weight"),
        ("CPU=1=2", {}, "invalid billing weight"),
    ],
)
def test_what_the_job_file_does_not_say_is_not_guessed(text, resources, message):
    changed = dataclasses.replace(RESOURCES, **resources)
    with pytest.raises(ValueError, match=message):
        site.billing_units(site.billing_weights(text), changed, largest=False)


@pytest.fixture
def profile(tmp_path):
    """A site profile whose default partition has weights; a function that changes it."""

    def write(weights=WEIGHTED, **changes):
        first, *others = SITE.partitions
        first = dataclasses.replace(first, billing_weights=weights)
        changed = dataclasses.replace(SITE, partitions=(first, *others), **changes)
        return str(site.save(changed, tmp_path / "site.json"))

    return write


def test_the_price_of_a_billing_hour(profile):
    options = Options(price="0.01 EUR/billing-hour", site=profile(), partition="cpu")
    changed = job(resources=vars(RESOURCES))
    assert slurm.cost(changed, options).amount("likely") == Decimal("0.01") * 40
    options = dataclasses.replace(options, site=profile(max_tres=True))
    assert slurm.cost(changed, options).amount("likely") == Decimal("0.01") * 16


@pytest.mark.parametrize(
    ("per", "options", "text"),
    [
        ("billing", {}, "weights are unknown; run `deploykit backends slurm --probe`, and set"),
        ("billing", {"site": "/no/x.json"}, "/no/x.json cannot be read or is not a site profile"),
        ("gpu", {"exclusive": True}, "with slurm.exclusive the job pays for whole nodes"),
        ("gpu", {"extra": {"gpus-per-task": "1"}}, "slurm.extra sets gpus-per-task"),
        ("cpu", {}, "resources.cpus_per_node is not set"),
    ],
)
def test_what_the_job_file_does_not_say_leaves_the_cost_unknown(per, options, text):
    estimate = slurm.cost(job(), Options(price=f"1 EUR/{per}-hour", **options))
    assert text in estimate.unknown[0]
    assert estimate.amount("worst") is None
    assert slurm.cost(job(), Options(price="1 EUR/node-hour", **options)).unknown == ()


def test_a_partition_without_weights_leaves_the_cost_unknown(profile):
    options = Options(price="0.01 EUR/billing-hour", site=profile(""), partition="cpu")
    assert (
        "the site profile has no billing weights for cpu" in slurm.cost(job(), options).unknown[0]
    )


def test_slurm_tells_the_weights_and_what_counts():
    weighted = PARTITIONS.replace(" Default=YES", f" Default=YES TRESBillingWeights={WEIGHTED}")
    config = CONFIG.format(select="select/cons_tres") + "PriorityFlags = NO_FAIR_TREE,MAX_TRES\n"
    read = site.parse(config, weighted, NODES, "", "now")
    assert read.partition("cpu").billing_weights == WEIGHTED
    assert read.max_tres
    assert (SITE.partition("cpu").billing_weights, SITE.max_tres) == ("", False)


def test_the_seconds_of_all_attempts():
    output = "42|600\n42|1200\n42_1|7\n421|9\n42|\n"
    assert states.parse_elapsed(output, "42") == 1800
    assert states.parse_elapsed("", "42") is None
    assert states.parse_elapsed("\x00|x\n42|²\n", "42") is None


@pytest.mark.slurm
@pytest.mark.slow
@pytest.mark.xdist_group("slurm")
def test_the_weights_of_a_real_partition_are_read(cluster):
    """Those of GPUs need AccountingStorageTRES, which this cluster does not set."""
    name, chosen = site.read().partition(None).name, "CPU=1.0,Mem=0.25G"
    set_weights = ["scontrol", "update", f"PartitionName={name}", "TRESBillingWeights="]
    subprocess.run([*set_weights[:-1], f"TRESBillingWeights={chosen}"], check=True)
    try:
        weights = site.read().partition(None).billing_weights
        assert site.billing_weights(weights) == site.billing_weights(chosen)
        assert len(site.billing_weights(weights)) == 2
    finally:
        subprocess.run(set_weights, check=False)
