"""A job of one rank runs without torchrun, and its program cannot tell."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.torch
SHOW = """\
    import json, os, sys
    own = {name: value for name, value in os.environ.items()
           if name.startswith(("TORCH", "MASTER", "GROUP", "ROLE", "OMP", "DEPLOYKIT"))
           or name.endswith(("RANK", "WORLD_SIZE"))}
    parents, pid = [], os.getppid()
    while pid > 1:
        parents.append(open(f"/proc/{pid}/cmdline").read())
        pid = int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
    print(json.dumps([sys.argv[1:], own, "--torchrun" in "".join(parents)]))
"""
MEET = """\
    import os, torch, torch.distributed as dist
    port = f"{int(os.environ['MASTER_PORT']):04X}"
    def heard():
        rows = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/net/{name}")]
        return {row[1][:-5] for row in rows if row[1].endswith(":" + port) and row[3] == "0A"}
    before = heard()
    dist.init_process_group("gloo")
    number = torch.ones(3)
    dist.all_reduce(number)
    print("met", number.tolist(), before == heard() == {"0100007F"})
    dist.destroy_process_group()
"""
SLEEPER = "import os, time\nprint('pid', os.getpid())\nwhile True: time.sleep(0.1)\n"


def words(restarts=0):
    counts = ["--nnodes=1", "--nproc-per-node=1", f"--max-restarts={restarts}"]
    return ["torchrun", *counts, "--"]


def gone(pid, patience=120):
    deadline = time.monotonic() + patience
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return not Path(f"/proc/{pid}").exists()


def of_program(started):
    (line,) = [line for line in started.log.splitlines() if " pid " in line]
    return int(line.split()[-1])


def test_the_environment_is_that_of_torchrun(bundle):
    bundle.write("show.py", SHOW)
    shown = []
    for restarts in (0, 1):  # torchrun is needed for a restart
        done = bundle.run(*words(restarts), "show.py", "a b", "--", "", DEPLOYKIT_RUN="r")
        (line,) = done.said["rank 0"]
        shown.append(json.loads(line))
    (argv, ours, torchrun), (_, theirs, other) = shown
    assert argv == ["a b", "--", ""]
    assert (torchrun, other) == (False, True)
    own = ("TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE")  # torchrun's
    for name in ("MASTER_PORT", "TORCHELASTIC_MAX_RESTARTS", *own):
        theirs.pop(name)
        ours.pop(name, None)
    assert ours == theirs


def test_the_ranks_store_is_there_on_loopback_alone(bundle):
    bundle.write("meet.py", MEET)
    done = bundle.run(*words(), "meet.py")
    assert done.code == 0, done.log
    assert done.said["rank 0"][-1] == "met [1.0, 1.0, 1.0] True"


@pytest.mark.parametrize(
    ("end", "code", "reason"),
    [
        ("sys.exit(7)", 7, "rank 0 exited with code 7"),
        ("sys.exit(75)", 75, "rank 0 exited with code 75"),
        ("os.kill(os.getpid(), 11)", 139, "rank 0 was terminated by SIGSEGV (exit code 139)"),
        ("os.kill(os.getppid(), 9)", 137, "rank 0 disappeared, as after SIGKILL"),
    ],
)
def test_the_exit_is_that_of_the_program(bundle, end, code, reason):
    bundle.write("end.py", f"import os, sys, time\n{end}\ntime.sleep(60)")
    done = bundle.run(*words(), "end.py")
    assert done.code == code, done.log
    assert bundle.end("node-0")["reason"].startswith(reason)


def test_nothing_survives_a_killed_launcher(bundle):
    bundle.write("sleeper.py", SLEEPER)
    started = bundle.start(*words(), "sleeper.py")
    started.wait_for(" pid ")
    started.process.kill()
    assert gone(of_program(started))


def test_a_program_that_ignores_signals_is_killed_when_its_grace_is_over(bundle):
    ignore = "import signal\nfor n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)\n"
    bundle.write("deaf.py", ignore + SLEEPER)
    started = bundle.start(*words(), "deaf.py", DEPLOYKIT_GRACE="0.5")
    started.wait_for(" pid ")
    os.kill(started.process.pid, signal.SIGTERM)
    done = started.finish()
    assert done.code == 137
    assert done.said["node 0"][-1] == "rank 0 disappeared, as after SIGKILL"
    assert gone(of_program(started))
