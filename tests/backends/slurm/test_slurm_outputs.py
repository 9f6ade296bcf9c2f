"""`outputs` and `environment` on a real cluster."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from deploykit.backends import slurm
from deploykit.bundle import archive as bundles
from deploykit.cli import main as cli
from deploykit.job.model import Environment, State
from tests.backends.slurm.slurm_helpers import ended, folder_of, output, wait_for
from tests.conda_stand_in import a_python, install

pytestmark = [pytest.mark.slurm, pytest.mark.torch, pytest.mark.xdist_group("slurm")]

TUTORIAL = """\
import os, pathlib, time, torch

os.environ |= {"RANK": os.environ["NODE_RANK"], "WORLD_SIZE": os.environ["NNODES"]}
torch.distributed.init_process_group("gloo")
epoch = torch.load("snapshot.pt")["epoch"] if os.path.exists("snapshot.pt") else 0
print("starts at epoch", epoch, flush=True)
torch.distributed.barrier()
if os.environ["RANK"] == "0":
    torch.save({"epoch": epoch + 1}, "snapshot.pt")
    if epoch == 0:
        pathlib.Path("half.pt").write_bytes(b"PK\\3\\4 not complete")
torch.distributed.barrier()
if epoch == 0:
    print("saved", flush=True)
    time.sleep(900)
torch.distributed.destroy_process_group()
"""
"""How PyTorch's multigpu_torchrun.py saves and resumes; the first attempt waits to be stopped."""


def lines(handle):
    return [line.text for line in slurm.logs(handle, follow=False)]


def changed(plan, options=None, **fields):
    """The plan of the same job with other fields."""
    job = dataclasses.replace(plan.job, **fields)
    chosen = options or plan.options
    assert list(slurm.check(job, chosen)) == []
    bundle = bundles.scan(plan.bundle.source, 10**8)
    return slurm.plan(job, chosen, run=plan.run, bundle=bundle)


def test_a_requeued_job_resumes_from_what_it_saved_in_its_working_folder(
    cluster, make_plan, send, tmp_path
):
    """Two nodes with one folder: the first one collects, at each end of the job."""
    plan = changed(make_plan(TUTORIAL, nodes=2), outputs=("*.pt",))
    handle = send(plan)
    wait_for(lambda: lines(handle).count("saved") == 2)
    folder = folder_of(plan.run, tmp_path)
    output("scontrol", "requeue", handle.id)
    wait_for((folder / "output/snapshot.pt").exists)
    assert ended(handle).state is State.SUCCEEDED
    said = lines(handle)
    assert said.count("starts at epoch 0") == said.count("starts at epoch 1") == 2
    assert sorted(path.name for path in (folder / "output").iterdir()) == ["snapshot.pt"]
    assert any("'half.pt' is incomplete" in line for line in said)
    record = json.loads((folder / "exit_records/written.json").read_text())
    assert record["working_folder"]["count"] == 2
    assert record["attempt"] == 1


@pytest.mark.nightly
def test_another_run_with_the_same_checkpoints_resumes(cluster, make_plan, send, tmp_path):
    kept = str(tmp_path / "kept")
    first = changed(make_plan(TUTORIAL, nodes=2), outputs=("*.pt",), checkpoints=kept)
    handle = send(first)
    wait_for(lambda: lines(handle).count("saved") == 2)
    slurm.cancel(handle)
    assert ended(handle).state is State.CANCELLED
    wait_for((Path(kept) / "working_folder/snapshot.pt").exists)
    second = make_plan(TUTORIAL, nodes=2, run="two-2")
    second = changed(second, outputs=("*.pt",), checkpoints=kept)
    handle = send(second)
    assert ended(handle).state is State.SUCCEEDED
    assert lines(handle).count("starts at epoch 1") == 2


SHOW = """\
import os, sys
print("prefix", sys.prefix, os.environ.get("FROM_ACTIVATE_D"), flush=True)
"""


@pytest.mark.parametrize("kind", ["venv", "conda", "home"])
def test_both_nodes_run_the_python_of_the_environment(
    kind, cluster, make_plan, send, tmp_path, monkeypatch
):
    if kind == "conda":
        root = install(tmp_path / "mini conda", with_torch=True)
        monkeypatch.setenv("CONDA_EXE", str(root / "bin/conda"))
        environment, prefix, script = Environment(conda="train"), root / "envs/train", "yes"
    else:
        home = Path(tmp_path / "no home")
        home.mkdir()
        prefix, script = a_python(home / "my venv", with_torch=True), None
        environment = Environment(venv="~/my venv" if kind == "home" else str(prefix))
    launcher = "torchrun" if kind == "conda" else "python"
    made = make_plan(SHOW, launcher=launcher, nodes=2, args=("a:b", ":"))
    plan = changed(made, environment=environment)
    handle = send(plan)
    assert ended(handle).state is State.SUCCEEDED, lines(handle)
    assert lines(handle).count(f"prefix {prefix} {script}") == 2


def test_an_environment_that_is_gone_ends_the_job_and_status_says_so(
    cluster, make_plan, send, tmp_path
):
    prefix = a_python(tmp_path / "venv", with_torch=True)
    plan = changed(make_plan(SHOW), environment=Environment(venv=str(prefix)))
    (prefix / "bin/python").unlink()
    handle = send(plan)
    status = ended(handle)
    assert (status.state, status.exit_code) == (State.FAILED, 78)
    assert status.reason.startswith("the job cannot start: ")
    assert status.reason.endswith(" (environment.venv)")


def test_wait_lists_what_a_job_wrote(cluster, project, capsys):
    (project / "train.py").write_text("open('a.log', 'w').write('x' * 2500)")
    sets = ["--set", "outputs=['*.log']", "--set", "entrypoint.launcher=python"]
    assert cli.main(["submit", "-b", "slurm", "--wait", *sets]) == 0
    said = capsys.readouterr().out
    assert "files   1 file, 2.5 kB, in " in said
    assert cli.main(["status"]) == 0
    assert "  2.5 kB  a.log" in capsys.readouterr().out
