#!/usr/bin/env python3
"""Run a real Slurm cluster on one machine, for tests and experiments.

    python3 infra/slurm/cluster.py start /tmp/box
    eval "$(python3 infra/slurm/cluster.py env /tmp/box)"
    sinfo
    python3 infra/slurm/cluster.py stop /tmp/box

Each node is a slurmd on 127.0.0.1 with simulated GPUs (links to /dev/null). The cluster has its own
munge key and socket, and short timers. Daemons and jobs run as the user who starts it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import accounts
import folders
import processes

PACKAGES = {
    "munged": "munge",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sinfo": "slurm-client",
}
SBIN = "/usr/sbin:/sbin"
"""The folders of the daemons, which are not on every user's PATH."""
PORTS = range(20000, 32000)
"""Below the ephemeral range, so that no outgoing connection can use one."""
MAX_SOCKET_PATH = 107
ATTEMPTS = 3
TIMEOUT = 300.0
"""Seconds to wait for a daemon to start, or for processes to end."""

CGROUP_CONF = "CgroupPlugin=cgroup/v1\nConstrainCores=no\nConstrainRAMSpace=no\n"


class ClusterError(Exception):
    """An error that the user can resolve."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    options = _parser().parse_args(argv)
    folder = Path(options.dir).expanduser().absolute()
    try:
        if os.path.lexists(folder):
            folders.check(folder)
        return int(options.do(folder, options))
    except (ClusterError, folders.UntrustedFolder) as error:
        print(f"cluster.py: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Run a real Slurm cluster on one machine.",
        epilog='To use it in a shell: eval "$(cluster.py env DIR)"; sinfo',
    )
    verbs = parser.add_subparsers(required=True, metavar="start|stop|status|env")
    for do, help_text in (
        (start, "start the cluster in DIR, unless it is running"),
        (stop, "stop the cluster and all its jobs; DIR and its logs are kept"),
        (status, "print each node and its state; exit code 3 when the cluster is down"),
        (env, "print the shell line that makes Slurm's commands use this cluster"),
    ):
        verb = verbs.add_parser(do.__name__, help=help_text, description=help_text)
        verb.add_argument(
            "dir",
            metavar="DIR",
            help="folder for configuration, state and logs; it is made private (mode 0700)",
        )
        verb.set_defaults(do=do)
        if do is start:
            _add_size_arguments(verb)
    return parser


def _add_size_arguments(verb: argparse.ArgumentParser) -> None:
    for name, default, help_text in (
        ("nodes", 4, "number of nodes"),
        ("cpus", 8, "CPUs per node, as seen by Slurm"),
        ("memory", 8000, "memory per node in MiB, as seen by Slurm"),
        ("gpus-per-node", 2, "simulated GPUs per node"),
        ("min-job-age", 3600, "how long the controller keeps a finished job, in seconds"),
        ("accounting", 0, "set to 1 to run slurmdbd; requires slurmdbd and mariadb-server"),
    ):
        verb.add_argument(
            f"--{name}",
            type=int,
            default=default,
            metavar="N",
            help=f"{help_text} (default {default})",
        )


def start(folder: Path, options: argparse.Namespace) -> int:
    """Start the cluster and wait until all its nodes are idle. Raises ClusterError."""
    _check(folder, options)
    names = ("nodes", "cpus", "memory", "gpus_per_node", "min_job_age", "accounting")
    size = {name: getattr(options, name) for name in names}
    if folders.take(folder):
        print(f"{folder}: was accessible to other users; its mode is now 0700")
    with folders.locked(folder / "lock"):
        record = _read_record(folder)
        if _running(record):
            if record["size"] != size:
                raise ClusterError(
                    f"{folder} is already running with {record['size']}; stop it first"
                )
            print(f"{folder}: already running")
            return 0
        _end(folder, record)
        began = time.monotonic()
        _launch(folder, size)
    print(f"{folder}: {size['nodes']} nodes idle after {time.monotonic() - began:.2f} s")
    print(f"export SLURM_CONF={shlex.quote(str(_conf(folder)))}")
    return 0


def stop(folder: Path, _: argparse.Namespace) -> int:
    """Stop the cluster and all its jobs."""
    if not folder.is_dir():
        print(f"{folder}: no cluster")
        return 0
    with folders.locked(folder / "lock"):
        _end(folder, _read_record(folder))
    print(f"{folder}: stopped")
    return 0


def status(folder: Path, _: argparse.Namespace) -> int:
    """Print each node; return 3 when the cluster is down."""
    if not _running(_read_record(folder)):
        print(f"{folder}: down")
        return 3
    print("\n".join(_sinfo(folder, "%N %T %c CPUs %m MiB %G")))
    return 0


def env(folder: Path, _: argparse.Namespace) -> int:
    """Print the line for `eval`. Raises ClusterError when the cluster is down."""
    if not _running(_read_record(folder)):
        raise ClusterError(f"no cluster is running in {folder}; start it first")
    print(f"export SLURM_CONF={shlex.quote(str(_conf(folder)))}")
    return 0


# --- starting


def _check(folder: Path, options: argparse.Namespace) -> None:
    wanted = PACKAGES | (accounts.PACKAGES if options.accounting else {})
    missing = [program for program in wanted if _program(program) is None]
    if missing:
        packages = " ".join(sorted({wanted[program] for program in missing}))
        raise ClusterError(
            f"not installed: {', '.join(missing)}. On Debian or Ubuntu: "
            f"apt-get install --no-install-recommends {packages}"
        )
    step = folder / "spool" / "n999" / "n999_99999999.4294967291"  # the socket of slurmstepd
    if len(str(step)) > MAX_SOCKET_PATH or any(c in str(folder) for c in " ,%\\'\"#="):
        raise ClusterError(
            f"{folder} cannot be used: the path of a Unix socket is limited to {MAX_SOCKET_PATH} "
            "characters, and Slurm does not accept spaces, quotes or any of , % # = \\ in a path. "
            "Choose a short, plain path"
        )
    if options.nodes < 1 or options.cpus < 1 or options.gpus_per_node < 0:
        raise ClusterError("--nodes and --cpus must be at least 1, --gpus-per-node at least 0")


def _launch(folder: Path, size: dict[str, int]) -> None:
    """Start all daemons; choose other ports if one is taken in the meantime."""
    for attempt in range(ATTEMPTS):
        ports = _free_ports(size["nodes"] + (3 if size["accounting"] else 1))
        _write_files(folder, size, ports)
        try:
            _start_daemons(folder, size, ports)
        except ClusterError:
            _end(folder, _read_record(folder))
            if attempt + 1 == ATTEMPTS:
                raise
        else:
            return


def _start_daemons(folder: Path, size: dict[str, int], ports: list[int]) -> None:
    pids: dict[str, list[int]] = {}

    def daemon(name: str, *argv: str) -> None:
        pids[name] = _spawn(folder, name, argv)
        record = {"size": size, "pids": pids}
        (folder / "cluster.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

    munge = folder / "munge"
    files = {"key-file": "key", "log-file": "log", "pid-file": "pid", "seed-file": "seed"}
    options = [f"--{option}={munge / name}" for option, name in files.items()]
    daemon("munged", "munged", "-F", "--force", f"--socket={_socket(folder)}", *options)
    _wait(folder, "munged", lambda: _socket(folder).exists(), pids)
    if size["accounting"]:
        accounts.start(
            folder,
            ports,
            daemon,
            lambda name, port: _wait(folder, name, lambda: _listens(port), pids),
        )
    daemon("slurmctld", "slurmctld", "-D", "-c", "-f", str(_conf(folder)))
    # a slurmd that starts before its controller listens retries after a second
    _wait(folder, "slurmctld", lambda: _listens(ports[0]), pids)
    for number in range(1, size["nodes"] + 1):
        daemon(f"n{number}", "slurmd", "-D", "-N", f"n{number}", "-f", str(_conf(folder)))
    idle = ["idle"] * size["nodes"]
    _wait(folder, "sinfo", lambda: _sinfo(folder, "%T") == idle, pids)


def _spawn(folder: Path, name: str, argv: Sequence[str]) -> list[int]:
    """Start a daemon; return its process id and start time, which identify it uniquely."""
    program = _program(argv[0])
    assert program is not None  # noqa: S101 - _check has verified it
    with (folder / "log" / f"{name}.out").open("ab") as log:
        process = subprocess.Popen(
            [program, *argv[1:]],
            cwd=folder,
            env={**os.environ, "SLURM_CONF": str(_conf(folder))},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    return [process.pid, processes.started(process.pid) or 0]


def _write_files(folder: Path, size: dict[str, int], ports: list[int]) -> None:
    for name in ("munge", "state", "spool", "run", "log", "dev"):
        (folder / name).mkdir(exist_ok=True)
    (folder / "munge").chmod(0o700)  # access to the socket allows submitting jobs
    folders.write(folder / "munge" / "key", secrets.token_bytes(64))
    for number in range(size["gpus_per_node"]):
        # a plain file works, with an error in the log; Count= without a file does not
        link = folder / "dev" / f"gpu{number}"
        link.unlink(missing_ok=True)
        link.symlink_to(os.devnull)
    template = Path(__file__).with_name("slurm.conf.in").read_text(encoding="utf-8")
    text = template.format(
        dir=folder,
        host=socket.gethostname().split(".")[0],
        user=_user(),
        ports=ports,
        node_lines="\n".join(_node_lines(size, ports)),
        accounts=accounts.settings(folder, ports) if size["accounting"] else accounts.OFF,
        **size,
    )
    _conf(folder).write_text(text, encoding="utf-8")
    if size["accounting"]:
        accounts.write(folder, ports)
    (folder / "gres.conf").write_text(_gres(folder, size), encoding="utf-8")
    (folder / "cgroup.conf").write_text(CGROUP_CONF, encoding="utf-8")


def _node_lines(size: dict[str, int], ports: list[int]) -> Iterator[str]:
    host = socket.gethostname().split(".")[0]
    gres = f" Gres=gpu:{size['gpus_per_node']}" if size["gpus_per_node"] else ""
    for number, port in enumerate(ports[1 : size["nodes"] + 1], start=1):
        yield (
            f"NodeName=n{number} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} "
            f"CPUs={size['cpus']} RealMemory={size['memory']}{gres}"
        )


def _gres(folder: Path, size: dict[str, int]) -> str:
    if not size["gpus_per_node"]:
        return ""
    return f"Name=gpu File={folder}/dev/gpu[0-{size['gpus_per_node'] - 1}]\n"


def _free_ports(count: int) -> list[int]:
    """`count` ports without a listener, searched from a random one upwards."""
    begin = secrets.randbelow(len(PORTS))
    free: list[int] = []
    for step in range(len(PORTS)):
        port = PORTS[(begin + step) % len(PORTS)]
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            free.append(port)
        if len(free) == count:
            return free
    raise ClusterError(f"fewer than {count} ports are free in {PORTS.start}-{PORTS.stop}")


def _wait(folder: Path, name: str, ready: Callable[[], bool], pids: dict[str, list[int]]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not ready():
        dead = [daemon for daemon, (pid, born) in pids.items() if not processes.alive(pid, born)]
        if dead or time.monotonic() > deadline:
            what = f"{dead[0]} exited" if dead else f"no answer after {TIMEOUT:g} s"
            raise ClusterError(
                f"the cluster did not start ({name}: {what})\n{_log_tails(folder, dead)}"
            )
        time.sleep(0.02)


def _log_tails(folder: Path, daemons: Sequence[str]) -> str:
    """The last lines of the logs of `daemons`, or of the controller."""
    names = {"munged": "munged.out", "slurmctld": "slurmctld.log"}
    chosen = [names.get(daemon, f"slurmd.{daemon}.log") for daemon in daemons]
    lines = [f"logs: {folder / 'log'}"]
    for name in chosen or ["slurmctld.log"]:
        with contextlib.suppress(FileNotFoundError):
            text = (folder / "log" / name).read_text(encoding="utf-8", errors="replace")
            lines += [f"  {name}: {line}" for line in text.splitlines()[-5:]]
    return "\n".join(lines)


# --- stopping


def _end(folder: Path, record: dict[str, Any]) -> None:
    """End the daemons in `record` and every process of a job. Raises ClusterError if one stays."""
    pids = [pid for pid, born in record.get("pids", {}).values() if processes.alive(pid, born)]
    for pid in pids:
        processes.send(pid, signal.SIGTERM)
    if not processes.gone(pids, 5):
        for pid in pids:
            processes.send(pid, signal.SIGKILL)
    # slurmstepd outlives its slurmd by design, and a job may ignore SIGTERM
    jobs = processes.of_jobs(_conf(folder))
    for pid in jobs:
        processes.send(pid, signal.SIGKILL)
    if not processes.gone([*pids, *jobs], TIMEOUT):
        raise ClusterError(f"these processes did not exit: {[*pids, *jobs]}")
    (folder / "cluster.json").unlink(missing_ok=True)
    _socket(folder).unlink(missing_ok=True)


# --- helpers


def _conf(folder: Path) -> Path:
    return folder / "slurm.conf"


def _socket(folder: Path) -> Path:
    return folder / "munge" / "socket"


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:{SBIN}")


def _user() -> str:
    import pwd

    return pwd.getpwuid(os.getuid()).pw_name


def _read_record(folder: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((folder / "cluster.json").read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError):
        return {}


def _running(record: dict[str, Any]) -> bool:
    pids = record.get("pids", {})
    return bool(pids) and all(processes.alive(pid, born) for pid, born in pids.values())


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _sinfo(folder: Path, layout: str) -> list[str]:
    done = subprocess.run(
        ["sinfo", "--noheader", "--Node", "--partition=main", f"--format={layout}"],
        env={**os.environ, "SLURM_CONF": str(_conf(folder))},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.split("\n")[:-1]


if __name__ == "__main__":
    sys.exit(main())
