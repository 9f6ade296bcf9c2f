"""Files: where deploykit keeps them, closed to other users, and opened without following links.

A state folder holds what runs as its owner: sources, scripts, pickled functions. So everything in
it is made here, with mode 0700 or 0600 whatever the umask. A source folder and its ``.git`` may be
another user's work: a link in it could name any file of this user, and a named pipe would block
its reader, so its files are read through `OpenFolder`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import shlex
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from deploykit.lib.errors import CannotWrite, TryAgain, UsageError

_PACKAGE = Path(__file__).resolve().parent.parent
HINT = "set DEPLOYKIT_HOME to a folder of your own, on a disk with free space"
"""What to do where the state folder cannot be used."""
LOCK = "submitting"
"""In a run folder: the file that is locked while the run is submitted."""
_OTHERS = 0o077
_WRITABLE = 0o022
"""By others than the owner."""
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def shipped(folder: str) -> Path:
    """`templates` or `entrypoints`: inside the package in a wheel, beside it in a checkout."""
    inside = _PACKAGE / folder
    return inside if inside.is_dir() else _PACKAGE.parent / folder


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
        return f"{path!r} has a name that is not UTF-8"
    return f"{path!r} needs a locale with UTF-8: export LC_ALL=C.UTF-8"


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


def bundles() -> Path:
    """Archives of source trees, named by their hash."""
    return state() / "bundles"


def source_states() -> Path:
    """What is known of source folders that have not changed since, by a hash of their path."""
    return state() / "sources"


def left_out() -> Path:
    """The nodes that new jobs leave out (`deploykit.run.excluded_nodes`)."""
    return state() / "nodes.json"


def private_folder(path: Path) -> Path:
    """Create a folder, and each level of it below `state`; narrow one that others may enter.

    Logs a warning for each that was narrowed. Raises CannotWrite where one cannot be made, or
    belongs to another user, who could put there what runs as this one.
    """
    top = state()
    levels = [level for level in path.parents if level == top or top in level.parents]
    for level in (*reversed(levels), path):
        try:
            make_folder(level)
            _require_own(level)
        except OSError as error:
            message = f"the folder {level} cannot be used: {error.strerror}"
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


def is_own_file(path: Path) -> bool:
    """Whether this is a regular file that belongs to the user."""
    try:
        info = path.lstat()
    except OSError:
        return False
    return info.st_uid == os.getuid() and stat.S_ISREG(info.st_mode)


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
    path: Path, text: str, what: str = "name another file", *, private: bool = False
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


def _require_own(path: Path) -> None:
    own, info, link = os.getuid(), path.stat(), path.lstat()
    if info.st_uid != own or link.st_uid not in (own, 0):  # a link may be the administrator's
        owner = info.st_uid if info.st_uid != own else link.st_uid
        raise CannotWrite(
            f"{path} belongs to another user (uid {owner}), who could change what runs as you",
            hint=HINT,
        )
    if info.st_mode & _OTHERS:
        import logging  # rarely needed

        path.chmod(0o700)
        was = f"{path} was open to other users (mode {stat.S_IMODE(info.st_mode):04o})"
        logging.getLogger(__name__).warning("warning: %s; its mode is now 0700", was)


class NotOwn(OSError):
    """A file that another user can change. `hint` is the command that prevents it."""

    hint: str | None = None


class NotRegular(OSError):
    """A link or a special file where a regular file was expected."""


class OpenFolder:
    """A folder held open, so that it stays the same one whatever happens to its path.

    It opens regular files below it, follows no link and waits for no pipe.
    """

    def __init__(self, path: Path) -> None:
        self._top = os.open(path, _FOLDER)
        self._below: tuple[str, int] = ("", self._top)
        """The folder that was used last: files come folder by folder."""

    def close(self) -> None:
        """Close its descriptors."""
        self._close_below()
        os.close(self._top)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self, path: str) -> io.FileIO:
        """The regular file `path`, relative, with forward slashes.

        Raises NotRegular, or another OSError, also where a folder on the way is a link.
        """
        return io.FileIO(self.descriptor(path))

    def descriptor(self, path: str) -> int:
        """The same as a descriptor, which the caller closes: faster for many small files."""
        folder, _, name = path.rpartition("/")
        try:
            descriptor = os.open(name, _FILE, dir_fd=self._enter(folder))
        except OSError as error:
            if error.errno in {errno.ELOOP, errno.ENXIO}:  # a link; a socket or device
                raise NotRegular(error.errno, "is not a regular file", path) from error
            raise
        _require_regular(descriptor, path)
        return descriptor

    def target(self, path: str) -> str:
        """What the link `path` points to, as it is written. Raises OSError where it is none."""
        folder, _, name = path.rpartition("/")
        return os.readlink(name, dir_fd=self._enter(folder))

    def remove(self, path: str) -> None:
        """Remove the file or link `path`."""
        folder, _, name = path.rpartition("/")
        os.unlink(name, dir_fd=self._enter(folder))

    def _enter(self, folder: str) -> int:
        if folder != self._below[0]:
            self._close_below()
            if folder:
                self._below = (folder, self._descend(folder))
        return self._below[1]

    def _descend(self, folder: str) -> int:
        here = self._top
        for part in folder.split("/"):
            try:
                deeper = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=here)
            finally:
                if here != self._top:
                    os.close(here)
            here = deeper
        return here

    def _close_below(self) -> None:
        if self._below[1] != self._top:
            os.close(self._below[1])
            self._below = ("", self._top)


def read_below(folder: Path, path: str, limit: int) -> bytes | None:
    """The bytes of a regular file below `folder`; None where there is none, or one over `limit`."""
    with contextlib.suppress(OSError, ValueError), OpenFolder(folder) as top, top.open(path) as f:
        return _all(f, limit)
    return None


def open_regular(path: Path) -> io.FileIO:
    """A regular file, opened for reading without following a link. Raises OSError."""
    return _regular(os.open(path, _FILE), str(path))


def read_regular(path: Path | str, limit: int) -> bytes:
    """The bytes of a regular file, which may be behind a link.

    Raises OSError, also where it is larger than `limit` bytes.
    """
    with _regular(os.open(path, _FILE & ~os.O_NOFOLLOW), str(path)) as file:
        return _all(file, limit)


def read_own(path: Path, limit: int) -> bytes:
    """The bytes of a regular file that no other user can change, nor put another in its place.

    Raises NotOwn where one can, or another OSError.
    """
    with _regular(os.open(path, _FILE & ~os.O_NOFOLLOW), str(path)) as file:
        for checked, info in ((path, os.fstat(file.fileno())), (path.parent, path.parent.stat())):
            _require_unchangeable(checked, info)
        return _all(file, limit)


def _require_unchangeable(path: Path, info: os.stat_result) -> None:
    if info.st_uid not in {os.getuid(), 0}:
        raise NotOwn(f"{path} belongs to another user (uid {info.st_uid}), who could change it")
    if info.st_mode & _WRITABLE:
        error = NotOwn(f"other users can change {path} (mode {stat.S_IMODE(info.st_mode):04o})")
        error.hint = f"chmod go-w {shlex.quote(str(path))}"
        raise error


def _regular(descriptor: int, path: str) -> io.FileIO:
    _require_regular(descriptor, path)
    return io.FileIO(descriptor)


def _require_regular(descriptor: int, path: str) -> None:
    """Close what is not a regular file, and raise."""
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    raise NotRegular(errno.EINVAL, "is not a regular file", path)


def _all(file: io.FileIO, limit: int) -> bytes:
    pieces, left = [], limit
    while piece := file.read(min(left + 1, 1 << 20)):
        left -= len(piece)
        if left < 0:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        pieces.append(piece)
    return b"".join(pieces)


def is_address(location: str) -> bool:
    """Whether a location is an address, such as an S3 prefix, and not a folder of a machine."""
    return "://" in location


def absolute(location: str, folder: Path) -> str:
    """A location in `folder`, unless it is absolute or an address; ``~`` is the home folder."""
    if is_address(location):
        return location
    return os.path.normpath(folder / expanded(location))
