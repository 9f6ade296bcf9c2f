"""A time limit is required where a job is billed or queued, and not on this machine."""

from __future__ import annotations

import pytest

from deploykit.cli import main as cli

WITHOUT = "name: hello\nentrypoint: {script: train.py}\n"
SAGEMAKER = (
    "sagemaker={role: arn:aws:iam::123456789012:role/x, bucket: my-bucket, region: us-east-1, "
    "instance_type: ml.g5.xlarge, framework_version: 2.8.0}"
)


@pytest.fixture(autouse=True)
def _without(project):
    (project / "job.yaml").write_text(WITHOUT)


def test_this_machine_needs_none(capsys):
    assert cli.main(["check"]) == 0
    assert cli.main(["submit", "--dry-run"]) == 0
    assert "--time-limit=0" in capsys.readouterr().out


@pytest.mark.parametrize(("backend", "more"), [("slurm", []), ("sagemaker", ["--set", SAGEMAKER])])
def test_elsewhere_it_is_required_and_named_with_all_other_problems(capsys, backend, more):
    argv = ["check", "--backend", backend, *more]
    assert cli.main(argv) == 65
    shown = capsys.readouterr().err
    assert "resources.time_limit: is required (for example, `time_limit: 30m` or" in shown
    assert "1 problem" in shown
    assert cli.main([*argv, "--set", "resources.time_limit=1h"]) == 0
