"""Two nodes of a real cluster, and another user who connects to their rendezvous store."""

from __future__ import annotations

import os

import pytest

from tests.backends.slurm.slurm_helpers import ended, folder_of, wait_for
from tests.intruder import attack, stores

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


def test_another_user_cannot_run_code_through_the_store(cluster, make_plan, send, tmp_path):
    """The ranks then restart, which reads everything that was written to the store."""
    marker, folder = tmp_path / "it ran", folder_of("one-1", tmp_path)
    handle = send(make_plan(TRAIN, nodes=2, retries=1))
    logs = [folder / "logs" / f"node-{node}.log" for node in range(2)]
    wait_for(lambda: all(log.exists() and " met 2 0" in log.read_text() for log in logs))
    report = attack(marker, stores(folder))
    assert report.count("wrote to") == 2, report
    if os.getuid() == 0:
        assert "as 65534" in report
    (folder / "go on").touch()
    ended(handle)
    assert not marker.exists()
