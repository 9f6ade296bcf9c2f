"""`infra/slurm/cluster.py`, run as a command."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.backends.slurm.slurm_helpers import CLUSTER, PATIENCE, cluster_command, wait_for
from tests.strangers import STRANGER, as_stranger, modes, open_place  # noqa: F401 - a fixture

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("slurm")]

SMALL = ("--nodes", "2", "--cpus", "2", "--gpus-per-node", "1")


def in_box(folder, *argv):
    env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    return subprocess.run(argv, env=env, capture_output=True, text=True, check=False)


def alive(folder):
    """Processes with this folder in their command line, and processes of its jobs."""
    processes = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes()
            variables = (entry / "environ").read_bytes()
        except (OSError, NotADirectoryError):
            continue
        job = b"SLURMD_NODENAME=" in variables and str(folder).encode() in variables
        if str(folder).encode() in words or job:
            processes.append((entry.name, words))
    return processes


def test_start_use_stop(box):
    done = cluster_command("start", box, *SMALL)
    assert done.returncode == 0, done.stderr
    shell = f'eval "$({sys.executable} {CLUSTER} env {box})"; '
    ran = subprocess.run(
        ["sh", "-c", f'{shell} srun -N2 --gpus-per-node=1 sh -c "echo $0 \\$SLURM_NODEID"'],
        capture_output=True,
        text=True,
        check=False,
    )
    assert sorted(ran.stdout.split()) == ["0", "1", "sh", "sh"], ran.stderr
    status = cluster_command("status", box)
    assert status.returncode == 0
    assert [line.split()[0] for line in status.stdout.splitlines()] == ["n1", "n2"]
    assert cluster_command("stop", box).returncode == 0
    assert alive(box) == []
    assert cluster_command("status", box).returncode == 3


def test_stop_can_be_repeated_and_ends_jobs_that_ignore_sigterm(box):
    assert cluster_command("start", box, *SMALL).returncode == 0
    job = box / "job.sh"
    job.write_text('#!/bin/bash\ntrap "" TERM\nsetsid sleep 600 &\nsrun sleep 600\n')
    assert in_box(box, "sbatch", f"--output={box}/out", str(job)).returncode == 0
    # the one in its own session, srun, and its task
    wait_for(lambda: sum(b"sleep" in words for _, words in alive(box)) >= 3)
    for _ in range(2):
        assert cluster_command("stop", box).returncode == 0
        assert alive(box) == []


def test_start_can_be_repeated_and_replaces_a_dead_controller(box):
    assert cluster_command("start", box, *SMALL).returncode == 0
    again = cluster_command("start", box, *SMALL)
    assert (again.returncode, "already running" in again.stdout) == (0, True)
    other = cluster_command("start", box, "--nodes", "3")
    assert (other.returncode, "stop it first" in other.stderr) == (1, True)
    pid = int((box / "run" / "slurmctld.pid").read_text())
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: cluster_command("status", box).returncode == 3)
    assert cluster_command("start", box, *SMALL).returncode == 0
    assert in_box(box, "srun", "echo", "hi").stdout == "hi\n"


def test_three_clusters_start_at_the_same_time(box, tmp_path):
    folders = [box / "a", box / "b", box / "c"]
    argv = [sys.executable, CLUSTER, "start"]
    many = [subprocess.Popen([*argv, folder, *SMALL], stdout=subprocess.PIPE) for folder in folders]
    try:
        assert [process.wait(PATIENCE) for process in many] == [0, 0, 0]
        for folder in folders:
            assert in_box(folder, "srun", "-N2", "echo", "hi").stdout == "hi\nhi\n"
    finally:
        for process, folder in zip(many, folders, strict=True):
            process.communicate()
            assert cluster_command("stop", folder).returncode == 0


@pytest.fixture
def owned(open_place):  # noqa: F811 - the fixture
    """A folder of another user's that everyone can enter, and a function to run what as whom."""
    if os.getuid():
        pytest.skip("only root can become another user")
    script = Path(shutil.copytree(CLUSTER.parent, open_place / "infra")) / "cluster.py"
    folder = open_place / "box"
    folder.mkdir(mode=0o755)
    os.chown(folder, STRANGER, STRANGER)

    def run_as(who, *argv):
        words = ["/usr/bin/python3", script, argv[1], folder, *argv[2:]]
        return subprocess.run(
            words if argv[0] == "cluster" else argv,
            env={**os.environ, "SLURM_CONF": str(folder / "slurm.conf")},
            user=who,
            group=who,
            extra_groups=[],
            capture_output=True,
            text=True,
            check=False,
        )

    yield folder, run_as
    run_as(STRANGER, "cluster", "stop")


