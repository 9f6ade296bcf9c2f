"""A node's launcher with a real torchrun below it: exit codes, signals, cleanup."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from deploykit_node import signals, supervisor
from tests.backends.slurm.slurm_helpers import wait_for
from tests.node.conftest import HOSTILE

pytestmark = pytest.mark.torch

DUMP = """\
    import json, os, sys
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
             "DEPLOYKIT_RESTART_COUNT", "DEPLOYKIT_SECRETS", "TOKEN", "GLOO_SOCKET_IFNAME",
             "NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS", "CHOSEN")
    print(json.dumps([sys.argv[1:], {name: os.environ.get(name) for name in names}]))
"""

SLEEPER = """\
    import os, signal, sys, time
    def finish(number, frame):
        print("handler", signal.Signals(number).name)
        if number == signal.SIGTERM:
            time.sleep(0.3)
            print("saved")
            sys.exit(0)
    for number in sys.argv[1:]:
        signal.signal(getattr(signal, number), finish)
    print("pid", os.getpid())
    while True:
        time.sleep(0.1)
"""


def torchrun(nodes=1, processes=2, restarts=0):
    counts = [f"--nnodes={nodes}", f"--nproc-per-node={processes}", f"--max-restarts={restarts}"]
    return ["torchrun", *counts, "--"]


def pids(done_or_started, count):
    lines = [line for line in done_or_started.log.splitlines() if " pid " in line]
    assert len(lines) == count
    return [int(line.split()[-1]) for line in lines]


def gone(pid):
    return wait_for(lambda: not Path(f"/proc/{pid}").exists())


def test_arguments_and_environment_arrive_unchanged_on_both_ranks(bundle, tmp_path):
    bundle.write("dump.py", DUMP)
    done = bundle.run(
        *torchrun(),
        "dump.py",
        *HOSTILE,
        CHOSEN="a\nb 'c' $d",
        ELSEWHERE="s3cret",
        DEPLOYKIT_SECRETS=json.dumps({"TOKEN": "secret:env:ELSEWHERE"}),
        DEPLOYKIT_OUTPUT_DIR=tmp_path / "new" / "output",
        DEPLOYKIT_CHECKPOINT_DIR="s3://bucket/checkpoints",
    )
    assert done.code == 0, done.log
    for rank in (0, 1):
        (line,) = done.said[f"rank {rank}"]
        argv, env = json.loads(line)
        assert argv == HOSTILE
        assert env.pop("MASTER_PORT").isdecimal()
        assert env == {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "DEPLOYKIT_RESTART_COUNT": "0",
            "DEPLOYKIT_SECRETS": None,
            "TOKEN": "s3cret",
            "GLOO_SOCKET_IFNAME": "lo",
            "NCCL_SOCKET_IFNAME": "=lo",
            "OMP_NUM_THREADS": "1",
            "CHOSEN": "a\nb 'c' $d",
        }
    assert (tmp_path / "new" / "output").is_dir()
    assert not (bundle.source / "s3:").exists()
    end = bundle.end("node-0")
    assert (end["exit_code"], end["rank"], end["attempt"]) == (0, None, 0)
    assert list(Path(tmp_path).glob("**/rank-*.pid")) == []


def test_two_emulated_nodes_form_one_world_over_gloo(bundle):
    package = bundle.source / "pack"
    package.mkdir()
    bundle.write(
        "pack/sums.py",
        """\
        import os, sys
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        one = torch.ones(1) * (dist.get_rank() + 1)
        dist.all_reduce(one)
        print("sum", one.item(), sys.argv[1:], os.environ["GLOO_SOCKET_IFNAME"], flush=True)
        dist.destroy_process_group()
        os._exit(0)
        """,
    )
    words = [*torchrun(nodes=2, processes=1), "-m", "pack.sums", "-m", "x"]
    # a port file from an attempt that has died must not be believed
    (bundle.run_dir / "rendezvous.json").write_text('{"port": 9, "pid": 99999999}')
    second = bundle.start(*words, node=1, DEPLOYKIT_NODE_RANK=1, DEPLOYKIT_NODES=2)
    time.sleep(0.3)
    first = bundle.start(*words, node=0, DEPLOYKIT_NODE_RANK=0, DEPLOYKIT_NODES=2)
    ends = [first.finish(), second.finish()]
    assert [end.code for end in ends] == [0, 0], ends
    said = {**ends[0].said, **ends[1].said}
    for rank in ("rank 0", "rank 1"):
        assert said[rank] == ["sum 3.0 ['-m', 'x'] lo"]
    assert said["node 0"][0].startswith("interfaces: ")
    assert "GLOO_SOCKET_IFNAME=lo" in said["node 0"][1]
    assert "node 1 of 2 (emulated): rendezvous at 127.0.0.1 port" in said["node 1"][2]
    assert bundle.end("node-1")["exit_code"] == 0


def test_the_code_of_the_rank_that_failed_first_is_reported(bundle):
    bundle.write(
        "fail.py",
        """\
        import os, sys, time
        if os.environ["RANK"] == "1":
            sys.exit(7)
        time.sleep(900)
        """,
    )
    done = bundle.run(*torchrun(), "fail.py")
    assert done.code == 7
    end = bundle.end("node-0")
    assert (end["exit_code"], end["rank"]) == (7, 1)
    assert end["reason"] == "rank 1 exited with code 7"
    assert end["ranks"] == {"0": 143, "1": 7}
    assert bundle.end("failed-0.0")["rank"] == 1
    assert bundle.end("failed-0.0-stopped")["rank"] == 0


def test_a_trainer_killed_by_sigkill_is_137(bundle):
    bundle.write("sleeper.py", SLEEPER)
    started = bundle.start(*torchrun(), "sleeper.py")
    started.wait_for(" pid ", 2)
    victim, other = pids(started, 2)
    os.kill(victim, signal.SIGKILL)
    done = started.finish()
    assert done.code == 137
    assert "was terminated by SIGKILL (exit code 137)" in bundle.end("node-0")["reason"]
    assert "Signal 9 (SIGKILL)" in done.log  # torchrun saw the same end
    assert gone(other)


def test_sigterm_lets_trainers_finish_with_0(bundle):
    bundle.write("sleeper.py", SLEEPER)
    started = bundle.start(*torchrun(), "sleeper.py", "SIGTERM")
    started.wait_for(" pid ", 2)
    started.process.terminate()
    done = started.finish()
    assert done.code == 0, done.log
    for rank in ("rank 0", "rank 1"):
        assert done.said[rank][1:] == ["handler SIGTERM", "saved"]
    assert done.said["node 0"] == ["SIGTERM received and forwarded to 2 ranks"]


def test_a_launcher_that_was_stopped_and_continued_goes_on(bundle):
    """As when a laptop sleeps; Slurm suspends jobs in this way."""
    bundle.write("sleeper.py", SLEEPER)
    env = {"DEPLOYKIT_STALL_SECONDS": "15"}  # it looks four times a second
    started = bundle.start(*torchrun(), "sleeper.py", "SIGTERM", **env)
    started.wait_for(" pid ", 2)
    for _ in range(3):
        started.process.send_signal(signal.SIGSTOP)
        time.sleep(0.6)
        started.process.send_signal(signal.SIGCONT)
    started.process.terminate()
    done = started.finish()
    assert done.code == 0, done.log
    assert done.said["node 0"] == ["SIGTERM received and forwarded to 2 ranks"]


def test_a_signal_before_any_rank_has_started_is_the_reason(bundle, tmp_path):
    """Slurm may preempt a job, or someone may cancel it, while torchrun is still loading."""
    hold = "import sys, time\nif '--torchrun' in sys.argv: print('held'), time.sleep(900)\n"
    (tmp_path / "sitecustomize.py").write_text(hold)
    bundle.write("sleeper.py", SLEEPER)
    env = {"PYTHONPATH": tmp_path, "PYTHONUNBUFFERED": 1}
    started = bundle.start(*torchrun(), "sleeper.py", **env)
    started.wait_for("held")
    started.process.terminate()
    assert started.finish().code == 143
    assert bundle.end("node-0")["reason"] == "SIGTERM arrived before any rank had started"


def test_sigterm_ends_trainers_without_a_handler(bundle):
    bundle.write("sleeper.py", SLEEPER)
    # the grace is longer than `finish` waits
    started = bundle.start(*torchrun(restarts=3), "sleeper.py", DEPLOYKIT_GRACE="900")
    started.wait_for(" pid ", 2)
    started.process.terminate()
    done = started.finish()
    assert done.code == 143
    assert "SIGTERM" in bundle.end("node-0")["reason"]
    assert "after a signal to stop" in bundle.end("node-0")["reason"]


def test_a_node_that_has_finished_does_not_wait_for_one_that_failed(bundle):
    """Slurm asks it to stop; torchrun would wait for the other node, until Slurm kills it."""
    bundle.write("half.py", "import os, sys\nsys.exit(7 * int(os.environ['RANK']))\n")
    words = [*torchrun(nodes=2, processes=1), "half.py"]
    # the grace is longer than `finish` waits
    given = {"DEPLOYKIT_NODES": 2, "DEPLOYKIT_GRACE": 900}
    first, second = (
        bundle.start(*words, node=node, DEPLOYKIT_NODE_RANK=node, **given) for node in (0, 1)
    )
    assert second.finish().code == 7
    assert first.process.poll() is None
    first.process.terminate()
    done = first.finish()
    assert done.code == 0, done.log
    assert bundle.end("node-0")["reason"] == "every rank exited with code 0"


def test_ranks_that_torchrun_restarts_after_the_signal_are_stopped_too(tmp_path, monkeypatch):
    """A rank that starts drops the record of the one before it, perhaps before it was read."""
    monkeypatch.setattr(supervisor, "TICK", 0.0)
    options = supervisor.Options(900, lambda _: None, lambda *_: None)
    with contextlib.ExitStack() as stack:
        sleep = ["sleep", "600"]
        processes = [stack.enter_context(subprocess.Popen(sleep)) for _ in range(3)]
        for process in processes:
            stack.callback(process.kill)
        agent, *rounds = processes
        watched = supervisor._Supervisor(agent, {}, tmp_path, options)
        act = (lambda: watched.handle(signals.Received(signal.SIGTERM, 0)), watched.tick)
        for rank, stop in zip(rounds, act, strict=True):
            (tmp_path / "rank-0.pid").write_text(json.dumps({"pid": rank.pid}))
            stop()
            assert rank.wait(250) == -signal.SIGTERM


def test_the_grace_of_the_ranks_is_not_followed_by_another(tmp_path, monkeypatch):
    """A script that ignores SIGTERM is killed when its time is over, and torchrun with it."""
    monkeypatch.setattr(supervisor, "TICK", 0.0)
    said = []
    options = supervisor.Options(0, said.append, lambda *_: None)
    deaf = ["bash", "-c", "trap '' TERM HUP; echo; exec sleep 600"]
    with contextlib.ExitStack() as stack:
        agent, rank = (
            stack.enter_context(
                subprocess.Popen(deaf, start_new_session=True, stdout=subprocess.PIPE)
            )
            for _ in range(2)
        )
        for process in (agent, rank):
            stack.callback(process.kill)
            process.stdout.readline()
        (tmp_path / "rank-0.pid").write_text(json.dumps({"pid": rank.pid}))
        watched = supervisor._Supervisor(agent, {}, tmp_path, options)
        watched.handle(signals.Received(signal.SIGTERM, 0))
        watched.tick()
        assert said[-1] == "the ranks did not exit in time: sending SIGKILL"
        assert {agent.wait(250), rank.wait(250)} == {-signal.SIGKILL}


def test_ranks_that_outlast_the_grace_are_killed(bundle):
    bundle.write(
        "deaf.py",
        """\
        import os, signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        print("pid", os.getpid())
        while True:
            time.sleep(0.1)
        """,
    )
    started = bundle.start(*torchrun(), "deaf.py", DEPLOYKIT_GRACE="0.5")
    started.wait_for(" pid ", 2)
    started.process.terminate()
    done = started.finish()
    assert done.code == 137
    assert done.said["node 0"][-2] == "the ranks did not exit in time: sending SIGKILL"
    assert all(gone(pid) for pid in pids(done, 2))


def test_a_notice_reaches_trainers_with_a_handler_and_kills_none(bundle):
    bundle.write("sleeper.py", SLEEPER)
    started = bundle.start(*torchrun(processes=1), "sleeper.py", "SIGUSR2", "SIGTERM")
    started.wait_for(" pid ")
    started.process.send_signal(signal.SIGUSR2)
    started.wait_for("handler SIGUSR2")
    started.process.send_signal(signal.SIGUSR1)  # the program has no handler
    started.wait_for("SIGUSR1 received and forwarded to 1 rank")
    started.process.terminate()
    done = started.finish()
    assert done.code == 0, done.log
    assert done.said["rank 0"][1:] == ["handler SIGUSR2", "handler SIGTERM", "saved"]


def test_a_notice_reaches_ranks_that_start_after_it(bundle):
    """The first attempt of the rank gets the notice and fails; so does the second, from here."""
    bundle.write(
        "again.py",
        """\
        import os, signal, sys, time
        told = []
        signal.signal(signal.SIGUSR2, lambda *_: told.append(1))
        print("ready", flush=True)
        while not told:
            time.sleep(0.05)
        print("told", flush=True)
        sys.exit(os.environ["DEPLOYKIT_RESTART_COUNT"] == "0")
        """,
    )
    started = bundle.start(*torchrun(processes=1, restarts=1), "again.py")
    started.wait_for("ready")
    started.process.send_signal(signal.SIGUSR2)
    done = started.finish()
    assert done.code == 0, done.log
    assert [line for line in done.said["rank 0"] if line in {"ready", "told"}] == [
        *("ready", "told", "ready", "told")
    ]
    assert "SIGUSR2 received and forwarded to 1 rank; ranks that start later will" in done.log
    assert "SIGUSR2 forwarded to 1 rank that started later" in done.log


def test_no_process_survives_a_killed_launcher(bundle):
    bundle.write("sleeper.py", SLEEPER)
    started = bundle.start(*torchrun(), "sleeper.py")
    started.wait_for(" pid ", 2)
    started.process.kill()
    assert all(gone(pid) for pid in pids(started, 2))


def test_no_process_survives_a_killed_torchrun(bundle):
    bundle.write("sleeper.py", SLEEPER)
    started = bundle.start(*torchrun(), "sleeper.py", "SIGTERM", "SIGUSR2")
    started.wait_for(" pid ", 2)
    torchruns = Path(f"/proc/{started.process.pid}/task/{started.process.pid}/children")
    os.kill(int(torchruns.read_text()), signal.SIGKILL)
    done = started.finish()
    assert done.code == 137
    assert bundle.end("node-0")["reason"].startswith("torchrun was terminated by SIGKILL")
    assert all(gone(pid) for pid in pids(started, 2))


def test_nohup_is_respected(bundle):
    bundle.write("sleeper.py", SLEEPER)
    launch = bundle.source / ".deploykit" / "launch.py"
    launch.rename(launch.with_name("real.py"))
    bundle.write(
        ".deploykit/launch.py",
        """\
        import os, signal, sys
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        os.execv(sys.executable, [sys.executable, ".deploykit/real.py", *sys.argv[1:]])
        """,
    )
    started = bundle.start(*torchrun(processes=1), "sleeper.py", "SIGTERM")
    started.wait_for(" pid ")
    started.process.send_signal(signal.SIGHUP)  # would be taken first: its number is the lowest
    started.process.terminate()
    done = started.finish()
    assert done.code == 0
    assert done.said["node 0"] == ["SIGTERM received and forwarded to 1 rank"]


def test_torchrun_restarts_a_failed_rank_and_counts_it(bundle):
    bundle.write(
        "once.py",
        """\
        import os, sys
        print("attempt", os.environ["DEPLOYKIT_RESTART_COUNT"])
        sys.exit(5 if os.environ["DEPLOYKIT_RESTART_COUNT"] == "3" else 0)
        """,
    )
    words = [*torchrun(processes=1, restarts=1), "once.py"]
    done = bundle.run(*words, SLURM_RESTART_COUNT=3, DEPLOYKIT_BACKEND="local")
    assert done.code == 0, done.log
    assert done.said["rank 0"] == ["attempt 3", "attempt 4"]
    assert bundle.end("node-0")["attempt"] == 3


def test_a_wrong_number_of_nodes_is_refused_at_once(bundle):
    bundle.write("dump.py", DUMP)
    done = bundle.run(*torchrun(nodes=2), "dump.py")
    assert done.code == 78
    assert "asks for 2 node(s), but alone started the job on 1" in done.log
    assert "Traceback" not in done.log
    assert bundle.end("node-0")["exit_code"] == 78


@pytest.mark.parametrize(
    ("end", "code", "reason"),
    [
        ("sys.exit(75)", 75, "rank 0 exited with code 75"),
        pytest.param(
            *("os.kill(os.getpid(), 11)", 139, "rank 0 was terminated by SIGSEGV (exit code 139)"),
            marks=pytest.mark.nightly,
        ),
        ("os.kill(os.getppid(), 9)", 137, "rank 0 disappeared, as if killed by SIGKILL"),
    ],
)
def test_a_job_of_one_rank_ends_as_its_program(bundle, end, code, reason):
    bundle.write("end.py", f"import os, sys, time\n{end}\ntime.sleep(60)")
    done = bundle.run(*torchrun(processes=1), "end.py")
    assert done.code == code, done.log
    assert bundle.end("node-0")["reason"].startswith(reason)
