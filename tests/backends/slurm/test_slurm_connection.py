"""`ssh` with a real sshd whose connections are refused, or break. Needs no Slurm."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from deploykit.backends import slurm
from deploykit.backends.slurm import arrays, remote
from deploykit.backends.slurm.remote import RemoteFolder
from deploykit.job.model import Handle
from deploykit.lib import paths
from deploykit.lib.errors import BackendUnavailable
from tests.backends.slurm.login_node import login_node
from tests.backends.slurm.slurm_helpers import wait_for
from tests.programs import need
from tests.strangers import modes, too_wide

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("slurm-ssh")]


@pytest.fixture(scope="module")
def node():
    need("ssh", "sshd")
    with login_node("unused", startups="1:100:1") as started:  # at most one login at a time
        yield started


@pytest.fixture
def login(node, monkeypatch):
    """The login node, without an open connection."""
    node.use(monkeypatch)
    node.close()
    node.proxy.left, node.proxy.refused, node.proxy.came = None, 0, 0
    yield node
    node.proxy.left, node.proxy.refused = None, 0
    node.close()


@pytest.fixture
def pauses(monkeypatch):
    """The pauses between retries, which are skipped."""
    waited = []
    monkeypatch.setattr(remote, "time", SimpleNamespace(sleep=waited.append))
    return waited


@pytest.fixture
def slept(pauses, monkeypatch):
    """As `pauses`, but not skipped: sshd accepts no login until it notices a broken one."""
    both = SimpleNamespace(sleep=lambda seconds: (pauses.append(seconds), time.sleep(seconds)))
    monkeypatch.setattr(remote, "time", both)
    return pauses


@pytest.fixture
def count(login):
    """A script that counts its starts, and a function that returns the count."""
    file = Path(f"{login.folder}/home/starts-{os.urandom(4).hex()}")
    return f"echo x >> {file}; echo done", lambda: len(file.read_text()) // 2


def test_a_busy_sshd_is_retried(login, count, monkeypatch):
    """sshd drops connections above its limit while many users log in at once."""
    script, starts = count
    with socket.create_connection(("127.0.0.1", login.proxy.target)) as slow:
        assert slow.recv(4) == b"SSH-"

        def pause(seconds):
            slow.close()  # without a login
            time.sleep(seconds)

        monkeypatch.setattr(remote, "time", SimpleNamespace(sleep=pause))
        assert remote.run("login1", script)[:2] == (0, b"done\n")
    assert (starts(), login.proxy.came) == (1, 2)
    assert "past MaxStartups" in (login.folder / "sshd.log").read_text()


@pytest.mark.parametrize("after", [30, 600, 1500])
def test_connections_that_break_during_the_key_exchange(login, count, slept, after):
    script, starts = count
    login.proxy.left = after
    assert remote.run("login1", script)[:2] == (0, b"done\n")
    assert starts() == 1
    assert slept[0] == 1


def test_connections_that_are_refused(login, count, pauses):
    """Three times, then always."""
    script, starts = count
    login.proxy.refused = 3
    assert remote.run("login1", script)[:2] == (0, b"done\n")
    assert (starts(), pauses) == (1, [1, 2, 4])
    login.close()
    login.proxy.refused, login.proxy.came = 99, 0
    pauses.clear()
    with pytest.raises(BackendUnavailable, match=r"ssh login1: kex_exchange_identification: "):
        remote.run("login1", script)
    assert (login.proxy.came, pauses) == (5, [1, 2, 4, 8])


@pytest.fixture
def hide_key(login):
    """A function that takes the key away, or with False gives it back."""
    key, hidden = login.folder / "key", login.folder / "key.away"
    yield lambda away=True: key.rename(hidden) if away else hidden.rename(key)
    if hidden.exists():
        hidden.rename(key)


def test_a_permanent_failure_is_not_retried(login, pauses, hide_key):
    with pytest.raises(BackendUnavailable, match=r"[Cc]ould not resolve"):
        remote.run("nowhere.invalid", "true")
    hide_key()
    with pytest.raises(BackendUnavailable, match="Permission denied"):
        remote.run("login1", "true")
    assert pauses == []


@pytest.mark.parametrize("shared", [True, False])
def test_a_script_that_has_started_is_never_repeated(login, count, pauses, shared):
    """The script kills its connection, so only the messages of ssh show that it started."""
    script, starts = count
    if shared:
        assert remote.run("login1", "true")[0] == 0
    with pytest.raises(BackendUnavailable):
        remote.run("login1", f"({script}) >&2; kill -9 $PPID; sleep 9")
    assert (starts(), pauses) == (1, [])


def test_a_connection_that_breaks_at_any_byte_starts_a_script_at_most_once(login, count, slept):
    script, starts = count
    before = login.proxy.passed
    assert remote.run("login1", script)[0] == 0
    whole, total = login.proxy.passed - before, 1
    for part in range(1, 12):
        login.close()
        login.proxy.left, earlier = whole * part // 12, starts()
        try:
            remote.run("login1", script)
        except BackendUnavailable:
            wait_for(lambda: login.proxy.left is None)
            total = starts()
            assert total - earlier <= 1
        else:
            total += 1
            assert starts() == total
    assert total > 1
    assert slept, "no connection was retried"


# --- one shared connection


def socket_folder():
    """The folder of sockets, or None."""
    options = remote.connection_options("login1")
    return Path(options[1].removeprefix("-oControlPath=")).parent if options else None


def test_sockets_are_in_a_folder_that_only_the_user_can_enter(login, count, tmp_path, monkeypatch):
    """Access to a socket allows running commands as the user."""
    runtime = Path(os.environ["XDG_RUNTIME_DIR"])
    assert socket_folder() == runtime / "deploykit-ssh"
    assert remote.run("login1", count[0])[0] == 0
    (path,) = socket_folder().iterdir()
    assert len(str(path)) + 17 <= 107
    login.close()
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        monkeypatch.setenv("DEPLOYKIT_HOME", short)
        runtime.chmod(0o755)
        assert socket_folder() == Path(short, "ssh")
        assert socket_folder().stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("DEPLOYKIT_HOME", str(tmp_path / ("x" * 60)))
    assert socket_folder() is None, "the path is too long for a socket"
    assert remote.run("login1", count[0])[0] == 0


def test_a_connection_of_the_user_is_used(login, count, own_control_path):
    """As `ssh_config` says, which may also keep it open for longer."""
    assert remote.connection_options("login1") == []
    assert remote.run("login1", count[0])[0] == 0
    assert own_control_path.exists()
    before = login.proxy.came
    assert remote.run("login1", count[0])[0] == 0
    assert login.proxy.came == before


@pytest.fixture
def own_control_path(login):
    config = login.folder / "config"
    text, path = config.read_text(), login.folder / "own socket"
    lines = (f'ControlPath "{path}"', "ControlMaster auto", "ControlPersist 300")
    config.write_text(text + "".join(f"  {line}\n" for line in lines))
    remote._has_control_path.cache_clear()
    yield path
    subprocess.run(["ssh", "-O", "exit", "login1"], capture_output=True, check=False)
    config.write_text(text)
    remote._has_control_path.cache_clear()


@pytest.mark.parametrize("own", [True, False])
def test_a_login_with_a_second_factor_uses_a_connection_opened_by_hand(
    count, hide_key, request, own
):
    """The key stands for what only a person can give."""
    if own:
        request.getfixturevalue("own_control_path")
    hide_key()
    with pytest.raises(BackendUnavailable, match="Permission denied") as denied:
        remote.run("login1", count[0])
    hide_key(away=False)
    # sshd accepts no login until it has noticed that the one before is over
    by_hand = shlex.split(denied.value.hint.rpartition(": ")[2])
    wait_for(lambda: subprocess.run(by_hand, check=False).returncode == 0)
    hide_key()
    assert remote.run("login1", count[0])[:2] == (0, b"done\n")


# --- exit records and logs


@pytest.fixture(params=["rsync", "tar"])
def run_folders(request, login, monkeypatch, tmp_path):
    """A run's folder on the login node, and its copy. The greeting there prevents rsync."""
    greeting = login.folder / "home/.bashrc"
    text = greeting.read_text()
    if request.param == "rsync":
        need("rsync")
        greeting.write_text("")
    monkeypatch.setattr(remote, "_without_rsync", set())
    monkeypatch.setenv("DEPLOYKIT_HOME", str(tmp_path))
    there, here = login.folder / "home/it's here/runs/one-1", tmp_path / "runs/one-1"
    for folder in (there / "logs", there / "exit_records", there / "tasks/3/logs", here):
        folder.mkdir(parents=True, mode=0o755)
    yield there, here
    if request.param == "rsync":
        assert remote._without_rsync == set()
    greeting.write_text(text)
    shutil.rmtree(there)


