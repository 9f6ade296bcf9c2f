"""Ten third-party scripts (people.toml), unmodified, on all three backends, without a job file.

The commands are those of docs/how-to/scripts-of-others.md, typed where the scripts are, in the
environment that has their packages and deploykit.
Two ranks: on one node of this machine, on two nodes of a real Slurm cluster, and on one host under
SageMaker's real launcher.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from pathlib import Path

import pytest

from tests.aws_server import sent_requests
from tests.backends.sagemaker.launcher.sagemaker_hosts import on_loopback, run_on_hosts
from tests.frameworks.people import CONFIG, IMAGE, PYTHON, WITHOUT_GPU, people, record

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.torch,
    pytest.mark.timeout(2400),
    pytest.mark.xdist_group("frameworks"),
]


@pytest.fixture(params=people(), ids=lambda one: one.name)
def person(request):
    if not request.param.is_here():
        pytest.skip("optional: python -m tests.frameworks.people fetch")
    return request.param


def submitted(person, backend, folder):
    """Everything that a successful submit printed."""
    home = Path(os.environ["HOME"])
    (home / ".config/deploykit").mkdir(parents=True)
    (home / ".config/deploykit/config.toml").write_text(CONFIG)
    stand_in = [f"env.PYTHONPATH={WITHOUT_GPU}"] if person.without_gpu else []
    done = subprocess.run(
        ["sh", "-c", person.command(backend, *(stand_in if backend != "sagemaker" else ()))],
        cwd=person.make(folder),
        env={**os.environ, "PATH": f"{PYTHON.parent}:{os.environ['PATH']}", "IMAGE": IMAGE},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout


def passed(person, backend, begun, log):
    """Everything that the script prints at its end, and as one of two ranks, is in the log."""
    missing = [pattern for pattern in person.prints if not re.search(pattern, log)]
    assert not missing, (missing, log[-6000:])
    record(person, backend, time.monotonic() - begun)


def test_on_this_machine(person, tmp_path):
    begun = time.monotonic()
    log = submitted(person, "local", tmp_path / "project")
    passed(person, "local", begun, log)


@pytest.mark.slurm
def test_on_two_nodes_of_slurm(person, cluster, tmp_path):
    begun = time.monotonic()
    log = submitted(person, "slurm", tmp_path / "project")
    passed(person, "slurm", begun, log)


@pytest.mark.aws
def test_on_sagemaker(person, aws, tmp_path):
    begun = time.monotonic()
    submitted(person, "sagemaker", tmp_path / "project")
    (request,) = sent_requests(aws)
    site = [PYTHON, "-c", 'import sysconfig; print(sysconfig.get_path("purelib"))']
    packages = subprocess.run(site, check=True, capture_output=True, text=True).stdout.strip()
    image = {"PYTHONPATH": f"{WITHOUT_GPU}:{packages}" if person.without_gpu else packages}
    (tmp_path / "hosts").mkdir()
    hosts = on_loopback(tmp_path / "hosts", 1)
    run_on_hosts(request, aws.endpoint, hosts, timeout=1800, image=image)
    passed(person, "sagemaker", begun, (hosts[0].folder / "log.txt").read_text())
