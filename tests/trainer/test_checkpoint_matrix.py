"""A run saved by any strategy on any number of ranks goes on with any other, on the same curve.

In double precision: what a checkpoint lost or mixed up would show, and rounding does not.
"""

import shutil

import pytest
import ranks
from standing import Ranks, topics

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
"""World and strategy, to options. A new strategy is a new row: it loads all others and they it."""

SAVED, END = 2, 4
"""Steps."""
EXACT = 1e-10
"""Of the losses and the final weights; measured: 1e-15 and 1e-12."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Trains a layout to a given step, in a given folder."""
    root = tmp_path_factory.mktemp("matrix")
    worlds = {world: Ranks(world, tmp_path_factory.mktemp("ranks")) for world in (1, 2, 3, 4)}
    given = (
        *("--task", "text", "--text", str(topics(root / "text", 6_000)), "--batch-size", "24"),
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
    """The folder of a layout that was stopped half way, made when first asked for."""
    folders = {}

    def folder(layout):
        if layout not in folders:
            folders[layout] = runs(layout, tmp_path_factory.mktemp("saved"), SAVED)
        return folders[layout]

    return folder


@pytest.mark.parametrize("loading", LAYOUTS)
@pytest.mark.parametrize("saving", LAYOUTS)
def test_it_goes_on_as_if_nothing_had_happened(
    saving, loading, runs, saved, uninterrupted, tmp_path
):
    shutil.copytree(saved(saving) / "checkpoints", tmp_path / "checkpoints")
    runs(loading, tmp_path, END)

    expected = ranks.losses(uninterrupted)
    assert list(expected) == [*range(1, END + 1)]
    rest = {step: loss for step, loss in expected.items() if step > SAVED}
    assert ranks.losses(tmp_path) == pytest.approx(rest, rel=0, abs=EXACT)
    assert (ranks.weights(tmp_path) - ranks.weights(uninterrupted)).abs().max() < EXACT