def test_only_the_owner_can_submit_jobs(needs_slurm, owned):
    """Also without root, and in a folder that was open: all jobs run as the owner."""
    folder, run_as = owned
    done = run_as(STRANGER, "cluster", "start", *SMALL)
    assert done.returncode == 0, done.stderr
    assert f"{folder}: was accessible to other users; its mode is now 0700" in done.stdout
    assert run_as(STRANGER, "srun", "id", "-u").stdout == f"{STRANGER}\n"
    refused = (["srun", "id", "-u"], ["srun", "cat", folder / "munge/key"])
    with ThreadPoolExecutor() as pool:  # srun takes a minute to give up
        for ran in pool.map(lambda argv: run_as("daemon", *argv), refused):
            assert (ran.stdout, ran.returncode != 0) == ("", True)
    assert modes(folder)["."] == modes(folder)["munge"] == 0o700
    assert modes(folder)["munge/key"] == 0o600
    assert run_as(STRANGER, "cluster", "stop").returncode == 0
    assert alive(folder) == []


def test_other_users_cannot_reach_munge(needs_slurm, open_place):  # noqa: F811
    folder = open_place / "box"
    try:
        assert cluster_command("start", folder, *SMALL).returncode == 0
        key, sock = folder / "munge/key", folder / "munge/socket"

        def connect():
            with socket.socket(socket.AF_UNIX) as end:
                end.connect(str(sock))

        connect()
        assert not as_stranger(connect)
        assert not as_stranger(key.read_bytes)
        assert not as_stranger(lambda: list(folder.iterdir()))
    finally:
        cluster_command("stop", folder)


def test_a_link_in_place_of_a_lock_is_not_followed(box, open_place, monkeypatch):  # noqa: F811
    """Neither in the folder for temporary files nor in that of the cluster."""
    kept = open_place / "kept"
    kept.write_text("keep")
    planted = open_place / f"slurm-box-ports-{os.getuid()}.lock"
    planted.symlink_to(kept)
    monkeypatch.setenv("TMPDIR", str(open_place))
    assert cluster_command("start", box, *SMALL).returncode == 0
    assert kept.read_text() == "keep"
    assert cluster_command("stop", box).returncode == 0
    (box / "lock").unlink()
    (box / "lock").symlink_to(kept)
    assert cluster_command("start", box, *SMALL).returncode != 0
    assert kept.read_text() == "keep"
    (box / "lock").unlink()


@pytest.mark.parametrize("verb", ["start", "stop", "env", "status"])
@pytest.mark.parametrize("how", ["another's", "link", "file", "writable"])
def test_a_folder_that_others_can_write_to_is_refused(needs_slurm, open_place, verb, how):  # noqa: F811
    """Its record says which processes to end, and its slurm.conf which plugins to load."""
    folder, victim = open_place / "box", subprocess.Popen(["sleep", "600"])
    started = int(Path(f"/proc/{victim.pid}/stat").read_text().rpartition(")")[2].split()[19])
    record = json.dumps({"size": {}, "pids": {"n1": [victim.pid, started]}})
    try:
        if how == "file":
            folder.touch()
        else:
            folder.mkdir()
            (folder / "cluster.json").write_text(record)
        if how == "another's":
            os.chown(folder, STRANGER, STRANGER)
        elif how == "link":
            folder = folder.rename(open_place / "real").parent / "box"
            folder.symlink_to(open_place / "real")
        elif how == "writable":
            folder.chmod(0o777)
        done = cluster_command(verb, folder, *(SMALL if verb == "start" else ()))
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith(f"cluster.py: {folder} ")
        assert "choose a" in done.stderr
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()


def test_missing_programs_are_named(tmp_path):
    without_sbin = "import sys, cluster; cluster.SBIN = ''; sys.exit(cluster.main())"
    done = subprocess.run(
        [sys.executable, "-c", without_sbin, "start", tmp_path / "box"],
        env={"PATH": str(tmp_path), "PYTHONPATH": str(CLUSTER.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.endswith(
        "apt-get install --no-install-recommends munge slurm-client slurmctld slurmd\n"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["a b", "x" * 100, "per%cent", "it's"])
def test_a_path_that_slurm_does_not_accept(needs_slurm, tmp_path, name):
    done = cluster_command("start", tmp_path / name)
    assert done.returncode == 1
    assert "Choose a short, plain path" in done.stderr
    assert list(tmp_path.iterdir()) == []
