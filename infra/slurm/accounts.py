"""Accounting for the cluster of `cluster.py`: slurmdbd with its own MariaDB.

Standard library only.
"""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import folders

PACKAGES = {
    "slurmdbd": "slurmdbd",
    "mariadbd": "mariadb-server",
    "mariadb-install-db": "mariadb-server",
}
OFF = "AccountingStorageType=accounting_storage/none"
ON = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={port}
AccountingStoragePass={dir}/munge/socket
JobAcctGatherFrequency=30"""
_DBD = """\
AuthType=auth/munge
AuthInfo=socket={dir}/munge/socket
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={port}
SlurmUser={user}
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={sql}
StorageUser=slurm
StoragePass={password}
StorageLoc=slurm
LogFile={dir}/log/slurmdbd.log
PidFile={dir}/run/slurmdbd.pid
"""
_SQL = """\
CREATE DATABASE IF NOT EXISTS slurm;
CREATE USER IF NOT EXISTS slurm@'127.0.0.1';
ALTER USER slurm@'127.0.0.1' IDENTIFIED BY '{password}';
GRANT ALL ON slurm.* TO slurm@'127.0.0.1';
"""


def settings(folder: Path, ports: list[int]) -> str:
    """Lines for slurm.conf. The last two ports are those of slurmdbd and of the database."""
    return ON.format(dir=folder, port=ports[-2])


def write(folder: Path, ports: list[int]) -> None:
    """Write the configuration of slurmdbd, which must be private.

    Other users can connect to the database on loopback, so that each start has a new password.
    """
    user, password = pwd.getpwuid(os.getuid()).pw_name, secrets.token_hex(20)
    values = {"dir": folder, "port": ports[-2], "sql": ports[-1]}
    text = _DBD.format(**values, user=user, password=password)
    folders.write(folder / "slurmdbd.conf", text.encode())
    folders.write(folder / "init.sql", _SQL.format(password=password).encode())


def start(
    folder: Path,
    ports: list[int],
    daemon: Callable[..., None],
    wait: Callable[[str, int], None],
) -> None:
    """Start the database and slurmdbd, and register the cluster with them.

    `daemon(name, *argv)` starts a program; `wait(name, port)` waits until it listens on the port.
    """
    data = folder / "sql"
    if not data.exists():
        program = shutil.which("mariadb-install-db")
        argv = [program, "--no-defaults", f"--datadir={data}", "--skip-test-db"]
        subprocess.run(argv, check=True, capture_output=True)
    files = [f"--datadir={data}", f"--socket={data}/socket", f"--pid-file={folder}/run/sql.pid"]
    network = ["--bind-address=127.0.0.1", f"--port={ports[-1]}", "--skip-log-bin"]
    own = ["--user=root"] if os.getuid() == 0 else []
    init = f"--init-file={folder}/init.sql"
    daemon("mariadbd", "mariadbd", "--no-defaults", *own, *files, *network, init)
    wait("mariadbd", ports[-1])
    daemon("slurmdbd", "slurmdbd", "-D")
    wait("slurmdbd", ports[-2])
    env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    argv = ["sacctmgr", "--immediate", "add", "cluster", "box"]
    subprocess.run(argv, env=env, check=False, capture_output=True)
