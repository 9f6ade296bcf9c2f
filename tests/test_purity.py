"""A dry run does nothing but read: no network, no program, no write, for every backend.

It runs in a process of its own under an audit hook that raises on anything else, with an empty
PATH, in a working folder and with a home that are read-only.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

GUARD = """
import os, sys

FORBIDDEN = {
    "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.link", "os.truncate",
    "os.chmod", "os.chown", "os.utime", "os.putenv", "os.system", "os.exec", "os.fork",
    "os.forkpty", "os.posix_spawn", "os.kill", "subprocess.Popen", "shutil.copyfile",
    "shutil.move", "shutil.rmtree", "tempfile.mkstemp", "tempfile.mkdtemp", "sqlite3.connect",
    "pty.spawn", "fcntl.flock", "fcntl.lockf",
}

def guard(event, args):
    if event.startswith("socket.") or event in FORBIDDEN:
        raise AssertionError(f"a dry run did {event} {args}")
    if event == "open" and args[1] is not None and set(args[1]) & set("wax+"):
        raise AssertionError(f"a dry run wrote {args[0]}")
    if event == "open" and args[1] is None and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        raise AssertionError(f"a dry run wrote {args[0]}")

from deploykit.cli import main as cli
sys.addaudithook(guard)
sys.exit(cli.main(sys.argv[1:]))
"""


def dry_run(folder, backend, *extra):
    env = {"PATH": "", "HOME": str(folder.parent / "home"), "PYTHONDONTWRITEBYTECODE": "1"}
    argv = [sys.executable, "-c", GUARD, "submit", "--backend", backend, "--dry-run", *extra]
    return subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, check=False)


@pytest.fixture
def read_only(tmp_path):
    """The repository's own job, as a user has it, where nothing can be written."""
    work = tmp_path / "work"
    work.mkdir()
    (tmp_path / "home").mkdir()
    text = (ROOT / "job.yaml").read_text()
    (work / "job.yaml").write_text(
        text.replace("source: entrypoints", f"source: {ROOT}/entrypoints")
    )
    for folder in (work, tmp_path / "home"):
        folder.chmod(0o555)
    yield work
    for folder in (work, tmp_path / "home"):
        folder.chmod(0o755)


@pytest.mark.parametrize("backend", ["local", "slurm", "sagemaker"])
def test_a_dry_run_only_reads(read_only, backend):
    done = dry_run(read_only, backend, "--run", "one")
    assert done.returncode == 0, done.stderr
    assert "deploykit" in done.stdout
    assert [path.name for path in read_only.iterdir()] == ["job.yaml"]
    assert list((read_only.parent / "home").iterdir()) == []


def test_a_dry_run_only_reads_the_data_that_would_be_uploaded(read_only):
    data = f"data.train={ROOT}/entrypoints"
    done = dry_run(read_only, "sagemaker", "--run", "one", "--set", data)
    assert done.returncode == 0, done.stderr
    assert "data.train: " in done.stderr
    assert list((read_only.parent / "home").iterdir()) == []


@pytest.mark.parametrize("backend", ["local", "slurm", "sagemaker"])
def test_a_dry_run_repeats_itself(read_only, backend):
    first, second = (dry_run(read_only, backend, "--run", "one").stdout for _ in range(2))
    assert first == second


def test_the_guard_refuses_a_forbidden_call(read_only):
    """The hook works: a submit without --dry-run triggers it."""
    env = {"PATH": os.environ["PATH"], "HOME": str(read_only.parent / "home")}
    env["PYTHONDONTWRITEBYTECODE"] = "1"
    argv = [sys.executable, "-c", GUARD, "submit", "--backend", "local"]
    done = subprocess.run(argv, cwd=read_only, env=env, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "a dry run did os.mkdir" in done.stderr
