"""A login node: a real sshd on a high port, with its own configuration and keys.

If the tests run as root, and other users can run a Python with PyTorch, the login is that of a
temporary user; otherwise it is that of the user who runs the tests. A proxy in front of sshd can
refuse connections, or break one after a number of bytes.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pwd
import select
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

from deploykit.backends.slurm import remote
from tests import programs
from tests.backends.slurm.slurm_helpers import wait_for

SSHD = programs.find("sshd")
CONFIG = """\
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/keys/%u
PidFile {folder}/sshd.pid
StrictModes no
UsePAM no
PasswordAuthentication no
MaxStartups {startups}
MaxSessions 100
SetEnv SLURM_CONF={conf}
"""
CLIENT = """\
Host login1
  HostName 127.0.0.1
  Port {port}
  User {user}
  IdentityFile {folder}/key
  UserKnownHostsFile {folder}/known
  StrictHostKeyChecking accept-new
  IdentitiesOnly yes
"""


@dataclass
class LoginNode:
    """The folder, the user and the proxy of the node."""

    folder: Path
    user: str
    proxy: Proxy

    @property
    def settings(self):
        """Arguments for the command line that set the host and what it needs."""
        section = {"host": "login1", "folder": f"{self.folder}/home/runs of {self.user}"}
        python, path = program() or (sys.executable, None)
        more = [f"slurm.python={python}", *([f"env.PYTHONPATH={path}"] if path else [])]
        words = [*(f"slurm.{name}={value}" for name, value in section.items()), *more]
        return [word for setting in words for word in ("--set", setting)]

    def use(self, monkeypatch):
        """Have `ssh login1` reach the node, with a short path for the socket."""
        runtime = self.folder / "runtime"
        runtime.mkdir(exist_ok=True)
        runtime.chmod(0o700)
        monkeypatch.setenv("PATH", f"{self.folder}/bin:{os.environ['PATH']}")
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))

    def close(self):
        """Close the shared connection, as ssh does after a minute."""
        argv = ["ssh", *remote.connection_options("login1"), "-O", "exit", "login1"]
        subprocess.run(argv, capture_output=True, check=False)


class Proxy(threading.Thread):
    """Forwards bytes to `port`. Attributes control and count what happens.

    `left`: bytes until the connection breaks, or None. `refused`: connections that are still to be
    refused. `passed`, `broken`, `came`: counts of bytes, breaks and connections.
    """

    def __init__(self, port):
        super().__init__(daemon=True)
        self.target, self.passed, self.left, self.broken = port, 0, None, 0
        self.refused, self.came = 0, 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]

    def run(self):
        with contextlib.suppress(OSError):
            while True:
                near, _ = self.listener.accept()
                self.came += 1
                if self.refused:
                    self.refused -= 1
                    near.close()
                    continue
                threading.Thread(target=self.serve, args=(near,), daemon=True).start()

    def serve(self, near):
        with (
            contextlib.suppress(OSError),
            near,
            socket.create_connection(("127.0.0.1", self.target)) as far,
        ):
            other = {near: far, far: near}
            while True:
                for end in select.select([near, far], [], [])[0]:
                    data = end.recv(1024)
                    if not data or not self.passes(len(data)):
                        return
                    other[end].sendall(data)

    def passes(self, count):
        self.passed += count
        if self.left is None:
            return True
        self.left -= count
        if self.left > 0:
            return True
        self.left, self.broken = None, self.broken + 1
        return False


@functools.cache
def program():
    """A Python with PyTorch that other users can run, and its PYTHONPATH; None if there is none."""
    packages, system = Path(sysconfig.get_path("purelib")), "/usr/bin/python3"
    if not open_to_all(packages):
        return None
    if open_to_all(Path(sys.executable).resolve()):
        return sys.executable, None
    argv = [system, "-c", "import sys; print(*sys.version_info[:2])"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    same = done.stdout.split() == [str(part) for part in sys.version_info[:2]]
    return (system, packages) if same else None


def open_to_all(path):
    return all(folder.stat().st_mode & 0o1 for folder in (path, *path.parents))


@contextlib.contextmanager
def login_user(home):
    """The name of the user who logs in: a temporary one if root can create it and it is useful."""
    if os.getuid() or program() is None:
        yield pwd.getpwuid(os.getuid()).pw_name
        return
    name = f"dk{os.getpid()}"
    home.mkdir()
    subprocess.run(["useradd", "-M", "-p", "*", "-d", home, "-s", "/bin/bash", name], check=True)
    shutil.chown(home, name)
    try:
        yield name
    finally:
        subprocess.run(["userdel", "--force", name], check=False, capture_output=True)


@contextlib.contextmanager
def login_node(conf, startups="100"):
    """Start the node, with `conf` as SLURM_CONF. `ssh login1` reaches it if `bin` is first on PATH.

    `startups` is the MaxStartups of sshd: its limit of connections before their login.
    """
    folder = Path(tempfile.mkdtemp(prefix="ssh-"))
    folder.chmod(0o755)
    (folder / "keys").mkdir()
    for key in ("host_key", "key"):
        argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key]
        subprocess.run(argv, check=True)
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        user = stack.enter_context(login_user(folder / "home"))
        shutil.copy(folder / "key.pub", folder / "keys" / user)
        (folder / "home").mkdir(exist_ok=True)
        (folder / "home" / ".bashrc").write_text("echo Welcome, your job 5 is still there\n")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        settings = CONFIG.format(port=port, folder=folder, conf=conf, startups=startups)
        (folder / "sshd.conf").write_text(settings)
        if not os.getuid():
            Path("/run/sshd").mkdir(exist_ok=True)
        argv = [SSHD, "-D", "-e", "-f", folder / "sshd.conf"]
        log = stack.enter_context((folder / "sshd.log").open("w"))
        sshd = stack.enter_context(subprocess.Popen(argv, stderr=log, stdin=subprocess.DEVNULL))
        stack.callback(sshd.terminate)
        wait_for(lambda: sshd.poll() or "Server listening" in (folder / "sshd.log").read_text())
        assert sshd.poll() is None, (folder / "sshd.log").read_text()
        proxy = Proxy(port)
        proxy.start()
        stack.callback(proxy.listener.close)
        (folder / "config").write_text(CLIENT.format(port=proxy.port, user=user, folder=folder))
        (folder / "bin").mkdir()
        ssh = folder / "bin" / "ssh"
        ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/config "$@"\n')
        ssh.chmod(0o755)
        yield LoginNode(folder, user, proxy)
