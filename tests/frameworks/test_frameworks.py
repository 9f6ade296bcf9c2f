"""Third-party scripts, unmodified: two ranks on every backend, and the same final metric.

Local runs them on one node, Slurm on two, SageMaker's real launcher on one host. What they import
is in .venv-frameworks (environment.sh here makes it).
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from deploykit.cli import main as cli
from tests.aws_server import sent_requests
from tests.backends.sagemaker.launcher.sagemaker_hosts import on_loopback, run_on_hosts

ROOT = Path(__file__).parents[2]
FOLDERS = ROOT / "examples/frameworks"
PYTHON = ROOT / ".venv-frameworks/bin/python"
TOLERANCE = 1e-5
"""Relative, between backends. A sum over two ranks does not depend on the order."""
LEARNED = {
    "accelerate": {"accuracy": 0.95},
    "accelerate-fsdp": {"accuracy": 0.95},
    "deepspeed": {f"accuracy with ZeRO {stage}": 0.95 for stage in (1, 2, 3)},
    "fastai-tabular": {"accuracy": 0.9},  # the larger class is 0.63 of all
    "fastai-text": {"accuracy": 0.8},  # the largest is 0.43
    "fastai-vision": {"accuracy": 0.9},
    "lightning": {"accuracy": 0.95},
    "transformers": {"perplexity": 18},  # a model of bytes alone, without context, has 25
    "trl-dpo": {"accuracy": 0.9},  # 0.5 before training
    "trl-sft": {"perplexity": 2},  # about 257 before training
}
"""The minimum of each metric, or the maximum of perplexity. Guessing digits gives 0.1."""

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.aws,
    pytest.mark.slurm,
    pytest.mark.torch,
    pytest.mark.timeout(900),
    pytest.mark.xdist_group("frameworks"),
]


def metrics(log):
    """The lines ``final NAME VALUE REST`` of rank 0."""
    found = re.findall(r"\[rank 0\] final (\w+) ([\d.]+)(.*)$", log, re.MULTILINE)
    return {name + rest: float(value) for name, value, rest in found}


def submit(name, backend, capsys, *settings):
    """Submit the example; what the command printed."""
    capsys.readouterr()
    limit = "resources.time_limit=1h"  # a busy machine makes no failure
    words = [word for setting in (limit, *settings) for word in ("--set", setting)]
    wait = [] if backend == "sagemaker" else ["--wait"]
    job = str(FOLDERS / name / "job.yaml")
    code = cli.main(["submit", job, "--backend", backend, "--run", f"on-{backend}", *wait, *words])
    shown = capsys.readouterr()
    assert code == 0, shown.out + shown.err
    return shown.out


@pytest.fixture
def on_sagemaker(aws, capsys, tmp_path):
    """Run an example's captured request under the real launcher; the log of its host."""

    def run(name):
        submit(name, "sagemaker", capsys, "sagemaker.sender=boto3")
        (request,) = sent_requests(aws)
        folder = tmp_path / "hosts"
        folder.mkdir()
        site = 'import sysconfig; print(sysconfig.get_path("purelib"))'
        frameworks = subprocess.run(
            [PYTHON, "-c", site], check=True, capture_output=True, text=True
        ).stdout.strip()
        image = {"PYTHONPATH": frameworks}
        run_on_hosts(request, aws.endpoint, on_loopback(folder, 1), timeout=400, image=image)
        return (folder / "host-0/log.txt").read_text()

    return run


@pytest.mark.parametrize("name", sorted(LEARNED))
def test_the_same_metric_everywhere(name, cluster, on_sagemaker, capsys):
    here = metrics(submit(name, "local", capsys, f"local.python={PYTHON}"))
    layout = ("resources.nodes=2", "resources.processes_per_node=1")
    slurm = metrics(submit(name, "slurm", capsys, f"slurm.python={PYTHON}", *layout))
    sagemaker = metrics(on_sagemaker(name))

    assert set(here) == set(LEARNED[name])
    for metric, bound in LEARNED[name].items():
        good = here[metric] <= bound if metric == "perplexity" else here[metric] >= bound
        assert good, here
    assert slurm == pytest.approx(here, rel=TOLERANCE, abs=0)
    assert sagemaker == pytest.approx(here, rel=TOLERANCE, abs=0)


def test_every_example_is_run():
    assert {path.parent.name for path in FOLDERS.glob("*/train.py")} == set(LEARNED)


@pytest.mark.parametrize("name", sorted(LEARNED))
def test_scripts_know_nothing_of_deploykit(name):
    assert "deploykit" not in (FOLDERS / name / "train.py").read_text().lower()
