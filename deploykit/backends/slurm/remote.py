"""Login nodes: commands over the user's own OpenSSH, and runs that are submitted there.

One connection serves all commands, and stays open for a minute after the last
(https://man.openbsd.org/ssh_config#ControlMaster). Every step of a submit can be repeated, and a
broken connection leaves a step either done or not done. The script that calls sbatch holds a lock
on the login node, so that a later query waits for its answer.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import os
import re
import shlex
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from deploykit.backends import base as backend
from deploykit.bundle import archive as bundles
from deploykit.job.decode import whole
from deploykit.job.model import Handle, Plan
from deploykit.lib import paths, shell
from deploykit.lib.errors import BackendUnavailable, CannotWrite, NotPermitted, TryAgain
from deploykit.observe import logfiles

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
"""Does on a login node what `commands.query_environment` does here."""


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


_GROWING = (*logfiles.ALL, "exit_records/history-*.jsonl")
"""Patterns of files in a run's folder that only grow: logs, also of a job array, and usage."""
_RECORD = "remote.json"
_SCRIPT = "plan.sh"
_MAX_LOG = 1 << 23
"""Bytes of one log that one call fetches."""
_MAX_LOGS = 1 << 26
"""Bytes of all logs that one call fetches."""
_GROWN = re.compile(
    r"(tasks/[0-9]{1,9}/)?logs/[^/]{1,200}\.log|exit_records/history-[0-9]{1,9}\.jsonl"
)
_EXIT_RECORD = re.compile(r"(tasks/[0-9]{1,9}/)?exit_records/[\w-][\w.-]{0,200}", re.ASCII)
"""The only file names that an answer of a login node may create on this machine."""
_SHA256 = "sha256sum | cut -c1-64"
_BUSY = 75
_FOREIGN_OWNER = 73
"""Exit codes of our own scripts: the lock is held, the folder belongs to another user."""
_NARROWED = "it was accessible to other users; its mode is now 0700"
_ENTER = (
    "umask 077; mkdir -p {folder} && cd {folder} && {{ [ -O . ] || exit 73; }} && "
    f'case "$(stat -c %a .)" in *00) ;; *) chmod go= . && echo "{_NARROWED}" >&2;; esac'
)
"""Creates and enters deploykit's folder on the login node, which is private to its user."""


@dataclass(frozen=True)
class RemoteFolder:
    """A run's folder on a login node."""

    host: str
    folder: str


def recorded_folder(folder: Path) -> RemoteFolder | None:
    """The run's folder on its login node; None where the run has no host or was never submitted."""
    try:
        return RemoteFolder(**json.loads((folder / _RECORD).read_text()))
    except FileNotFoundError:
        return None


def remains(folder: Path) -> Iterator[tuple[str, str]]:
    """The run's folder on its login node, and the command that deletes it."""
    remote_folder = recorded_folder(folder)
    if remote_folder is not None:
        remove = shell.command("rm", "-r", "--", remote_folder.folder)
        yield (
            f"{remote_folder.host}:{remote_folder.folder}",
            shell.command("ssh", "--", remote_folder.host, remove),
        )


def deliver(plan: Plan, local: Path) -> RemoteFolder:
    """Copy the bundle, unless it is there already, unpack it for the run, and copy the script.

    Where to is recorded first in `local`, the run's folder on this machine, for a submit that is
    interrupted. Raises BackendUnavailable, CannotWrite, NotPermitted or TryAgain when a step fails.
    """
    home = plan.options.home
    remote = RemoteFolder(plan.options.host, str(plan.options.run_folder(plan.run)))
    paths.write(local / _RECORD, json.dumps(asdict(remote)) + "\n")
    archive = f"bundles/{plan.bundle.hash}.tar.gz"
    folder = _relative(remote, home)
    folders = " ".join(shlex.quote(f"{folder}/{name}") for name in backend.FOLDERS)
    # the name proves nothing: the hash is that of the uncompressed archive
    same = f'[ "$(gzip -dc {archive} | {_SHA256})" = {plan.bundle.hash} ]'
    good = f"[ -O {archive} ] && gzip -tq {archive} && {same}"
    is_there = _do(remote.host, home, f"mkdir -p bundles {folders}; if {good}; then echo yes; fi")
    if not is_there:
        _upload(remote.host, home, archive, bundles.store(plan.bundle).read_bytes())
    # `source` gets its name last, so one that exists is complete
    tar = f"tar --no-same-permissions -xzf {archive} -C {folder}/new"
    unpack = f"{tar} && mv {folder}/new {folder}/source"
    fresh = f"rm -rf {folder}/new; mkdir {folder}/new && {unpack}"
    # other nodes see changes of a file at once if the file exists already
    then = (
        f"touch {folder}/rendezvous.json {folder}/sending; [ -d {folder}/source ] || {{ {fresh}; }}"
    )
    _upload(remote.host, home, f"{folder}/{_SCRIPT}", plan.text.encode(), then)
    return remote


