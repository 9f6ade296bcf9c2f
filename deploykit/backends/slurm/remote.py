"""Login nodes: commands over the user's own OpenSSH, and runs that are submitted there.

Every step of a submit can be repeated, and a broken connection leaves a step either done or not
done. The script that calls sbatch holds a lock on the login node, so that a later query waits for
its answer. Exit records and logs come back by rsync, or by tar where rsync is missing.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import re
import shlex
import shutil
import tarfile
import tempfile
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple

from deploykit.backends import base as backend
from deploykit.backends import checkpoints
from deploykit.backends.base import RemoteFile
from deploykit.bundle import archive as bundles
from deploykit.job.model import Handle, Plan
from deploykit.lib import paths, progress, shell, untar
from deploykit.lib.errors import BackendUnavailable, CannotWrite, NotPermitted, TryAgain
from deploykit.observe import logfiles

# --- ssh

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

_LOGIN_DENIED = re.compile(r"Permission denied \(|Host key verification failed")
"""Messages of ssh where a login needs a person, whom BatchMode does not ask."""

_LOGGED_IN = "Authenticated to "
_VERBOSE_ONLY = (_LOGGED_IN, "Transferred: sent ", "Bytes per second: sent ")
"""Lines that ssh prints only in verbose mode."""

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
        shown = _without_verbose(err)
        if code != _SSH_FAILED:
            return code, out.partition(_MARK)[2], shown
        if pause is None or _LOGGED_IN in err or not _NOT_CONNECTED.search(err):
            break
        if pause == _PAUSES[0]:
            reason = shown.strip().partition("\n")[0]
            progress.warn(f"ssh {host}: {reason}; retrying")
        time.sleep(pause)
    hint = f"check `{shell.command('ssh', '--', host, 'true')}`, then run the same command again"
    if _LOGIN_DENIED.search(err):
        socket = [option for option in connection_options(host) if "ControlPath" in option]
        hint = (
            "if the login requires a password or a second factor, open a connection for deploykit "
            f"to use: {shell.command('ssh', '-fNM', *socket, '--', host)}"
        )
    raise BackendUnavailable(f"ssh {host}: {shown.strip() or 'the connection was lost'}", hint=hint)


def _without_verbose(text: str) -> str:
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith(_VERBOSE_ONLY))


def argv(host: str, script: str) -> list[str]:
    """The verbose ssh command for a script of sh, which any login shell gets as one quoted line."""
    line = shlex.join(["sh", "-c", f"echo {_MARK.decode().strip()}; {script}"])
    settings = [*connection_options(host), "-oBatchMode=yes", "-oLogLevel=VERBOSE"]
    return ["ssh", "-T", *settings, "--", host, line]


def attached(host: str, script: str, *, terminal: bool) -> list[str]:
    """The ssh command for a script of sh whose input and output are those of this process.

    `terminal` asks for one there, too. ssh may ask the user for a password.
    """
    line = shlex.join(["sh", "-c", _CLEAN_ENVIRONMENT + script])
    settings = [*connection_options(host), "-oLogLevel=ERROR"]
    return ["ssh", "-t" if terminal else "-T", *settings, "--", host, line]


def connection_options(host: str) -> list[str]:
    """Options of ssh with which commands share one connection for a minute after the last.

    Empty where the user's own configuration of the host names a ControlPath, and where no folder is
    safe for a socket. https://man.openbsd.org/ssh_config#ControlMaster
    """
    folder = None if _has_control_path(host) else _socket_folder()
    if folder is None:
        return []
    return ["-oControlMaster=auto", f"-oControlPath={folder}/%C", "-oControlPersist=60"]


@functools.cache
def _has_control_path(host: str) -> bool:
    """Whether the user's configuration of ssh names a socket for shared connections to `host`."""
    _, configuration, _ = shell.raw(["ssh", "-G", "--", host])
    return re.search(rb"(?m)^controlpath (?!none$)", configuration) is not None


