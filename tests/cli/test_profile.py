"""Profiles: traces of two real ranks of a script that asks for nothing, and hostile traces."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from deploykit.cli import main as cli
from deploykit.observe import traces

TRAIN = """\
import sys, time
import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # DDP would keep the group open
import own  # what the sitecustomize of the user provides

dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
for step in range(int(sys.argv[-1])):
    if rank == 1:
        time.sleep(0.2)
    model(torch.randn(8, 64)).sum().backward()
    first.step()
    second.step()
print("user", own.NAME, flush=True)
del model, first, second
dist.destroy_process_group()
"""


def submit(capsys, *words, backend="local"):
    Path("train.py").write_text(TRAIN)
    Path("site").mkdir(exist_ok=True)
    Path("site/sitecustomize.py").write_text("import sys\nsys.path.append('site')\n")
    Path("site/own.py").write_text("NAME = 'customized'\n")
    base = ["submit", "--backend", backend, "--wait", "--set", "resources.processes_per_node=2"]
    base += ["--set", "env.PYTHONPATH=site", *words]
    assert cli.main(base) == 0
    return "".join(capsys.readouterr())


def event(name, start, length, category="cpu_op", thread=1):
    places = {"pid": 1, "tid": thread, "ts": start, "dur": length}
    return {"ph": "X", "cat": category, "name": name, **places}


def write(folder, rank, events):
    path = folder / f"rank-{rank}.trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    return path


@pytest.mark.torch
@pytest.mark.slow
def test_two_ranks_of_any_script_are_profiled(project, capsys):
    shown = submit(capsys, "--profile", "torch:3:5", "--run", "prof", "--", "8")
    assert "deploykit: profiled steps 3 to 5: " in shown
    assert "user customized" in shown
    assert cli.main(["profile", "prof"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("prof: 2 ranks, ")
    assert "rank 1 waits least: the others wait for it\n" in text
    assert "aten::addmm" in text
    assert "open in https://ui.perfetto.dev: " in text
    assert cli.main(["profile", "prof", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["slowest_rank"] == 1
    waiting = [rank["waiting_seconds"] / rank["seconds"] for rank in data["ranks"]]
    assert waiting[0] > 0.5 > waiting[1]


@pytest.mark.nightly
@pytest.mark.slurm
@pytest.mark.torch
@pytest.mark.xdist_group("slurm")
def test_two_nodes_of_a_cluster_are_profiled(cluster, project, capsys):
    words = ["--set", "resources.nodes=2", "--set", "resources.processes_per_node=1"]
    words = [*words, "--profile", "torch:2:3", "--run", "prof", "--", "4"]
    assert "deploykit: profiled steps 2 to 3: " in submit(capsys, *words, backend="slurm")
    assert cli.main(["profile", "prof", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert ([one["rank"] for one in data["ranks"]], data["slowest_rank"]) == ([0, 1], 1)


@pytest.mark.nightly
@pytest.mark.torch
@pytest.mark.slow
def test_a_program_that_ends_too_early_says_why_there_is_no_profile(project, capsys):
    shown = submit(capsys, "--profile", "torch:30:50", "--run", "prof", "--", "2")
    assert "deploykit: no profile: the program ended after 2 optimizer steps" in shown
    assert cli.main(["profile", "prof"]) == 66
    assert "--profile torch:20:25" in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.torch
@pytest.mark.slow
def test_a_program_without_a_gpu_is_not_harmed_by_memory_snapshots(project, capsys):
    """No test here has a GPU that runs out of memory."""
    shown = submit(capsys, "--profile", "memory", "--run", "prof", "--", "4")
    assert "user customized" in shown
    assert "deploykit: " not in shown
    assert cli.main(["profile", "prof"]) == 66


def test_times_of_gpus_are_those_of_kernels(tmp_path):
    events = [
        event("aten::mm", 0, 9000),
        event("gemm", 0, 400, "kernel", 7),
        event("ncclDevKernel_AllReduce_Sum", 300, 500, "kernel", 8),
        event("gemm", 900, 100, "kernel", 7),
        event("Memcpy HtoD", 1000, 0, "gpu_memcpy", 7),
    ]
    one = traces.read(write(tmp_path, 3, events))
    assert (one.rank, one.on_gpu) == (3, True)
    found = (one.computing, one.communicating, one.waiting)
    assert found == pytest.approx((500e-6, 500e-6, 400e-6))
    assert one.operators["gemm"] == (2, pytest.approx(500e-6))


def test_an_operator_does_not_count_those_that_it_calls(tmp_path):
    events = [event("linear", 0, 100), event("addmm", 10, 80), event("linear", 0, 50, thread=2)]
    one = traces.read(write(tmp_path, 0, events))
    assert one.operators == {
        "linear": (2, pytest.approx(70e-6)),
        "addmm": (1, pytest.approx(80e-6)),
    }


def test_snapshots_of_memory_are_listed(tmp_path, capsys):
    (tmp_path / "rank-10.memory.pickle").touch()
    (tmp_path / "rank-9.memory.pickle").touch()
    assert cli.main(["profile", "--from", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{tmp_path}: 2 memory snapshots of GPUs that ran out of memory",
        f"open in https://pytorch.org/memory_viz: {tmp_path}/rank-9.memory.pickle",
        f"open in https://pytorch.org/memory_viz: {tmp_path}/rank-10.memory.pickle",
    ]


NO_TRACES = {
    "empty": b"",
    "no gzip": b"no gzip",
    "no list": gzip.compress(b"{}"),
    "no mapping": gzip.compress(b"[]"),
    "events that are a number": gzip.compress(b'{"traceEvents": 3}'),
    "cut off": gzip.compress(b'{"traceEvents": []}' * 100)[:-9],
    "too deep": gzip.compress(b"[" * 100_000),
}


@pytest.mark.parametrize("name", NO_TRACES)
def test_what_is_no_trace_is_refused(tmp_path, name, capsys):
    (tmp_path / "rank-0.trace.json.gz").write_bytes(NO_TRACES[name])
    assert cli.main(["profile", "--from", str(tmp_path)]) == 69
    assert "trace" in capsys.readouterr().err


def test_odd_events_are_left_out(tmp_path, capsys):
    odd = [3, {}, event("a", float("nan"), 1), event("a", 0, float("inf")), event("a", 0, -1)]
    write(tmp_path, 0, [*odd, {**event("a", 0, 1), "ts": "0"}, event("\x1b[2Jb", 5, 5)])
    (tmp_path / "rank-x.trace.json.gz").write_bytes(b"")
    assert cli.main(["profile", "--from", str(tmp_path)]) == 0
    assert "1 rank," in capsys.readouterr().out


@pytest.mark.parametrize(
    "value", ["torch:1:2", "torch:5:4", "nsys:5:4", "nsys:", "torch", "torch:2", "torch:2:3x"]
)
def test_a_wrong_profile_is_a_problem_of_the_job_file(project, capsys, value):
    assert cli.main(["check", "--backend", "local", "--set", f"profile={value}"]) == 65
    assert "profile: " in capsys.readouterr().err
