"""The stacks of real processes: by py-spy, and by the hook that the launcher puts in front."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from deploykit_node import cluster, records
from deploykit_node.observe import hooks, processes, stacks
from deploykit_node.observe.stacks import NoStacks, with_sources
from tests.backends.slurm.slurm_helpers import wait_for

SPY = shutil.which("py-spy", path=Path(sys.executable).parent)
SEEN = """
import json, os, sys
try:
    import sitecustomize
    found = [sitecustomize.__file__, sitecustomize.__name__]
except ImportError as error:
    found = str(error)
modules = sorted(name for name in sys.modules if "custom" in name)
cache = sorted(sys.path_importer_cache)
print(json.dumps([sys.path, dict(os.environ), found, modules, sys.argv, cache]))
"""
STUCK = """
import threading, time
lock = threading.Lock()
def worker():
    with lock:
        print("ready", flush=True)
        time.sleep(600)
def step_é():
    with lock:
        pass
threading.Thread(target=worker, daemon=True).start()
time.sleep(0.3)
step_é()
"""


@pytest.fixture
def start(tmp_path):
    """A function that starts a script with the hook, and waits for its first line."""
    started = []

    def begin(text, *, hook=True, first="ready", **more):
        script = tmp_path / "é train.py"
        script.write_text(textwrap.dedent(text), encoding="utf-8")
        env, file = hooks.environment({**os.environ, **more}, tmp_path, 0)
        argv = [sys.executable, script]
        child = subprocess.Popen(
            argv, env=env if hook else None, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        started.append(child)
        if first:
            assert child.stdout.readline().strip() == first.encode()
        return child, file

    yield begin
    for child in started:
        child.kill()
        child.wait()
        child.stdout.close()
        child.stderr.close()


def stuck_in(threads):
    return [frame["name"] for frame in threads[0]["frames"]]


@pytest.fixture
def stuck(start):
    """A program that waits for a lock, and the file for its stacks."""
    child, file = start(STUCK)
    wait_for(lambda: "step_é" in stuck_in(stacks.by_signal(child.pid, file)))
    return child, file


@pytest.fixture(params=["3.10", "this"])
def python(request):
    return request.getfixturevalue("old_python") if request.param == "3.10" else sys.executable


@pytest.mark.parametrize("own", [None, "", ":", "{here}", "{here}:{here}/x"])
@pytest.mark.parametrize("custom", [None, "seen = 1", "import sys; sys.path.append('/added')"])
def test_the_program_sees_no_trace_of_the_hook(own, custom, tmp_path, python):
    if custom is not None:
        (tmp_path / "sitecustomize.py").write_text(custom)
    env = {"PATH": os.environ["PATH"]}
    if own is not None:
        env["PYTHONPATH"] = own.format(here=tmp_path)

    def seen(env):
        return json.loads(
            subprocess.run(
                [python, "-c", SEEN, "a"], env=env, cwd=tmp_path, check=True, capture_output=True
            ).stdout
        )

    hooked, file = hooks.environment(env, tmp_path, 0)
    assert seen(hooked) == seen(env)
    assert int(file.read_text()) >= 100


@pytest.mark.parametrize("custom", ["raise ValueError('mine')", "import nothing_there", "1 +"])
def test_a_broken_sitecustomize_is_reported_as_without_the_hook(custom, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(custom)
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path)}

    def errors(env):
        argv = [sys.executable, "-c", "print('ran')"]
        done = subprocess.run(argv, env=env, check=False, capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    assert errors(hooks.environment(env, tmp_path, 0)[0]) == errors(env)


def test_a_folder_that_is_gone_does_not_stop_the_program(tmp_path):
    env, _ = hooks.environment(os.environ, tmp_path, 0)
    env["DEPLOYKIT_STACK_FILE"] = str(tmp_path / "gone" / "file")
    done = subprocess.run(
        [sys.executable, "-c", "print('ran')"], env=env, check=True, capture_output=True
    )
    assert (done.stdout, done.stderr) == (b"ran\n", b"")


def test_children_of_the_program_have_no_hook(start):
    child, _ = start(
        """
        import os, subprocess, sys
        print(subprocess.run([sys.executable, "-c", "import os; print('PYTHONPATH' in os.environ)"],
              capture_output=True, text=True).stdout.strip(), flush=True)
        """,
        first="False" if "PYTHONPATH" not in os.environ else "True",
    )
    assert child.wait() == 0


def test_a_program_writes_its_own_stacks_while_it_hangs(stuck):
    child, file = stuck
    main, other = with_sources(stacks.by_signal(child.pid, file))
    assert main["name"] == "MainThread"
    assert [(frame["name"], frame["source"]) for frame in main["frames"]] == [
        ("step_é", "with lock:"),
        ("<module>", "step_é()"),
    ]
    assert Path(main["frames"][0]["file"]).name == "é train.py"
    assert other["frames"][0]["name"] == "worker"
    assert child.poll() is None


@pytest.mark.parametrize(
    ("hook", "change"),
    [
        (False, "pass"),
        (True, "signal.signal(signal.SIGURG, signal.SIG_DFL)"),
        (True, "os.closerange(3, 500)"),
        (True, "os.closerange(3, 500); [os.open('/dev/null', os.O_RDWR) for _ in range(200)]"),
    ],
)
def test_a_program_without_the_hook_gets_no_signal(hook, change, start):
    program = f"import os, signal, time; {change}; print('ready', flush=True); time.sleep(600)"
    child, file = start(program, hook=hook)
    before = file.read_bytes() if hook else None
    with pytest.raises(NoStacks, match="SIGURG handler"):
        stacks.by_signal(child.pid, file)
    assert not hook or file.read_bytes() == before
    assert child.poll() is None


def test_a_stopped_program_cannot_write_but_can_be_read(stuck, monkeypatch):
    monkeypatch.setattr(stacks, "_PATIENCE", 0.2)
    child, file = stuck
    child.send_signal(signal.SIGSTOP)
    wait_for(lambda: processes.stat(child.pid).state == "T")
    with pytest.raises(NoStacks, match="within"):
        stacks.by_signal(child.pid, file)
    assert stuck_in(stacks.by_spy(SPY, child.pid, "T"))[0] == "step_é"
    assert processes.stat(child.pid).state == "T"
    child.send_signal(signal.SIGCONT)
    wait_for(lambda: file.read_bytes().count(b"most recent call first") >= 4)
    assert child.poll() is None


@pytest.mark.parametrize("native", [False, True])
def test_py_spy_names_the_main_thread_first(stuck, native):
    child, _ = stuck
    main, other = with_sources(stacks.by_spy(SPY, child.pid, "S", native=native))
    frames = {frame["name"]: frame["source"] for frame in main["frames"]}
    assert (main["name"], frames["step_é"]) == ("MainThread", "with lock:")
    assert "worker" in {frame["name"] for frame in other["frames"]}
    assert (len(frames) > 3) == native


def test_py_spys_complaint_is_one_line(start):
    sleeper = subprocess.Popen(["sleep", "600"])
    try:
        with pytest.raises(NoStacks, match=r"^py-spy: [^\n]+$"):
            stacks.by_spy(SPY, sleeper.pid, "S")
        with pytest.raises(NoStacks, match="cannot be started"):
            stacks.by_spy("/nowhere/py-spy", sleeper.pid, "S")
    finally:
        sleeper.kill()
        sleeper.wait()


def test_an_answer_that_is_not_py_spys_is_no_stack(tmp_path):
    for text in ("[]", "{}", "null", "7", "[7]"):
        fake = tmp_path / "py-spy"
        fake.write_text(f"#!/bin/sh\necho '{text}'\n")
        fake.chmod(0o700)
        with pytest.raises(NoStacks, match="not running Python code"):
            stacks.by_spy(str(fake), 1, "S")


def record(env, rank, child, file):
    processes.register(env, cluster.Rank("torchrun", rank, rank, 2, 2), child.pid, stacks=file)


REFUSED = ["unshare", "--user"]
"""In a user namespace of its own a program may read no other, as with kernel.yama.ptrace_scope."""
needs_namespaces = pytest.mark.skipif(
    shutil.which("unshare") is None
    or subprocess.run([*REFUSED, "true"], capture_output=True, check=False).returncode != 0,
    reason="optional: no user namespaces",
)


@needs_namespaces
def test_a_program_that_py_spy_may_not_read_writes_its_stacks_itself(stuck, tmp_path):
    child, file = stuck
    env = {"DEPLOYKIT_RUN_DIR": str(tmp_path / "run")}
    record(env, 0, child, file)
    refused = tmp_path / "py-spy"
    refused.write_text(f'#!/bin/sh\nexec {" ".join(REFUSED)} {SPY} "$@"\n')
    refused.chmod(0o700)
    stacks.write(env, tmp_path / "dump", stacks.Options(str(refused)))
    (only,) = records.read(tmp_path / "dump" / f"{os.uname().nodename}.json")["ranks"]
    assert only["tool"] == "faulthandler"
    assert only["problem"].startswith("py-spy is not permitted to read the program (kernel.yama.")
    assert only["process"]["threads"][0]["frames"][0]["source"] == "with lock:"


@needs_namespaces
def test_a_program_that_nothing_may_look_at_is_named_with_the_reasons(start, tmp_path):
    """All of the dump is refused, as that of a program with capabilities of its own."""
    child, file = start(STUCK)
    run = tmp_path / "run"
    record({"DEPLOYKIT_RUN_DIR": str(run)}, 0, child, file)
    launch = Path(stacks.__file__).parents[2] / "launch.py"
    argv = [sys.executable, launch, "--dump-stacks", run, tmp_path / "dump", f"--py-spy={SPY}"]
    subprocess.run([*REFUSED, *argv], check=True)
    (only,) = records.read(tmp_path / "dump" / f"{os.uname().nodename}.json")["ranks"]
    assert (only["tool"], only["process"]["threads"]) == ("", [])
    assert only["problem"].startswith("py-spy is not permitted to read the program")
    assert only["problem"].endswith("lacks permission to read the program's open files")
    assert child.poll() is None


def test_a_node_writes_one_file_with_all_its_ranks(stuck, tmp_path):
    child, file = stuck
    run = tmp_path / "run"
    env = {"DEPLOYKIT_RUN_DIR": str(run)}
    record(env, 0, child, file)
    record(env, 1, child, file)
    old = records.read(run / "exit_records/process-1.json")
    records.write(run / "exit_records/process-1.json", {**old, "started": old["started"] - 1})
    records.write(run / "exit_records/process-2.json", {**old, "host": "other"})
    host = os.uname().nodename
    for options, tool in ((stacks.Options(SPY), "py-spy"), (stacks.Options(None), "faulthandler")):
        stacks.write(env, tmp_path / tool, options)
        node = records.read(tmp_path / tool / f"{host}.json")
        (only,) = node["ranks"]
        assert (node["host"], node["world_size"]) == (host, 2)
        assert (only["rank"], only["tool"]) == (0, tool)
        assert only["process"]["threads"][0]["frames"][0]["source"] == "with lock:"
    assert only["problem"] == "py-spy is not installed on the node"
    child.kill()
    child.wait()
    assert processes.here(env) == {}


def test_of_a_thousand_nodes_the_records_of_this_one_are_read(start, tmp_path, monkeypatch):
    run = tmp_path / "run"
    env = {"DEPLOYKIT_RUN_DIR": str(run)}
    child, file = start(STUCK, **env, RANK="7")
    record(env, 7, child, file)
    of_another_run, other_file = start(STUCK, DEPLOYKIT_RUN_DIR=f"{run}2", RANK="8")
    record(env, 8, of_another_run, other_file)
    monkeypatch.setattr(records, "read_all", None)
    assert list(processes.here(env)) == [7]


def test_the_workers_of_a_rank_are_read_too(start, tmp_path):
    child, file = start(
        """
        import multiprocessing, time
        def load():
            print("ready", flush=True)
            time.sleep(600)
        worker = multiprocessing.get_context("fork").Process(target=load, daemon=True)
        worker.start()
        worker.join()
        """
    )
    env = {"DEPLOYKIT_RUN_DIR": str(tmp_path / "run")}
    record(env, 0, child, file)
    stacks.write(env, tmp_path / "dump", stacks.Options(SPY))
    node = records.read(tmp_path / "dump" / f"{os.uname().nodename}.json")
    (worker,) = node["ranks"][0]["children"]
    assert worker["threads"][0]["frames"][0]["name"] == "load"
    os.kill(worker["pid"], signal.SIGKILL)


def test_a_full_disk_does_not_stop_the_program(tmp_path):
    (tmp_path / "file").touch()
    env = {"DEPLOYKIT_RUN_DIR": str(tmp_path / "file")}
    rank = cluster.Rank("torchrun", 0, 0, 1, 1)
    processes.register(env, rank, os.getpid(), stacks=tmp_path)


def test_threads_of_a_newer_python_are_understood():
    text = """\
Thread 0x00007f1 [worker] (most recent call first):
  File "/a/threading.py", line 327 in wait
  File "/a/threading.py", line 1002 in _bootstrap

Current thread 0x00007f2 [python] (most recent call first):
  File "/a/b\\xe9.py", line 5 in f
  ...
  File "/a/t.py", line 6 in <module>

Current thread's C stack trace (most recent call first):
  Binary file "/lib/libc.so.6", at killpg+0x10 [0x1]
"""
    threads = list(stacks.parse(text))
    assert [len(thread["frames"]) for thread in threads] == [2, 2]
    assert stacks._main_first(threads)[0]["frames"][0] == {
        "name": "f",
        "file": "/a/bé.py",
        "line": 5,
        "source": "",
    }
