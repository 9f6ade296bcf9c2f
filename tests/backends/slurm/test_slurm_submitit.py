"""What the backend uses of submitit that submitit does not promise: one test for each.

If one fails after an upgrade of submitit, change `deploykit/backends/slurm/` to match.
"""

from __future__ import annotations

import inspect
import os

import pytest
from hypothesis import HealthCheck, given, settings
from submitit.core import core, utils
from submitit.slurm import slurm as real

from deploykit.backends import slurm
from deploykit.job.model import Entrypoint, JobSpec
from tests.backends.slurm.plans import CASES, OfflineExecutor, plan_of, rendered_by_submitit
from tests.backends.slurm.random_jobs import OPTIONS, RESOURCES


@pytest.fixture
def executor(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    return OfflineExecutor(tmp_path / "folder")


@pytest.mark.parametrize("name", CASES)
def test_submitits_renderer_gives_the_planned_script(home, name):
    plan = plan_of(*CASES[name])
    assert rendered_by_submitit(plan) == plan.text


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(options=OPTIONS, resources=RESOURCES)
@pytest.mark.slow
def test_submitits_renderer_gives_the_planned_script_of_any_valid_job(options, resources):
    job = JobSpec("any", Entrypoint("train.py"), resources)
    if not list(slurm.check(job, options)):
        plan = plan_of(job, options)
        assert rendered_by_submitit(plan) == plan.text


def test_the_real_executor_requires_srun(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RuntimeError, match="srun"):
        real.SlurmExecutor(tmp_path)


def test_the_constructor_requires_only_affinity_and_writes_nothing(executor, tmp_path):
    assert isinstance(executor, real.SlurmExecutor)
    assert list(tmp_path.iterdir()) == []


def test_the_renderer_accepts_our_parameters(executor):
    """None drops a default, and `additional_parameters` overrides one."""
    executor.update_parameters(
        job_name="name",
        time=7,
        signal_delay_s=11,
        wckey=None,
        stderr_to_stdout=True,
        use_srun=False,
        setup=["# first"],
        additional_parameters={"output": "out here", "no-requeue": True},
    )
    assert executor._make_submission_file_text("true\nfalse", "uid") == (
        "#!/bin/bash\n\n# Parameters\n"
        "#SBATCH --job-name=name\n#SBATCH --no-requeue\n#SBATCH --nodes=1\n"
        "#SBATCH --open-mode=append\n#SBATCH --output='out here'\n#SBATCH --signal=USR2@11\n"
        "#SBATCH --time=7\n\n# setup\n# first\n\n# command\nexport SUBMITIT_EXECUTOR=slurm\n"
        "true\nfalse\n"
    )


def test_the_renderer_has_no_parameter_that_we_do_not_know():
    """A new default of submitit's would appear in every script."""
    assert set(inspect.signature(real._make_sbatch_string).parameters) == {
        *("command", "folder", "job_name", "partition", "time", "nodes", "ntasks_per_node"),
        *("cpus_per_task", "cpus_per_gpu", "num_gpus", "gpus_per_node", "gpus_per_task", "qos"),
        *("setup", "teardown", "mem", "mem_per_gpu", "mem_per_cpu", "signal_delay_s", "comment"),
        *("constraint", "exclude", "account", "gres", "mail_type", "mail_user", "nodelist"),
        *("dependency", "exclusive", "array_parallelism", "wckey", "stderr_to_stdout"),
        *("map_count", "additional_parameters", "srun_args", "use_srun"),
    }


def test_the_hook_may_replace_the_file_and_the_command(tmp_path):
    """`_submit_command` writes the file, calls the hook with its path, and runs what it returns."""
    sent = b"\xc3\xa9 exactly this\r\n"

    class Hooked(OfflineExecutor):
        def _make_submission_command(self, submission_file_path):
            self.rendered = submission_file_path.read_text()
            submission_file_path.write_bytes(sent)
            copy = 'cp "$0" "$1"; echo Submitted batch job 4242'
            return ["sh", "-c", copy, str(submission_file_path), str(tmp_path / "sent")]

        def _throttle(self):
            raise AssertionError

    executor = Hooked(tmp_path)
    assert executor._submit_command("").job_id == "4242"
    assert executor.rendered.startswith("#!/bin/bash\n")
    assert (tmp_path / "sent").read_bytes() == sent
    assert (tmp_path / "4242_submission.sh").read_bytes() == sent


def test_the_command_is_sbatch_and_the_path(executor, tmp_path):
    path = tmp_path / "x.sh"
    assert executor._make_submission_command(path) == ["sbatch", str(path)]


def test_a_failed_command_raises_its_error_output_and_prints_it(capsys):
    argv = ["sh", "-c", "echo 'sbatch: error: no' >&2; exit 1"]
    with pytest.raises(utils.FailedJobError, match=r"^sbatch: error: no$"):
        utils.CommandFunction(argv, verbose=False)()
    assert capsys.readouterr().err == "sbatch: error: no\n"


def test_an_answer_without_a_job_id_raises():
    with pytest.raises(utils.FailedSubmissionError):
        real.SlurmExecutor._get_job_id_from_submission_command("")


def test_a_job_object_starts_no_process(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "posix_spawn", None)
    monkeypatch.setattr(core.subprocess, "Popen", None)
    assert real.SlurmJob(folder=tmp_path, job_id="1", tasks=[0]).job_id == "1"
