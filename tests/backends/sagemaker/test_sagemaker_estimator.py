"""`deploykit.sagemaker.estimator`: its `fit()` sends the request of the dry run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import yaml

from deploykit import sagemaker
from deploykit.lib.errors import BackendUnavailable, JobFileError
from tests.aws_server import sent_requests

pytestmark = [pytest.mark.aws, pytest.mark.xdist_group("notebook"), pytest.mark.slow]
ROOT = Path(__file__).parents[3]
SECTION = {
    "role": "arn:aws:iam::123456789012:role/training",
    "bucket": "my-bucket",
    "region": "us-east-1",
    "instance_type": "ml.g5.12xlarge",
    "framework_version": "2.8.0",
}
CELL = textwrap.dedent(
    """\
    import sys
    from deploykit.sagemaker import estimator

    assert "sagemaker" not in sys.modules
    pytorch = estimator("job.yaml", ["sagemaker.spot=true", "sagemaker.max_wait=1h"], run="one")
    from sagemaker.pytorch import PyTorch

    assert isinstance(pytorch, PyTorch)
    pytorch.fit(wait=False)
    pytorch.fit(wait=False, job_name="two")
    """
)


@pytest.fixture
def notebook(project):
    """The folder of a SageMaker job with data."""
    job = yaml.safe_load((project / "job.yaml").read_text())
    job |= {"data": {"train": "s3://my-bucket/train"}, "checkpoints": "s3://my-bucket/c"}
    job["sagemaker"] = SECTION
    (project / "job.yaml").write_text(yaml.safe_dump(job))
    return project


def test_fit_sends_the_plan(aws, notebook, tmp_path):
    """In a separate process, with a configuration of the SDK that would change the request."""
    home = tmp_path / "home"
    (home / ".config/sagemaker").mkdir(parents=True)
    (home / ".config/sagemaker/config.yaml").write_text(
        "SchemaVersion: '1.0'\nSageMaker: {TrainingJob: {EnableNetworkIsolation: true}}\n"
    )
    environment = {**os.environ, "HOME": str(home), "PYTHONPATH": str(ROOT)}
    environment["SAGEMAKER_SUPPRESS_V2_WARNING"] = "1"
    changes = ["--run", "one", "--set", "sagemaker.spot=true", "--set", "sagemaker.max_wait=1h"]
    dry_run = ["submit", "--backend", "sagemaker", "--dry-run", *changes]
    planned = subprocess.run(
        [sys.executable, "-m", "deploykit", *dry_run],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    subprocess.run([sys.executable, "-c", CELL], env=environment, check=True, capture_output=True)
    first, second = sent_requests(aws)
    assert first == json.loads(planned.stdout)
    assert second["TrainingJobName"] == second["Environment"]["DEPLOYKIT_RUN"] == "two"
    uploaded = [one for one in aws.requests if one.method == "PUT"]
    assert len(uploaded) == 1


def test_every_problem_of_the_job_is_reported(notebook):
    with pytest.raises(JobFileError) as caught:
        sagemaker.estimator("job.yaml", ["sagemaker.max_wait=1h", "resources.time_limit=29d"])
    paths = {problem.path for problem in caught.value.problems}
    assert {"sagemaker.max_wait", "resources.time_limit"} <= paths


@pytest.mark.parametrize("installed", [None, "3.1.0"])
def test_a_missing_sdk_is_reported(notebook, monkeypatch, installed):
    """No hint may replace the version 3 of the SDK that a user has."""
    set_version(monkeypatch, installed)
    with pytest.raises(BackendUnavailable, match=f"installed: {installed or 'none'}") as caught:
        sagemaker.estimator()
    assert "pip install" not in caught.value.hint
    assert "a separate environment" in caught.value.hint


def set_version(monkeypatch, installed):
    def version(name):
        if installed is None:
            raise PackageNotFoundError(name)
        return installed

    monkeypatch.setattr("importlib.metadata.version", version)
