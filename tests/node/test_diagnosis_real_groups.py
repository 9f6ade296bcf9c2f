"""Failures of groups of ranks, made for real under torchrun over gloo, and their diagnosis."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import pytest

from deploykit.cli import main as cli
from tests.node import netns

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("failing groups")]


JOIN = """\
import datetime, os, socket, sys, time
import torch
from torch import distributed
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
def free_port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]
def join(seconds=120, **more):
    distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=seconds), **more)
def hurry():
    distributed.barrier()
    distributed.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=3))
"""
"""On top of every program."""


class Failure(NamedTuple):
    """A program, and the expected diagnosis of its logs."""

    label: str
    program: str
    proof: str
    """In a line of the evidence."""
    rank: int | None = None
    """The rank that failed first, where that matters."""
    ranks: int = 2
    env: dict[str, str] = {}  # noqa: RUF012 - of a NamedTuple


FAILURES = {
    "an exception on one rank": Failure(
        "user_code_error",
        """
        join()
        if rank == 1:
            raise ValueError("label 7 is not below 5")
        distributed.all_reduce(torch.ones(1))
        """,
        "ValueError: label 7 is not below 5",
        rank=1,
    ),
    "a rank that ends early": Failure(
        "remote_peer_died",
        """
        join()
        if rank == 1:
            os._exit(0)
        distributed.all_reduce(torch.ones(1))
        """,
        "by peer",
        rank=0,
    ),
    "a rank that is late": Failure(
        "collective_timeout",
        """
        join()
        hurry()
        if rank == 1:
            time.sleep(600)
        distributed.all_reduce(torch.ones(1))
        """,
        "Timed out waiting 3000ms",
        rank=0,
    ),
    "other sizes on each rank": Failure(
        "collective_timeout",
        """
        join()
        distributed.all_reduce(torch.ones(4 + 4 * rank))
        """,
        "op.preamble.length <= op.nbytes",
    ),
    "other collectives on each rank": Failure(
        "collective_timeout",
        """
        distributed.set_debug_level_from_env()
        join()
        tensor = torch.ones(1)
        distributed.all_reduce(tensor) if rank else distributed.broadcast(tensor, 0)
        """,
        "Detected mismatch between collectives",
        env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"},
    ),
    "parameters without a part in the loss": Failure(
        "ddp_unused_parameters",
        """
        join()
        model = torch.nn.ModuleDict({name: torch.nn.Linear(1, 1) for name in "ab"})
        class Half(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.parts = model
            def forward(self, x):
                return self.parts["a"](x)
        half = torch.nn.parallel.DistributedDataParallel(Half())
        for _ in range(2):
            half(torch.ones(1, 1)).sum().backward()
        """,
        "Expected to have finished reduction",
    ),
    "a killed rank": Failure(
        "host_oom",
        """
        join()
        if rank == 1:
            os.kill(os.getpid(), 9)
        distributed.all_reduce(torch.ones(1))
        """,
        "SIGKILL",
        rank=1,
    ),
    "a crash in native code": Failure(
        "segfault",
        """
        import ctypes
        if rank == 1:
            ctypes.string_at(0)
        """,
        "SIGSEGV",
        rank=1,
    ),
    "an interface that is not there": Failure(
        "net_iface_wrong",
        "join()",
        "nosuch0",
        env={"GLOO_SOCKET_IFNAME": "nosuch0"},
    ),
    "a GPU where there is none": Failure(
        "gpu_not_visible",
        """
        torch.ones(1).cuda()
        """,
        "Torch not compiled with CUDA enabled",
        ranks=1,
    ),
    "NCCL where there is none": Failure(
        "gpu_not_visible",
        """
        distributed.init_process_group("nccl")
        """,
        "NCCL built in",
    ),
    "a port that is taken": Failure(
        "port_in_use",
        """
        taken = socket.create_server(("127.0.0.1", 0))
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
        os.environ["MASTER_PORT"] = str(taken.getsockname()[1])
        join()
        """,
        "EADDRINUSE",
        ranks=1,
    ),
    "a first node without an address": Failure(
        "dns_failure",
        """
        os.environ["MASTER_ADDR"] = "no-such-node.invalid"
        join(3)
        """,
        "no-such-node.invalid",
        ranks=1,
    ),
    "a first node where nothing listens": Failure(
        "rdzv_timeout",
        """
        join(3, init_method=f"tcp://127.0.0.1:{free_port()}", rank=1, world_size=2)
        """,
        "client socket has timed out",
        ranks=1,
    ),
    "a node that never comes": Failure(
        "rdzv_timeout",
        """
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
        join(3, init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=2)
        """,
        "1/2 clients joined",
        ranks=1,
    ),
    "a checkpoint cut short": Failure(
        "checkpoint_corrupt",
        """
        torch.save({"w": torch.ones(1000)}, "last.pt")
        os.truncate("last.pt", 2000)
        torch.load("last.pt")
        """,
        "PytorchStreamReader failed",
        ranks=1,
    ),
    "a checkpoint of another model": Failure(
        "checkpoint_mismatch",
        """
        torch.nn.Linear(3, 2).load_state_dict(torch.nn.Linear(4, 2).state_dict())
        """,
        "size mismatch for weight",
        ranks=1,
    ),
    "a loss that is no number": Failure(
        "nan_loss",
        """
        weight = torch.ones(1, requires_grad=True)
        for step in range(20):
            loss = (weight**4).sum()
            print(f"step {step} loss {loss.item()}", flush=True)
            (slope,) = torch.autograd.grad(loss, weight)
            weight = (weight - 1e9 * slope).detach().requires_grad_()
        torch.multinomial(weight.expand(2), 1)
        """,
        "loss nan",
        ranks=1,
    ),
    "more memory than there is": Failure(
        "host_oom",
        """
        torch.empty(10**15)
        """,
        "DefaultCPUAllocator",
        ranks=1,
    ),
    "a small /dev/shm": Failure(
        "shm_too_small",
        """
        import ctypes
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.unshare(0x00020000) == 0
        assert libc.mount(b"none", b"/", None, (1 << 18) | 16384, None) == 0
        assert libc.mount(b"none", b"/dev/shm", b"tmpfs", 0, b"size=64k") == 0
        data = torch.utils.data.DataLoader(torch.ones(64, 4096), batch_size=64, num_workers=1)
        next(iter(data))
        """,
        "shared memory",
        ranks=1,
    ),
    "a killed worker of the data": Failure(
        "dataloader_worker_killed",
        """
        class Data(torch.utils.data.Dataset):
            def __len__(self):
                return 4
            def __getitem__(self, index):
                os.kill(os.getpid(), 9)
        next(iter(torch.utils.data.DataLoader(Data(), num_workers=1)))
        """,
        "is killed by signal: Killed",
        ranks=1,
    ),
    "bad data in a worker": Failure(
        "user_code_error",
        """
        class Data(torch.utils.data.Dataset):
            def __len__(self):
                return 4
            def __getitem__(self, index):
                raise KeyError("caption")
        next(iter(torch.utils.data.DataLoader(Data(), num_workers=1)))
        """,
        "KeyError",
        ranks=1,
    ),
    "an index outside a table": Failure(
        "user_code_error",
        """
        join()
        torch.nn.Embedding(5, 2)(torch.tensor([3 + 3 * rank]))
        distributed.barrier()
        """,
        "IndexError: index out of range in self",
        rank=1,
    ),
}


DUMP = """
from torch._C._distributed_c10d import _dump_fr_trace
def leave(stacks):
    with open(f"fr_{rank}", "wb") as file:
        file.write(_dump_fr_trace(True, stacks, False))
    os._exit(0)
"""
SKIPPED = """
join()
hurry()
try:
    for step in range(5):
        if step != 2 or rank != 1:
            distributed.all_reduce(torch.ones(10))
except RuntimeError:
    pass
leave(stacks=True)
"""
RESHAPED = """
join()
for step in range(4):
    distributed.broadcast(torch.ones(20 if (rank, step) == (1, 2) else 10), 0)
leave(stacks=False)
"""
"""Gloo takes a broadcast into a tensor that is too large, so nobody crashes or waits."""
RECORDED = {"skipped": DUMP + SKIPPED, "reshaped": DUMP + RESHAPED}
RECORDER = {"TORCH_FR_BUFFER_SIZE": "100"}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder of each failure, by name, with its `torchrun.log`."""
    programs = {name: (each.program, each.ranks, each.env) for name, each in FAILURES.items()}
    programs |= {name: (program, 2, RECORDER) for name, program in RECORDED.items()}
    folders = {name: tmp_path_factory.mktemp("failure") for name in programs}
    for name, (program, _, _) in programs.items():
        (folders[name] / "train.py").write_text(JOIN + textwrap.dedent(program))
    cases = [
        {"folder": str(folders[name]), "ranks": ranks, "env": env}
        for name, (_, ranks, env) in programs.items()
    ]
    subprocess.run(
        [sys.executable, str(Path(__file__).with_name("failing_groups.py"))],
        input=json.dumps(cases).encode(),
        env={
            "PATH": os.environ["PATH"],
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(tmp_path_factory.mktemp("torchrun")),
        },
        check=True,
        timeout=840,
    )
    return folders


def first_finding(files, capsys):
    code = cli.main(["diagnose", *map(str, files), "--json"])
    assert code == 79, [file.read_bytes() for file in files]
    return json.loads(capsys.readouterr().out)["causes"][0]


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_of_ranks_is_named(name, made, capsys):
    failure, log = FAILURES[name], made[name] / "torchrun.log"
    if "unshare" in failure.program:
        netns.needed()
    first = first_finding([log], capsys)
    assert first["cause"] == failure.label, log.read_text()
    assert any(failure.proof in proof["text"] for proof in first["evidence"]), first
    assert {proof["file"] for proof in first["evidence"]} == {str(log)}
    if failure.rank is not None:
        assert first["first_rank"] == failure.rank, log.read_text()


def test_the_recorder_tells_which_rank_missed_a_collective(made, capsys):
    """Rank 1 leaves out one of five, so the others wait for it in the last."""
    files = [made["skipped"] / f"fr_{rank}" for rank in (0, 1)]
    first = first_finding([made["skipped"] / "torchrun.log", *files], capsys)
    assert (first["cause"], first["first_rank"]) == ("collective_timeout", 1)
    assert "collective_mismatch" in first["also"]
    (proof,) = first["evidence"]
    assert (proof["file"], proof["line"], proof["rank"]) == (str(files[1]), 5, 1)
    assert "rank 1 never made call 6 of group default_pg" in proof["text"]
    assert re.search(r"\(all_reduce of Float \[\[10\]\] at train\.py:\d+\)", proof["text"])


def test_the_recorder_tells_which_rank_had_another_shape(made, capsys):
    files = [made["reshaped"] / f"fr_{rank}" for rank in (0, 1)]
    first = first_finding(files, capsys)
    assert (first["cause"], first["first_rank"]) == ("collective_timeout", 1)
    (proof,) = first["evidence"]
    assert "rank 1 ran broadcast of Float [[20]]" in proof["text"]
    assert "; the others ran broadcast of Float [[10]]" in proof["text"]
