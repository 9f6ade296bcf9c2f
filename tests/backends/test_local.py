"""The local backend with real processes: the whole life of a run through the command line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deploykit.backends import local
from deploykit.cli import main as cli
from deploykit.job.model import Handle
from deploykit.lib import paths
from deploykit.run import lifecycle

pytestmark = pytest.mark.torch
PLAIN = ("--set", "entrypoint.launcher=python")
"""Without torchrun, which takes seconds to start."""


def submit(capsys, *extra):
    assert cli.main(["submit", "--backend", "local", "--json", *extra]) == 0
    return json.loads(capsys.readouterr().out)


def status(capsys, run):
    capsys.readouterr()
    assert cli.main(["status", run, "--json"]) == 0
    return json.loads(capsys.readouterr().out)[0]


def wait_for(condition, seconds=250):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def test_a_run_from_submit_to_end(project, capsys):
    (project / "train.py").write_text(
        "import os, sys\n"
        "print('here', sys.argv[1:], os.environ['WORLD_SIZE'], flush=True)\n"
        "open(os.environ['DEPLOYKIT_OUTPUT_DIR'] + '/' + os.environ['RANK'], 'w').close()\n"
    )
    argv = ["submit", "--backend", "local", "--wait", "--set", "resources.processes_per_node=2"]
    assert cli.main(argv) == 0
    shown = capsys.readouterr().out
    assert "[rank 0] here ['--epochs', '5'] 2" in shown
    assert "[rank 1] here ['--epochs', '5'] 2" in shown
    assert "succeeded, exit code 0" in shown
    found = status(capsys, "hello")
    assert found["state"] == "succeeded"
    assert sorted(path.name for path in Path(found["output"]).iterdir()) == ["0", "1"]
    assert cli.main(["list"]) == 0
    assert f"{found['run']}\tlocal\tsucceeded" in capsys.readouterr().out
    assert cli.main(["logs", "--rank", "1"]) == 0
    assert capsys.readouterr().out == "[rank 1] here ['--epochs', '5'] 2\n"
    assert cli.main(["wait", "--json"]) == 0


@pytest.mark.parametrize(
    ("nodes", "program"),
    [
        (1, "sys.exit(7 if os.environ['RANK'] == '0' else 0)"),
        (2, "sys.exit(7) if os.environ['RANK'] == '1' else time.sleep(300)"),
    ],
)
def test_the_trainers_own_exit_code(project, capsys, nodes, program):
    """A node that fails stops the others."""
    (project / "train.py").write_text(f"import os, sys, time; {program}")
    run = submit(capsys, "--set", f"resources.nodes={nodes}")["run"]
    assert cli.main(["wait", run, "--timeout", "250"]) == 7
    assert "failed, exit code 7" in capsys.readouterr().out


def test_cancel_lets_the_trainer_finish(project, capsys, tmp_path):
    (project / "train.py").write_text(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('saved', flush=True), sys.exit(0)))\n"
        "print('ready', flush=True); time.sleep(600)\n"
    )
    run = submit(capsys, *PLAIN)["run"]
    log = tmp_path / "state folder/runs" / run / "logs/node-0.log"
    wait_for(lambda: log.exists() and "ready" in log.read_text())
    assert status(capsys, run)["state"] == "running"
    assert cli.main(["wait", run, "--timeout", "0.1"]) == 124
    assert cli.main(["cancel", run]) == 0
    assert cli.main(["wait", run]) == 143
    assert status(capsys, run)["state"] == "cancelled"
    assert "saved" in log.read_text()
    assert cli.main(["cancel", run]) == 0


DAEMON = """
import os, subprocess, sys, time
words = ["sh", "-c", sys.argv[2] + "(exec sleep 900) & echo up; wait"]
quiet = {"stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
daemon = subprocess.Popen(words, start_new_session=True, stdout=subprocess.PIPE, **quiet)
daemon.stdout.readline()
print("daemon", daemon.pid, flush=True)
time.sleep(float(sys.argv[1]))
os._exit(0)
"""


@pytest.mark.parametrize("cancelled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_daemon_that_the_script_left_ends_with_the_run(project, capsys, tmp_path, cancelled):
    """The one of the cancelled run ignores SIGTERM."""
    (project / "train.py").write_text(DAEMON)
    args = ["900", "trap '' TERM; "] if cancelled else ["0", ""]
    run = submit(capsys, "--set", f"entrypoint.args={args}", *PLAIN)["run"]
    log = tmp_path / "state folder/runs" / run / "logs/node-0.log"
    wait_for(lambda: log.exists() and "daemon" in log.read_text())
    if cancelled:
        assert cli.main(["cancel", run]) == 0
    assert cli.main(["wait", run]) == (143 if cancelled else 0)
    daemon = int(log.read_text().split("daemon ")[1].split()[0])
    assert not Path(f"/proc/{daemon}").exists()
    assert cli.main(["logs", run]) == 0
    assert re.search(
        rf"stopped processes left running: sh \({daemon}\), sleep \(\d+\)",
        capsys.readouterr().out,
    )


EARLY = """
import os, signal, sys
from deploykit_node import emulated_nodes
start = emulated_nodes._Nodes._start
def told(*words):
    process = start(*words)
    os.kill(os.getpid(), signal.SIGTERM)
    return process
emulated_nodes._Nodes._start = told
sys.exit(emulated_nodes.main(sys.argv[1:]))
"""


def test_a_cancel_while_launchers_are_being_started_reaches_each(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "train.py").write_text("import time; time.sleep(900)")
    words = ["torchrun", "--nnodes=2", "--nproc-per-node=1", "--", "train.py"]
    argv = [sys.executable, "-c", EARLY, "--nodes=2", "--time-limit=900", *words]
    more = {"DEPLOYKIT_RUN_DIR": str(tmp_path), "PYTHONPATH": str(paths.shipped("entrypoints"))}
    done = subprocess.run(argv, env=os.environ | more, cwd=tmp_path, check=False, timeout=250)
    assert done.returncode == 143


def test_the_time_limit_holds(project, capsys):
    """The minimum in a job file is a minute; the plan of this run has 3 s."""
    (project / "train.py").write_text("import time; time.sleep(600)")
    plan = lifecycle.prepare(Path("job.yaml"), list(PLAIN[1:]), "local", None).plan
    assert "--time-limit=300 " in plan.text
    text = plan.text.replace("--time-limit=300 ", "--time-limit=3 ")
    run = lifecycle.submit(plan._replace(text=text)).run
    assert cli.main(["wait", run]) == 124
    assert "time limit" in status(capsys, run)["reason"]


def test_killed_launcher_is_not_running_for_ever(project, capsys, tmp_path):
    (project / "train.py").write_text("import time; print('up', flush=True); time.sleep(600)")
    run = submit(capsys, *PLAIN)["run"]
    folder = tmp_path / "state folder/runs" / run
    log = folder / "logs/node-0.log"
    wait_for(lambda: log.exists() and "up" in log.read_text())
    argv = ["ps", "-o", "sid=", "-p", (folder / "claim").read_text().strip()]
    session = subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()
    subprocess.run(["pkill", "-KILL", "-s", session], check=True)
    wait_for(lambda: status(capsys, run)["state"] == "failed")
    subprocess.run(["pkill", "-KILL", "-f", str(folder)], check=False)


def test_same_run_id_starts_one_job(project, capsys, tmp_path):
    counter = tmp_path / "starts"
    (project / "train.py").write_text(f"open({str(counter)!r}, 'a').write('x')")
    words = ["submit", "--backend", "local", "--run", "one"]
    argv = [sys.executable, "-m", "deploykit", *words]
    many = [
        subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(5)
    ]
    codes = [process.wait() for process in many]
    for process in many:
        process.communicate()
    assert set(codes) <= {0, 75}
    assert 0 in codes
    assert cli.main(["wait", "one"]) == 0
    assert counter.read_text() == "x"
    (project / "train.py").write_text("print('another')")
    assert cli.main([*words, "--set", "retries=1"]) == 64
    told = "belongs to a different job; retries was 0, now 1; the source files, or the version"
    assert told in capsys.readouterr().err
    assert cli.main([*words, "--set", "env.A=private"]) == 64
    message = capsys.readouterr().err
    assert "belongs to a different job; env.A differs; " in message
    assert "private" not in message


def test_dry_run_is_what_runs(project, capsys, tmp_path):
    argv = ["submit", "--backend", "local", "--run", "same", "--nodes", "2", *PLAIN]
    assert cli.main([*argv, "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert cli.main(argv) == 0
    assert (tmp_path / "state folder/runs/same/plan.sh").read_text() == text
    assert cli.main(["wait", "same"]) == 0


def test_a_failed_run_ends_with_its_cause(project, capsys):
    (project / "train.py").write_text("import no_such_module_at_all\n")
    run = submit(capsys)["run"]
    assert cli.main(["wait", run]) == 1
    shown = capsys.readouterr().out
    assert "missing_module" in shown
    assert "no_such_module_at_all" in shown
    labels = [line.split()[0] for line in shown.splitlines()[-3:]]
    assert labels == [f"{run}:", "cause", "more"]
    assert shown.endswith(f"  more    deploykit diagnose {run}\n")
    assert cli.main(["logs", run]) == 0
    assert capsys.readouterr().err.splitlines()[-1].startswith("cause: missing_module, ")
    assert cli.main(["diagnose", run, "--json"]) == 79
    (finding, *_) = json.loads(capsys.readouterr().out)["causes"]
    assert (finding["cause"], finding["first_rank"]) == ("missing_module", 0)


@pytest.mark.parametrize(
    ("python", "what"),
    [
        ("no-such-python", "is not on PATH"),
        ("/nope/python", "was not found"),
        ("/etc", "is not executable"),
        ("~who/bin/python", ": the home folder of ~who was not found"),
    ],
)
def test_a_python_that_cannot_run_is_refused(project, capsys, python, what):
    assert cli.main(["check", "--backend", "local", "--set", f"local.python={python}"]) == 65
    assert f"local.python: {python} {what}".replace(" :", ":") in capsys.readouterr().err


def test_the_home_folder_of_a_python_is_filled_in(project, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "my python").symlink_to(sys.executable)
    argv = ["submit", "--backend", "local", "--dry-run", "--set", "local.python=~/my python"]
    assert cli.main(argv) == 0
    assert f"\nexec '{tmp_path}/my python' .deploykit/launch.py " in capsys.readouterr().out


def test_the_end_of_a_run_wakes_who_waits_for_it(tmp_path):
    """Also where it has ended before, or its folder is gone; the time-out of the test says so."""
    handle = Handle("local", "here", "a", "a", str(tmp_path))
    local.await_end([handle], 0)
    with subprocess.Popen(["sleep", "0.2"]) as shell:
        (tmp_path / "claim").write_text(f"{shell.pid}\n")
        local.await_end([handle], 10_000)
        assert shell.wait() == 0
    local.await_end([handle], 10_000)


def test_the_curve_of_a_tqdm_bar_has_its_steps_and_logs_show_few_states(project, capsys):
    (project / "train.py").write_text(
        "import time\n"
        "from tqdm import tqdm\n"
        "bar = tqdm(range(1, 16), mininterval=0)\n"
        "for step in bar:\n"
        "    bar.set_postfix(loss=1 / step)\n"
        "    time.sleep(0.15)\n"
    )
    run = submit(capsys, "--wait", *PLAIN)["run"]
    assert cli.main(["metrics", run, "--name", "loss", "--csv"]) == 0
    losses = capsys.readouterr().out.splitlines()[1:]
    assert len(losses) >= 5  # all 15, unless the machine is very busy
    assert cli.main(["logs", run]) == 0
    assert capsys.readouterr().out.count("/15 [") < len(losses)
