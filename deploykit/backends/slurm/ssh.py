"""Run commands on a login node through the user's own OpenSSH and its configuration.

One connection serves all commands, and stays open for a minute after the last
(https://man.openbsd.org/ssh_config#ControlMaster).
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

from deploykit.lib import paths, shell
from deploykit.lib.errors import BackendUnavailable, CannotWrite

_MARK = b"deploykit begins\n"
"""Separates the output of the user's start-up files from that of the script."""

_SSH_FAILED = 255
"""The exit code of ssh for its own errors: https://man.openbsd.org/ssh#EXIT_STATUS."""

_TIMEOUT = 300
"""Seconds for one script, including the transfer of its input and output."""

_PAUSES = (1.0, 2.0, 4.0, 8.0)
"""Seconds before each retry of a connection. sshd drops connections while many users log in at
once (MaxStartups), and blocks an address for 15 s after repeated failures (PerSourcePenalties):
https://man.openbsd.org/sshd_config."""

_NOT_CONNECTED = re.compile(
    r"^(kex|ssh)_exchange_identification: |banner exchange|^Connection (closed|reset) by |"
    r"^ssh: connect to host .*: Connection (refused|reset)",
    re.MULTILINE,
)
"""Messages of ssh for a refused or closed connection. `Connection closed by` can also appear after
the login."""

_LOGGED_IN = "Authenticated to "
_VERBOSE_ONLY = (_LOGGED_IN, "Transferred: sent ", "Bytes per second: sent ")
"""Lines that ssh prints only in verbose mode; they are not shown to users."""

_MAX_SOCKET_FOLDER = 107 - len("/") - 40 - 17
"""Longest path of the folder for sockets, in characters. A Unix socket's path has at most 107: the
name is %C of ssh_config (40), with a suffix (17) while ssh creates it."""

_CLEAN_ENVIRONMENT = (
    "export TZ=UTC; unset $(env | sed -n "
    "'s/^\\(\\(SQUEUE\\|SACCT\\|SCONTROL\\)_[A-Z0-9_]*\\|SLURM_TIME_FORMAT\\)=.*/\\1/p'); "
)
"""Does on a login node what `client.query_environment` does here."""


def run_slurm(host: str, argv: Sequence[str]) -> shell.Result:
    """Run one of Slurm's commands on `host`, without the user's filters and formats.

    Raises BackendUnavailable when the connection fails.
    """
    code, out, err = run(host, _CLEAN_ENVIRONMENT + f"exec {shlex.join(argv)}")
    return shell.Result(code, out.decode(errors="replace"), err)


def run(host: str, script: str, data: bytes | None = None) -> tuple[int, bytes, str]:
    """Run a script of sh on `host`, with `data` as its standard input.

    Returns its exit code, standard output and standard error. Retries a connection that is refused
    or closed before the login, because the script cannot have started then. Raises
    BackendUnavailable when no connection is possible, or when it breaks after the login.
    """
    for pause in (*_PAUSES, None):
        code, out, err = shell.raw(argv(host, script), data=data or b"", timeout=_TIMEOUT)
        lines = err.splitlines(keepends=True)
        shown = "".join(line for line in lines if not line.startswith(_VERBOSE_ONLY))
        if code != _SSH_FAILED:
            return code, _after_mark(out), shown
        if pause is None or not _failed_before_login(err):
            break
        _warn_of_retry(host, shown, pause)
        time.sleep(pause)
    raise BackendUnavailable(
        f"ssh {host}: {shown.strip() or 'the connection was lost'}",
        hint=f"try `{shell.command('ssh', '--', host, 'true')}`, then the same command again",
    )


def _failed_before_login(err: str) -> bool:
    """Whether ssh, in verbose mode, failed before the login, so that no script has started."""
    return _LOGGED_IN not in err and _NOT_CONNECTED.search(err) is not None


def _warn_of_retry(host: str, err: str, pause: float) -> None:
    """Log the reason of the first retry."""
    if pause == _PAUSES[0]:
        reason = err.strip().partition("\n")[0]
        logging.getLogger(__name__).warning("ssh %s: %s; retrying", host, reason)


def argv(host: str, script: str) -> list[str]:
    """The verbose ssh command for a script of sh, which any login shell gets as one quoted line."""
    line = shlex.join(["sh", "-c", f"echo {_MARK.decode().strip()}; {script}"])
    settings = [*connection_options(), "LogLevel=VERBOSE"]
    options = [word for setting in settings for word in ("-o", setting)]
    return ["ssh", "-T", *options, "--", host, line]


def attached(host: str, script: str, *, terminal: bool) -> list[str]:
    """The ssh command for a script of sh whose input and output are those of this process.

    `terminal` asks for one there, too.
    """
    line = shlex.join(["sh", "-c", _CLEAN_ENVIRONMENT + script])
    settings = [*connection_options(), "LogLevel=ERROR"]
    options = [word for setting in settings for word in ("-o", setting)]
    return ["ssh", "-t" if terminal else "-T", *options, "--", host, line]


def connection_options() -> list[str]:
    """Options of ssh that share one connection, or that turn sharing off where it is not safe."""
    folder = _socket_folder()
    if folder is None:
        return ["ControlPath=none"]
    return ["ControlMaster=auto", f"ControlPath={folder}/%C", "ControlPersist=60"]


def _after_mark(out: bytes) -> bytes:
    """The output of the script, without that of the user's start-up files."""
    return out.partition(_MARK)[2]


def _socket_folder() -> Path | None:
    """A folder with a short path that only this user can enter; None where there is none."""
    for folder in _socket_folder_candidates():
        if len(str(folder)) <= _MAX_SOCKET_FOLDER:
            with contextlib.suppress(OSError):
                folder.mkdir(mode=0o700, exist_ok=True)
                if paths.is_private_folder(folder):
                    return folder
    return None


def _socket_folder_candidates() -> Iterator[Path]:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and paths.is_private_folder(Path(runtime)):
        yield Path(runtime, "deploykit-ssh")
    yield Path(tempfile.gettempdir(), f"deploykit-ssh-{os.getuid()}")
    with contextlib.suppress(CannotWrite):
        yield paths.private_folder(paths.state()) / "ssh"
