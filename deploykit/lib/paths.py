"""Files: where deploykit keeps them, closed to other users, and how they are opened.

A state folder holds what runs as its owner: sources, scripts, pickled functions. So everything in
it is made here, with mode 0700 or 0600 whatever the umask. A log or record may turn out to be a
named pipe, whose reader would wait without end, so these are opened here too.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from deploykit.lib import progress
from deploykit.lib.errors import CannotWrite, TryAgain, UsageError

_PACKAGE = Path(__file__).resolve().parent.parent
HINT = "set DEPLOYKIT_HOME to a folder that you own, on a disk with free space"
"""What to do where the state folder cannot be used."""
LOCK = "submitting"
"""In a run folder: the file that is locked while the run is submitted."""
_SCRATCH = ".deploykit-temporary-"
_OTHERS = 0o077
"""The permissions of others than the owner."""


def shipped(folder: str) -> Path:
    """`templates` or `entrypoints`: inside the package in a wheel, beside it in a checkout."""
    inside = _PACKAGE / folder
    return inside if inside.is_dir() else _PACKAGE.parent / folder


def add_node_plane() -> None:
    """Make the modules of the node plane importable: what they wrote, they also read."""
    node_plane = str(shipped("entrypoints"))
    if node_plane not in sys.path:
        sys.path.append(node_plane)


def state() -> Path:
    """The folder that deploykit writes to: ``$DEPLOYKIT_HOME``, else the XDG state folder.

    On Slurm the nodes must see it too, as they do where homes are on a shared file system. Raises
    CannotWrite where the user's home is unknown.
    """
    chosen = os.environ.get("DEPLOYKIT_HOME")
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    folder = Path(chosen or f"{base}/deploykit")
    try:
        folder = folder.expanduser().absolute()
    except RuntimeError as error:
        raise CannotWrite(f"cannot expand {folder}: {error}", hint=HINT) from error
    if why := not_text(str(folder)):
        raise CannotWrite(f"the state folder {why}", hint=HINT)
    return folder


def not_text(path: str) -> str | None:
    """Why a path cannot be written into a plan or the registry; None where it can."""
    if path.isascii() or path.encode(errors="ignore").decode() == path:
        return None
    if sys.getfilesystemencoding() == "utf-8":
        return f"{path!r} is not a valid UTF-8 name"
    return f"{path!r} requires a UTF-8 locale: export LC_ALL=C.UTF-8"


def config() -> Path:
    """The user's config file: below ``$XDG_CONFIG_HOME`` if that is absolute, else ~/.config."""
    base = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    if not base.is_absolute():
        base = Path(expanded("~"), ".config")
    return base / "deploykit" / "config.toml"


def expanded(path: str) -> str:
    """A path with the home folder for ``~``; that of an unknown user stays as it is."""
    return os.path.expanduser(path)  # noqa: PTH111 - pathlib's raises for an unknown user


def run_folder(run: str) -> Path:
    """The run folder: plan, source, logs, output, checkpoints."""
    return state() / "runs" / run


@contextlib.contextmanager
def submitting(folder: Path, run: str) -> Iterator[None]:
    """Lock the run while it is submitted; the lock ends with the process. Raises TryAgain.

    A run whose folder was deleted, also just now by another process, is not being submitted.
    """
    with contextlib.ExitStack() as held:
        with contextlib.suppress(FileNotFoundError):
            file = held.enter_context(open(folder / LOCK, "wb", opener=private_opener))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise TryAgain(
                    f"{run} is being submitted or removed by another process",
                    hint="try again in a moment",
                ) from error
        yield


@contextlib.contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold a lock, which ends with the process. Without `wait`, raises BlockingIOError."""
    with open(path, "w", encoding="utf-8", opener=private_opener) as file:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield


@contextlib.contextmanager
def scratch(beside: Path) -> Iterator[Path]:
    """Create a temporary folder in another one, and delete those of processes that were killed."""
    with contextlib.ExitStack() as held:
        with contextlib.ExitStack() as creating:
            with contextlib.suppress(OSError):  # no locks here: nothing is deleted
                creating.enter_context(_folder_locked(beside))
                for path in beside.glob(f"{_SCRATCH}*"):
                    with contextlib.suppress(OSError), _folder_locked(path, wait=False):
                        shutil.rmtree(path)
            own = held.enter_context(tempfile.TemporaryDirectory(dir=beside, prefix=_SCRATCH))
            with contextlib.suppress(OSError):
                held.enter_context(_folder_locked(Path(own)))
        yield Path(own)


@contextlib.contextmanager
def _folder_locked(folder: Path, *, wait: bool = True) -> Iterator[None]:
    """As `locked`, without a file."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        os.close(opened)


