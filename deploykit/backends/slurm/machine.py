"""Where Slurm's commands run: on this machine, or on a login node over OpenSSH.

ssh is the user's, with the user's own configuration. One connection serves all commands for a
minute after the last (https://man.openbsd.org/ssh_config#ControlMaster).
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shlex
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from deploykit import paths, quoting, shell
from deploykit.errors import BackendUnavailable, CannotWrite

HERE = "localhost"
"""The place of a job that was sent from this machine."""

_MARK = b"deploykit begins\n"
"""Before it stands what the user's start-up files print."""
_BROKEN = 255
"""ssh's own exit code: https://man.openbsd.org/ssh#EXIT_STATUS."""

_PAUSES = (1.0, 2.0, 4.0, 8.0)
"""Seconds before another try to connect. sshd drops connections while many log in at once
(MaxStartups), and refuses an address for 15 s after several faults (PerSourcePenalties):
https://man.openbsd.org/sshd_config."""
_NOT_HAD = re.compile(
    r"^(kex|ssh)_exchange_identification: |banner exchange|^Connection (closed|reset) by |"
    r"^ssh: connect to host .*: Connection (refused|reset)",
    re.MULTILINE,
)
"""ssh's words for a connection that was refused, or ended; the last but one also later on."""
_LOGGED_IN = "Authenticated to "
_REMARKS = (_LOGGED_IN, "Transferred: sent ", "Bytes per second: sent ")
"""Lines that ssh adds only in verbose mode; users do not see them."""

_LONGEST = 107 - len("/") - 40 - 17
"""Characters of a folder for sockets: what is left of a socket's path without the name, which is
%C of ssh_config, and the ending that ssh gives it while it is made."""

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

    Where the connection is refused or ends before the login, nothing was sent, and it is tried
    again a few times. Raises BackendUnavailable where it cannot be had, or breaks later.
    """
    for pause in (*_PAUSES, None):
        code, out, err = shell.raw(argv(host, script, verbose=True), data=data or b"", timeout=300)
        said = "".join(line for line in err.splitlines(True) if not line.startswith(_REMARKS))
        if code != _BROKEN:
            return code, after_mark(out), said
        if pause is None or not nothing_sent(err):
            break
        _note(host, said, pause)
        time.sleep(pause)
    raise BackendUnavailable(
        f"ssh {host}: {said.strip() or 'the connection broke'}",
        hint=f"try `{quoting.command('ssh', '--', host, 'true')}`, then the same command again",
    )


def nothing_sent(err: str) -> bool:
    """Whether ssh, being verbose, ended before the login, so that no script can have started."""
    return _LOGGED_IN not in err and _NOT_HAD.search(err) is not None


def _note(host: str, said: str, pause: float) -> None:
    """Say, the first time, why it takes longer."""
    if pause == _PAUSES[0]:
        why = said.strip().partition("\n")[0]
        logging.getLogger(__name__).warning("ssh %s: %s; trying again", host, why)


def argv(host: str, script: str, *, verbose: bool = False) -> list[str]:
    """Ssh's words for it. The login shell there may be any: it sees one quoted line."""
    line = shlex.join(["sh", "-c", f"echo {_MARK.decode().strip()}; {script}"])
    chosen = [*sharing(), *(["LogLevel=VERBOSE"] if verbose else [])]
    options = [word for option in chosen for word in ("-o", option)]
    return ["ssh", "-T", *options, "--", host, line]


def sharing() -> list[str]:
    """Options of ssh by which one connection serves all commands, where it can be kept safely."""
    folder = _sockets()
    if folder is None:
        return ["ControlPath=none"]
    return ["ControlMaster=auto", f"ControlPath={folder}/%C", "ControlPersist=60"]


def after_mark(out: bytes) -> bytes:
    return out.partition(_MARK)[2]


def _sockets() -> Path | None:
    """A short path to a folder that only this user can enter or create; None if there is none."""
    for place in _places():
        if len(str(place)) <= _LONGEST:
            with contextlib.suppress(OSError):
                place.mkdir(mode=0o700, exist_ok=True)
                if paths.is_private_folder(place):
                    return place
    return None


def _places() -> Iterator[Path]:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and paths.is_private_folder(Path(runtime)):
        yield Path(runtime, "deploykit-ssh")
    yield Path(tempfile.gettempdir(), f"deploykit-ssh-{os.getuid()}")
    with contextlib.suppress(CannotWrite):
        yield paths.private_folder(paths.state()) / "ssh"
