"""Hosts in namespaces, each with its own network, name, processes and files, as mpirun requires.

Each host has an address on a bridge, /opt/ml, an sshd that accepts the other hosts' key, and Open
MPI. Requires root, iproute2, openssh-server and openmpi-bin.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from pathlib import Path

from tests.backends.sagemaker.launcher.sagemaker_hosts import BASE, Host

GATEWAY = "10.78.0.254"
"""Address of this computer on the hosts' network, inside `namespaces`."""
_ENTER = Path(__file__).with_name("enter.sh")
_DONE = Path("/tmp/done.algo-1")
"""File by which the launcher signals that mpirun has ended; its path is fixed."""
_SSH = """\
Host *
  IdentityFile /etc/ssh/key
  LogLevel ERROR
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
"""
_SSHD = """\
AuthorizedKeysFile /etc/ssh/key.pub
HostKey /etc/ssh/key
PermitRootLogin prohibit-password
PidFile none
StrictModes no
UsePAM yes
"""
_PAM = """\
auth required pam_permit.so
account required pam_permit.so
session required pam_env.so
"""


@contextlib.contextmanager
def namespaces(folder, count):
    """Hosts algo-1, algo-2 and so on, for `run_on_hosts`, with folders in `folder`."""
    names = [f"algo-{number}" for number in range(1, count + 1)]
    shared = folder / "shared"
    _share(shared, names)
    with contextlib.ExitStack() as stack:
        # not removed: the sshd of another test needs it
        Path("/run/sshd").mkdir(exist_ok=True)
        if not Path(BASE).exists():
            Path(BASE).mkdir(parents=True)
            stack.callback(Path(BASE).rmdir)
        stack.callback(_DONE.unlink, missing_ok=True)
        bridge = f"dk{os.getpid()}"
        _remove_left_over()
        _ip("link", "add", bridge, "type", "bridge")
        stack.callback(_ip, "link", "delete", bridge)
        _ip("address", "add", f"{GATEWAY}/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        yield [
            stack.enter_context(_host(number, name, bridge, folder / name, shared))
            for number, name in enumerate(names, start=1)
        ]


def _remove_left_over():
    """Remove bridges of tests that were killed: they have the address of this one."""
    for path in Path("/sys/class/net").glob("dk*"):
        owner = path.name.removeprefix("dk")
        if owner.isdecimal() and not Path("/proc", owner).exists():
            _ip("link", "delete", path.name)


def _share(folder, names):
    """Write what all hosts share: the host names, and one ssh key."""
    ssh = folder / "ssh"
    ssh.mkdir(parents=True)
    addresses = enumerate(names, start=1)
    lines = ["127.0.0.1 localhost", *(f"{_address(number)} {name}" for number, name in addresses)]
    (folder / "hosts").write_text("\n".join(lines) + "\n")
    (folder / "pam").write_text(_PAM)
    (ssh / "ssh_config").write_text(_SSH)
    (ssh / "sshd_config").write_text(_SSHD)
    keygen = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", ssh / "key"]
    subprocess.run(keygen, check=True)


@contextlib.contextmanager
def _host(number, name, bridge, folder, shared):
    namespace, outside = f"{bridge}n{number}", f"{bridge}v{number}"
    keys = folder / ".ssh"  # paramiko reads it
    keys.mkdir(parents=True)
    shutil.copy(shared / "ssh/key", keys / "id_ed25519")
    _ip("netns", "add", namespace)
    try:
        peer = ("peer", "name", "eth0", "netns", namespace)
        _ip("link", "add", outside, "type", "veth", *peer)
        _ip("link", "set", outside, "master", bridge, "up")
        inside = ("-n", namespace)
        _ip(*inside, "address", "add", f"{_address(number)}/24", "dev", "eth0")
        for interface in ("lo", "eth0"):
            _ip(*inside, "link", "set", interface, "up")
        yield Host(name, folder, BASE, "eth0", _enter(namespace, name, folder, shared))
    finally:
        _ip("netns", "delete", namespace)


def _enter(namespace, name, folder, shared):
    unshared = ("--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc")
    return (
        *("ip", "netns", "exec", namespace, "unshare", *unshared),
        *("sh", str(_ENTER), name, str(folder), str(shared)),
    )


def _address(number):
    return f"10.78.0.{number}"


def _ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True)
