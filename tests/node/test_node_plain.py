"""`launcher: python`: one plain process on each node, for programs that start the others."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from deploykit.cli import main as cli
from deploykit.lib import paths
from tests.backends.slurm.slurm_helpers import wait_for
from tests.ports import free_port

SHOW = """\
    import json, os, socket, sys
    own = {name: value for name, value in os.environ.items()
           if name.startswith(("TORCH", "MASTER", "GROUP", "ROLE", "OMP", "DEPLOYKIT_PLAIN"))
           or "RANK" in name or name.endswith("WORLD_SIZE") or name == "NNODES"}
    with socket.create_server((own["MASTER_ADDR"], int(own["MASTER_PORT"]))):
        print(json.dumps([sys.argv[1:], own]))
"""
WAITS = """\
    import signal
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    print("ready", flush=True)
    print(signal.sigwait([signal.SIGTERM]))
"""
TUTORIAL = """\
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.nn.functional
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel


def work(local, each, own_address):
    if own_address:
        os.environ["MASTER_ADDR"] = "localhost"
        os.environ["MASTER_PORT"] = own_address
    nodes, node = int(os.environ["NNODES"]), int(os.environ["NODE_RANK"])
    dist.init_process_group("gloo", rank=node * each + local, world_size=nodes * each)
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    model(torch.ones(8, 4)).sum().backward()
    total = torch.ones(1)
    dist.all_reduce(total)
    print(f"process {dist.get_rank()} of {nodes * each} sums {total.item():.0f}\\n", end="")
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(work, args=(2, "".join(sys.argv[1:])), nprocs=2)
"""
"""As PyTorch's tutorial of DistributedDataParallel starts its processes.

The second import and `del model` are the fix of `aborted_at_exit`, without which gloo aborts some.
"""
JOB = """\
name: plain
entrypoint: {script: train.py, launcher: python, args: %s}
resources: {nodes: %d, time_limit: 10m}
"""


def plain(nodes=1):
    return ["python", f"--nnodes={nodes}", "--"]


def test_a_plain_process_finds_nothing_of_torchrun(bundle):
    bundle.write("show.py", SHOW)
    done = bundle.run(*plain(), "show.py", "a b", "--", "")
    assert done.code == 0, done.log
    argv, own = json.loads(done.said["rank 0"][0])
    assert argv == ["a b", "--", ""]
    assert own.pop("MASTER_PORT").isdecimal()
    assert own == {"NODE_RANK": "0", "NNODES": "1", "MASTER_ADDR": "127.0.0.1"}


def test_on_sagemaker_below_no_launcher(bundle):
    bundle.write("show.py", SHOW)
    hosts = {"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1"}
    done = bundle.run(*plain(), "show.py", DEPLOYKIT_BACKEND="sagemaker", **hosts)
    assert done.code == 0, done.log
    _, own = json.loads(done.said["rank 0"][0])
    assert (own["NODE_RANK"], own["NNODES"]) == ("0", "1")


@pytest.mark.parametrize(
    ("ends", "code"), [("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", 137), ("pass", 0)]
)
def test_it_ends_as_its_program(bundle, ends, code):
    bundle.write("train.py", f"import os, sys\n{ends}\n")
    done = bundle.run(*plain(), "train.py")
    assert done.code == code
    assert bundle.end("node-0")["exit_code"] == code


def test_it_gets_signals(bundle):
    bundle.write("train.py", WAITS)
    started = bundle.start(*plain(), "train.py")
    started.wait_for("ready")
    started.process.send_signal(signal.SIGTERM)
    done = started.finish()
    assert (done.code, done.said["rank 0"]) == (0, ["ready", "15"])


def project(tmp_path, monkeypatch, nodes, args="[]"):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(TUTORIAL)
    Path("job.yaml").write_text(JOB % (args, nodes))


def sums(run):
    log = "".join(path.read_text() for path in paths.run_folder(run).glob("logs/*.log"))
    return sorted(line.partition("] ")[2] for line in log.splitlines() if " sums " in line), log


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_script_that_starts_its_own_processes(tmp_path, monkeypatch, nodes):
    project(tmp_path, monkeypatch, nodes)
    assert cli.main(["submit", "--backend", "local", "--run", "one", "--wait"]) == 0
    size = 2 * nodes
    assert sums("one")[0] == [f"process {rank} of {size} sums {size}" for rank in range(size)]


@pytest.mark.torch
@pytest.mark.slow
def test_a_script_that_chooses_its_own_port(tmp_path, monkeypatch):
    project(tmp_path, monkeypatch, 1, f"['{free_port()}']")
    assert cli.main(["submit", "--backend", "local", "--run", "one", "--wait"]) == 0
    assert len(sums("one")[0]) == 2


@pytest.mark.slurm
@pytest.mark.torch
@pytest.mark.xdist_group("slurm")
def test_two_nodes_of_slurm(cluster, tmp_path, monkeypatch):
    project(tmp_path, monkeypatch, 2)
    code = cli.main(["submit", "--backend", "slurm", "--run", "one", "--wait"])
    found, log = sums("one")
    assert code == 0, log
    assert found == [f"process {rank} of 4 sums 4" for rank in range(4)]


@pytest.mark.torch
@pytest.mark.slow
def test_status_names_processes_that_wait_where_nobody_listens(tmp_path, monkeypatch, capsys):
    """Below torchrun the tutorial's processes are clients of a store that does not exist."""
    port = free_port()
    project(tmp_path, monkeypatch, 1, f"['{port}']")
    program = Path("train.py").read_text()
    Path("train.py").write_text(
        f"import os\nos.environ.update(NNODES='1', NODE_RANK='0')\n{program}"
    )
    words = ["entrypoint.launcher=torchrun", "env.DEPLOYKIT_STALL_SECONDS=20"]
    more = [word for setting in words for word in ("--set", setting)]
    assert cli.main(["submit", "--backend", "local", "--run", "one", *more]) == 0
    try:
        wait_for(lambda: "no progress" in status(capsys)["reason"])
        expected = f"2 of 2 processes are waiting to connect to localhost:{port}, where nothing"
        assert status(capsys)["reason"].endswith(f": {expected} is listening")
        assert cli.main(["diagnose", "one", "--json"]) == 79
        (cause, *_) = json.loads(capsys.readouterr().out)["causes"]
        assert "launcher: python" in cause["fix"]
    finally:
        cli.main(["cancel", "one"])


def status(capsys):
    capsys.readouterr()
    assert cli.main(["status", "one", "--json"]) == 0
    return json.loads(capsys.readouterr().out)[0]
