"""Ten third-party scripts (people.toml), unmodified, on all three backends.

Two ranks: on one node of this machine, on two nodes of a real Slurm cluster, and on one host under
SageMaker's real launcher.
"""

from __future__ import annotations

import re
import subprocess
import time

import pytest

from deploykit import cli
from tests.aws_server import sent_requests
from tests.frameworks.people import PYTHON, WITHOUT_GPU, people, record
from tests.sagemaker.launcher.sagemaker_hosts import on_loopback, run_on_hosts

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.torch,
    pytest.mark.timeout(1200),
    pytest.mark.xdist_group("frameworks"),
]


@pytest.fixture(params=people(), ids=lambda one: one.name)
def person(request):
    if not request.param.is_here():
        pytest.skip("optional: python -m tests.frameworks.people fetch")
    return request.param


def submitted(job, backend, capsys, *words):
    """Everything that a successful submit printed."""
    capsys.readouterr()
    code = cli.main(["submit", str(job), "--backend", backend, *words])
    shown = capsys.readouterr()
    assert code == 0, (shown.out + shown.err)[-6000:]
    return shown.out


def without_gpu(person):
    return ["--set", f"env.PYTHONPATH={WITHOUT_GPU}"] if person.without_gpu else []


def passed(person, backend, begun, log):
    """Everything that the script prints at its end, and as one of two ranks, is in the log."""
    missing = [pattern for pattern in person.prints if not re.search(pattern, log)]
    assert not missing, (missing, log[-6000:])
    record(person, backend, time.monotonic() - begun)


def test_on_this_machine(person, tmp_path, capsys):
    job, begun = person.write_job(tmp_path / "project"), time.monotonic()
    log = submitted(job, "local", capsys, "--wait", *without_gpu(person))
    passed(person, "local", begun, log)


@pytest.mark.slurm
def test_on_two_nodes_of_slurm(person, cluster, tmp_path, capsys):
    job, begun = person.write_job(tmp_path / "project", person.ranks), time.monotonic()
    log = submitted(job, "slurm", capsys, "--wait", *without_gpu(person))
    passed(person, "slurm", begun, log)


@pytest.mark.aws
def test_on_sagemaker(person, aws, tmp_path, capsys):
    job, begun = person.write_job(tmp_path / "project"), time.monotonic()
    submitted(job, "sagemaker", capsys, "--set", "sagemaker.sender=boto3")
    (request,) = sent_requests(aws)
    site = [PYTHON, "-c", 'import sysconfig; print(sysconfig.get_path("purelib"))']
    packages = subprocess.run(site, check=True, capture_output=True, text=True).stdout.strip()
    image = {"PYTHONPATH": f"{WITHOUT_GPU}:{packages}" if person.without_gpu else packages}
    (tmp_path / "hosts").mkdir()
    hosts = on_loopback(tmp_path / "hosts", 1)
    run_on_hosts(request, aws.endpoint, hosts, timeout=900, image=image)
    passed(person, "sagemaker", begun, (hosts[0].folder / "log.txt").read_text())