def fetch(there, here):
    folder = RemoteFolder("login1", str(there))
    remote.fetch_exit_records("login1", [(Handle("slurm", "login1", "7", "one-1", here), folder)])
    remote.fetch_logs(folder, here)


def copied(here):
    return {str(path.relative_to(here)) for path in here.rglob("*") if not path.is_dir()}


def test_logs_and_records_are_mirrored(run_folders, request):
    there, here = run_folders
    (there / "claim").symlink_to("77")
    (there / "exit_records/node-0.json").write_text('{"exit_code": 1}')
    for name in ("logs/node-0.log", "tasks/3/logs/node-1.log", "exit_records/history-0.jsonl"):
        (there / name).write_text("one\n")
    (there / "logs/core").write_text("no log")
    fetch(there, here)
    expected = {"claim", "exit_records/node-0.json", "exit_records/history-0.jsonl"}
    expected |= {"logs/node-0.log", "tasks/3/logs/node-1.log"}
    assert copied(here) == expected
    assert arrays.claimed_by(here) == "77"
    assert remote._without_rsync == (set() if "rsync" in request.node.name else {"login1"})
    with (here / "logs/node-0.log").open() as follower:
        assert follower.read() == "one\n"
        with (there / "logs/node-0.log").open("a") as file:
            file.write("two\n")
        (there / "exit_records/node-0.json").write_text('{"exit_code": 2}')
        fetch(there, here)
        assert follower.read() == "two\n", "a log is appended to, and never replaced"
    assert (here / "exit_records/node-0.json").read_text() == '{"exit_code": 2}'
    assert too_wide(modes(here / "exit_records")) == {}
    assert too_wide(modes(here / "logs")) == {}
    (there / "exit_records/node-0.json").unlink()
    (here / "output").mkdir()
    (here / "plan.sh").write_text("own")
    fetch(there, here)
    assert copied(here) == expected - {"exit_records/node-0.json"} | {"plan.sh"}


