"""The types of the Python API, as a strict mypy of a user sees them."""

from __future__ import annotations

import subprocess
import sys

import pytest

GOOD = """
from datetime import timedelta
import deploykit
from deploykit.errors import FunctionFailed, JobFileError, TimedOut


def train(lr: float) -> float:
    return lr


job = deploykit.Job(
    name="digits",
    entrypoint={"script": "train.py", "args": ["--lr", 0.1]},
    resources={"nodes": 2, "time_limit": timedelta(hours=1)},
    slurm={"partition": "gpu"},
)
run: deploykit.Run = deploykit.submit(job, backend="slurm", args=[1], set={"retries": 2})
try:
    status: deploykit.Status = run.wait(timeout=60, check=True)
except (JobFileError, TimedOut, deploykit.errors.RunFailed) as error:
    code: int = error.exit_code
texts: list[str] = [line.text for line in run.logs(follow=True, rank=0)]
plans: list[deploykit.Plan] = [deploykit.plan("job.yaml")]
failed: list[str] = [one.id for one in deploykit.runs(state=["failed", deploykit.State.UNKNOWN])]
fixes: list[str] = [cause.fix for cause in run.diagnose().causes]
warnings: list[deploykit.Problem] = deploykit.check(job, backend=["local", "slurm"])
values: dict[int, float] = deploykit.launch(train, 0.1, nodes=2, slurm={"partition": "gpu"})
later: deploykit.Run = deploykit.launch(train, 0.1, wait=False)
"""
BAD = """
import deploykit

deploykit.submit(7)
deploykit.Job(name="x", entrypoint={"scrip": "train.py"}, resources={"time_limit": "1h"})
deploykit.launch(len, "x").upper()
deploykit.submitt
"""


@pytest.mark.slow
def test_a_strict_type_checker_knows_the_api(tmp_path):
    for name, text in (("good.py", GOOD), ("bad.py", BAD)):
        (tmp_path / name).write_text(text)
    argv = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "good.py", "bad.py"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
    found = [tuple(line.split(":")[:2]) for line in done.stdout.splitlines()]
    lines = [
        number for number, line in enumerate(BAD.splitlines(), 1) if line.startswith("deploykit.")
    ]
    assert sorted(set(found)) == [("bad.py", str(line)) for line in lines], done.stdout
