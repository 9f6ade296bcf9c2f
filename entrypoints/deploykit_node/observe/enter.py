"""A command beside a rank that runs: on its node, in its working folder, with its environment.

    launch.py --enter RUN_FOLDER RANK -- [COMMAND ARGS...]

Without a command a shell; with the command ``--debugger`` a connection to the debugger that the
rank waits for, on standard input and output. Ends as the command ends; 69 where the rank does not
run here.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from deploykit_node import cluster
from deploykit_node.cluster import Environ
from deploykit_node.observe import debugger, faults, processes

_UNAVAILABLE = 69
"""EX_UNAVAILABLE of sysexits.h."""
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126
"""What shells exit with: https://pubs.opengroup.org/onlinepubs/9799919799/utilities/V3_chap02.html"""
_OURS = (*faults.VARIABLES, "DEPLOYKIT_PYTHONPATH")
"""What the launcher adds for its hook (faults.py)."""
_DEBUGGER = ["--debugger"]


def main(argv: Sequence[str], environ: Environ) -> NoReturn:
    """Become the command."""
    folder, number, _, *command = argv
    here = processes.here({**environ, "DEPLOYKIT_RUN_DIR": folder})
    record = here.get(int(number))
    try:
        if record is None:
            raise ProcessLookupError
        env, cwd = _of_process(record["pid"])
    except (OSError, ValueError):
        name = cluster.host_name(environ)
        _fail(_UNAVAILABLE, f"rank {number} does not run on {name} any more")
    if command == _DEBUGGER:
        debugger.relay(env)
        sys.exit(0)
    if "TERM" in environ:
        env["TERM"] = environ["TERM"]
    _become(command or _shell(env), env, cwd)


def _of_process(pid: int) -> tuple[dict[str, str], str]:
    """The environment and the working folder of a process. Raises OSError where it has ended.

    https://man7.org/linux/man-pages/man5/proc_pid_environ.5.html
    """
    entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    pairs = (os.fsdecode(entry).partition("=") for entry in entries if b"=" in entry)
    env = _without_hook({name: value for name, _, value in pairs})
    return env, str(Path(f"/proc/{pid}/cwd").readlink())


def _without_hook(env: dict[str, str]) -> dict[str, str]:
    """The environment as it was before the launcher added its hook."""
    if any(name in env for name in faults.VARIABLES):
        own = env.get("DEPLOYKIT_PYTHONPATH")
        env.pop("PYTHONPATH", None)
        env |= {} if own is None else {"PYTHONPATH": own}
    return {name: value for name, value in env.items() if name not in _OURS}


def _shell(env: Environ) -> list[str]:
    own = env.get("SHELL", "")
    return [own if shutil.which(own) else shutil.which("bash") or "/bin/sh", "-i"]


def _become(command: Sequence[str], env: dict[str, str], cwd: str) -> NoReturn:
    try:
        os.chdir(cwd)
        os.execvpe(command[0], list(command), env)  # noqa: S606 - no shell is the point
    except FileNotFoundError:
        _fail(_NOT_FOUND, f"{command[0]}: not found on this node")
    except OSError as error:
        _fail(_NOT_EXECUTABLE, f"{command[0]}: {error.strerror}")


def _fail(code: int, text: str) -> NoReturn:
    print(f"deploykit: {text}", file=sys.stderr, flush=True)
    sys.exit(code)
