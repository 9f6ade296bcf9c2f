"""What the backend uses of submitit and submitit does not promise: one test a hook.

When one fails after an upgrade of submitit, `deploykit/backends/slurm/` must follow.
"""

from __future__ import annotations

import inspect
import os

import pytest
from submitit.core import core, utils
from submitit.slurm import slurm as real

from deploykit.backends.slurm import script


@pytest.fixture
def executor(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    return script.offline(tmp_path / "folder")


def test_the_real_executor_wants_srun(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RuntimeError, match="srun"):
        real.SlurmExecutor(tmp_path)


def test_affinity_is_all_that_the_constructor_asks_and_it_writes_nothing(executor, tmp_path):
    assert isinstance(executor, real.SlurmExecutor)
    assert list(tmp_path.iterdir()) == []


def test_the_renderer_takes_our_parameters(executor):
    """`_make_submission_file_text(command, uid)`; None drops a default, more= overrides one."""
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
    """A new default of submitit's would leak into every script."""
    assert set(inspect.signature(real._make_sbatch_string).parameters) == {
        *("command", "folder", "job_name", "partition", "time", "nodes", "ntasks_per_node"),
        *("cpus_per_task", "cpus_per_gpu", "num_gpus", "gpus_per_node", "gpus_per_task", "qos"),
        *("setup", "teardown", "mem", "mem_per_gpu", "mem_per_cpu", "signal_delay_s", "comment"),
        *("constraint", "exclude", "account", "gres", "mail_type", "mail_user", "nodelist"),
        *("dependency", "exclusive", "array_parallelism", "wckey", "stderr_to_stdout"),
        *("map_count", "additional_parameters", "srun_args", "use_srun"),
    }


def test_submit_command_sends_the_text_and_does_not_throttle(tmp_path):
    """`_submit_command` writes `_make_submission_file_text`'s answer, calls the command, parses."""

    class Recorded(type(script.offline(tmp_path))):
        def _make_submission_file_text(self, command, uid):
            return "exactly this\r\n"

        def _make_submission_command(self, submission_file_path):
            self.sent = submission_file_path.read_bytes()
            return ["echo", "Submitted batch job 4242"]

        def _throttle(self):
            raise AssertionError

    executor = Recorded(tmp_path)
    assert executor._submit_command("").job_id == "4242"
    assert executor.sent == b"exactly this\r\n"
    assert (tmp_path / "4242_submission.sh").read_bytes() == executor.sent


def test_the_command_is_sbatch_and_the_path(executor, tmp_path):
    path = tmp_path / "x.sh"
    assert executor._make_submission_command(path) == ["sbatch", str(path)]


def test_a_refusal_is_raised_with_sbatchs_words_and_printed(capsys):
    argv = ["sh", "-c", "echo 'sbatch: error: no' >&2; exit 1"]
    with pytest.raises(utils.FailedJobError, match=r"^sbatch: error: no$"):
        utils.CommandFunction(argv, verbose=False)()
    assert capsys.readouterr().err == "sbatch: error: no\n"


def test_an_answer_without_a_job_id_is_an_error():
    with pytest.raises(utils.FailedSubmissionError):
        real.SlurmExecutor._get_job_id_from_submission_command("")


def test_a_job_object_asks_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "posix_spawn", None)
    monkeypatch.setattr(core.subprocess, "Popen", None)
    assert real.SlurmJob(folder=tmp_path, job_id="1", tasks=[0]).job_id == "1"
