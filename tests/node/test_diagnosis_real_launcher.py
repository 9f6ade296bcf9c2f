"""Failures below the node launcher, made for real, and their diagnosis from the node's log."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from typing import NamedTuple

import pytest

from deploykit.cli import main as cli
from tests.node import netns

RANK_1 = {
    "RANK": 1,
    "LOCAL_RANK": 1,
    "WORLD_SIZE": 2,
    "LOCAL_WORLD_SIZE": 2,
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": 1,
}
"""The launcher as the second rank of a launcher above, such as SageMaker's."""
TWO_RANKS = ("torchrun", "--nnodes=1", "--nproc-per-node=2", "--")


class Failure(NamedTuple):
    """A program, and the expected diagnosis of its log."""

    label: str
    program: str
    proof: str
    """In a line of the evidence."""


FAILURES = {
    "an exception": Failure(
        "division_by_zero",
        "def step(): return 1 / 0\nstep()",
        "ZeroDivisionError: division by zero",
    ),
    "a missing module": Failure(
        "missing_module",
        "import no_such_module_at_all",
        "No module named 'no_such_module_at_all'",
    ),
    "a file that shadows a module": Failure(
        "lib_incompatible",
        """
        import os, runpy
        open("sched.py", "w").close()
        open("main.py", "w").write("from sched import scheduler")
        runpy.run_path(os.path.abspath("main.py"))
        """,
        "cannot import name 'scheduler' from 'sched'",
    ),
    "no Python": Failure("user_code_error", "for step in range(3) print(step)", "SyntaxError"),
    "an unknown argument": Failure(
        "bad_arguments",
        """
        import argparse
        parser = argparse.ArgumentParser()
        parser.add_argument("--epochs", type=int)
        parser.parse_args(["--epoches=3"])
        """,
        "unrecognized arguments: --epoches=3",
    ),
    "a value of the wrong type": Failure(
        "bad_arguments",
        """
        import argparse
        parser = argparse.ArgumentParser()
        parser.add_argument("--epochs", type=int)
        parser.parse_args(["--epochs=many"])
        """,
        "argument --epochs: invalid int value: 'many'",
    ),
    "no data": Failure(
        "file_not_found",
        "open('/data/digits/train.csv')",
        "/data/digits/train.csv",
    ),
    "a folder that may not be written to": Failure(
        "file_permission",
        """
        import os
        os.mkdir("closed", 0o500)
        if os.geteuid() == 0:
            os.seteuid(65534)
        open("closed/last.pt", "w")
        """,
        "PermissionError: [Errno 13] Permission denied",
    ),
    "a full disk": Failure(
        "disk_full",
        """
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        os.mkdir("scratch")
        assert libc.unshare(0x00020000) == 0
        assert libc.mount(b"none", b"/", None, (1 << 18) | 16384, None) == 0
        assert libc.mount(b"none", b"scratch", b"tmpfs", 0, b"size=64k") == 0
        with open("scratch/last.pt", "wb") as file:
            file.write(bytes(1 << 20))
        """,
        "No space left on device",
    ),
    "too many files": Failure(
        "fd_limit",
        """
        import resource
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        held = [open("train.py") for _ in range(100)]
        """,
        "Too many open files",
    ),
    "too little memory": Failure(
        "host_oom",
        """
        import resource
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
        bytearray(1 << 32)
        """,
        "MemoryError",
    ),
    "a port that is taken": Failure(
        "port_in_use",
        """
        import socket
        taken = socket.create_server(("127.0.0.1", 0))
        socket.create_server(taken.getsockname())
        """,
        "Address already in use",
    ),
    "nobody listens": Failure(
        "net_unreachable",
        """
        import socket
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = server.getsockname()
        socket.create_connection(address)
        """,
        "Connection refused",
    ),
    "a name without an address": Failure(
        "dns_failure",
        "import socket; socket.create_connection(('no-such-node.invalid', 29500))",
        "socket.gaierror",
    ),
}


def first_finding(capsys, what):
    capsys.readouterr()
    assert cli.main(["diagnose", str(what), "--json"]) == 79
    first, *_ = json.loads(capsys.readouterr().out)["causes"]
    return first


def proved(finding, proof):
    return any(proof in line["text"] for line in finding["evidence"])


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_of_a_program_is_named(name, bundle, capsys):
    failure = FAILURES[name]
    if "unshare" in failure.program:
        netns.needed()
    bundle.write("train.py", textwrap.dedent(failure.program))
    done = bundle.run(*TWO_RANKS, "train.py", **RANK_1)
    assert done.code > 0
    first = first_finding(capsys, bundle.run_dir / "node-0.log")
    assert first["cause"] == failure.label, done.log
    assert proved(first, failure.proof), first
    assert first["first_rank"] == 1


REFUSED = {
    "a world smaller than asked": ("unknown", "started 2: training would be silently wrong", 4, {}),
    "a folder that cannot be": (
        "file_not_found",
        "but this folder cannot be created here",
        2,
        {"DEPLOYKIT_OUTPUT_DIR": "/dev/null/out"},
    ),
    "no such program": ("file_not_found", "File train.py not found", 2, {}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_start_that_the_launcher_refuses_is_explained(name, bundle, capsys):
    label, proof, ranks, env = REFUSED[name]
    if name != "no such program":
        bundle.write("train.py", "")
    words = ("torchrun", "--nnodes=1", f"--nproc-per-node={ranks}", "--", "train.py")
    assert bundle.run(*words, **RANK_1, **env).code in {64, 78}
    first = first_finding(capsys, bundle.run_dir / "node-0.log")
    assert first["cause"] == label
    assert proved(first, proof), first


def test_a_python_without_torch_is_named(bundle, capsys, tmp_path):
    """An environment of its own, without a single package."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    bundle.write("train.py", "")
    done = bundle.run(*TWO_RANKS, "train.py", python=str(tmp_path / "bare/bin/python"))
    assert done.code == 78
    first = first_finding(capsys, bundle.run_dir / "node-0.log")
    assert (first["cause"], first["evidence"][0]["line"]) == ("missing_module", 1)


def test_a_rank_that_torchrun_finds_killed(bundle, capsys):
    """Both ranks under a real torchrun: the one that was killed is the first."""
    bundle.write(
        "train.py",
        """
        import os, time
        if os.environ["RANK"] == "1":
            while not os.path.exists("up"):
                time.sleep(0.05)
            os.kill(os.getpid(), 9)
        open("up", "w").close()
        time.sleep(600)
        """,
    )
    assert bundle.run(*TWO_RANKS, "train.py").code == 137
    first = first_finding(capsys, bundle.run_dir / "node-0.log")
    assert (first["cause"], first["first_rank"]) == ("host_oom", 1)
    assert "killed_by_signal" in first["also"]


def test_a_python_whose_interpreter_is_not_there(project, tmp_path, capsys):
    python = tmp_path / "python-of-a-removed-environment"
    python.write_text("#!/no/such/python\n")
    python.chmod(0o755)
    argv = ["submit", "--backend", "local", "--run", "one", "--wait"]
    assert cli.main([*argv, "--set", f"local.python={python}"]) == 1
    first = first_finding(capsys, "one")
    assert first["cause"] == "command_not_found"
    assert proved(first, f"{python}: not found")
