"""Many processes submit at once, and no run is lost."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from deploykit.cli import main as cli
from tests.aws_server import SECTION, sent_requests
from tests.nightly import few

pytestmark = pytest.mark.slow


@pytest.mark.aws
@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", few([8, 50], 8))
def test_so_many_concurrent_submits_start_as_many_jobs(count, project, aws, capsys):
    with (project / "job.yaml").open("a") as file:
        file.write(SECTION)
    argv = [sys.executable, "-m", "deploykit", "submit", "--backend", "sagemaker", "--json"]
    running = [
        subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(count)
    ]
    answers = [process.communicate() for process in running]
    assert [process.returncode for process in running] == [0] * count, answers
    submitted = {json.loads(out)["run"] for out, _ in answers}
    assert len(submitted) == count
    assert {request["TrainingJobName"] for request in sent_requests(aws)} == submitted
    assert len(sent_requests(aws)) == count
    assert cli.main(["list", "--limit", "100", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert {row["run"] for row in listed if row["handle"]} == submitted
