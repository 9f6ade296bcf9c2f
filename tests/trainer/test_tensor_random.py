"""Under tensor parallelism ranks drop the same of what they share, and their own of the rest."""

import re

import pytest

from tests.trainer.ranks import losses

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("trainer")]

WORDS = ("--task", "tests.trainer.tensor_dropout:task", "--strategy", "tp", "--no-tensorboard")
STEPS = ("--steps", "3", "--log-every", "1", "--batch-size", "8")


def masks(pools, folder, *options):
    """What each of two ranks kept, in order: within the sharded layers, and outside."""
    texts = pools[2].train(folder, *WORDS, *STEPS, *options)
    found = [re.findall(r"^(within|outside) ([01]+)$", text, re.MULTILINE) for text in texts]
    return [
        {place: [mask for where, mask in one if where == place] for place in ("within", "outside")}
        for one in found
    ]


@pytest.mark.parametrize(
    "kind", [(), ("--task-option", "function=yes")], ids=["module", "function"]
)
def test_masks_are_common_or_of_each_rank(pools, tmp_path, kind):
    first, second = masks(pools, tmp_path, *kind)

    assert first["outside"] == second["outside"]
    assert len(first["outside"]) >= 6
    assert len({*first["outside"]}) == len(first["outside"])
    assert len({*first["within"], *second["within"]}) == 2 * len(first["outside"])
    assert {len(mask) for mask in first["within"]} == {32}


def test_layers_that_are_computed_again_drop_the_same(pools, tmp_path):
    once = masks(pools, tmp_path / "once")[1]
    again = masks(pools, tmp_path / "again", "--checkpoint-activations")[1]

    assert {*again["within"]} == {*once["within"]}
    assert len(again["within"]) > len(once["within"])
    assert losses(tmp_path / "again") == losses(tmp_path / "once")
    assert len(losses(tmp_path / "once")) == 3
