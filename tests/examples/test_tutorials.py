"""The examples in examples/tutorials, run for real; their pages say what they do."""

from __future__ import annotations

import difflib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from deploykit.cli import main as cli
from tests.aws_server import sent_requests
from tests.backends.sagemaker.launcher.sagemaker_hosts import on_loopback, run_on_hosts
from tests.docs_runner import blocks
from tests.ports import free_port
from tests.trainer.ranks import outputs, start_ranks

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ROOT / "examples/tutorials"
PAGES = ROOT / "docs/how-to"

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("tutorials")]


def ranks_of(folder, world, script, *arguments, code=0):
    """The output of each rank, started without a launcher."""
    return outputs(start_ranks(folder, world, str(FOLDERS / script), *arguments), code)


def submitted(backend, example, *settings):
    """Submit and wait; what was printed."""
    words = [word for one in (*settings, "resources.time_limit=1h") for word in ("--set", one)]
    wait = [] if backend == "sagemaker" else ["--wait"]
    return ["submit", str(FOLDERS / example / "job.yaml"), "--backend", backend, *wait, *words]


@pytest.fixture
def submit(capsys):
    def run(backend, example, *settings, code=0):
        capsys.readouterr()
        found = cli.main(submitted(backend, example, *settings))
        shown = capsys.readouterr()
        assert found == code, shown.out + shown.err
        return shown.out

    return run


def epochs(text):
    return re.findall(r"epoch \d+: .*\d", text)


def test_ddp_and_fsdp_train_the_same_network_on_any_number_of_ranks(submit, tmp_path):
    """The job file is that of ddp.py on two ranks."""
    (alone,) = ranks_of(tmp_path / "1", 1, "one-to-many/single.py")
    (one,) = ranks_of(tmp_path / "one", 1, "one-to-many/ddp.py")
    ddp = submit("local", "one-to-many", f"output={tmp_path / 'ddp'}")
    assert "outputs collected: 1 file" in ddp
    fsdp = ranks_of(tmp_path / "fsdp", 2, "one-to-many/fsdp.py")
    assert len(epochs(alone)) == len(epochs(one)) == 6
    assert float(epochs(alone)[-1].split()[-1]) > 0.9
    assert float(epochs(one)[-1].split()[-1]) > 0.9
    assert [epochs(text) for text in (ddp, *fsdp)] == [epochs(one), epochs(one), []]
    saved = [torch.load(tmp_path / name / "model.pt") for name in ("one", "ddp", "fsdp")]
    assert list(saved[0]) == list(torch.load(tmp_path / "1/model.pt"))
    for name, weight in saved[0].items():
        for other in saved[1:]:
            torch.testing.assert_close(other[name], weight, rtol=0, atol=1e-5)


def changed(old, new):
    """The changed lines of two scripts, with the docstring and empty lines left out."""
    texts = [(FOLDERS / "one-to-many" / name).read_text().splitlines()[1:] for name in (old, new)]
    lines = list(difflib.unified_diff(*texts, lineterm="", n=0))[2:]
    return [line for line in lines if not line.startswith("@@") and line.strip("+- ")]


def test_the_page_shows_the_lines_that_change():
    page = (PAGES / "one-to-many.md").read_text()
    shown = [block.text.splitlines() for block in blocks(page) if block.language == "diff"]
    assert shown == [changed("single.py", "ddp.py"), changed("ddp.py", "fsdp.py")]


def test_the_page_shows_what_each_rank_is_told(submit):
    job = ("resources.nodes=2", "entrypoint.script=ranks.py", "outputs=[]")
    text = submit("local", "one-to-many", *job)
    told = re.findall(r"node (\d), local rank (\d), rank (\d), world size (\d)", text)
    page = (PAGES / "one-to-many.md").read_text()
    rows = re.findall(r"^\| (\d) \| (\d) \| (\d) \| (\d) \|$", page, re.MULTILINE)
    assert len(rows) == 4
    assert sorted(told) == rows


@pytest.mark.nightly
def test_data_parallel_and_ddp_end_with_the_same_loss(submit):
    arguments = "entrypoint.args=[--steps, 4, --parts, 2]"
    text = submit("local", "dp-or-ddp", arguments)
    rows = re.findall(r"\| (\w[\w ]+) \| (\d) \| [\d.]+ \| \d+ ms \| ([\d.]+) \|", text)
    names = ["one process", "DataParallel", "DistributedDataParallel"]
    assert [row[:2] for row in rows] == list(zip(names, "122", strict=True))
    losses = [float(row[2]) for row in rows]
    assert losses == pytest.approx([losses[0]] * 3, rel=0, abs=1e-5)
    assert abs(losses[0] - 2.302585) > 1e-3  # of a network that guesses


