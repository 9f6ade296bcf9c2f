"""`client`, with stand-ins for Slurm's commands."""

from __future__ import annotations

import json
import os
import shlex
import sys
from types import SimpleNamespace

import pytest

from deploykit.backends import slurm
from deploykit.backends.slurm import Options, arrays, commands, sbatch
from deploykit.job.model import State
from deploykit.lib.errors import BackendUnavailable, SubmitRefused, TryAgain
from tests.backends.slurm.slurm_helpers import folder_of

SBATCH = """\
import json, os, sys
with open(sys.argv[1], newline="") as file:
    record = {{"text": file.read(), "environ": dict(os.environ)}}
record["mode"] = os.stat(sys.argv[1]).st_mode & 0o777
json.dump(record, open({record!r}, "w"))
sys.stderr.write({err!r})
print("Submitted batch job 4242") if not {err!r} else sys.exit(1)
"""
TIMEOUT = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation\n"


@pytest.fixture
def fake_slurm(tmp_path, monkeypatch):
    """A function that installs stand-ins: what sbatch complains of, and what squeue prints."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr(sbatch, "time", SimpleNamespace(sleep=lambda _: None))

    def install(err="", squeue=""):
        (tmp_path / "sbatch.py").write_text(SBATCH.format(record=f"{tmp_path}/record", err=err))
        lines = {
            "sbatch": shlex.join([sys.executable, f"{tmp_path}/sbatch.py"]) + ' "$@"',
            "squeue": squeue,
            "scontrol": "echo ClusterName = box",
            "srun": "false",
        }
        for name, line in lines.items():
            (folder / name).write_text(f"#!/bin/sh\n{line}\n")
            (folder / name).chmod(0o755)
        return lambda: json.loads((tmp_path / "record").read_text())

    return install


def test_sbatch_gets_the_planned_script_in_a_clean_environment(
    fake_slurm, make_plan, send, monkeypatch
):
    """A later import of a submodule does not replace the backend's functions."""
    record = fake_slurm()
    for name in ("SLURM_JOB_ID", "RANK", "SBATCH_TIMELIMIT"):
        monkeypatch.setenv(name, "5")
    monkeypatch.setenv("SBATCH_ACCOUNT", "lab")
    plan = make_plan("", args=("é\r\n",))
    handle = send(plan)
    assert (handle.id, handle.target) == ("4242", "localhost")
    assert record()["text"] == plan.text
    assert record()["mode"] == 0o600
    environ = record()["environ"]
    assert not {"SLURM_JOB_ID", "RANK", "SBATCH_TIMELIMIT"} & set(environ)
    assert environ["SBATCH_ACCOUNT"] == "lab"
    assert all(callable(getattr(slurm, name)) for name in ("check", "plan", "submit", "status"))


def test_a_submit_records_the_job_the_cluster_and_the_size_of_the_array(
    fake_slurm, make_plan, send, tmp_path
):
    fake_slurm()
    handle = send(make_plan("", options=Options(array=3)))
    folder = folder_of("one-1", tmp_path)
    assert arrays.job_id(folder) == "4242"
    assert arrays.tasks(handle) == range(3)
    assert (folder / "cluster").read_text() == "box\n"


def test_a_refused_job(fake_slurm, make_plan, send, capfd):
    fake_slurm(err="sbatch: error: invalid partition specified: nope\n")
    with pytest.raises(SubmitRefused, match=r"^Slurm refused the job: invalid partition") as caught:
        send(make_plan(""))
    assert "slurm.partition" in caught.value.hint
    assert capfd.readouterr() == ("", "")


def test_a_job_that_may_be_queued_although_sbatch_timed_out(fake_slurm, make_plan, send, tmp_path):
    """It was; it was not; the controller stays silent."""
    row = f"77|PENDING|N/A|N/A|1|main|9|None|one-1|{folder_of('one-1', tmp_path)}/source"
    fake_slurm(err=TIMEOUT)
    with pytest.raises(TryAgain, match="Socket timed out"):
        send(make_plan(""))
    fake_slurm(err=TIMEOUT, squeue="exit 1")
    with pytest.raises(TryAgain, match="may or may not be queued") as caught:
        send(make_plan(""))
    assert "deploykit submit --run one-1" in caught.value.hint
    fake_slurm(err=TIMEOUT, squeue=f"echo {shlex.quote(row)}")
    assert send(make_plan("")).id == "77"


def test_find_prefers_the_job_that_claimed_the_run(fake_slurm, tmp_path):
    rows = [
        f"{number}|RUNNING|N/A|N/A|1|main|9|None|{name}|{folder}/source"
        for number, name, folder in [
            (9, "run-b", tmp_path),
            (10, "run-a", "/another/folder"),
            (12, "run-a", tmp_path),
            (101, "run-a", tmp_path),
        ]
    ]
    fake_slurm(squeue=f"printf '%s\\n' {shlex.join(rows)}")
    assert sbatch.find("run-a", tmp_path, "localhost").id == "12"
    (tmp_path / "claim").symlink_to("101")
    assert sbatch.find("run-a", tmp_path, "localhost").id == "101"
    assert sbatch.find("run-x", tmp_path / "other", "localhost") is None


