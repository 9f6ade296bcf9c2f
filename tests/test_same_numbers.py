"""One job file, four ranks, every backend: the same loss at every step, and what was shown is sent.

The four layouts: this machine 1 x 4 and 2 x 2, a real Slurm cluster 2 x 2, and two hosts of
SageMaker's real container launcher, fed with the request that the moto server received.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deploykit.cli import main as cli
from tests.aws_server import sent_requests
from tests.backends.sagemaker.launcher.sagemaker_hosts import on_loopback, run_on_hosts
from tests.backends.slurm.slurm_helpers import output
from tests.trainer_losses import losses

ROOT = Path(__file__).parent.parent
ARGUMENTS = "entrypoint.args=[--epochs, 2, --batch-size, 64, --log-every, 1, --seed, 0]"
STEPS = 34
TOLERANCE = 1e-6

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("port-7777")]


def argv(backend, run, nodes, processes, *more):
    layout = [f"resources.nodes={nodes}", f"resources.processes_per_node={processes}", ARGUMENTS]
    overrides = [word for text in layout for word in ("--set", text)]
    job = str(ROOT / "job.yaml")
    return ["submit", job, "--backend", backend, "--run", run, *overrides, *more]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The losses of four processes on one node of this machine."""
    env = {**os.environ, "DEPLOYKIT_HOME": str(tmp_path_factory.mktemp("reference"))}

    def tell(*words):
        command = [sys.executable, "-m", "deploykit", *words]
        return subprocess.run(
            command, env=env, check=True, capture_output=True, text=True, cwd=ROOT
        ).stdout

    tell(*argv("local", "one-by-four", 1, 4, "--wait"))
    found = losses(json.loads(tell("status", "one-by-four", "--json"))[0]["output"])
    assert list(found) == list(range(1, STEPS + 1))
    return found


def _output(run, capsys):
    capsys.readouterr()
    assert cli.main(["status", run, "--json"]) == 0
    return json.loads(capsys.readouterr().out)[0]["output"]


def _shown(capsys, arguments):
    capsys.readouterr()
    assert cli.main([*arguments, "--dry-run"]) == 0
    return capsys.readouterr().out


def test_two_emulated_nodes(reference, capsys):
    assert cli.main(argv("local", "two-by-two", 2, 2, "--wait")) == 0
    found = losses(_output("two-by-two", capsys))
    assert found == pytest.approx(reference, rel=0, abs=TOLERANCE)


@pytest.mark.slurm
def test_slurm(cluster, reference, capsys, tmp_path):
    arguments = argv("slurm", "on-slurm", 2, 2)
    shown = _shown(capsys, arguments)
    assert cli.main([*arguments, "--wait"]) == 0
    found = losses(_output("on-slurm", capsys))
    assert found == pytest.approx(reference, rel=0, abs=TOLERANCE)
    job = (tmp_path / "state folder/runs/on-slurm/claim").readlink()
    output("scontrol", "write", "batch_script", str(job), str(tmp_path / "stored"))
    assert (tmp_path / "stored").read_bytes() == shown.encode()


@pytest.mark.aws
def test_sagemaker(aws, reference, capsys, tmp_path):
    arguments = argv("sagemaker", "in-the-cloud", 2, 2)
    shown = _shown(capsys, arguments)
    assert cli.main(arguments) == 0
    (request,) = sent_requests(aws)
    assert request == json.loads(shown)
    (tmp_path / "hosts").mkdir()
    first, _ = run_on_hosts(request, aws.endpoint, on_loopback(tmp_path / "hosts", 2))
    assert losses(first) == pytest.approx(reference, rel=0, abs=TOLERANCE)
