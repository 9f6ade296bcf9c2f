"""Lists of prices: what ships, what was asked for, and how old both are."""

from __future__ import annotations

import datetime as dt
import json
from decimal import Decimal

from deploykit.cost import prices
from deploykit.cost.prices import Price, PriceList
from deploykit.lib import paths

DAY = dt.date(2026, 11, 23)


def test_each_list_that_ships_has_its_day_and_source():
    lists = prices.shipped("sagemaker")
    assert {one.region for one in lists} == {"us-east-1", "eu-west-1", "ap-south-1"}
    for one in lists:
        assert dt.date.fromisoformat(one.day) <= dt.datetime.now(dt.UTC).date()
        assert one.source.startswith("https://")
        assert one.currency == "USD"
        found = [*one.hourly.values(), *one.hosting.values(), *filter(None, [one.serverless])]
        assert found
        assert all(Decimal(price) > 0 for price in found)


def test_an_endpoint_has_a_price_of_its_own():
    """It is not always that of a training job."""
    training = prices.machine("sagemaker", "us-east-1", "ml.g6.xlarge")
    hosting = prices.hosting("sagemaker", "us-east-1", "ml.g6.xlarge")
    assert (training[0].amount, hosting[0].amount) == (Decimal("1.127"), Decimal("1.1267"))
    assert prices.hosting("sagemaker", "us-east-1", "ml.m5.large") is None
    assert prices.machine("sagemaker", "us-east-1", "ml.m5.large") is not None
    assert prices.serverless("sagemaker", "us-east-1")[0].amount == Decimal("0.00002")
    assert prices.serverless("sagemaker", "eu-west-1") is None


def test_a_machine_that_no_list_has_has_no_price():
    assert prices.machine("sagemaker", "us-east-1", "ml.p5en.48xlarge") is None
    assert prices.machine("sagemaker", "sa-east-1", "ml.g5.xlarge") is None


def test_prices_that_were_asked_for_win_and_the_others_stay():
    asked = PriceList("us-east-1", "USD", "2026-11-23", "AWS", {"ml.g5.xlarge": "1.5"}, "0.14")
    path = prices.store("sagemaker", asked)
    assert path == paths.state() / "prices/sagemaker-us-east-1.json"
    assert json.loads(path.read_text())["day"] == "2026-11-23"
    price, currency = prices.machine("sagemaker", "us-east-1", "ml.g5.xlarge")
    assert (price, currency) == (Price(Decimal("1.5"), "2026-11-23", "AWS"), "USD")
    assert prices.machine("sagemaker", "us-east-1", "ml.g6.2xlarge")[0].day == "2026-04-21"
    assert prices.storage("sagemaker", "us-east-1")[0].amount == Decimal("0.14")


def test_old_prices_are_named_after_60_days():
    on = [Price(Decimal(1), (DAY - dt.timedelta(days)).isoformat(), "") for days in (0, 60, 61)]
    assert prices.old(on[:2], DAY) == ""
    stale = "prices from 2026-09-23 are 61 days old; run `deploykit cost --refresh`"
    assert prices.old(on, DAY) == stale
    assert prices.old([Price(Decimal(1), "", "")], DAY) == ""
    assert prices.old([], DAY) == ""


def test_only_numbers_are_prices():
    for text in ("", "x", "-1", "NaN", "Infinity", "1e999999", "9" * 40, 3, None, ["1"]):
        assert not prices.is_price(text)
    assert prices.is_price("0")
    assert prices.is_price("25.2512883")
