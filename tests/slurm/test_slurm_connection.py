"""Connections to a real sshd that are refused, or end at the worst moment: no Slurm is needed."""

from __future__ import annotations

import os
import shutil
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from login_node import SSHD, login_node
from slurm_helpers import wait_for
from strangers import STRANGER, as_stranger, open_place  # noqa: F401 - a fixture

from deploykit.backends.slurm import machine
from deploykit.errors import BackendUnavailable

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("slurm-ssh")]


@pytest.fixture(scope="module")
def node():
    if SSHD is None or shutil.which("ssh") is None:
        pytest.skip("not installed: openssh-server")
    with login_node("unused", startups="1:100:1") as found:  # one at a time may log in
        yield found


@pytest.fixture
def far(node, monkeypatch):
    """The login node, to which there is no connection yet."""
    monkeypatch.setenv("PATH", f"{node.folder}/bin:{os.environ['PATH']}")
    node.close()
    node.proxy.left, node.proxy.refused, node.proxy.came = None, 0, 0
    yield node
    node.proxy.left, node.proxy.refused = None, 0
    node.close()


@pytest.fixture
def pauses(monkeypatch):
    """Seconds between two tries, which are not waited for."""
    waited = []
    monkeypatch.setattr(machine, "time", SimpleNamespace(sleep=waited.append))
    return waited


@pytest.fixture
def tries(monkeypatch):
    """As `pauses`, but waited for: this sshd lets nobody in while it still sees a broken one."""
    waited = []

    def sleep(seconds):
        waited.append(seconds)
        time.sleep(seconds)

    monkeypatch.setattr(machine, "time", SimpleNamespace(sleep=sleep))
    return waited


@pytest.fixture
def count(far):
    """A script that counts how often it was started, and how often that was."""
    file = Path(f"{far.folder}/home/starts-{os.urandom(4).hex()}")
    return f"echo x >> {file}; echo done", lambda: len(file.read_text()) // 2


def test_a_busy_sshd_is_asked_again(far, count, monkeypatch):
    """As on a login node where many log in at once: sshd drops connections above its limit."""
    script, starts = count
    with socket.create_connection(("127.0.0.1", far.proxy.target)) as slow:
        assert slow.recv(4) == b"SSH-"

        def pause(seconds):
            slow.close()  # it does not log in after all
            time.sleep(seconds)

        monkeypatch.setattr(machine, "time", SimpleNamespace(sleep=pause))
        assert machine.run("login1", script)[:2] == (0, b"done\n")
    assert (starts(), far.proxy.came) == (1, 2)
    assert "past MaxStartups" in (far.folder / "sshd.log").read_text()


@pytest.mark.parametrize("refused", [1, 3])
def test_connections_that_end_before_a_word(far, count, pauses, refused):
    script, starts = count
    far.proxy.refused = refused
    assert machine.run("login1", script)[:2] == (0, b"done\n")
    assert starts() == 1
    assert pauses == [1, 2, 4, 8][:refused]


@pytest.mark.parametrize("after", [30, 600, 1500])
def test_connections_that_end_amid_the_exchange_of_keys(far, count, tries, after):
    script, starts = count
    far.proxy.left = after
    assert machine.run("login1", script)[:2] == (0, b"done\n")
    assert starts() == 1
    assert tries[0] == 1


def test_one_that_is_refused_each_time(far, count, pauses):
    script, _ = count
    far.proxy.refused = 99
    with pytest.raises(BackendUnavailable, match=r"ssh login1: kex_exchange_identification: "):
        machine.run("login1", script)
    assert (far.proxy.came, pauses) == (5, [1, 2, 4, 8])


def test_what_is_no_passing_fault_is_not_tried_again(far, pauses):
    with pytest.raises(BackendUnavailable, match=r"[Cc]ould not resolve"):
        machine.run("nowhere.invalid", "true")
    key = far.folder / "key"
    hidden = key.rename(far.folder / "key.away")
    try:
        with pytest.raises(BackendUnavailable, match="Permission denied"):
            machine.run("login1", "true")
    finally:
        hidden.rename(key)
    assert pauses == []