def sbatch(remote: RemoteFolder, kept: Iterable[str]) -> tuple[int, bytes, str]:
    """Submit the script there; a repeated call returns the answer of the first that succeeded.

    Of the variables that give sbatch options, only `kept` stay set. Returns the exit code, standard
    output and standard error. Raises BackendUnavailable when the connection fails, in which case
    the job may be queued.
    """
    names = f"env | sed -n 's/^\\(SBATCH_[A-Z_]*\\)=.*/\\1/p' | grep -vxE '{'|'.join(kept)}'"
    # the job inherits the umask of sbatch, which must be the user's own
    fresh = f"(umask 077; : > job.new); sbatch {_SCRIPT} > job.new && mv job.new job || exit 1"
    once = f"[ -s job ] || {{ {fresh}; }}; cat job"
    script = (
        f"cd {shlex.quote(remote.folder)} && unset $({names}); "
        f"flock -w 60 sending sh -c {shlex.quote(once)}"
    )
    return run(remote.host, script)


def find_job(remote: RemoteFolder) -> str | None:
    """The id of the job that was submitted there, or that has started the run; None without one.

    Raises BackendUnavailable when the connection fails or a submit holds the lock.
    """
    script = (
        f"cd {shlex.quote(remote.folder)} 2>/dev/null || exit 0; exec 9>sending; "
        f"flock -w 60 9 || exit {_BUSY}; cat job 2>/dev/null || readlink claim; exit 0"
    )
    code, out, err = run(remote.host, script)
    if code:
        raise BackendUnavailable(f"{remote.host}: {err.strip() or 'a submit is in progress there'}")
    return job_id(out)


def job_id(out: bytes) -> str | None:
    """The id in what sbatch printed (``Submitted batch job 42``) or in a claim (``42``)."""
    match = re.search(rb"(?<![0-9])[0-9]{1,18}(?![0-9])", out)
    return match[0].decode() if match else None


def fetch_exit_records(host: str, runs: Sequence[tuple[Handle, RemoteFolder]]) -> None:
    """Copy the exit records and claims of these runs and their tasks to this machine, in one call.

    Raises BackendUnavailable when the connection fails.
    """
    patterns = "exit_records/*.json tasks/*/exit_records/*.json"  # files of one line each
    show = (
        'cd "$1" 2>/dev/null && { printf "\\t%s\\n" "$1"; '
        f"grep -sH '' {patterns}; [ ! -L claim ] || echo \"claim:$(readlink claim)\"; }}"
    )
    folders = " ".join(shlex.quote(remote.folder) for _, remote in runs)
    script = f'show() {{ {show}; }}; for run in {folders}; do (show "$run"); done; exit 0'
    local_by_remote = {remote.folder: Path(handle.folder) for handle, remote in runs}
    files: dict[str, dict[str, str]] = {folder: {} for folder in local_by_remote}
    current = ""
    for line in _run_long(host, script).decode(errors="replace").splitlines():
        if line.startswith("\t"):
            current = line[1:]
        else:
            name, _, text = line.partition(":")
            files.setdefault(current, {})[name] = text
    for folder, local in local_by_remote.items():
        _mirror(local, files[folder])


def _mirror(folder: Path, files: dict[str, str]) -> None:
    """Make the exit records and the claim in `folder` the same as on the login node."""
    for path in (*folder.glob("exit_records/*.json"), *folder.glob("tasks/*/exit_records/*.json")):
        if str(path.relative_to(folder)) not in files:
            path.unlink()
    for name, text in files.items():
        if name == "claim":
            if whole(text) is not None:
                with contextlib.suppress(FileExistsError):
                    (folder / "claim").symlink_to(text)
        elif _EXIT_RECORD.fullmatch(name):
            path = folder / name
            paths.make_folder(path.parent)
            paths.write(path, text + "\n")


