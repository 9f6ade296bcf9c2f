"""Find the input channels of a job, and copy those that have `stage`, before any rank starts.

A copy's folder is named after a hash of its source and of the listing: names, sizes, ETags or times
of change. It gets that name when all files are there with their sizes. So a folder with the name is
no half copy, a changed source gets another folder, and a later job that wants the same data reuses
it. What an interrupted copy has left is completed by the next one on this node.
"""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import hashlib
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

from deploykit_node import log, records
from deploykit_node.bucket import Bucket, Entry, reason
from deploykit_node.cluster import BadEnvironment, Cluster, LaunchError
from deploykit_node.environment import Environ
from deploykit_node.network.gathering import Pause, gathering
from deploykit_node.outputs import readable
from deploykit_node.records import StagingRecord

T = TypeVar("T")
R = TypeVar("R")

VARIABLE = "DEPLOYKIT_STAGE"
"""JSON object from a channel's name to its section in the job file."""

_DATA = "DEPLOYKIT_DATA_"
_AT_ONCE = 16
"""Files copied at the same time: a shared file system answers many requests at once."""
_AT_MOST = 1 << 30
"""Bytes for one call of sendfile."""
_CHUNK = 64
"""Files that a thread takes at a time, or fewer, so that few large ones are copied at once too."""
_BATCH = 10_000
"""Objects that are requested from S3 together; each takes memory until it has arrived."""
_NOTE_EVERY = 2.0
"""Seconds between two notes of the progress."""


class StagingError(BadEnvironment):
    """A channel is missing, or was not copied. The message names the channel and the file."""


def run(env: Environ, here: Cluster, *, elastic: bool) -> None:
    """Copy the channels, and set ``DEPLOYKIT_DATA_<NAME>`` to their folders.

    Returns when the other nodes have copied theirs too, unless their number may change: they meet
    next, and would not wait for long. Raises StagingError.
    """
    channels = json.loads(env.pop(VARIABLE, "{}"))
    if here.launcher != "sagemaker":  # which brings the data itself
        _require(env, without=[name.upper() for name in channels])
    if not channels:
        return
    progress = _Progress(env, here.node)
    for name, channel in channels.items():
        try:
            path = _Channel(name, channel, env, here, progress).copy()
        except StagingError:
            raise
        except LaunchError as error:
            raise StagingError(f"data.{name} could not be copied to this node: {error}") from error
        except OSError as error:
            why = reason(error)
            raise StagingError(f"data.{name} could not be copied to this node: {why}.") from error
        env[f"{_DATA}{name.upper()}"] = str(path)
        progress.copied(name, path)
    everybody = None if elastic else gathering(env, "staged", here)
    if everybody is not None:
        everybody.arrive()
        while not everybody.complete():
            time.sleep(0.1)
    progress.finish()


def _require(env: Environ, without: Sequence[str]) -> None:
    """Raise StagingError with all folders of channels, but those in `without`, that are missing.

    This node may see other file systems than the machine that sent the job.
    """
    locations = {
        variable.removeprefix(_DATA): location
        for variable, location in env.items()
        if variable.startswith(_DATA) and "://" not in location
    }
    missing = [
        f"data.{name.lower()}: {location} was not found on this node. {_near(location)}"
        for name, location in sorted(locations.items())
        if name not in without and not os.path.exists(location)  # noqa: PTH110 - a name too long
    ]
    if missing:
        raise StagingError(" ".join(missing))


def _near(location: str) -> str:
    """What may be meant: a similar name beside it, else the nearest folder that exists."""
    parent, name = os.path.split(location.rstrip("/"))
    if os.path.isdir(parent):  # noqa: PTH112 - as above
        near = difflib.get_close_matches(name, os.listdir(parent), n=1)  # noqa: PTH208
        return f"Did you mean {parent}/{near[0]}?" if near else f"{parent} does not contain it."
    while not os.path.isdir(parent):  # noqa: PTH112
        parent = os.path.dirname(parent)  # noqa: PTH120
    return f"Only {parent} exists here: choose a folder on a file system that this node mounts."