def bundles() -> Path:
    """Archives of source trees, named by their hash."""
    return state() / "bundles"


def left_out() -> Path:
    """The nodes that new jobs leave out (`deploykit.run.excluded_nodes`)."""
    return state() / "nodes.json"


def private_folder(path: Path) -> Path:
    """Create a folder, and each level of it below `state`; narrow one that others may enter.

    Logs a warning for each that was narrowed. Raises CannotWrite where one cannot be made or
    narrowed.
    """
    top = state()
    levels = [level for level in path.parents if level == top or top in level.parents]
    for level in (*reversed(levels), path):
        try:
            make_folder(level)
            mode = stat.S_IMODE(level.stat().st_mode)
            if mode & _OTHERS:
                level.chmod(0o700)
                was = f"{level} was open to other users (mode {mode:04o})"
                progress.warn(f"warning: {was}; its mode is now 0700")
        except OSError as error:
            message = f"cannot use the folder {level}: {error.strerror}"
            raise CannotWrite(message, hint=HINT) from error
    return path


def is_private_folder(path: Path) -> bool:
    """Whether this is a folder, not a link to one, that is the user's and closed to all others."""
    try:
        info = path.lstat()
    except OSError:
        return False
    closed = info.st_uid == os.getuid() and not info.st_mode & _OTHERS
    return closed and stat.S_ISDIR(info.st_mode)


def make_folder(path: Path) -> None:
    """Create a folder and its missing parents, with mode 0700. Existing ones are left as is."""
    if not path.parent.exists():
        make_folder(path.parent)
    path.mkdir(mode=0o700, exist_ok=True)


def write(path: Path, content: str | bytes) -> None:
    """Write a private file, text in UTF-8."""
    with open(path, "wb", opener=private_opener) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def create(
    path: Path, text: str, what: str = "choose another file name", *, private: bool = False
) -> None:
    """Write a new file of the user's, which others may read unless it is `private`.

    Raises UsageError where it exists, with `what` to do, or where it cannot be written.
    """
    opener = private_opener if private else None
    try:
        with open(path, "x", encoding="utf-8", opener=opener) as file:
            file.write(text)
    except FileExistsError as error:
        raise UsageError(f"{path} already exists", hint=what) from error
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error


def touch(path: Path) -> None:
    """Create an empty private file, unless it exists.

    An existing one is not opened: closing it would drop the locks that SQLite holds on it in
    another thread (https://www.sqlite.org/howtocorrupt.html, 2.2).
    """
    try:
        os.close(private_opener(str(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        if path.stat().st_mode & _OTHERS:
            make_private(path)


def private_opener(path: str, flags: int) -> int:
    """Open with mode 0600, as the `opener` of `open`."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
    if os.fstat(descriptor).st_mode & _OTHERS:
        os.fchmod(descriptor, 0o600)
    return descriptor


def make_private(path: Path) -> None:
    """Close a file, which another library made, to other users."""
    path.chmod(stat.S_IMODE(path.stat().st_mode) & ~_OTHERS)


def open_regular(path: Path | str, *, follow: bool = False) -> io.FileIO:
    """A regular file, opened for reading; one behind a link only with `follow`.

    Raises OSError, also for a pipe or a device, which is not waited for.
    """
    nofollow = 0 if follow else os.O_NOFOLLOW
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | nofollow)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return io.FileIO(descriptor)
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "is not a regular file", str(path))


def read_regular(path: Path | str, limit: int) -> bytes:
    """The bytes of a regular file, which may be behind a link.

    Raises OSError, also where it is larger than `limit` bytes.
    """
    with open_regular(path, follow=True) as file:
        if os.fstat(file.fileno()).st_size > limit:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
        return file.readall()


def read_below(folder: Path, path: str, limit: int) -> bytes | None:
    """The bytes of a regular file below `folder`; None where there is none, or one over `limit`."""
    with contextlib.suppress(OSError, ValueError):
        return read_regular(folder / path, limit)
    return None


def is_address(location: str) -> bool:
    """Whether a location is an address, such as an S3 prefix, and not a folder of a machine."""
    return "://" in location


def absolute(location: str, folder: Path) -> str:
    """A location in `folder`, unless it is absolute or an address; ``~`` is the home folder."""
    if is_address(location):
        return location
    return os.path.normpath(folder / expanded(location))