def test_find_does_not_guess(fake_slurm, tmp_path):
    """The run's cluster is another one, or Slurm does not answer."""
    fake_slurm(squeue="exit 1")
    with pytest.raises(BackendUnavailable, match="squeue: no reason given"):
        sbatch.find("run-a", tmp_path, "localhost")
    (tmp_path / "cluster").write_text("prod\n")
    with pytest.raises(BackendUnavailable, match="'prod', but this one is 'box'"):
        sbatch.find("run-a", tmp_path, "localhost")


def test_without_slurm(make_plan, send, monkeypatch, tmp_path):
    plan = make_plan("")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BackendUnavailable, match="sbatch is not on PATH"):
        send(plan)


def test_queries_have_no_filters_of_the_user():
    environment = commands.query_environment(
        {"SQUEUE_STATES": "PD", "SACCT_FORMAT": "x", "SLURM_CONF": "/x"}
    )
    assert environment == {"SLURM_CONF": "/x", "TZ": "UTC", "SLURM_BITSTR_LEN": "0"}


def test_variables_of_launchers_and_other_jobs_are_unset():
    environ = {
        **dict.fromkeys(("SLURM_CONF", "DEPLOYKIT_HOME", "PATH", "NCCL_DEBUG", "SBATCH_ACCOUNT")),
        **dict.fromkeys(("SLURM_JOB_ID", "SLURMD_NODENAME", "SRUN_CPUS_PER_TASK", "RANK")),
        **dict.fromkeys(("SBATCH_PARTITION", "SBATCH_ARRAY_INX", "TORCHELASTIC_RUN_ID")),
        "DEPLOYKIT_NODE_RANK": "",
    }
    assert commands.unwanted(environ, "#SBATCH --partition=gpu\n") == [
        *("DEPLOYKIT_NODE_RANK", "RANK", "SBATCH_ARRAY_INX", "SBATCH_PARTITION", "SLURMD_NODENAME"),
        *("SLURM_JOB_ID", "SRUN_CPUS_PER_TASK", "TORCHELASTIC_RUN_ID"),
    ]


@pytest.mark.parametrize(
    ("reason", "warns"), [("PartitionNodeLimit", True), ("Priority", False), ("Licenses", False)]
)
def test_a_job_that_can_never_start_is_warned_of(
    fake_slurm, make_plan, send, caplog, reason, warns
):
    fake_slurm(squeue=f"echo '{reason}'")
    handle = send(make_plan("pass"))
    assert handle.id == "4242"
    assert (handle.status is not None and handle.status.state is State.BLOCKED) == warns
    texts = [record.getMessage() for record in caplog.records if "one-1 is" in record.getMessage()]
    expected = (
        "warning: one-1 is queued, but it requests more nodes than the partition allows, "
        "so it can never start; run `deploykit cancel one-1` to remove the job"
    )
    assert texts == ([expected] if warns else [])


def test_a_job_that_slurm_refused_is_not_the_run_although_slurm_lists_it(fake_slurm, tmp_path):
    """The controller keeps such a job as one that failed."""
    line = "7|FAILED|N/A|N/A|1|main|9|{}|one-1|{}/source"
    fake_slurm(squeue=f"echo '{line.format('BadConstraints', tmp_path)}'")
    assert sbatch.find("one-1", tmp_path, "localhost") is None
    fake_slurm(squeue=f"echo '{line.format('NonZeroExitCode', tmp_path)}'")
    assert sbatch.find("one-1", tmp_path, "localhost").id == "7"


FAILED = "sbatch: error: Batch job submission failed: "


@pytest.mark.parametrize(
    ("text", "complaint", "hint"),
    [
        (
            f"sbatch: error: invalid partition specified: x\n{FAILED}Invalid partition name",
            "invalid partition specified: x; Batch job submission failed: Invalid partition name",
            "slurm.partition",
        ),
        (f"{FAILED}Invalid account or account/partition combination", None, "slurm.account"),
        (f"{FAILED}Requested node configuration is not available", None, "request less per node"),
        (f"{FAILED}Requested time limit is invalid (missing or", None, "resources.time_limit"),
        ("sbatch: error: Memory specification can not be satisfied", None, "resources.memory"),
        (f"{FAILED}Invalid qos specification", None, "slurm.qos"),
        (
            "sbatch: unrecognized option '--nope'\nTry \"sbatch --help\" for more information",
            "unrecognized option '--nope'",
            "slurm.extra",
        ),
        ("sbatch: error: Invalid --mail-type specification", None, "slurm.mail_type"),
    ],
)
def test_a_refusal_names_the_key_to_change(text, complaint, hint):
    """Recorded from Slurm 22.05. The complaint is the text without sbatch's own words."""
    error = commands.error_for(text)
    assert isinstance(error, SubmitRefused)
    assert (complaint or text.removeprefix("sbatch: error: ")) in str(error)
    assert hint in error.hint


@pytest.mark.parametrize(
    ("text", "kind", "is_uncertain"),
    [
        ("Unable to contact slurm controller (connect failure)", BackendUnavailable, False),
        ("Socket timed out on send/recv operation", TryAgain, True),
        ("Slurm temporarily unable to accept job, sleeping and retrying", TryAgain, False),
    ],
)
def test_temporary_failures(text, kind, is_uncertain):
    assert type(commands.error_for(FAILED + text)) is kind
    assert commands.is_uncertain(FAILED + text) is is_uncertain