class Folder:
    """The files below a folder that the node sees, or a single file; as `bucket.Bucket`."""

    def __init__(self, location: str) -> None:
        self.location = location
        self._file = Path(location).name if Path(location).is_file() else ""
        self._root = str(Path(location).parent) if self._file else location

    def entries(self) -> list[Entry]:
        """All files, sorted by name; links count as what they lead to. Raises OSError."""
        if self._file:
            return self._listed([self._file])
        names = sorted(_files(self._root))
        return [entry for some in _in_chunks(self._listed, names) for entry in some]

    def download(self, entries: Sequence[Entry], folder: Path, done: Callable[[int], None]) -> None:
        """Copy files into `folder`; an interrupted copy is shorter. Raises OSError."""
        for parent in {os.path.dirname(entry.name) for entry in entries}:  # noqa: PTH120 - quick
            os.makedirs(folder / parent, exist_ok=True)  # noqa: PTH103 - as above
        _in_chunks(partial(self._copy, folder=str(folder), done=done), entries)

    def _listed(self, names: Sequence[str]) -> list[Entry]:
        states = [os.stat(f"{self._root}/{name}") for name in names]  # noqa: PTH116 - quick
        listed = zip(names, states, strict=True)
        return [Entry(name, state.st_size, state.st_mtime, "") for name, state in listed]

    def _copy(self, entries: Sequence[Entry], folder: str, done: Callable[[int], None]) -> None:
        for entry in entries:
            _copy_file(f"{self._root}/{entry.name}", f"{folder}/{entry.name}")
            done(entry.size)


