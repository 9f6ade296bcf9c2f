"""Two nodes of a real cluster, and another user who reaches the port at which they meet."""

from __future__ import annotations

import os

import pytest
from intruder import attack, stores
from slurm_helpers import ended, folder_of, wait_for

from deploykit.model import State

pytestmark = [pytest.mark.slurm, pytest.mark.torch, pytest.mark.xdist_group("slurm")]

TRAIN = """
import os, time
from pathlib import Path
import torch, torch.distributed as dist
dist.init_process_group("gloo")
one = torch.ones(1)
dist.all_reduce(one)
print("met", int(one.item()), os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
go_on = Path(os.environ["DEPLOYKIT_RUN_DIR"], "go on")
while not go_on.exists():
    time.sleep(0.1)
if os.environ["RANK"] == "1" and os.environ["DEPLOYKIT_RESTART_COUNT"] == "0":
    os._exit(9)
dist.all_reduce(one)
os._exit(0)
"""


def test_another_user_who_reaches_the_store_of_two_nodes_runs_no_code(
    cluster, make_plan, send, tmp_path
):
    """The ranks are started again afterwards, which reads everything that was written."""
    canary, folder = tmp_path / "it ran", folder_of("one-1", tmp_path)
    handle = send(make_plan(TRAIN, nodes=2, retries=1))
    logs = [folder / "logs" / f"node-{node}.log" for node in range(2)]
    wait_for(lambda: all(log.exists() and " met 2 0" in log.read_text() for log in logs))
    said = attack(canary, stores(folder))
    assert said.count("wrote to") == 2, said
    if os.getuid() == 0:
        assert "as 65534" in said
    (folder / "go on").touch()
    status = ended(handle)
    assert not canary.exists()
    text = "".join(log.read_text() for log in logs)
    assert status.state in (State.SUCCEEDED, State.FAILED), text