@pytest.mark.parametrize("name", ["x\ny.log", "\n.log", "\x1b[2J.log", "a\r.log", "b c.log"])
def test_a_log_with_an_odd_name_leaves_the_others_complete(run_folders, name):
    """Whoever runs code in the job chooses the names."""
    there, here = run_folders
    (there / "logs/node-0.log").write_text("one\n")
    (there / "logs" / name).write_text("evil\n")
    fetch(there, here)
    assert copied(here) - {"logs/b c.log"} == {"logs/node-0.log"}


def test_links_do_not_lead_out_of_the_folder(run_folders):
    """And a folder that was deleted there is not an error."""
    there, here = run_folders
    fetch(there / "gone", here)
    assert copied(here) == set()
    (there / "logs/node-0.log").symlink_to("/etc/passwd")
    (there / "exit_records/node-0.json").symlink_to("/etc/passwd")
    (there / "logs/node-1.log").write_text("one\n")
    fetch(there, here)
    assert copied(here) == {"logs/node-1.log"}


def test_logs_of_a_login_node_are_elsewhere(tmp_path):
    """So `metrics` and `watch` fetch what is new, instead of reading the old copy."""
    paths.make_folder(tmp_path / "logs")
    (tmp_path / "logs/node-0.log").write_text("step 1 loss 1\n")
    handle = Handle("slurm", "", "1", "one", str(tmp_path))
    assert not slurm.logs_elsewhere(handle)
    (tmp_path / "remote.json").write_text(json.dumps({"host": "login", "folder": "/runs/one"}))
    assert slurm.logs_elsewhere(handle)