def _socket_folder() -> Path | None:
    """A folder with a short path that only this user can enter; None where there is none."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    own = runtime is not None and paths.is_private_folder(Path(runtime))
    folder = Path(runtime, "deploykit-ssh") if runtime and own else paths.state() / "ssh"
    if len(str(folder)) > _MAX_SOCKET_FOLDER:
        return None
    with contextlib.suppress(OSError, CannotWrite):
        return paths.private_folder(folder)
    return None


# --- submitting

_RECORD = "remote.json"
_VERSIONS = "exit_records/pylock.toml"
_SCRIPT = "plan.sh"
_LOCK_HELD = 75
_FOREIGN_OWNER = 73
"""Exit codes of our own scripts: another submit holds the lock, another user owns the folder."""
_NARROWED = "the folder was accessible to other users; its mode is now 0700"
_ENTER = (
    "umask 077; mkdir -p {folder} && cd {folder} && {{ [ -O . ] || exit 73; }} && "
    f'case "$(stat -c %a .)" in *00) ;; *) chmod go= . && echo "{_NARROWED}" >&2;; esac'
)
"""Creates and enters deploykit's folder on the login node, which is private to its user."""


class RemoteFolder(NamedTuple):
    """A run's folder on a login node."""

    host: str
    folder: str


def recorded_folder(folder: Path) -> RemoteFolder | None:
    """The run's folder on its login node; None where the run has no host or was never submitted."""
    try:
        return RemoteFolder(**json.loads((folder / _RECORD).read_text()))
    except FileNotFoundError:
        return None


def logs_elsewhere(handle: Handle) -> bool:
    """Return whether the run's logs are on a login node."""
    return recorded_folder(Path(handle.folder)) is not None


def remains(handle: Handle, output: str) -> Iterator[tuple[str, str]]:  # noqa: ARG001 - the contract
    """The run's folder on its login node, and the command that deletes it."""
    remote = recorded_folder(Path(handle.folder))
    if remote is not None:
        remove = shell.command("rm", "-r", "--", remote.folder)
        command = shell.command("ssh", "--", remote.host, remove)
        yield f"{remote.host}:{remote.folder}", command


def remove_remains(handle: Handle, output: str) -> None:  # noqa: ARG001 - the contract
    """Delete the run's folder on its login node. Raises BackendUnavailable or NotPermitted."""
    remote = recorded_folder(Path(handle.folder))
    if remote is not None:
        code, _, err = run(remote.host, f"rm -rf -- {shlex.quote(remote.folder)}")
        if code:
            raise NotPermitted(f"{remote.host}:{remote.folder} was not deleted: {err.strip()}")


def deliver(plan: Plan, local: Path) -> RemoteFolder:
    """Copy the bundle, unless it is there already, unpack it for the run, and copy the script.

    `local`, the run's folder on this machine, first records the destination, for a submit that is
    interrupted. Raises BackendUnavailable, CannotWrite, NotPermitted or TryAgain when a step fails.
    """
    host, home = plan.options.host, plan.options.home
    remote = RemoteFolder(host, str(plan.options.run_folder(plan.run)))
    paths.write(local / _RECORD, json.dumps(remote._asdict()) + "\n")
    archive = f"bundles/{plan.bundle.hash}.tar.gz"
    folder = str(Path(remote.folder).relative_to(home))  # a run id needs no quotes
    folders = " ".join(f"{folder}/{name}" for name in backend.FOLDERS)
    if not _do(host, home, f"mkdir -p bundles {folders}; [ ! -e {archive} ] || echo yes"):
        _upload(host, home, archive, bundles.store(plan.bundle).read_bytes())
    # `source` gets its name last, so one that exists is complete. Other nodes see changes of
    # rendezvous.json at once because it exists already
    unpack = (
        f"touch {folder}/rendezvous.json {folder}/sending; [ -d {folder}/source ] || {{ "
        f"rm -rf {folder}/new; mkdir {folder}/new && "
        f"tar --no-same-permissions -xzf {archive} -C {folder}/new && "
        f"mv {folder}/new {folder}/source; }}"
    )
    _upload(host, home, f"{folder}/{_SCRIPT}", plan.text.encode(), unpack)
    versions = local / _VERSIONS
    if versions.is_file():  # the run is to get those of an earlier one
        _upload(host, home, f"{folder}/{_VERSIONS}", versions.read_bytes())
    return remote


