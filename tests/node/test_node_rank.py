"""launch.py as one rank: its program's arguments, output, signals and exit. No torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deploykit_node import relay
from tests.backends.slurm.slurm_helpers import wait_for
from tests.node.conftest import HOSTILE


def piped(bundle, as_rank, *words):
    """A rank whose output the caller reads."""
    return subprocess.Popen(
        [sys.executable, ".deploykit/launch.py", *map(str, words)],
        cwd=bundle.source,
        env={"PATH": os.environ["PATH"], **{name: str(value) for name, value in as_rank.items()}},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_arguments_arrive_unchanged_on_the_oldest_python(bundle, as_rank, old_python):
    bundle.write(
        "dump.py",
        """\
        import json, os, sys
        print(sys.version_info[:2])
        print(json.dumps(sys.argv))
        print(os.environ["RANK"], os.environ["DEPLOYKIT_RESTART_COUNT"], file=sys.stderr)
        """,
    )
    done = bundle.run("--", "dump.py", *HOSTILE, python=old_python, **as_rank)
    assert done.code == 0, done.log
    said = done.said["rank 3"]
    assert "(3, 10)" in said
    assert json.dumps(["dump.py", *HOSTILE]) in said
    assert "3 0" in said
    assert bundle.end("rank-3")["exit_code"] == 0


@pytest.mark.parametrize("words", [["dump.py"], ["--", "dump.py"], ["--", "-m", "dump"]])
def test_runs_a_script_or_a_module(bundle, as_rank, words):
    bundle.write("dump.py", "import sys; print(sys.argv[1:])")
    done = bundle.run(*words, "--", "x", **as_rank)
    assert done.said["rank 3"] == ["['--', 'x']"]


def test_no_line_is_lost(bundle, as_rank):
    bundle.write(
        "chatty.py",
        """\
        import os, sys, threading
        def say(number, name):
            with os.fdopen(number, "w") as out:
                for line in range(10_000):
                    out.write(f"{name} {line}\\n")
                out.write(f"{name} last, unterminated")
        err = threading.Thread(target=say, args=(2, "err"))
        err.start()
        say(1, "out")
        err.join()
        os._exit(0)
        """,
    )
    done = bundle.run("chatty.py", **as_rank)
    assert done.code == 0
    said = done.said["rank 3"]
    for name in ("out", "err"):
        wanted = [f"{name} {line}" for line in range(10_000)] + [f"{name} last, unterminated"]
        assert [line for line in said if line.startswith(name)] == wanted
    assert len(said) == 20_002


def test_each_stream_stays_itself(bundle, as_rank):
    bundle.write("both.py", "import sys; print('o'); print('e', file=sys.stderr)")
    process = piped(bundle, as_rank, "both.py")
    output, errors = process.communicate()
    assert process.returncode == 0
    assert output.endswith(b"Z [rank 3] o\n")
    assert errors.endswith(b"Z [rank 3] e\n")


def test_a_long_line_comes_in_pieces_and_bytes_are_kept(bundle, as_rank):
    length = 3 * relay.PIECE + 5
    bundle.write(
        "long.py",
        f"""\
        import os
        os.write(1, b"\\xff\\x00\\n")
        data = b"x" * {length}
        while data:
            data = data[os.write(1, data):]
        """,
    )
    done = bundle.run("long.py", **as_rank)
    first, *pieces = done.said["rank 3"]
    assert first == "\udcff\0"
    assert "".join(pieces) == "x" * length
    assert 4 <= len(pieces) <= 8


def test_an_unfinished_line_is_kept_when_the_program_is_killed(bundle, as_rank):
    bundle.write("half.py", "import os; os.write(1, b'half'); os.kill(os.getpid(), 9)")
    done = bundle.run("half.py", **as_rank)
    assert done.said["rank 3"] == ["half"]
    assert done.code == -signal.SIGKILL
    assert bundle.end("rank-3")["exit_code"] == 137


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("sys.exit(7)", 7),
        ("sys.exit('text')", 1),
        ("raise RuntimeError", 1),
        ("os.abort()", -6),
        ("os.kill(os.getpid(), 15)", -15),
        ("os.kill(os.getpid(), 11)", -11),
    ],
)
def test_the_launcher_above_sees_the_same_exit(bundle, as_rank, end, code):
    bundle.write("end.py", f"import os, sys\n{end}\n")
    assert bundle.run("end.py", **as_rank).code == code


LISTEN = """\
    import signal, sys, time
    from pathlib import Path
    received, ended = [], []
    def handle(number, frame):
        received.append(number)
        Path("received").touch()
    signal.signal(getattr(signal, sys.argv[1]), handle)
    signal.signal(getattr(signal, sys.argv[2]), lambda *_: ended.append(1))
    print("ready")
    while not ended:
        time.sleep(0.01)
    print(len(received))
