"""Where Slurm's commands run: on this machine, or on a login node over OpenSSH.

ssh is the user's, with the user's own configuration. One connection serves all commands for a
minute after the last (https://man.openbsd.org/ssh_config#ControlMaster).
"""

from __future__ import annotations

import os
import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path

from deploykit import quoting, shell
from deploykit.errors import BackendUnavailable

HERE = "localhost"
"""The place of a job that was sent from this machine."""

_MARK = b"deploykit begins\n"
"""Before it stands what the user's start-up files print."""
_BROKEN = 255
"""ssh's own exit code: https://man.openbsd.org/ssh#EXIT_STATUS."""

_CLEAN = (
    "export TZ=UTC; unset $(env | sed -n "
    "'s/^\\(\\(SQUEUE\\|SACCT\\|SCONTROL\\)_[A-Z0-9_]*\\|SLURM_TIME_FORMAT\\)=.*/\\1/p'); "
)
"""As `states.environment` does here: without the user's own filters and formats."""


def ask(host: str, argv: Sequence[str]) -> shell.Result:
    """Run one of Slurm's commands there."""
    code, out, err = run(host, _CLEAN + f"exec {shlex.join(argv)}")
    return shell.Result(code, out.decode(errors="replace"), err)


def run(host: str, script: str, data: bytes | None = None) -> tuple[int, bytes, str]:
    """Run a script of sh there, with `data` as its standard input: code, output, complaints.

    Raises BackendUnavailable where the connection cannot be had, or breaks.
    """
    code, out, err = shell.raw(argv(host, script), data=data or b"", timeout=300)
    if code == _BROKEN:
        raise BackendUnavailable(
            f"ssh {host}: {err.strip() or 'the connection broke'}",
            hint=f"try `{quoting.command('ssh', '--', host, 'true')}`, then the same command again",
        )
    return code, after_mark(out), err


def argv(host: str, script: str) -> list[str]:
    """Ssh's words for it. The login shell there may be any: it sees one quoted line."""
    line = shlex.join(["sh", "-c", f"echo {_MARK.decode().strip()}; {script}"])
    shared = ["ControlMaster=auto", f"ControlPath={_sockets()}/%C", "ControlPersist=60"]
    options = [word for option in shared for word in ("-o", option)]
    return ["ssh", "-T", *options, "--", host, line]


def after_mark(out: bytes) -> bytes:
    return out.partition(_MARK)[2]


def _sockets() -> Path:
    """A folder of the user's alone, with a short path: that of a socket has 107 letters at most."""
    folder = Path(tempfile.gettempdir(), f"deploykit-ssh-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    info = folder.lstat()
    if info.st_uid != os.getuid() or info.st_mode & 0o77 or folder.is_symlink():
        raise BackendUnavailable(
            f"{folder} is not yours alone, so no connection is kept there", hint="remove it"
        )
    return folder
