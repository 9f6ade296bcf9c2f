"""A checkpoint of any strategy on any number of ranks is resumed by any other, with equal results.

In double precision, in which rounding does not hide state that a checkpoint has lost.
"""

import shutil

import pytest

from tests.nightly import few
from tests.trainer import ranks
from tests.trainer.rank_pool import RankPool, write_help_topics

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
def runs(tmp_path_factory):
    """A function that trains a layout to a given step in a given folder."""
    root = tmp_path_factory.mktemp("matrix")
    worlds = {world: RankPool(world, tmp_path_factory.mktemp("ranks")) for world in (1, 2, 3, 4)}
    given = (
        *(
            "--task",
            "text",
            "--text",
            str(write_help_topics(root / "text", 6_000)),
            "--batch-size",
            "24",
        ),
        *("--layers", "1", "--width", "24", "--heads", "12", "--sequence", "12"),
        *("--log-every", "1", "--no-tensorboard"),
    )

    def run(layout, folder, steps):
        world, strategy = layout.split()
        ways = ("--strategy", strategy, *LAYOUTS[layout], "--steps", str(steps))
        worlds[int(world)].train(folder, *given, *ways, double=True)
        return folder

    yield run
    for started in worlds.values():
        started.close()


@pytest.fixture(scope="module")
def uninterrupted(runs, tmp_path_factory):
    return runs("1 single", tmp_path_factory.mktemp("uninterrupted"), END)


@pytest.fixture(scope="module")
def saved(runs, tmp_path_factory):
    """The folder of a layout that was stopped half way, trained on first use."""
    folders = {}

    def folder(layout):
        if layout not in folders:
            folders[layout] = runs(layout, tmp_path_factory.mktemp("saved"), SAVED)
        return folders[layout]

    return folder


@pytest.mark.parametrize(("saving", "loading"), few(PAIRS, *EACH_ONCE))
def test_a_resumed_run_equals_an_uninterrupted_one(
    saving, loading, runs, saved, uninterrupted, tmp_path
):
    shutil.copytree(saved(saving) / "checkpoints", tmp_path / "checkpoints")
    runs(loading, tmp_path, END)

    expected = ranks.losses(uninterrupted)
    assert list(expected) == [*range(1, END + 1)]
    rest = {step: loss for step, loss in expected.items() if step > SAVED}
    assert ranks.losses(tmp_path) == pytest.approx(rest, rel=0, abs=EXACT)
    assert (ranks.weights(tmp_path) - ranks.weights(uninterrupted)).abs().max() < EXACT
