"""`pytorchddp` and `mpi` under SageMaker's real launcher: mpirun over ssh, on two hosts."""

from __future__ import annotations

import json
import os
import shutil
import textwrap
from pathlib import Path

import pytest

from deploykit.backends.sagemaker.request import PROCESSES
from deploykit.job.model import Entrypoint
from tests.aws_server import recorder
from tests.backends.sagemaker.launcher.sagemaker_hosts import LauncherFailedError, run_on_hosts
from tests.backends.sagemaker.launcher.sagemaker_namespaces import GATEWAY, namespaces
from tests.backends.sagemaker.launcher.test_sagemaker_launcher import ARGUMENTS
from tests.programs import needs
from tests.trainer.ranks import outputs, start_ranks
from tests.trainer_losses import losses

TIMEOUT = 600
"""Seconds. The launcher itself sleeps for 30 seconds at the end."""
pytestmark = [
    pytest.mark.aws,
    pytest.mark.torch,
    pytest.mark.timeout(TIMEOUT + 300),
    pytest.mark.xdist_group("port-7777"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
    needs("ip", "mpirun", "sshd", "unshare"),
]

TRAINER = Path(__file__).parents[4] / "entrypoints"
TRAINING = ("--steps", "6", "--batch-size", "64", "--log-every", "1", "--no-tensorboard")
RECORDER = textwrap.dedent(
    """\
    import json, os, runpy, sys
    from pathlib import Path

    given = {"argv": sys.argv[1:], "env": dict(os.environ)}
    folder = Path(os.environ["DEPLOYKIT_OUTPUT_DIR"])
    (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(given))
    sys.argv[1:] = json.loads(os.environ["TRAINING"])
    runpy.run_path("train.py", run_name="__main__")
    """
)
"""Records its arguments and environment, then runs the trainer."""
CHOSEN = {"NCCL_DEBUG": "VERSION", "NCCL_PROTO": "LL", "FI_PROVIDER": "tcp", "OMP_NUM_THREADS": "1"}


@pytest.fixture
def two(moto, tmp_path):
    """Two hosts, and the server's URL on their network."""
    with namespaces(tmp_path / "hosts", 2) as hosts, recorder(moto, GATEWAY) as server:
        yield hosts, server.endpoint


def test_pytorchddp_on_two_hosts(captured, two, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(TRAINER, source)
    (source / "recorder.py").write_text(RECORDER)
    env = {**CHOSEN, "TRAINING": json.dumps(TRAINING), "PLAIN": "ü 'x' $y"}
    entrypoint = Entrypoint(script="recorder.py", args=ARGUMENTS)
    options = {"framework_version": "2.2.0", "instance_type": "ml.p4d.24xlarge"}
    request = captured(source, entrypoint=entrypoint, env=env, distribution="pytorchddp", **options)
    hosts, endpoint = two
    folders = run_on_hosts(request, endpoint, hosts, timeout=TIMEOUT)
    assert losses(folders[0]) == pytest.approx(on_one_node(tmp_path / "alone"), rel=0, abs=1e-6)
    for rank in range(4):
        given = json.loads((folders[rank // 2] / f"rank-{rank}.json").read_text())
        assert tuple(given["argv"]) == ARGUMENTS
        world = {"WORLD_SIZE": "4", "LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2"}
        network = {"NCCL_SOCKET_IFNAME": "=eth0", "GLOO_SOCKET_IFNAME": "eth0"}
        expected = env | world | network
        assert {name: given["env"].get(name) for name in expected} == expected


def test_a_world_that_is_too_small_is_stopped(captured, two, program):
    """With half of the ranks, training would run and give wrong results."""

    def halved(request):
        return {**request, "HyperParameters": request["HyperParameters"] | {PROCESSES: "1"}}

    request = captured(program("print('trained')"), halved, distribution="mpi")
    hosts, endpoint = two
    with pytest.raises(LauncherFailedError, match="4 ranks, but mpirun started 2: training"):
        run_on_hosts(request, endpoint, hosts, timeout=TIMEOUT)
    assert "trained" not in (hosts[0].folder / "log.txt").read_text()


def on_one_node(folder):
    """The losses of four ranks of the trainer, without any launcher."""
    outputs(start_ranks(folder, 4, str(TRAINER / "train.py"), *TRAINING))
    return losses(folder / "output")