"""


def end_by(bundle, started, name, end):
    """Send `end` once the program has handled signal `name` and the relay has taken it.

    The relay takes signals one after the other, so a second copy of `name` comes before `end`.
    Another process sends `end`: the relay does not forward what its parent, like torchrun, sends.
    """
    wait_for((bundle.source / "received").exists)
    wait_for(lambda: not is_pending(started.process.pid, signal.Signals[name]))
    argv = ["sh", "-c", f"kill -s {end.removeprefix('SIG')} {started.process.pid}"]
    subprocess.run(argv, check=True)
    return started.finish()


def is_pending(pid, number):
    text = Path(f"/proc/{pid}/status").read_text()
    (mask,) = [line.split()[1] for line in text.splitlines() if line.startswith("ShdPnd:")]
    return int(mask, 16) >> (number - 1) & 1


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP"])
def test_signals_are_forwarded_once(bundle, as_rank, name):
    bundle.write("listen.py", LISTEN)
    end = "SIGUSR1" if name == "SIGUSR2" else "SIGUSR2"
    started = bundle.start("listen.py", name, end, **as_rank)
    started.wait_for("ready")
    started.process.send_signal(signal.Signals[name])
    done = end_by(bundle, started, name, end)
    assert done.code == 0
    assert done.said["rank 3"] == ["ready", "1"]
    assert bundle.end("rank-3")["stopped"] == (name in ("SIGTERM", "SIGINT", "SIGHUP"))


def test_a_signal_to_the_process_group_reaches_the_program_once(bundle, as_rank):
    """The sender is the relay's parent and uses killpg, as torchrun does.

    The relay is suspended until the program has handled its copy, so that the kernel does not merge
    a second one with it.
    """
    bundle.write("listen.py", LISTEN)
    started = bundle.start("listen.py", "SIGTERM", "SIGUSR2", TORCHELASTIC_RUN_ID="x", **as_rank)
    started.wait_for("ready")
    started.process.send_signal(signal.SIGSTOP)
    os.killpg(started.process.pid, signal.SIGTERM)
    wait_for((bundle.source / "received").exists)
    started.process.send_signal(signal.SIGCONT)
    assert end_by(bundle, started, "SIGTERM", "SIGUSR2").said["rank 3"] == ["ready", "1"]


def test_a_signal_before_the_program_exists_is_not_lost(bundle, as_rank):
    """The relay starts with SIGTERM blocked, as below torchrun, and receives it at once."""
    bundle.write("stay.py", "import time; time.sleep(60)")
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        started = bundle.start("stay.py", TORCHELASTIC_RUN_ID="x", **as_rank)
        os.killpg(started.process.pid, signal.SIGTERM)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    assert started.finish().code == -signal.SIGTERM
    assert bundle.end("rank-3")["stopped"]


def test_the_program_dies_with_its_relay(bundle, as_rank):
    bundle.write("stay.py", "import os, time; print('pid', os.getpid()); time.sleep(60)")
    started = bundle.start("stay.py", **as_rank)
    started.wait_for(" pid ")
    started.process.kill()
    wait_for(lambda: not Path(f"/proc/{started.log.split()[-1]}").exists())


def test_a_grandchild_that_keeps_the_output_open_does_not_hang_the_rank(bundle, as_rank):
    bundle.write(
        "parent.py",
        """\
        import pathlib, subprocess, sys, time
        code = "import time\\nfor _ in range(9000):"
        code += " print('on', flush=True); open('begun', 'w').close(); time.sleep(0.1)"
        subprocess.Popen([sys.executable, "-c", code])
        while not pathlib.Path("begun").exists():
            time.sleep(0.05)
        print("done")
        """,
    )
    done = bundle.run("parent.py", **as_rank)  # DRAIN is shorter than its output
    assert done.code == 0
    assert "done" in done.said["rank 3"]
    assert "on" in done.said["rank 3"]


def test_output_is_complete_when_the_reader_is_slow(bundle, as_rank):
    """Everything in the pipe is read after the program has exited, however slow the reader."""
    bundle.write("quick.py", "for n in range(2000): print(n, 'x' * 100)")
    process = piped(bundle, as_rank, "quick.py")
    time.sleep(relay.DRAIN + 2)
    text = process.communicate()[0].decode()
    assert [line.split()[3] for line in text.splitlines()] == [str(n) for n in range(2000)]


def test_training_continues_when_the_log_is_closed(bundle, as_rank, tmp_path):
    bundle.write(
        "write.py",
        """\
        import pathlib, sys, time
        for n in range(50):
            print("line", n, flush=True)
            time.sleep(0.01)
        pathlib.Path(sys.argv[1]).write_text("done")
        """,
    )
    with piped(bundle, as_rank, "write.py", tmp_path / "mark") as process:
        process.stdout.close()
        assert process.wait(250) == 0
    assert (tmp_path / "mark").read_text() == "done"


def test_mpirun_variables_become_torchruns(bundle):
    bundle.write(
        "names.py",
        """\
        import os
        print(*(os.environ[name] for name in
                ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")))
        """,
    )
    mpi = {"RANK": 2, "LOCAL_RANK": 0, "SIZE": 4, "LOCAL_SIZE": 2}
    env = {f"OMPI_COMM_WORLD_{name}": value for name, value in mpi.items()}
    done = bundle.run("names.py", MASTER_ADDR="h", MASTER_PORT=1, **env)
    assert done.said["rank 2"] == ["2 0 4 2 h"]
    done = bundle.run("names.py", **env)
    assert done.code == 78
    assert "without MASTER_ADDR and MASTER_PORT" in done.log


def test_runs_where_the_system_does_not_report_the_sender(bundle, as_rank):
    """As on macOS, which has no sigwaitinfo."""
    launch = bundle.source / ".deploykit" / "launch.py"
    without = "import _signal; del _signal.sigwaitinfo\nimport os\n"
    launch.write_text(launch.read_text().replace("import os\n", without, 1))
    bundle.write(
        "listen.py",
        """\
        import signal, time
        got = []
        signal.signal(signal.SIGUSR2, lambda *_: got.append(1))
        print("ready")
        while not got:
            time.sleep(0.01)
        print("got")
        """,
    )
    started = bundle.start("listen.py", **as_rank)
    started.wait_for("ready")
    started.process.send_signal(signal.SIGUSR2)
    assert started.finish().said["rank 3"] == ["ready", "got"]