def fetch_logs(remote: RemoteFolder, folder: Path) -> None:
    """Append to the logs in `folder` what was written on the login node since the last call.

    The same for the history of what the ranks used.

    Raises BackendUnavailable when the connection fails or the answer is not understood.
    """
    while _fetch_part(remote, folder):
        pass


def _fetch_part(remote: RemoteFolder, folder: Path) -> bool:
    """Fetch at most `_MAX_LOGS` bytes; return whether there may be more."""
    sizes = "".join(
        f"{shlex.quote(str(path.relative_to(folder)))}) at={path.stat().st_size};; "
        for pattern in _GROWING
        for path in folder.glob(pattern)
    )
    # stat shows which files have grown, so that no process starts for the others
    script = (
        f"cd {shlex.quote(remote.folder)} 2>/dev/null || exit 0; "
        f"stat -c '%s %n' {' '.join(_GROWING)} 2>/dev/null | {{ t=0; while read -r n f; do "
        '[ -f "$f" ] || continue; '  # part of a name with a line break
        f'case "$f" in {sizes}*) at=0;; esac; n=$((n - at)); [ "$n" -gt 0 ] || continue; '
        f'[ "$n" -le {_MAX_LOG} ] || n={_MAX_LOG}; '
        f't=$((t + n)); [ "$t" -le {_MAX_LOGS} ] || break; printf "%s %s\\n" "$f" "$n"; '
        'tail -c "+$((at + 1))" "$f" | head -c "$n"; done; }; exit 0'
    )
    return _append_logs(remote.host, folder, _run_long(remote.host, script))


def _append_logs(host: str, folder: Path, out: bytes) -> bool:
    """Append the parts in `out`, each after a line with its name and size."""
    more = len(out) > _MAX_LOGS - _MAX_LOG
    stream = io.BytesIO(out)
    while head := stream.readline():
        name, _, count = head.decode(errors="replace").rstrip("\n").rpartition(" ")
        size = whole(count)
        if size is None:
            raise BackendUnavailable(f"{host} sent {name[:80]!r} instead of a log")
        part = stream.read(size)
        if _GROWN.fullmatch(name) and name.isprintable():
            paths.make_folder((folder / name).parent)
            with open(folder / name, "ab", opener=paths.private_opener) as file:
                file.write(part)
        more = more or size == _MAX_LOG
    return more


def _run_long(host: str, script: str) -> bytes:
    """The output of a script that may exceed the length of a command line's argument."""
    _, out, _ = run(host, "exec sh", script.encode())
    return out


def _relative(remote: RemoteFolder, home: Path) -> str:
    """The run's folder, relative to deploykit's; a run id needs no quotes."""
    return str(Path(remote.folder).relative_to(home))


def _upload(host: str, home: Path, path: str, content: bytes, then: str = "true") -> None:
    """Write a complete file or none, and run the script `then` once the file is complete."""
    digest = hashlib.sha256(content).hexdigest()
    check = f'[ "$(cat {path}.$$ | {_SHA256})" = {digest} ]'
    _do(host, home, f"cat > {path}.$$ && {check} && mv {path}.$$ {path} && {{ {then}; }}", content)


def _do(host: str, home: Path, script: str, data: bytes | None = None) -> bytes:
    """Run a script in deploykit's folder on `host`; return its output."""
    enter = _ENTER.format(folder=shlex.quote(str(home)))
    code, out, err = run(host, f"{enter} && {script}", data)
    if _NARROWED in err:
        logging.getLogger(__name__).warning("warning: %s: %s: %s", host, home, _NARROWED)
    if code == 0:
        return out
    if code == _FOREIGN_OWNER:
        raise CannotWrite(
            f"{host}: {home} belongs to another user, who could change what runs as you",
            hint="set slurm.folder to a folder of your own",
        )
    message = f"{host}: {err.strip() or f'a step of the submit failed with exit code {code}'}"
    if "denied" in err:
        raise NotPermitted(message, hint="set slurm.folder to a folder that you may write to")
    raise TryAgain(message, hint=f"submit again; if that fails too, check slurm.folder on {host}")
