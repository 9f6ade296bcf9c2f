"""`ssh` with a real sshd whose connections are refused, or break. Needs no Slurm."""

from __future__ import annotations

import os
import shutil
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from deploykit.backends.slurm import remote
from deploykit.lib.errors import BackendUnavailable
from tests.backends.slurm.login_node import login_node
from tests.backends.slurm.slurm_helpers import wait_for
from tests.programs import need
from tests.strangers import STRANGER, as_stranger, open_place  # noqa: F401 - a fixture

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("slurm-ssh")]


@pytest.fixture(scope="module")
def node():
    need("ssh", "sshd")
    with login_node("unused", startups="1:100:1") as started:  # at most one login at a time
        yield started


@pytest.fixture
def login(node, monkeypatch):
    """The login node, without an open connection."""
    monkeypatch.setenv("PATH", f"{node.folder}/bin:{os.environ['PATH']}")
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
def slept(monkeypatch):
    """As `pauses`, but not skipped: sshd accepts no login until it notices a broken one."""
    waited = []

    def sleep(seconds):
        waited.append(seconds)
        time.sleep(seconds)

    monkeypatch.setattr(remote, "time", SimpleNamespace(sleep=sleep))
    return waited


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


@pytest.mark.parametrize("refused", [1, 3])
def test_connections_that_are_refused(login, count, pauses, refused):
    script, starts = count
    login.proxy.refused = refused
    assert remote.run("login1", script)[:2] == (0, b"done\n")
    assert starts() == 1
    assert pauses == [1, 2, 4, 8][:refused]


@pytest.mark.parametrize("after", [30, 600, 1500])
def test_connections_that_break_during_the_key_exchange(login, count, slept, after):
    script, starts = count
    login.proxy.left = after
    assert remote.run("login1", script)[:2] == (0, b"done\n")
    assert starts() == 1
    assert slept[0] == 1


def test_a_connection_that_is_always_refused(login, count, pauses):
    script, _ = count
    login.proxy.refused = 99
    with pytest.raises(BackendUnavailable, match=r"ssh login1: kex_exchange_identification: "):
        remote.run("login1", script)
    assert (login.proxy.came, pauses) == (5, [1, 2, 4, 8])


def test_a_permanent_failure_is_not_retried(login, pauses):
    with pytest.raises(BackendUnavailable, match=r"[Cc]ould not resolve"):
        remote.run("nowhere.invalid", "true")
    key = login.folder / "key"
    hidden = key.rename(login.folder / "key.away")
    try:
        with pytest.raises(BackendUnavailable, match="Permission denied"):
            remote.run("login1", "true")
    finally:
        hidden.rename(key)
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


# --- the folder of the sockets: access to one allows running commands as the user


@pytest.fixture
def shared(open_place, monkeypatch):  # noqa: F811 - the fixture
    """The folder for temporary files, in which every user may create files."""
    open_place.chmod(0o1777)
    monkeypatch.setattr(remote.tempfile, "tempdir", str(open_place))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("DEPLOYKIT_HOME", str(open_place / "a state folder of far too long a name"))
    return open_place


def socket_folder():
    """The folder of sockets, or None."""
    paths = [option for option in remote.connection_options() if option.startswith("ControlPath=/")]
    return Path(paths[0].partition("=")[2]).parent if paths else None


def created_by_stranger(folder):
    """The folder, which another user created first."""
    path = folder / f"deploykit-ssh-{os.getuid()}"
    shutil.rmtree(path, ignore_errors=True)
    assert as_stranger(lambda: path.mkdir(mode=0o777))
    return path


def test_a_folder_that_another_user_created_is_not_used(shared, login, count):
    path = created_by_stranger(shared)
    script, starts = count
    assert socket_folder() is None
    assert remote.run("login1", script)[:2] == (0, b"done\n")
    assert (starts(), list(path.iterdir())) == (1, [])


@pytest.mark.parametrize("how", ["wide", "link", "file"])
def test_a_folder_that_is_not_private_is_not_used(shared, how):
    path, own = shared / f"deploykit-ssh-{os.getuid()}", shared / "own"
    own.mkdir(mode=0o700)
    if how == "wide":
        path.mkdir()
        path.chmod(0o755)
    elif how == "link":
        path.symlink_to(own)
    else:
        path.touch()
    assert socket_folder() is None


def test_the_runtime_folder_of_the_user_comes_first(shared, monkeypatch):
    runtime = shared / "run"
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    assert socket_folder() == runtime / "deploykit-ssh"
    os.chown(runtime, STRANGER, STRANGER)  # as after `sudo` or `su`
    assert socket_folder() == shared / f"deploykit-ssh-{os.getuid()}"


def test_the_state_folder_is_the_last_resort(shared, monkeypatch, login, count):
    created_by_stranger(shared)
    monkeypatch.setenv("DEPLOYKIT_HOME", str(shared / "state"))
    assert socket_folder() == shared / "state/ssh"
    assert remote.run("login1", count[0])[0] == 0
    (path,) = socket_folder().iterdir()
    assert len(str(path)) + 17 <= 107
    login.close()


def test_a_path_that_is_too_long_for_a_socket(shared, monkeypatch):
    monkeypatch.setattr(remote.tempfile, "tempdir", str(shared / ("x" * 40)))
    assert socket_folder() is None
