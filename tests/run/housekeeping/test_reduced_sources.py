"""What a run that has ended still needs of its source."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from deploykit.bundle import node_plane
from deploykit.cli import main as cli
from deploykit.job.model import State, Status
from deploykit.lib import paths
from deploykit.run import registry, storage
from deploykit.run import state as run_state
from tests.run.housekeeping.state import ACTIVE, tree


@pytest.fixture
def old(add):
    """The folder of a run that has ended, with four newer ones."""
    folder = add("old", days=1)
    for number in range(4):
        add(f"new-{number}")
    return folder


def test_each_run_works_in_a_copy_of_its_own(add):
    """A trainer that writes into a file of its source changes nothing for others."""
    first, second = add("first"), add("second")
    before = tree(second / "source")
    with (first / "source/package/data/table.csv").open("r+") as file:
        file.write("overwritten in place")
    assert tree(second / "source") == before
    third = add("third")
    assert tree(third / "source") == before


def test_runs_that_have_ended_keep_what_they_wrote_and_the_newest_stay_whole(add):
    folders = [add(f"run-{number}", days=10 - number) for number in range(5)]
    whole = tree(folders[4] / "source")
    oldest = folders[0] / "source"
    (oldest / "snapshot.pt").write_text("weights")
    (oldest / "package/config.json").write_text('{"changed": true}')
    storage.tidy()
    assert tree(oldest) == {
        "snapshot.pt": b"weights",
        "package/config.json": b'{"changed": true}',
        node_plane.FILES: whole[node_plane.FILES],
    }
    assert set(tree(folders[1] / "source")) == {node_plane.FILES}
    for folder in folders[2:]:
        assert tree(folder / "source") == whole


def test_the_command_of_the_guide_brings_a_reduced_source_back(add):
    folders = [add(f"run-{number}", days=10 - number) for number in range(4)]
    whole = tree(folders[3] / "source")
    (folders[0] / "source/package/config.json").write_text("mine")
    storage.tidy()
    guide = (Path(__file__).parents[3] / "docs/how-to/clean-up.md").read_text(encoding="utf-8")
    line = next(line for line in guide.splitlines() if line.startswith("tar "))
    line = line.replace("~/.local/state/deploykit", "$DEPLOYKIT_HOME")
    line = line.replace("HASH", registry.get("run-0").bundle).replace("RUN", "run-0")
    line = line.replace("$DEPLOYKIT_HOME", f"'{paths.state()}'")
    subprocess.run(["sh", "-c", line], check=False, capture_output=True)
    assert tree(folders[0] / "source") == {**whole, "package/config.json": b"mine"}


@pytest.mark.parametrize("state", [*ACTIVE, State.UNSENT])
def test_the_source_of_a_run_that_may_need_it_is_not_reduced(add, state):
    folder = add("old", state, days=1)
    for number in range(4):
        add(f"new-{number}")
    before = tree(folder / "source")
    storage.tidy()
    assert tree(folder / "source") == before


def test_without_the_right_archive_nothing_is_taken_away(old):
    before = tree(old / "source")
    (archive,) = storage.bundles().values()
    good = archive.read_bytes()
    archive.write_bytes(good[: len(good) // 2])
    storage.tidy()
    assert tree(old / "source") == before
    archive.unlink()
    storage.tidy_all()
    assert tree(old / "source") == before


def test_a_folder_that_the_run_replaced_by_a_link_is_not_emptied(old, tmp_path):
    """The files behind it are the same as in the bundle, but belong to another folder."""
    elsewhere = tmp_path / "elsewhere"
    (old / "source/package").rename(elsewhere)
    (old / "source/package").symlink_to(elsewhere)
    before = tree(elsewhere)
    storage.tidy()
    assert tree(elsewhere) == before
    assert not (old / "source/train.py").exists()


@pytest.mark.parametrize("which", ["", "source"])
def test_a_run_folder_that_is_a_link_is_not_reduced(old, tmp_path, which):
    elsewhere = tmp_path / "elsewhere"
    (old / which).rename(elsewhere)
    (old / which).symlink_to(elsewhere)
    before = tree(elsewhere)
    storage.tidy()
    assert tree(elsewhere) == before


def test_the_end_of_a_run_reduces_the_sources_of_older_ones(add):
    """As `wait`, `status` and `list` see it: the run's shell has gone, so it has ended."""
    old = add("old", days=1)
    add("ending")
    registry.update("ending", Status(State.RUNNING))
    for number in range(3):
        add(f"new-{number}")
    run_state.refresh([registry.get("ending")])
    assert set(tree(old / "source")) == {node_plane.FILES}


@pytest.mark.slow
def test_runs_of_one_source_take_little_more_than_one(add, source):
    (source / "weights.bin").write_bytes(os.urandom(1 << 20))
    for number in range(20):
        add(f"run-{number:02}", days=30 - number)
    before = storage.size(paths.state())
    storage.tidy()
    assert len(storage.whole(registry.every())) == 12  # a few at each end of a run
    assert cli.main(["prune", "--yes"]) == 0
    assert before > 20 << 20
    assert storage.size(paths.state()) < 8 << 20  # three copies, the archive, and small files