class _Channel:
    """One channel on this node."""

    def __init__(
        self,
        name: str,
        section: dict[str, str],
        env: Environ,
        here: Cluster,
        progress: _Progress,
    ) -> None:
        self._name, self._mode, self._location = name, section["stage"], section["path"]
        self._base, self._env, self._here = section.get("stage_folder"), env, here
        self._progress, self._say = progress, partial(log.say, here.node)

    def copy(self) -> Path:
        """Have the data on this node; its folder, or its file if the source is one."""
        if self._mode == "shared" and self._here.node:
            return self._copied_by_node_0()
        source = self._source()
        entries, share = self._share(source.entries())
        folder = self._root() / self._folder_name(entries, share)
        with self._alone(folder):
            self._complete(source, entries, folder)
        is_file = [entry.name for entry in entries] == [Path(self._location).name]
        return folder / entries[0].name if is_file and Path(self._location).is_file() else folder

    def _source(self) -> Bucket | Folder:
        if "://" in self._location:
            return Bucket(self._location, self._env)
        return Folder(self._location)

    def _share(self, entries: list[Entry]) -> tuple[list[Entry], str]:
        """The files of this node, and which share of all they are, as part of a name."""
        if not entries:
            raise StagingError(f"data.{self._name}: there are no files in {self._location}.")
        for entry in entries:
            if not {"", ".", ".."}.isdisjoint(entry.name.split("/")):  # only a bucket has these
                raise StagingError(
                    f"data.{self._name}: the name of {self._location}/{entry.name} is not "
                    "valid on the node. Rename the object."
                )
        if self._mode != "shard":
            return entries, ""
        node, count = self._here.node, len(self._here.hosts)
        if len(entries) < count:
            raise StagingError(
                f"data.{self._name}: {self._location} has {_counted(len(entries))}, too few to "
                f"give each of {count} nodes a share. Split it into more files, or set stage: node."
            )
        return entries[node::count], f"-{node}-of-{count}"

    def _root(self) -> Path:
        """The folder of all copies, which only this user can read."""
        if self._base is None and self._mode == "shared":
            root = Path(self._env["DEPLOYKIT_RUN_DIR"], "data")
            records.make_folder(root)
            return root
        base = self._temporary() if self._base is None else self._expanded(self._base)
        return records.own_folder(base, "set stage_folder to a folder of your own.")

    def _temporary(self) -> Path:
        choices = (self._env.get("SLURM_TMPDIR"), "/scratch", self._env.get("TMPDIR"), "/tmp")  # noqa: S108 - `own_folder` is closed to other users
        for folder in filter(None, choices):
            if Path(folder).is_dir() and os.access(folder, os.W_OK | os.X_OK):
                return Path(folder)
        raise StagingError(
            f"data.{self._name}: this node has no writable temporary folder. Set stage_folder."
        )

    def _expanded(self, text: str) -> Path:
        folder = os.path.expandvars(text)
        if not folder.startswith("/"):
            raise StagingError(
                f"data.{self._name}.stage_folder is {text}, which is not an absolute path on "
                "this node. Check that the variable is set there."
            )
        return Path(folder)

    def _folder_name(self, entries: list[Entry], share: str) -> str:
        listing = json.dumps([self._location, entries]).encode()
        end = self._location.rstrip("/").rpartition("/")[2] or "data"
        return f"{end}{share}-{hashlib.sha256(listing).hexdigest()[:16]}"

    @contextlib.contextmanager
    def _alone(self, folder: Path) -> Iterator[None]:
        """While no other job on this node copies into the folder."""
        lock = folder.with_name(f"{folder.name}.lock")
        with open(lock, "ab", opener=records.private) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._say(f"data.{self._name}: waiting for another process to copy it to {folder}")
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError:  # a file system without locks, which is then a shared one
                pass
            yield

    def _complete(self, source: Bucket | Folder, entries: list[Entry], folder: Path) -> None:
        """Copy what is missing; the folder gets its name at the end."""
        # other nodes may copy to the same shared folder at the same time
        part = folder.with_name(f"{folder.name}.part-{os.uname().nodename}")
        target = folder if folder.exists() else part
        begun_before = target.exists()
        missing = [entry for entry in entries if not (begun_before and _has(target, entry))]
        if target == folder and not missing:
            self._say(f"data.{self._name}: reusing the complete copy in {folder}")
            return
        target.mkdir(mode=0o700, exist_ok=True)
        self._check_space(missing, target)
        size = sum(entry.size for entry in entries)
        left = sum(entry.size for entry in missing)
        self._say(
            f"data.{self._name}: copying {readable(left)} in {_counted(len(missing))} from "
            f"{self._location} to {folder}"
        )
        begun = time.monotonic()
        self._progress.begin(self._name, size, size - left)
        for start in range(0, len(missing), _BATCH):
            source.download(missing[start : start + _BATCH], target, self._progress.add)
        for entry in entries:
            if not _has(target, entry):
                raise StagingError(
                    f"data.{self._name}: {self._location}/{entry.name} is incomplete in "
                    f"{target}. It may have changed while being copied: submit the job again."
                )
        if target == part:
            if begun_before:
                _remove_others(part, entries)
            try:
                part.rename(folder)
            except OSError:
                if not folder.is_dir():
                    raise
                shutil.rmtree(part)  # another node was first
        self._say(f"data.{self._name}: copied in {time.monotonic() - begun:.1f} s")

    def _check_space(self, missing: Sequence[Entry], folder: Path) -> None:
        system = os.statvfs(folder)
        block, free = system.f_frsize, system.f_bavail * system.f_frsize
        needed = sum(-(-entry.size // block) * block for entry in missing)
        if needed > free:
            raise StagingError(
                f"data.{self._name} needs {readable(needed)} in {folder.parent}, which has "
                f"{readable(free)} free. Delete old copies there, or set stage_folder to a folder "
                "on a larger disk."
            )

    def _copied_by_node_0(self) -> Path:
        """Wait until node 0 has copied the channel, and return its folder."""
        shared = records.folder(self._env)
        if shared is None:
            raise StagingError(f"data.{self._name}: stage: shared requires a shared run folder.")
        pause, attempt = Pause.of(len(self._here.hosts)), records.attempt(self._env)
        while True:
            record = records.valid(shared / "staging-0.json", {"attempt": int, "folders": dict})
            if record and record["attempt"] == attempt and self._name in record["folders"]:
                return Path(record["folders"][self._name])
            if records.has_ended(self._env, 0):
                raise StagingError(f"data.{self._name}: node 0 did not copy the data; see its log.")
            time.sleep(pause.seconds())


class _Progress:
    """Notes in ``staging-N.json`` how far this node is, for `deploykit status`."""

    def __init__(self, env: Environ, node: int) -> None:
        shared = records.folder(env)
        self._path = shared / f"staging-{node}.json" if shared else None
        self._lock, self._noted = threading.Lock(), 0.0
        self._record: StagingRecord = {
            "attempt": records.attempt(env),
            "channel": "",
            "copied": 0,
            "size": 0,
            "folders": {},
            "done": False,
        }

    def begin(self, channel: str, size: int, copied: int) -> None:
        self._record["channel"] = channel
        self._record["size"], self._record["copied"] = size, copied
        self._note()

    def add(self, count: int) -> None:
        """Note bytes that have arrived. Called by several threads."""
        with self._lock:
            self._record["copied"] += count
            if time.monotonic() - self._noted > _NOTE_EVERY:
                self._note()

    def copied(self, channel: str, path: Path) -> None:
        self._record["folders"][channel] = str(path)
        self._note()

    def finish(self) -> None:
        self._record["done"] = True
        self._note()

    def _note(self) -> None:
        if self._path is not None:
            records.write(self._path, self._record)
        self._noted = time.monotonic()


def _in_chunks(work: Callable[[Sequence[T]], R], items: Sequence[T]) -> list[R]:
    """Do the work for chunks of the items in several threads. The first error ends all."""
    length = max(1, min(_CHUNK, len(items) // _AT_ONCE))
    chunks = [items[start : start + length] for start in range(0, len(items), length)]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        pending = [pool.submit(work, chunk) for chunk in chunks]
        try:
            return [future.result() for future in pending]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _copy_file(source: str, target: str) -> None:
    """As `shutil.copyfile`, which makes twice as many system calls for a small file."""
    if sys.platform != "linux":  # where sendfile writes to sockets only
        shutil.copyfile(source, target)
        return
    opened = []
    try:  # `open` would ask for the state of both, and threads would wait for each other once more
        opened.append(os.open(source, os.O_RDONLY | os.O_CLOEXEC))
        opened.append(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666))
        while os.sendfile(opened[1], opened[0], None, _AT_MOST):
            pass
    except OSError as error:
        error.filename = error.filename or target
        raise
    finally:
        for file in opened:
            os.close(file)


def _counted(files: int) -> str:
    return "1 file" if files == 1 else f"{files} files"


def _files(root: str) -> Iterator[str]:
    """The names of all files below a folder, through links. Raises OSError."""
    for folder, _, files in os.walk(root, onerror=_raise, followlinks=True):
        below = os.path.relpath(folder, root)
        yield from files if below == "." else (f"{below}/{name}" for name in files)


def _raise(error: OSError) -> None:
    raise error


def _has(folder: Path, entry: Entry) -> bool:
    """Whether the folder has all of the file."""
    try:
        return os.stat(f"{folder}/{entry.name}").st_size == entry.size  # noqa: PTH116 - quick
    except (FileNotFoundError, NotADirectoryError):
        return False


def _remove_others(folder: Path, entries: Sequence[Entry]) -> None:
    """Delete files that are not listed, such as halves of an interrupted download."""
    for name in set(_files(str(folder))).difference(entry.name for entry in entries):
        (folder / name).unlink()
