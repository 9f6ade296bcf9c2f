"""Hosts with networks, names, processes and files of their own, as mpirun needs them.

Each is a set of namespaces with an address on a bridge, /opt/ml, an sshd that takes the other
hosts' key, and Open MPI. Needs root, iproute2, openssh-server and openmpi-bin.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from pathlib import Path

from sagemaker_hosts import BASE, Host

GATEWAY = "10.78.0.254"
"""This machine's address on the hosts' network, while `machines` is open."""
_ENTER = Path(__file__).with_name("enter.sh")
_DONE = Path("/tmp/done.algo-1")
"""The launcher's word that mpirun has ended: a constant of its own."""
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


def missing():
    """What this machine lacks, in words; empty where nothing."""
    programs = [name for name in ("ip", "mpirun", "sshd", "unshare") if shutil.which(name) is None]
    return [*programs, *(["root"] if os.geteuid() else [])]


@contextlib.contextmanager
def machines(folder, count):
    """Hosts algo-1, algo-2 and so on, for `run_on_hosts`, with folders in `folder`."""
    names = [f"algo-{number}" for number in range(1, count + 1)]
    shared = folder / "shared"
    _share(shared, names)
    with contextlib.ExitStack() as stack:
        # it stays: another test's sshd takes no connection without it
        Path("/run/sshd").mkdir(exist_ok=True)
        if not Path(BASE).exists():
            Path(BASE).mkdir(parents=True)
            stack.callback(Path(BASE).rmdir)
        stack.callback(_DONE.unlink, missing_ok=True)
        bridge = f"dk{os.getpid()}"
        _ip("link", "add", bridge, "type", "bridge")
        stack.callback(_ip, "link", "delete", bridge)
        _ip("address", "add", f"{GATEWAY}/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        yield [
            stack.enter_context(_machine(number, name, bridge, folder / name, shared))
            for number, name in enumerate(names, start=1)
        ]


def _share(folder, names):
    """What all machines have alike: who is who, and one key for all."""
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
def _machine(number, name, bridge, folder, shared):
    namespace, outside = f"{bridge}n{number}", f"{bridge}v{number}"
    keys = folder / ".ssh"  # where paramiko looks for them
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
    apart = ("--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc")
    return (
        *("ip", "netns", "exec", namespace, "unshare", *apart),
        *("sh", str(_ENTER), name, str(folder), str(shared)),
    )


def _address(number):
    return f"10.78.0.{number}"


def _ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True)
