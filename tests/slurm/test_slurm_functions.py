"""Python functions through submitit, on a real cluster without accounts."""

from __future__ import annotations

import os

import pytest
from slurm_helpers import wait_for
from submitit.core.utils import FailedJobError, UncompletedJobError

from deploykit.errors import JobFileError
from deploykit.slurm import executor

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("slurm")]


@pytest.fixture
def functions(cluster, project, tmp_path):
    return executor(overrides=["env.GREETING=hello"], folder=tmp_path / "functions of mine")


def test_a_function_and_its_result(functions):
    job = functions.submit(lambda x: (os.environ["GREETING"], x + 1), 41)
    assert job.result() == ("hello", 42)
    text = job.paths.submission_file.read_text()
    assert "wckey" not in text
    assert "#SBATCH --time=5\n" in text


def test_a_function_that_raises(functions):
    job = functions.submit(lambda: 1 / 0)
    with pytest.raises(FailedJobError, match="ZeroDivisionError"):
        job.result()


def test_an_array_is_one_call(functions):
    jobs = functions.map_array(lambda a, b: a * b, [1, 2, 3], [4, 5, 6])
    assert [job.result() for job in jobs] == [4, 10, 18]
    (array,) = {job.job_id.split("_")[0] for job in jobs}
    assert array.isdigit()
    assert functions.submit(int, "7").result() == 7, "the next one is no array"


def test_a_function_whose_process_is_killed_has_ended(functions):
    job = functions.submit(lambda: os.kill(os.getpid(), 9))
    wait_for(job.done)
    assert job.state == "FAILED"
    with pytest.raises(UncompletedJobError):
        job.result()


def test_what_a_function_cannot_have(project):
    words = ["slurm.host=login1", "slurm.folder=/x", "env.KEY=secret:env:KEY"]
    with pytest.raises(JobFileError) as caught:
        executor(overrides=[*words, "slurm.container={image: a.sif}"])
    wrong = {problem.path for problem in caught.value.problems}
    assert wrong == {"slurm.host", "slurm.container", "env.KEY"}