def _upload(host: str, home: Path, path: str, content: bytes, then: str = "true") -> None:
    """Write a complete file or none, and run the script `then` once the file is complete."""
    complete = f'[ "$(wc -c < {path}.$$)" -eq {len(content)} ]'
    script = f"cat > {path}.$$ && {complete} && mv {path}.$$ {path} && {{ {then}; }}"
    _do(host, home, script, content)


def _do(host: str, home: Path, script: str, data: bytes | None = None) -> bytes:
    """Run a script in deploykit's folder on `host`; return its output."""
    enter = _ENTER.format(folder=shlex.quote(str(home)))
    code, out, err = run(host, f"{enter} && {script}", data)
    if _NARROWED in err:
        progress.warn(f"warning: {host}: {home}: {_NARROWED}")
    if code == 0:
        return out
    if code == _FOREIGN_OWNER:
        raise CannotWrite(
            f"{host}: {home} belongs to another user, who could change the code that you run",
            hint="set slurm.folder to a folder that you own",
        )
    message = f"{host}: {err.strip() or f'a command of the submit failed with exit code {code}'}"
    if "denied" in err:
        raise NotPermitted(message, hint="set slurm.folder to a folder that you can write to")
    raise TryAgain(message, hint=f"submit again; if that fails too, check slurm.folder on {host}")


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
        f"flock -w 60 9 || exit {_LOCK_HELD}; cat job 2>/dev/null || readlink claim; exit 0"
    )
    code, out, err = run(remote.host, script)
    if code:
        raise BackendUnavailable(f"{remote.host}: {err.strip() or 'another submit is in progress'}")
    return job_id(out)


def job_id(out: bytes) -> str | None:
    """The id in what sbatch printed (``Submitted batch job 42``) or in a claim (``42``)."""
    match = re.search(rb"(?<![0-9])[0-9]{1,18}(?![0-9])", out)
    return match[0].decode() if match else None


# --- exit records and logs

_RECORDS = (*("claim*", "exit_records/*.json", _VERSIONS, "tasks/*/exit_records/*.json"),)
"""Exit records, and the link `claim`, which `Path.glob` finds only by a pattern."""
_LOGS = (*logfiles.ALL, "exit_records/history-*.jsonl")
"""Files in a run's folder that only grow: logs, also of a job array, and usage."""

_RSYNC_DONE = {0, 23, 24}
"""Exit codes of rsync: success, and files that are missing or vanished.

https://download.samba.org/pub/rsync/rsync.1#EXIT_VALUES
"""
_without_rsync: set[str] = set()
"""Hosts for which rsync failed, for example because a start-up file there prints something."""


def fetch_exit_records(host: str, runs: Sequence[tuple[Handle, RemoteFolder]]) -> None:
    """Copy the exit records and claims of these runs and their tasks to this machine.

    Records that no longer exist there are deleted. Raises BackendUnavailable when the connection
    fails.
    """
    patterns_by_folders: dict[tuple[Path, Path], list[str]] = defaultdict(list)
    for handle, remote in runs:
        source, local = Path(remote.folder), Path(handle.folder)
        patterns = patterns_by_folders[source.parent, local.parent]
        patterns += [f"{source.name}/{pattern}" for pattern in _RECORDS]
    for (source, local), patterns in patterns_by_folders.items():
        _fetch(RemoteFolder(host, str(source)), local, patterns, growing=False)


def fetch_logs(remote: RemoteFolder, folder: Path) -> None:
    """Append to the logs in `folder` what was written on the login node since the last call.

    The same for the history of what the ranks used. Raises BackendUnavailable when the connection
    fails.
    """
    paths.make_folder(folder)
    _fetch(remote, folder, _LOGS, growing=True)


def _fetch(remote: RemoteFolder, local: Path, patterns: Sequence[str], *, growing: bool) -> None:
    """Copy the files that match `patterns`: only what is new of those that are `growing`."""
    host = remote.host
    if not (_can_rsync(host) and _rsync(remote, local, patterns, growing=growing)):
        _tar(remote, local, patterns, growing=growing)
        _without_rsync.add(host)


