"""A checkpoint of any strategy on any number of ranks is resumed by any other, with equal results.

In double precision, in which rounding does not hide state that a checkpoint has lost.
"""

import shutil

import pytest

from tests.nightly import few
from tests.trainer import ranks
from tests.trainer.rank_pool import write_help_topics

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("trainer")]

LAYOUTS = {
    "1 single": (),
    "2 ddp": (),
    "3 zero3": (),
    "4 zero1": (),
    "4 zero2": (),
    "4 hsdp": ("--shard-ranks", "2"),
    "4 tp-dp": ("--tensor-parallel", "2", "--sequence-parallel"),
    "4 fsdp-tp": ("--tensor-parallel", "2"),
}
"""World size and strategy, to options. A new row is combined with all others, both ways."""

PAIRS = [(saving, loading) for saving in LAYOUTS for loading in LAYOUTS]
EACH_ONCE = [*zip(LAYOUTS, [*LAYOUTS][3:] + [*LAYOUTS][:3], strict=True)]
"""Each layout saves once and loads once, on another number of ranks or with another strategy."""

SAVED, END = 2, 4
"""Steps."""
EXACT = 1e-10
"""Of the losses and the final weights; measured: 1e-15 and 1e-12."""


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """The world size of a layout, and the options that train it to a step."""
    text = write_help_topics(tmp_path_factory.mktemp("matrix") / "text", 6_000)
    task = ("--task", "text", "--text", str(text), "--batch-size", "24")
    model = ("--layers", "1", "--width", "24", "--heads", "12", "--sequence", "12")
    common = (*task, *model, "--log-every", "1", "--no-tensorboard")

    def of_layout(layout, steps):
        world, strategy = layout.split()
        ways = ("--strategy", strategy, *LAYOUTS[layout], "--steps", str(steps))
        return int(world), *common, *ways

    return of_layout


@pytest.mark.parametrize(("saving", "loading"), few(PAIRS, *EACH_ONCE))
def test_a_resumed_run_equals_an_uninterrupted_one(saving, loading, words, pools, once, tmp_path):
    saved = once(*words(saving, SAVED), double=True)
    shutil.copytree(saved / "checkpoints", tmp_path / "checkpoints")
    world, *options = words(loading, END)
    pools[world].train(tmp_path, *options, double=True)

    uninterrupted = once(*words("1 single", END), double=True)
    expected = ranks.losses(uninterrupted)
    assert list(expected) == [*range(1, END + 1)]
    rest = {step: loss for step, loss in expected.items() if step > SAVED}
    assert ranks.losses(tmp_path) == pytest.approx(rest, rel=0, abs=EXACT)
    assert (ranks.weights(tmp_path) - ranks.weights(uninterrupted)).abs().max() < EXACT
