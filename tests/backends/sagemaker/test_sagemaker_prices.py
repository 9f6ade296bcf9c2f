"""AWS's price list: what is asked, what of its answer counts, and what a job did cost."""

from __future__ import annotations

import json
from decimal import Decimal

import pytest

from deploykit.backends import sagemaker
from deploykit.backends.sagemaker import offers
from deploykit.cli import main as cli
from deploykit.cost import prices
from deploykit.lib.errors import BackendUnavailable, NotPermitted, UsageError
from tests.aws_server import SECTION, as_json
from tests.backends.sagemaker.sagemaker_jobs import vary


def product(usage, *amounts, term="OnDemand"):
    """A product of the list, in the form of GetProducts: JSON in a string."""
    dimensions = {
        f"SKU.{number}": {"unit": "Hrs", "pricePerUnit": {"USD": amount}, "appliesTo": []}
        for number, amount in enumerate(amounts)
    }
    return json.dumps(
        {
            "product": {
                "productFamily": "ML Instance",
                "attributes": {"usagetype": usage},
                "sku": "SKU",
            },
            "serviceCode": "AmazonSageMaker",
            "terms": {term: {"SKU.JRTCKXETXF": {"priceDimensions": dimensions}}},
            "version": "20261120000000",
        }
    )


MACHINES = [
    product("EUC1-Train:ml.g5.xlarge", "1.7610000000"),
    product("EUC1-Train:ml.m5.xlarge", "0.0000000000", "0.2760000000"),  # a free tier first
    product("EUC1-Train:ml.p5.48xlarge", "79.1200000000"),
    product("EUC1-TrainWarmPool:ml.g5.xlarge", "9.0"),
    product("EUC1-Host:ml.g6.xlarge", "9.0"),
    product("EUC1-Train:ml.g6.xlarge", "9.0", term="Reserved"),
    product("EUC1-Train:ml.g6.xlarge", "many"),
    '{"product": []}',
    "[" * 50_000,
]
DISK = [
    product("EUC1-Train:VolumeUsage.gp2", "0.1660000000"),
    product("EUC1-Host:VolumeUsage.gp2", "9.0"),
]


@pytest.fixture
def asked(aws):
    """An AWS that answers about prices, page by page; the requests that it got."""
    requests = []

    def answer(request):
        requests.append(request)
        if "NextToken" in request:
            return {"FormatVersion": "aws_v1", "PriceList": [*MACHINES[2:], *DISK]}
        return {"FormatVersion": "aws_v1", "PriceList": MACHINES[:2], "NextToken": "more"}

    aws.answers["GetProducts"] = answer
    return requests


@pytest.mark.aws
def test_the_prices_of_a_region_are_asked_for_and_kept(asked):
    assert "3 prices for eu-central-1" in offers.refresh_prices(*vary(region="eu-central-1"))
    kept = prices.stored("sagemaker", "eu-central-1")
    assert dict(kept.hourly) == {
        "ml.g5.xlarge": "1.7610000000",
        "ml.m5.xlarge": "0.2760000000",
        "ml.p5.48xlarge": "79.1200000000",
    }
    assert kept.storage == "0.1660000000"
    assert dict(kept.hosting) == {"ml.g6.xlarge": "9.0"}
    assert prices.hosting("sagemaker", "eu-central-1", "ml.g6.xlarge")[0].amount == 9
    wanted = [{one["Field"]: one["Value"] for one in request["Filters"]} for request in asked]
    assert wanted == [{"regionCode": "eu-central-1"}] * 2
    assert {request["ServiceCode"] for request in asked} == {"AmazonSageMaker"}


@pytest.mark.aws
def test_refresh_on_the_command_line(asked, project, capsys):
    with (project / "job.yaml").open("a") as file:
        file.write(SECTION.replace("us-east-1", "eu-central-1").replace("ml.g5", "ml.m5"))
        file.write("  distribution: none\n")
    argv = ["cost", "--backend", "sagemaker", "--json"]
    assert cli.main(argv) == 0
    assert json.loads(capsys.readouterr().out)["worst"] is None
    assert cli.main([*argv, "--refresh"]) == 0
    shown = capsys.readouterr()
    disk = Decimal(30) * Decimal("0.166") / 730
    worst = (Decimal("0.276") + disk) * 420 / 3600
    assert json.loads(shown.out)["worst"] == float(round(worst, 2))
    assert "3 prices for eu-central-1" in shown.err
    assert cli.main(argv) == 0  # and from now on without asking
    assert json.loads(capsys.readouterr().out)["worst"] == float(round(worst, 2))
    assert len(asked) == 2


@pytest.mark.aws
def test_an_answer_without_prices_keeps_what_there_was(aws):
    aws.answers["GetProducts"] = lambda _: {"FormatVersion": "aws_v1", "PriceList": []}
    with pytest.raises(BackendUnavailable, match="has no training prices for us-east-1"):
        offers.refresh_prices(*vary(region="us-east-1"))
    assert prices.stored("sagemaker", "us-east-1") is None


@pytest.mark.aws
def test_without_permission_the_error_says_so(aws):
    denied = {"__type": "AccessDeniedException", "message": "not authorized: pricing:GetProducts"}
    aws.respond = lambda *_: as_json(400, denied)
    with pytest.raises(NotPermitted):
        offers.refresh_prices(*vary(region="us-east-1"))


def test_without_a_region_nothing_is_asked(monkeypatch):
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match="no region"):
        offers.refresh_prices(*vary(region=None))


def test_a_heterogeneous_cluster_adds_its_groups(vary):
    groups = ({"name": "a", "instance_type": "ml.g5.xlarge", "instance_count": 3},)
    groups += ({"name": "b", "instance_type": "ml.g6.xlarge", "instance_count": 2},)
    parts = tuple(sagemaker.options.InstanceGroup(**group) for group in groups)
    job, options = vary(instance_groups=parts, instance_type=None, time_limit=3600)
    estimate = sagemaker.cost(job, options)
    assert estimate.amount("likely") == 3 * Decimal("1.408") + 2 * Decimal("1.127")


def test_a_disk_without_a_price_leaves_the_sum_unknown(vary):
    kept = prices.PriceList("us-east-1", "USD", "2026-11-23", "AWS", {"ml.m5.xlarge": "0.23"})
    prices.store("sagemaker", kept)
    estimate = sagemaker.cost(*vary(instance_type="ml.m5.xlarge"))
    (unknown,) = estimate.unknown
    assert unknown.startswith(
        "no price is known for disks in us-east-1; `deploykit cost --refresh`"
    )
    assert estimate.amount("worst") is None