@pytest.mark.parametrize("shared", [True, False])
def test_a_script_that_has_begun_is_never_started_again(far, count, pauses, shared):
    """Its connection dies with it, and nothing of its output arrives: only ssh's words tell."""
    script, starts = count
    if shared:
        assert machine.run("login1", "true")[0] == 0
    with pytest.raises(BackendUnavailable):
        machine.run("login1", f"({script}) >&2; kill -9 $PPID; sleep 9")
    assert (starts(), pauses) == (1, [])


def test_a_connection_that_breaks_at_any_byte_starts_a_script_at_most_once(far, count, tries):
    script, starts = count
    before = far.proxy.passed
    assert machine.run("login1", script)[0] == 0
    whole, total = far.proxy.passed - before, 1
    for part in range(1, 12):
        far.close()
        far.proxy.left, earlier = whole * part // 12, starts()
        try:
            machine.run("login1", script)
        except BackendUnavailable:
            wait_for(lambda: far.proxy.left is None)
            total = starts()
            assert total - earlier <= 1
        else:
            total += 1
            assert starts() == total
    assert total > 1
    assert tries, "some of them were to be tried again"


# --- the folder of the sockets: who can reach one there runs commands as the user


@pytest.fixture
def shared(open_place, monkeypatch):  # noqa: F811 - the fixture
    """The folder for temporary files, in which everybody may make what he likes."""
    open_place.chmod(0o1777)
    monkeypatch.setattr(machine.tempfile, "tempdir", str(open_place))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("DEPLOYKIT_HOME", str(open_place / "a state folder of far too long a name"))
    return open_place


def kept():
    """Where connections are kept, if they are."""
    found = [option for option in machine.sharing() if option.startswith("ControlPath=/")]
    return Path(found[0].partition("=")[2]).parent if found else None


def planted(folder):
    """As another user makes it first."""
    place = folder / f"deploykit-ssh-{os.getuid()}"
    shutil.rmtree(place, ignore_errors=True)
    assert as_stranger(lambda: place.mkdir(mode=0o777))
    return place


def test_a_folder_that_another_user_made_first(shared, far, count):
    place = planted(shared)
    script, starts = count
    assert kept() is None
    assert machine.run("login1", script)[:2] == (0, b"done\n")
    assert (starts(), list(place.iterdir())) == (1, [])


@pytest.mark.parametrize("how", ["wide", "link", "file"])
def test_a_folder_that_is_not_closed(shared, how):
    place, mine = shared / f"deploykit-ssh-{os.getuid()}", shared / "mine"
    mine.mkdir(mode=0o700)
    if how == "wide":
        place.mkdir()
        place.chmod(0o755)
    elif how == "link":
        place.symlink_to(mine)
    else:
        place.touch()
    assert kept() is None


def test_the_users_own_runtime_folder_comes_first(shared, monkeypatch):
    runtime = shared / "run"
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    assert kept() == runtime / "deploykit-ssh"
    os.chown(runtime, STRANGER, STRANGER)  # as after `sudo` or `su`
    assert kept() == shared / f"deploykit-ssh-{os.getuid()}"


def test_the_state_folder_is_the_last_resort(shared, monkeypatch, far, count):
    planted(shared)
    monkeypatch.setenv("DEPLOYKIT_HOME", str(shared / "state"))
    assert kept() == shared / "state/ssh"
    assert machine.run("login1", count[0])[0] == 0
    (socket_there,) = kept().iterdir()
    assert len(str(socket_there)) + 17 <= 107
    far.close()


def test_a_path_that_is_too_long_for_a_socket(shared, monkeypatch):
    monkeypatch.setattr(machine.tempfile, "tempdir", str(shared / ("x" * 40)))
    assert kept() is None
