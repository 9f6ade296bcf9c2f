"""What is known of a run beside its logs, as evidence for its diagnosis."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest

from deploykit.backends import local
from deploykit.backends.slurm import states
from deploykit.cli import main as cli
from deploykit.diagnose import cause_rules
from deploykit.job.model import State, Status
from deploykit.lib import paths
from deploykit.run import diagnosis, registry
from tests import ras_server

BY_STATE = {
    "TIMEOUT": "slurm_time_limit",
    "DEADLINE": "slurm_time_limit",
    "OUT_OF_MEMORY": "slurm_oom",
    "NODE_FAIL": "slurm_node_fail",
    "PREEMPTED": "slurm_preempted",
    "BOOT_FAIL": "slurm_node_boot_failure",
    "LAUNCH_FAILED": "slurm_node_fail",
    "RECONFIG_FAIL": "slurm_node_fail",
    "Stopped/MaxRuntimeExceeded": "slurm_time_limit",
    "Failed/Interrupted": "slurm_preempted",
}
REASONS = {"Failed/Interrupted": "interrupted: the spot instances were reclaimed"}
QUIET = "2026-11-21T02:00:00.000Z [rank 0] step 1 loss 0.7\n"
RAISED = """\
[rank{0}]: Traceback (most recent call last):
[rank{0}]:   File "/home/ada/job/train.py", line 9, in <module>
[rank{0}]: ValueError: shard {0} has 3 columns
"""


def test_a_misspelled_module_of_the_source_is_named(capsys, run):
    source = paths.run_folder("one") / "source"
    source.mkdir(parents=True)
    (source / "utils.py").touch()
    _, found = run(capsys, log="ModuleNotFoundError: No module named 'utlis'\n")
    assert found["causes"][0]["fix"].startswith("Did you mean utils? ")


def test_a_module_in_src_is_named_with_its_folder(capsys, run):
    package = paths.run_folder("one") / "source/src/nets"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    _, found = run(capsys, log="ModuleNotFoundError: No module named 'nets.unet'\n")
    first, *_ = found["causes"][0]["fix"].splitlines()
    assert first.startswith("Your source has nets.unet in src, where Python does not look: ")
    assert first.endswith(" --set env.PYTHONPATH=src")


def test_a_rank_that_lost_its_own_worker(capsys, run):
    frame = '  File "/usr/lib/python3.11/multiprocessing/connection.py", line 395, in _recv'
    texts = ["Traceback (most recent call last):", frame, "ConnectionResetError: [Errno 104] reset"]
    log = "".join(f"2026-11-21T02:00:00.000Z [rank 1] {text}\n" for text in texts)
    reason = "rank 1 exited with code 1"
    _, found = run(capsys, reason=reason, log=log, node_0=ended(1, reason))
    assert found["causes"][0]["cause"] == "remote_peer_died"


def test_each_proof_of_chained_exceptions_is_shown_once(capsys, run):
    begin, frame = "Traceback (most recent call last):", '  File "/job/a.py", line 4, in <module>'
    between = "The above exception was the direct cause of the following exception:"
    texts = [begin, frame, "    int(x)", "ValueError: invalid literal for int() with base 10: '1a'"]
    texts += ["", between, "", begin, frame, "    f(x)", "RuntimeError: no model", "dim: 12a"]
    log = "".join(f"2026-11-21T02:00:00.000Z [rank 0] {text}\n" for text in texts)
    _, found = run(capsys, log=log)
    assert [proof["line"] for proof in found["causes"][0]["evidence"]] == [4, 11]


def test_without_a_cause_the_last_lines_of_the_rank_that_failed_are_named(capsys, run):
    reason = "rank 1 exited with code 3"
    run(capsys, reason=reason, node_0=ended(3, reason))
    cli.main(["diagnose", "one"])
    assert "deploykit logs one -n 50 --rank 1\n" in capsys.readouterr().out


@pytest.fixture
def run(monkeypatch):
    """Makes a run with a state, a log and records, and gives the code and JSON of its diagnosis."""

    def diagnosed(capsys, state=State.FAILED, native="ended", reason="", log=QUIET, **records):
        folder = paths.run_folder("one")
        for name in ("logs", "exit_records"):
            (folder / name).mkdir(parents=True)
        (folder / "logs/node-0.log").write_text(log)
        for name, record in records.items():
            (folder / f"exit_records/{name.replace('_', '-')}.json").write_text(json.dumps(record))
        row = registry.Run("one", "job", "local", "here", str(folder), "a", "b", None, 1.0, "/out")
        registry.add(row)
        registry.confirm("one", "7")
        status = Status(state, native, reason)
        monkeypatch.setattr(local, "status", lambda handles: dict.fromkeys(handles, status))
        registry.update("one", status)
        code = cli.main(["diagnose", "one", "--json"])
        return code, json.loads(capsys.readouterr().out)

    return diagnosed


def ended(code, reason, rank=1, **more):
    finished = "2026-11-21T02:15:19.250+00:00"
    return {
        "exit_code": code,
        "reason": reason,
        "rank": rank,
        "finished": finished,
        "attempt": 0,
        **more,
    }


def test_every_state_in_which_slurm_failed_a_job_is_covered():
    failed = {name for name, state in states._STATES.items() if state is State.FAILED}
    assert failed - {"FAILED"} == {name for name in BY_STATE if name.isupper()}


@pytest.mark.parametrize("native", BY_STATE)
def test_the_state_alone_names_the_cause(native, run, capsys):
    code, found = run(capsys, native=native, reason=REASONS.get(native, ""))
    (cause, *_) = found["causes"]
    assert (code, cause["cause"]) == (79, BY_STATE[native])
    assert cause["evidence"][0]["file"] == "status of one"


@pytest.mark.parametrize(
    ("record", "label"),
    [
        (ended(139, "rank 1 was terminated by SIGSEGV (exit code 139)"), "segfault"),
        (ended(137, "rank 1 was terminated by SIGKILL (exit code 137)"), "host_oom"),
        (ended(137, "rank 1 disappeared, as if killed by SIGKILL"), "host_oom"),
        (ended(135, "rank 1 was terminated by SIGBUS (exit code 135)"), "shm_too_small"),
        (ended(127, "rank 1 exited with code 127"), "command_not_found"),
    ],
)
def test_how_a_rank_ended_is_evidence_where_the_log_is_silent(record, label, run, capsys):
    code, found = run(capsys, node_0=record)
    (cause, *_) = found["causes"]
    assert (code, cause["cause"], cause["first_rank"]) == (79, label, 1)
    assert cause["evidence"][0]["file"] == "exit records of one"


LOST = """\
[rank0]: RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:9381.
"""


@pytest.mark.parametrize(
    ("code", "log", "cause"),
    [
        (0, LOST, "collective_mismatch"),  # uneven data: rank 1 had fewer steps
        (0, QUIET, None),
        (143, LOST, None),
        (0, RAISED.format(0), "user_code_error"),
    ],
)
def test_a_rank_that_finished_earlier_is_why_another_lost_its_connection(
    code, log, cause, run, capsys
):
    record = ended(1, "rank 0 exited with code 1", 0, ranks={"0": 1, "1": code})
    _, found = run(capsys, log=log, node_0=record, node_1=ended(0, "fine", None, ranks=["0"]))
    assert [one["cause"] for one in found["causes"]] == ([cause] if cause else [])
    if cause == "collective_mismatch":
        (proof,) = found["causes"][0]["evidence"]
        assert proof["text"] == "rank 1 exited with code 0 while rank 0 still communicated"


def test_no_rank_of_a_run_that_succeeded_failed_first(run, capsys):
    log = "[rank 0] step 5 loss=nan\n"
    _, found = run(capsys, state=State.SUCCEEDED, log=log, node_0=ended(0, "fine", None))
    (cause,) = found["causes"]
    assert (cause["cause"], cause["first_rank"]) == ("nan_loss", None)


def test_a_rank_that_was_stopped_first_did_not_run_out_of_memory(run, capsys):
    reason = "rank 1 was terminated by SIGKILL (exit code 137) after a signal to stop"
    _, found = run(capsys, log=f"[node 0] {reason}\n", node_0=ended(137, reason))
    assert "host_oom" not in {cause["cause"] for cause in found["causes"]}


def test_ranks_that_were_ended_because_they_stalled_did_not_run_out_of_memory(run, capsys):
    reason = "rank 0 was terminated by SIGKILL (exit code 137)"
    log = f"[node 0] on_stall: restart: sending SIGKILL to the ranks\n[node 0] {reason}\n"
    _, found = run(capsys, log=log, node_0=ended(137, reason, 0))
    assert [cause["cause"] for cause in found["causes"]] == ["hang"]


def test_a_node_that_failed_its_check_is_named(run, capsys):
    why = "node 1 (lynx-2) computes wrong matrix products: faulty GPU, CPU or memory"
    unhealthy = {"attempt": 0, "failed_check": True, "hosts": {"lynx-2": why}}
    record = ended(78, "preflight stopped the job", None)
    _, found = run(capsys, node_0=record, unhealthy_0=unhealthy)
    (cause,) = found["causes"]
    assert (cause["cause"], cause["evidence"][0]["file"]) == ("gpu_hardware", "preflight of one")
    assert why in cause["evidence"][0]["text"]


def test_a_node_that_only_disappeared_failed_no_check(run, capsys):
    unhealthy = {
        "attempt": 0,
        "failed_check": False,
        "hosts": {"lynx-2": "its launcher disappeared"},
    }
    code, found = run(capsys, node_0=ended(3, "rank 1 exited with code 3"), unhealthy_0=unhealthy)
    assert (code, found["causes"], found["ending"]) == (82, [], "unknown")


def test_of_ranks_that_raised_the_one_that_ended_first_is_named(run, capsys):
    log = RAISED.format(0) + RAISED.format(2)
    _, found = run(capsys, log=log, node_0=ended(1, "rank 2 exited with code 1", 2))
    assert found["causes"][0]["first_rank"] == 2


@pytest.mark.parametrize(
    ("attempt", "told", "label"),
    [
        (3, "", "user_code_error"),
        (3, " after a signal to stop", "slurm_preempted"),
        (0, "", "slurm_preempted"),
    ],
)
def test_preemptions_of_earlier_attempts_are_not_the_cause(attempt, told, label, run, capsys):
    preempted = "slurmstepd-n1: error: *** JOB 7 ON n1 CANCELLED AT T DUE TO PREEMPTION ***\n"
    record = ended(1, f"rank 2 exited with code 1{told}", 2) | {"attempt": attempt}
    _, found = run(capsys, log=2 * preempted + RAISED.format(2), node_0=record)
    assert found["causes"][0]["cause"] == label


def test_a_run_that_succeeded_overcame_what_its_log_tells(run, capsys):
    code, found = run(capsys, State.SUCCEEDED, log=RAISED.format(0))
    assert (code, found["causes"], found["ending"]) == (0, [], "healthy")


def test_a_nan_counts_although_the_program_ended_well(run, capsys):
    code, found = run(capsys, State.SUCCEEDED, log="step 1 loss nan\nstep 2 loss nan\n")
    assert (code, found["causes"][0]["cause"]) == (79, "nan_loss")


def test_every_cause_that_success_does_not_refute_exists():
    known = {rule.label for rule in cause_rules.load().causes}
    assert known >= diagnosis._DESPITE_SUCCESS | diagnosis._FROM_OUTSIDE


def test_a_run_that_has_not_ended_is_not_called_healthy(live, capsys):
    live.log("step 1")
    assert cli.main(["diagnose", "live-run"]) == 84
    said = capsys.readouterr().out
    assert said.startswith("unfinished: the run has not ended, and its logs show no failure so far")
    assert "deploykit dump live-run" in said
    assert cli.main(["diagnose", "live-run", "--json"]) == 84
    assert json.loads(capsys.readouterr().out)["ending"] == "unfinished"


def test_a_run_that_makes_no_progress_hangs(live, capsys):
    """What its launchers recorded, and not the log, tells that it hangs."""
    live.log("step 1")
    (live.folder / "exit_records").mkdir()
    since = (datetime.now(UTC) - timedelta(minutes=7)).isoformat()
    stall = {"time": since, "seconds": 300, "longest": 1, "dump": "", "nodes": 1, "attempt": 0}
    stall |= {"waiting": 0, "address": "", "refused": False, "stopped": False}
    (live.folder / "exit_records/stall-0.json").write_text(json.dumps(stall))
    assert cli.main(["diagnose", "live-run", "--json"]) == 79
    first, *_ = json.loads(capsys.readouterr().out)["causes"]
    assert first["cause"] == "hang"
    assert first["evidence"][0]["text"] == "no progress for 10 min"
    assert "deploykit dump live-run" in first["fix"]


STALL = {"seconds": 300, "longest": 1, "dump": "one-stall", "nodes": 1, "attempt": 0, "waiting": 0}
STALL |= {"address": "", "refused": False, "time": "2026-11-29T08:00:00Z", "stopped": True}
TIMED_OUT = "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT T DUE TO TIME LIMIT ***\n"


def test_a_run_that_made_no_progress_needs_no_longer_time_limit(run, capsys):
    record = ended(
        143, "rank 0 was terminated by SIGTERM (exit code 143) after a signal to stop", 0
    )
    code, found = run(capsys, log=TIMED_OUT, node_0=record, stall_0=STALL)
    (first,) = found["causes"]
    assert (code, first["cause"]) == (79, "hang")
    assert first["evidence"][0]["text"] == "no progress for 5 min before it was stopped"


@pytest.mark.parametrize(
    ("code", "change"),
    [(75, {}), (143, {"stopped": False}), (143, {"nodes": 2})],
    ids=["it saved", "it was not stopped", "another node made progress"],
)
def test_a_run_that_made_progress_keeps_its_cause(code, change, run, capsys):
    record = ended(code, f"rank 0 exited with code {code} after a signal to stop", 0)
    _, found = run(capsys, log=TIMED_OUT, node_0=record, stall_0=STALL | change)
    assert found["causes"][0]["cause"] == "slurm_time_limit"


def test_what_nccl_reported_stands_beside_the_ranks(run, capsys):
    kept = paths.run_folder("one") / "stacks/one-stall"
    kept.mkdir(parents=True)
    (kept / "n1.ras").write_text(ras_server.REPORTS["counts"])
    record = ended(143, "rank 0 was terminated by SIGTERM after a signal to stop", 0)
    _, found = run(capsys, log=TIMED_OUT, node_0=record, stall_0=STALL)
    texts = [proof["text"] for proof in found["causes"][0]["evidence"]]
    told = "communicator #0-0 (aa11bb22cc33dd44) of 4 ranks: AllReduce: 3 ranks at 120; rank 2 at"
    assert f"NCCL before it was stopped: {told} 119" in texts


def test_a_node_whose_launcher_was_killed_is_named_and_not_the_one_that_reports_it(run, capsys):
    """Exit code 137 of the other launcher is what it saw, and no lack of memory there."""
    reason = "the launcher of node 1 (n2) disappeared, as if killed by SIGKILL"
    log = (
        "srun: error: n2: task 1: Killed\n"
        f"2026-11-28T19:25:10.265Z [node 0] {reason}\n"
        "srun: error: n1: task 0: Exited with exit code 137\n"
    )
    code, found = run(capsys, reason=reason, log=log, node_0=ended(137, reason, None))
    (cause,) = found["causes"]
    assert (code, cause["cause"]) == (79, "killed_by_signal")
    assert {proof["text"] for proof in cause["evidence"]} == {reason}
    assert "deploykit logs one --node 1\nOn n2, check whether it ran out of memory" in cause["fix"]
