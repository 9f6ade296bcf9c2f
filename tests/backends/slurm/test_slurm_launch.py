"""`deploykit.launch` on a real cluster: two nodes, each with its own launcher."""

from __future__ import annotations

import os
import sys

import pytest

import deploykit
from deploykit.lib.errors import FunctionFailed

pytestmark = [pytest.mark.slurm, pytest.mark.torch, pytest.mark.xdist_group("slurm")]


def where(number):
    """The node of this rank, and the sum over all ranks."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor(dist.get_rank() * number)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return os.environ["SLURMD_NODENAME"], int(total)


def fails_on_rank_1():
    if os.environ["RANK"] == "1":
        raise ValueError("bad luck")


def test_each_rank_returns_a_value_or_its_exception(cluster, project):
    given = {"backend": "slurm", "nodes": 2, "slurm": {"python": sys.executable}}
    values = deploykit.launch(where, 7, processes_per_node=2, **given)
    assert sorted(values) == [0, 1, 2, 3]
    assert {total for _, total in values.values()} == {42}
    assert values[0][0] == values[1][0] != values[2][0] == values[3][0]
    with pytest.raises(FunctionFailed, match="rank 1: ValueError: bad luck") as caught:
        deploykit.launch(fails_on_rank_1, **given)
    assert isinstance(caught.value.__cause__, ValueError)
    assert [run.state.value for run in deploykit.runs(backend="slurm")] == ["failed", "succeeded"]
