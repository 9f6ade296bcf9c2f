"""Many nodes that come to one point: when each knows, and how many file operations that takes."""

from __future__ import annotations

import os
import random

import pytest

from benchmarks.scale_nodes import end_of_job
from deploykit_node import records
from deploykit_node.cluster import Cluster, Rank
from deploykit_node.network import gathering


@pytest.fixture
def failed(tmp_path):
    """Records the end of a rank on a node of its own, and what that node says failed first."""

    def record(rank, code, *, stopped=False, torchrun_round=0):
        folder = tmp_path / f"node-{rank}"
        folder.mkdir(exist_ok=True)
        env = {
            "DEPLOYKIT_RUN_DIR": str(tmp_path),
            "DEPLOYKIT_RANK_DIR": str(folder),
            "TORCHELASTIC_RESTART_COUNT": str(torchrun_round),
        }
        records.register(env, folder, rank, os.getpid())
        records.record_rank(env, Rank("torchrun", rank, 0, 8, 1), code, stopped=stopped)
        found = records.first_failure(env, folder)
        return found and found["rank"]

    return record


def test_all_nodes_know_the_first_rank_that_failed_and_few_records_are_written(failed, tmp_path):
    assert failed(0, 0) is None
    assert failed(1, -15, stopped=True) == 1  # torchrun on its node was told to stop
    assert [failed(rank, 7) for rank in (2, 3, 4)] == [2, 2, 2]
    assert failed(5, -15, stopped=True) == 2
    names = sorted(path.name for path in (tmp_path / "exit_records").iterdir())
    assert names == ["failed-0.0-stopped.json", "failed-0.0.json"]


def test_the_failure_of_an_earlier_round_of_torchrun_is_no_reason(failed):
    assert failed(2, 7) == 2
    assert failed(3, 0, torchrun_round=1) is None
    assert failed(4, 9, torchrun_round=1) == 4


def test_few_nodes_know_at_once(tmp_path):
    both = [gathering.Gathering(tmp_path / "new", node, 2) for node in (0, 1)]
    both[0].arrive()
    assert not both[0].complete()
    both[1].arrive()
    assert both[1].complete()


@pytest.mark.parametrize("count", [12, 100, 1000])
def test_a_thousand_nodes_end_with_few_file_operations(count, tmp_path):
    """Before, a node opened every rank's record five times a second."""
    end = end_of_job(tmp_path, count, random.Random(1))
    assert end.most_in_a_second <= 50
    assert end.operations <= 9 * count + 1000
    assert end.late <= 8.0  # on the clock of the simulation


def test_another_attempt_deletes_what_is_left_of_earlier_ones_alone(failed, tmp_path):
    failed(2, 7)
    here = Cluster("slurm", 1, ("a", "b"))
    now = {"DEPLOYKIT_RUN_DIR": str(tmp_path), "SLURM_RESTART_COUNT": "1"}
    for env in ({**now, "SLURM_RESTART_COUNT": "0"}, now):
        gathering.gathering(env, "ended", here).arrive()
    records.clear(now, 0)
    names = [path.name for path in (tmp_path / "exit_records").iterdir()]
    assert names == ["gathering-ended-1"]