def _rsh(host: str) -> str:
    """Rsync's option for the ssh command that it uses."""
    ssh = ["ssh", "-T", *connection_options(host), "-oBatchMode=yes"]
    return f"--rsh={shlex.join(ssh)}"


def _rsync(remote: RemoteFolder, local: Path, patterns: Sequence[str], *, growing: bool) -> bool:
    """Copy with rsync; return whether it worked. Links that point out of the folder are skipped."""
    parents = {f"/{p}/" for pattern in patterns for p in PurePosixPath(pattern).parents if p.name}
    rules = [*sorted(parents), *(f"/{pattern}" for pattern in patterns)]
    code, _, _ = shell.raw(
        [
            *("rsync", _rsh(remote.host), "--protect-args"),
            *("--recursive", "--chmod=D700,F600"),
            *(["--append"] if growing else ["--checksum", "--links", "--safe-links", "--delete"]),
            *("--exclude=*[[:cntrl:]]*", "--include-from=-", "--exclude=*"),
            *("--", f"{remote.host}:{remote.folder}/", f"{local}/"),
        ],
        data="\n".join(rules).encode(),
        timeout=_TIMEOUT,
    )
    return code in _RSYNC_DONE


def _tar(remote: RemoteFolder, local: Path, patterns: Sequence[str], *, growing: bool) -> None:
    """Copy an archive of all the files, and take what is new from it."""
    script = (
        f"cd {shlex.quote(remote.folder)} 2>/dev/null && "
        f"tar -czf - -- {' '.join(patterns)} 2>/dev/null; exit 0"
    )
    _, out, _ = run(remote.host, "exec sh", script.encode())  # may be too long for an argument
    if not out:
        return
    with tempfile.TemporaryDirectory(
        prefix="fetched-", dir=paths.private_folder(paths.state())
    ) as temporary:
        copy = Path(temporary)
        try:
            with tarfile.open(fileobj=io.BytesIO(out)) as archive:
                untar.extract_all(archive, copy, skip_unsafe=True)
        except (tarfile.TarError, zlib.error, EOFError, OSError, LookupError, ValueError) as error:
            raise BackendUnavailable(f"{remote.host} sent an invalid archive: {error}") from error
        matching = [path for pattern in patterns for path in copy.glob(pattern)]
        files = [path for path in matching if path.is_symlink() or path.is_file()]
        names = {path.relative_to(copy) for path in files if str(path).isprintable()}
        for name in names:
            paths.make_folder((local / name).parent)
            _take(copy / name, local / name, growing=growing)
    if not growing:
        for path in [path for pattern in patterns for path in local.glob(pattern)]:
            if path.relative_to(local) not in names:
                path.unlink()


def _take(new: Path, old: Path, *, growing: bool) -> None:
    """Write what a new copy of a file holds: at its end, if the file is one that grows."""
    if old.is_symlink():
        old.unlink()
    if new.is_symlink():
        if "/" not in (target := str(new.readlink())):  # as that of a claim
            old.symlink_to(target)
    elif growing:
        with new.open("rb") as source, open(old, "ab", opener=paths.private_opener) as target_file:
            source.seek(target_file.tell())
            shutil.copyfileobj(source, target_file)
    else:
        paths.write(old, new.read_bytes())


# --- results and checkpoints

_RSYNC_IMPOSSIBLE = {2, 12, 127}
"""Exit codes of rsync where the login node has none, or prints something before it starts."""
_LIST = r"find . -type f -printf '%s %T@ %p\0'"
"""GNU find: size, seconds since 1970, path."""


def files(handle: Handle, part: str) -> Sequence[RemoteFile] | None:
    """The files of a run that was sent over ssh, or is in a bucket; see `base.Capabilities`."""
    if part == "checkpoints" and (bucket := checkpoints.location(handle)):
        return checkpoints.files(handle, bucket)
    remote = recorded_folder(Path(handle.folder))
    if remote is None:
        return None
    job = json.loads((Path(handle.folder) / backend.JOB).read_text())
    root = (job.get(part) or f"{remote.folder}/{part}").removeprefix("~/")  # ssh starts there
    script = f"cd -- {shlex.quote(root)} 2>/dev/null || exit 0; {_LIST}"
    code, out, err = run(remote.host, script)
    if code:
        raise NotPermitted(f"{remote.host}:{root}: {err.strip()}")
    entries = []
    for entry in filter(None, os.fsdecode(out).split("\0")):
        size, modified, name = entry.split(" ", 2)
        name = name.removeprefix("./")
        address = f"{remote.host}:{root}/{name}"
        entries.append(RemoteFile(name, int(size), float(modified), address))
    return sorted(entries)


