"""Jobs on a real cluster, from submit to their end, with the real launcher on every node."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from deploykit.backends import slurm
from deploykit.backends.slurm import Options, commands, sbatch
from deploykit.cli import main as cli
from deploykit.job.model import Handle, State
from deploykit.lib.errors import BackendUnavailable, SubmitRefused
from tests.backends.slurm.slurm_helpers import cluster_command, ended, folder_of, output, wait_for
from tests.intruder import attack, stores

ROOT = Path(__file__).parents[3]
pytestmark = [pytest.mark.slurm, pytest.mark.torch, pytest.mark.xdist_group("slurm")]

REPORT = """
import json, os, sys
path = os.environ["DEPLOYKIT_OUTPUT_DIR"] + "/" + os.environ["RANK"]
with open(path, "w") as file:
    json.dump([sys.argv[1:], dict(os.environ)], file)
print("here", flush=True)
"""
SLOW = "import time; print('up', flush=True); time.sleep(300)"
WAITS = """
import os, time
print('up', flush=True)
while not os.path.exists('go'):
    time.sleep(0.1)
"""
HOSTILE = ("", "a b", "it's", "$(id)", "`id`", "a\r\nb", "#SBATCH --hold", "\\", "é☃", "%j", ":")


def state_of(handle):
    return slurm.status([handle])[handle]


def stored(handle):
    """The batch script that the controller stores."""
    return subprocess.run(
        ["scontrol", "write", "batch_script", handle.id, "-"], check=True, capture_output=True
    ).stdout


def test_the_network_is_tested_before_the_trainer(cluster, make_plan, send, tmp_path):
    env = {"DEPLOYKIT_PREFLIGHT": "200"}
    handle = send(make_plan("print('trained')", nodes=3, env=env))
    status = ended(handle)
    logs = folder_of("one-1", tmp_path) / "logs"
    text = (logs / "node-0.log").read_text()
    assert (status.state, status.exit_code) == (State.SUCCEEDED, 0), text
    assert "preflight: passed, 3 nodes in " in text
    assert "preflight: bus bandwidth: " in text  # of all pairs, though one node is always left out
    assert "preflight: FAILED" not in text


def test_two_nodes_by_two_ranks(cluster, make_plan, send, tmp_path):
    prolog = tmp_path / "prolog.sh"
    prolog.write_text("#!/bin/sh\necho export FROM_PROLOG=yes\n")
    prolog.chmod(0o755)
    plan = make_plan(
        REPORT,
        launcher="torchrun",
        args=HOSTILE,
        env={"OMP_NUM_THREADS": "1", "ODD": "a\nb '$(id)'"},
        nodes=2,
        processes_per_node=2,
        cpus_per_node=2,
        gpus_per_node=2,
        memory=512 * 1024**2,
        options=Options(
            extra={"comment": "it's #1: a\\b $(id)"},
            partition="main",
            srun=(f"--task-prolog={prolog}",),
        ),
    )
    handle = send(plan)
    assert stored(handle) == plan.text.encode()
    # with --json, squeue lists every job, whatever --jobs says
    jobs = json.loads(output("squeue", "--json"))["jobs"]
    job = next(job for job in jobs if str(job["job_id"]) == handle.id)
    assert job["comment"] == "it's #1: a\\b $(id)"
    assert (job["name"], job["partition"], job["requeue"]) == ("one-1", "main", True)
    assert (job["time_limit"], job["node_count"], job["memory_per_node"]) == (10, 2, 512)
    status = ended(handle)
    folder = folder_of("one-1", tmp_path)
    logs = {path.name: path.read_text() for path in (folder / "logs").iterdir()}
    assert (status.state, status.exit_code) == (State.SUCCEEDED, 0), logs
    assert status.started <= status.finished
    for rank in range(4):
        arguments, environ = json.loads((folder / "output" / str(rank)).read_text())
        assert arguments == list(HOSTILE)
        assert environ["WORLD_SIZE"] == "4"
        assert environ["ODD"] == "a\nb '$(id)'"
        assert environ["CUDA_VISIBLE_DEVICES"] == "0,1"
        assert environ["DEPLOYKIT_RUN"] == "one-1"
        assert environ["FROM_PROLOG"] == "yes"
    ranks = [line.rank for line in slurm.logs(handle, follow=False) if line.text == "here"]
    assert sorted(ranks) == [0, 1, 2, 3]


@pytest.mark.parametrize(("nodes", "launcher"), [(1, "python"), (2, "torchrun")])
def test_the_exit_code_of_the_trainer(cluster, make_plan, send, nodes, launcher):
    code = "7 if os.environ.get('RANK', '0') == '0' else 0"
    program = f"import os, sys, time; time.sleep(1); sys.exit({code})"
    status = ended(send(make_plan(program, nodes=nodes, launcher=launcher)))
    assert (status.state, status.native, status.exit_code) == (State.FAILED, "FAILED", 7)
    assert "7" in status.reason


def test_states_from_queued_to_cancelled(cluster, make_plan, send, tmp_path):
    handle = send(make_plan(SLOW, options=Options(extra={"begin": "now+1hour"})))
    assert state_of(handle).state is State.QUEUED
    assert "start time" in wait_for(lambda: state_of(handle).reason)
    output("scontrol", "update", f"JobId={handle.id}", "StartTime=now")
    log = folder_of("one-1", tmp_path) / "logs/node-0.log"
    wait_for(lambda: log.exists() and "up" in log.read_text())
    status = state_of(handle)
    assert (status.state, status.native) == (State.RUNNING, "RUNNING")
    assert status.started is not None
    slurm.cancel(handle)
    assert ended(handle).state is State.CANCELLED
    slurm.cancel(handle)


@pytest.mark.nightly
def test_a_job_that_was_suspended_and_resumed_goes_on(cluster, make_plan, send, tmp_path):
    """As gang scheduling does it. The launcher looks at its ranks every 0.25 s."""
    handle = send(
        make_plan(WAITS, launcher="torchrun", nodes=2, env={"DEPLOYKIT_STALL_SECONDS": "15"})
    )
    folder = folder_of("one-1", tmp_path)
    logs = [folder / "logs" / f"node-{node}.log" for node in (0, 1)]
    wait_for(lambda: all(log.exists() and "up" in log.read_text() for log in logs))
    for _ in range(2):
        output("scontrol", "suspend", handle.id)
        wait_for(lambda: state_of(handle).native == "SUSPENDED")
        time.sleep(3)  # Slurm stops the processes 2 s after it has warned them
        output("scontrol", "resume", handle.id)
        wait_for(lambda: state_of(handle).native == "RUNNING")
    for source in folder.rglob("source"):
        (source / "go").touch()
    status = ended(handle)
    text = "".join(log.read_text() for log in logs)
    assert (status.state, status.exit_code) == (State.SUCCEEDED, 0), text
    assert "received" not in text


def test_cancel_a_pending_job_and_none_of_another_name(cluster, make_plan, send):
    handle = send(make_plan(SLOW, options=Options(extra={"hold": ""})))
    assert "held" in wait_for(lambda: state_of(handle).reason)
    slurm.cancel(Handle("slurm", "localhost", handle.id, "another", handle.folder))
    assert not state_of(handle).state.final
    slurm.cancel(handle)
    assert ended(handle).state is State.CANCELLED


def test_a_log_is_followed_until_the_job_ends(cluster, make_plan, send):
    program = "import time\nfor n in range(20): print('line', n, flush=True); time.sleep(0.1)"
    handle = send(make_plan(program))
    lines = [line.text for line in slurm.logs(handle, follow=True) if line.rank == 0]
    assert lines == [f"line {n}" for n in range(20)]


def test_no_line_is_lost_or_repeated_across_a_requeue(cluster, tmp_path, monkeypatch):
    """The benchmark of logs, 8 ranks on 2 nodes, with a fifth of its lines."""
    spec = importlib.util.spec_from_file_location("figures", ROOT / "benchmarks/slurm.py")
    figures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(figures)
    monkeypatch.setattr(figures, "LINES", 10_000)
    monkeypatch.chdir(tmp_path)
    result = figures.logs(tmp_path)
    assert (result["lines"], result["exit_code"]) == (8 * 10_000, 0)
    assert result["ranks_with_every_line_once_in_order"] == 8


def test_a_run_is_found_and_a_repeated_submit_trains_once(cluster, make_plan, send, tmp_path):
    count = f"open({str(tmp_path / 'starts')!r}, 'a').write('x')"
    plan = make_plan(count, options=Options(extra={"hold": ""}))
    folder = folder_of(plan.run, tmp_path)
    assert slurm.find(plan.run, folder, plan.target) is None
    handles = [send(plan)]
    assert slurm.find(plan.run, folder, plan.target) == handles[0]
    handles.append(send(plan))
    output("scontrol", "release", *(handle.id for handle in handles))
    assert {ended(handle).state for handle in handles} == {State.SUCCEEDED}
    assert (tmp_path / "starts").read_text() == "x"
    first = slurm.find(plan.run, folder, plan.target)
    assert first.id == str((folder / "claim").readlink())
    log = (folder / "logs/slurm.log").read_text()
    assert f"job {first.id} has already started this run" in log


def test_the_status_of_many_runs(cluster, make_plan, send):
    held = Options(extra={"hold": ""})
    handles = [send(make_plan(REPORT, run=f"many-{n}", options=held)) for n in range(5)]
    slurm.cancel(handles[0])
    ended(handles[0])
    states = [status.state.value for status in slurm.status(handles).values()]
    assert states == ["cancelled", *["queued"] * 4]


@pytest.mark.parametrize(
    ("wanted", "hint"),
    [
        ({"options": Options(partition="nope")}, "slurm.partition"),
        ({"options": Options(nodelist="n9")}, "slurm.nodelist"),
        ({"options": Options(constraint="a100")}, "slurm.constraint"),
        ({"options": Options(reservation="tuesday")}, "slurm.reservation"),
        ({"gpus_per_node": 9}, "per node"),
        ({"gpus_per_node": 9, "options": Options(gres_style="gres")}, "per node"),
        ({"memory": 1024**4}, "resources.memory"),
        ({"options": Options(mail_type="NOPE")}, "slurm.mail_type"),
        ({"options": Options(extra={"no-such-option": ""})}, "slurm.extra"),
    ],
)
@pytest.mark.usefixtures("cluster")
def test_refusals(make_plan, send, capfd, wanted, hint):
    with pytest.raises(SubmitRefused, match="Slurm refused the job: ") as caught:
        send(make_plan(REPORT, **wanted))
    assert hint in caught.value.hint
    assert capfd.readouterr() == ("", "")
    assert output("squeue", "--noheader") == ""


def test_a_controller_that_is_down(box, make_plan, send, monkeypatch):
    assert cluster_command("start", box, "--nodes", "1").returncode == 0
    assert cluster_command("stop", box).returncode == 0
    conf = box / "slurm.conf"
    conf.write_text(conf.read_text().replace("MessageTimeout=10", "MessageTimeout=2"))
    monkeypatch.setenv("SLURM_CONF", str(conf))
    with pytest.raises(BackendUnavailable, match="Unable to contact slurm controller"):
        send(make_plan(REPORT))
    handle = Handle("slurm", "localhost", "1", "one-1", str(box))
    assert state_of(handle).state is State.UNKNOWN


def test_a_job_is_found_that_a_frozen_controller_queued(cluster, make_plan, send, monkeypatch):
    plan = make_plan("print('up')")
    controller = int((cluster / "run/slurmctld.pid").read_text())
    monkeypatch.setattr(commands, "setting", lambda *_: "box")  # as if queried before the freeze
    pauses = []

    def thaw(seconds):
        os.kill(controller, signal.SIGCONT)
        pauses.append(seconds)
        time.sleep(seconds)

    monkeypatch.setattr(sbatch, "time", SimpleNamespace(sleep=thaw))
    os.kill(controller, signal.SIGSTOP)
    try:
        handle = send(plan)
    finally:
        os.kill(controller, signal.SIGCONT)
    assert pauses, "sbatch did not time out"
    assert stored(handle) == plan.text.encode()
    assert ended(handle).state is State.SUCCEEDED


@pytest.mark.slow
def test_a_frozen_controller_hides_no_run(cluster, project, capsys):
    """`squeue` waits for 10 s (MessageTimeout); `list` shows what is known after 5 s."""
    (project / "train.py").write_text("import time; time.sleep(900)")
    plain = ["--set", "entrypoint.launcher=python"]
    assert cli.main(["submit", "--backend", "slurm", "--run", "one", *plain]) == 0
    capsys.readouterr()

    def running():
        assert cli.main(["list", "--json"]) == 0
        return json.loads(capsys.readouterr().out)[0]["state"] == "running"

    wait_for(running)
    controller = int((cluster / "run/slurmctld.pid").read_text())
    os.kill(controller, signal.SIGSTOP)
    try:
        assert cli.main(["list"]) == 0
    finally:
        os.kill(controller, signal.SIGCONT)
    (row,) = capsys.readouterr().out.splitlines()
    assert row.startswith("one\tslurm\trunning\t")
    assert row.endswith("\tlast known; slurm did not answer within 5 s")
    wait_for(running)
    assert cli.main(["cancel", "one"]) == 0


def test_a_submit_from_a_rank_of_another_job(cluster, make_plan, send, tmp_path, monkeypatch):
    inherited = "RANK=3 WORLD_SIZE=9 DEPLOYKIT_NODE_RANK=5 DEPLOYKIT_NODES=7 SLURM_JOB_ID=1 "
    inherited += "SLURM_NODEID=4 SLURM_MEM_PER_CPU=5 SBATCH_TIMELIMIT=1 SBATCH_ARRAY_INX=0-3 "
    inherited += "SQUEUE_STATES=CG SBATCH_EXPORT=NONE"
    for variable in inherited.split():
        monkeypatch.setenv(*variable.split("="))
    handle = send(make_plan(REPORT, launcher="torchrun", memory=512 * 1024**2))
    assert ended(handle).state is State.SUCCEEDED
    _, environ = json.loads((folder_of("one-1", tmp_path) / "output/0").read_text())
    assert environ["WORLD_SIZE"] == "1"


def test_sampled_states_agree_with_the_controllers_throughout_a_requeue(cluster, make_plan, send):
    """A sample counts if the controller reports the same state before and after it."""
    program = (
        "import os, time; time.sleep(0 if os.environ['DEPLOYKIT_RESTART_COUNT'] > '0' else 900)"
    )
    handle = send(make_plan(program))
    show = ["scontrol", "--oneliner", "show", "job", handle.id]

    def sample():
        before, status, after = output(*show), state_of(handle), output(*show)
        natives = {re.search(r"JobState=(\S+)", text)[1] for text in (before, after)}
        if len(natives) > 1:
            return None
        assert natives == {status.native}
        return status.native

    wait_for(lambda: sample() == "RUNNING")
    output("scontrol", "requeue", handle.id)
    wait_for(lambda: sample() == "PENDING")
    wait_for(lambda: sample() == "COMPLETED")


def test_gpus_by_gres_with_setup_and_export_none(cluster, make_plan, send, tmp_path):
    """Setup runs first and is not read as a directive; the export does not affect the steps."""
    marker = tmp_path / "set up"
    setup = ("#SBATCH --hold", f"echo \"$SLURM_JOB_ID\" > '{marker}'")
    options = Options(gres_style="gres", setup=setup, extra={"export": "NONE"})
    handle = send(make_plan(REPORT, launcher="torchrun", gpus_per_node=2, options=options))
    assert ended(handle).state is State.SUCCEEDED
    ranks = sorted(path.name for path in (folder_of("one-1", tmp_path) / "output").iterdir())
    assert ranks == ["0", "1"]
    assert marker.read_text() == f"{handle.id}\n"


def test_the_source_is_the_bundle(cluster, make_plan, send, tmp_path):
    """A change of the source after the submit has no effect."""
    plan = make_plan("print('as submitted', flush=True)", options=Options(extra={"hold": ""}))
    handle = send(plan)
    Path(plan.bundle.source, "train.py").write_text("raise SystemExit(9)")
    output("scontrol", "release", handle.id)
    assert ended(handle).state is State.SUCCEEDED
    assert "as submitted" in [line.text for line in slurm.logs(handle, follow=False)]


RESTARTED = """
import os, time
from pathlib import Path
import torch, torch.distributed as dist
dist.init_process_group("gloo")
one = torch.ones(1)
dist.all_reduce(one)
print("met", int(one.item()), os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
go_on = Path(os.environ["DEPLOYKIT_RUN_DIR"], "go on")
while not go_on.exists():
    time.sleep(0.1)
if os.environ["RANK"] == "1" and os.environ["DEPLOYKIT_RESTART_COUNT"] == "0":
    os._exit(9)
dist.all_reduce(one)
os._exit(0)
"""


def test_another_user_cannot_run_code_through_the_store(cluster, make_plan, send, tmp_path):
    """The ranks then restart, which reads everything that was written to the store."""
    marker, folder = tmp_path / "it ran", folder_of("one-1", tmp_path)
    handle = send(make_plan(RESTARTED, launcher="torchrun", nodes=2, retries=1))
    logs = [folder / "logs" / f"node-{node}.log" for node in range(2)]
    wait_for(lambda: all(log.exists() and " met 2 0" in log.read_text() for log in logs))
    report = attack(marker, stores(folder))
    assert report.count("wrote to") == 2, report
    if os.getuid() == 0:
        assert "as 65534" in report
    (folder / "go on").touch()
    ended(handle)
    assert not marker.exists()
