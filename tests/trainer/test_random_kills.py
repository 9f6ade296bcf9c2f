"""SIGKILLs at random steps and in saves lose at most one checkpoint interval each."""

import json
from itertools import pairwise

import pytest

from tests.nightly import few
from tests.trainer.ranks import losses, start

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("trainer")]

INTERVAL = 5


@pytest.mark.parametrize("kills", few([10, 50], 10))
def test_kills_lose_at_most_an_interval_each(kills, pools, tmp_path):
    process = start(["-m", "tests.trainer.random_kills", str(tmp_path), str(kills)], tmp_path)
    rounds = [json.loads(line) for line in process.communicate()[0].splitlines()]
    assert process.returncode == 0

    assert len(rounds) == kills + 1
    for before, after in pairwise(rounds):
        assert after["skipped"] == 0, "a checkpoint had its final name but was damaged"
        assert 0 <= before["logged"] - after["resumed"] <= INTERVAL
    assert sum(one.get("saving", False) for one in rounds) >= kills // 10, (
        "too few kills hit a save"
    )
    assert rounds[-1]["logged"] > kills

    whole, options = tmp_path / "whole", ("--epochs", "100000", "--log-every", "1")
    pools[2].train(whole, *options, "--steps", str(rounds[-1]["logged"]), "--no-tensorboard")
    assert losses(tmp_path) == losses(whole), "bit-identical to an uninterrupted run"