def download(
    handle: Handle,
    files: Sequence[RemoteFile],
    folder: Path,
    done: Callable[[int], None],
) -> None:
    """Copy files with rsync, which resumes half a file; without it, in one stream of tar."""
    if not files:
        return
    if files[0].address.startswith("s3://"):
        checkpoints.download(handle, checkpoints.location(handle) or "", files, folder, done)
        return
    remote = recorded_folder(Path(handle.folder))
    if remote is None:
        return
    root = files[0].address.removeprefix(f"{remote.host}:").removesuffix(f"/{files[0].name}")
    if not (_can_rsync(remote.host) and _rsync_files(remote.host, root, files, folder, done)):
        _without_rsync.add(remote.host)
        _tar_files(remote.host, root, files, folder, done)


@contextlib.contextmanager
def _names(files: Sequence[RemoteFile]) -> Iterator[IO[bytes]]:
    """The names of files, for the standard input of rsync or tar."""
    with tempfile.TemporaryFile() as names:
        names.write(b"\0".join(os.fsencode(file.name) for file in files))
        names.seek(0)
        yield names


def _can_rsync(host: str) -> bool:
    return host not in _without_rsync and ":" not in host and shutil.which("rsync") is not None


def _rsync_files(
    host: str, root: str, files: Sequence[RemoteFile], folder: Path, done: Callable[[int], None]
) -> bool:
    """Return whether rsync exists there. Raises TryAgain if it began and did not end well."""
    command = [
        *("rsync", _rsh(host), "--protect-args", "--times"),
        *("--partial-dir=.deploykit-partial", "--out-format=%l", "--files-from=-", "--from0"),
        *("--", f"{host}:{root}/", f"{folder}/"),
    ]

    began = False

    def count(lines: IO[bytes]) -> None:
        nonlocal began
        for line in lines:
            if line.strip().isdigit():
                began = True
                done(int(line))

    with _names(files) as names:
        code, complaint = shell.streamed(command, names, count)
    if code in _RSYNC_IMPOSSIBLE and not began:
        return False
    if code:
        raise _interrupted(host, complaint or f"rsync exited with code {code}")
    return True


def _tar_files(
    host: str, root: str, files: Sequence[RemoteFile], folder: Path, done: Callable[[int], None]
) -> None:
    """Raises TryAgain if the stream ends early."""
    times = {file.name: file.modified for file in files}
    script = f"cd -- {shlex.quote(root)} && exec tar -cf - --no-recursion --null -T -"

    def extract(stream: IO[bytes]) -> None:
        while stream.readline() not in {_MARK, b""}:
            pass  # what the user's start-up files print
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            for member in archive:
                _extract(archive, member, folder, times.get(member.name, member.mtime))
                done(member.size)

    try:
        with _names(files) as names:
            code, complaint = shell.streamed(argv(host, script), names, extract)
    except tarfile.TarError as error:
        raise _interrupted(host, str(error)) from error
    if code:
        raise _interrupted(host, complaint or f"tar exited with code {code}")


def _extract(
    archive: tarfile.TarFile, member: tarfile.TarInfo, folder: Path, modified: float
) -> None:
    """Write a regular file under a temporary name first."""
    content = archive.extractfile(untar.checked(member, folder))
    if content is None:
        return
    path = folder / member.name
    part = path.with_name(f".{path.name}.part")
    with content, part.open("wb") as file:
        shutil.copyfileobj(content, file)
    os.utime(part, (modified, modified))
    part.replace(path)


def _interrupted(host: str, why: str) -> TryAgain:
    return TryAgain(
        f"{host}: the download was interrupted: {_without_verbose(why)}",
        hint="run the same command again to copy the missing files",
    )