def test_the_page_shows_the_figures_of_advise(capsys):
    page = (PAGES / "dp-or-ddp.md").read_text()
    command = re.search(r"^`deploykit (advise [^`]+)`", page, re.MULTILINE)[1].split()
    table = re.findall(r"^\| `([\w-]+)` \| ([\d.]+) \| ([\d.]+) \|$", page, re.MULTILINE)
    assert [row[0] for row in table] == ["single", "dp", "ddp", "zero2", "pp-dp"]
    for column, link in enumerate(("nvlink", "pcie"), start=1):
        assert cli.main([*command, "--link", link, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)["candidates"]
        seconds = {one["strategy"]: one["seconds"]["total"] for one in found}
        assert [f"{1 / seconds[row[0]]:.1f}" for row in table] == [row[column] for row in table]


@pytest.mark.parametrize(
    "backend", ["local", pytest.param("slurm", marks=[pytest.mark.slurm, pytest.mark.nightly])]
)
def test_a_tensor_goes_to_another_node_and_back(backend, submit, request):
    if backend == "slurm":
        request.getfixturevalue("cluster")
    text = submit(backend, "messages")
    assert "[rank 1] rank 1 received 1 from rank 0" in text
    assert "[rank 0] rank 0 received 2 from rank 1" in text


def test_gradients_averaged_by_hand_train_as_one_process_does(tmp_path):
    (alone,) = ranks_of(tmp_path, 1, "messages/all_reduce.py")
    first, second = ranks_of(tmp_path, 2, "messages/all_reduce.py")
    assert "weights 2.9996 -1.9998, bias 0.9997" in alone
    assert first == alone
    assert second == alone.splitlines()[-1] + "\n"


def test_tcp_works_without_torchrun_and_never_with_it(tmp_path, submit, capsys):
    """torchrun's own store is at MASTER_PORT, and it makes every rank a client of some store."""
    url = f"tcp://127.0.0.1:{free_port()}"
    texts = ranks_of(tmp_path, 2, "messages/send_recv.py", "--init-method", url)
    assert "rank 0 received 2 from rank 1" in texts[0]
    arguments = f"entrypoint.args=[--init-method, '{url}', --timeout, 2]"
    text = submit("local", "messages", arguments, "name=fixed", code=1)
    assert f"trying to connect to ({url.removeprefix('tcp://').replace(':', ', ')})" in text
    assert "cause   rdzv_timeout" in text


@pytest.fixture(scope="module")
def snapshots(tmp_path_factory):
    """The folder of the snapshots of `whole`; the last one is of its third epoch."""
    return tmp_path_factory.mktemp("snapshots")


@pytest.fixture(scope="module")
def whole(tmp_path_factory, snapshots):
    """What the Trainer class prints on this machine, in four epochs without interruption."""
    env = {**os.environ, "DEPLOYKIT_HOME": str(tmp_path_factory.mktemp("whole"))}
    arguments = "entrypoint.args=[--epochs, 4, --save-every, 3]"
    words = submitted("local", "trainer-class", arguments, f"checkpoints={snapshots}")
    done = subprocess.run(
        [sys.executable, "-m", "deploykit", *words],
        env=env,
        check=True,
        capture_output=True,
        text=True,
    )
    found = epochs(done.stdout)
    assert len(found) == 4
    assert float(found[-1].split()[-1]) > 0.9
    return found


def test_the_trainer_class_continues_from_its_snapshot(whole, snapshots, submit):
    text = submit(
        "local", "trainer-class", f"checkpoints={snapshots}", "entrypoint.args=[--epochs, 4]"
    )
    assert "continuing with epoch 3" in text
    assert epochs(text) == whole[3:]


@pytest.mark.nightly
@pytest.mark.slurm
def test_the_trainer_class_on_slurm(whole, submit, cluster):
    layout = ("resources.nodes=2", "resources.processes_per_node=1")
    text = submit("slurm", "trainer-class", *layout, "entrypoint.args=[--epochs, 4]")
    assert epochs(text) == whole


@pytest.mark.aws
@pytest.mark.nightly
def test_the_trainer_class_on_sagemaker(whole, submit, aws, tmp_path):
    submit("sagemaker", "trainer-class", "entrypoint.args=[--epochs, 4]")
    (request,) = sent_requests(aws)
    (tmp_path / "hosts").mkdir()
    hosts = on_loopback(tmp_path / "hosts", 1)
    (data,) = run_on_hosts(request, aws.endpoint, hosts)
    assert epochs((hosts[0].folder / "log.txt").read_text()) == whole
    assert (data / "snapshot.pt").exists()


def test_scripts_know_nothing_of_deploykit():
    scripts = sorted(FOLDERS.glob("*/*.py"))
    assert len(scripts) >= 7
    assert not [path for path in scripts if "deploykit" in path.read_text().lower()]
