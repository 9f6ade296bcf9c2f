"""Checkpoints in a bucket: copied there file by file, and used only when all of them are there.

A checkpoint's files lie below the prefix under their own names. What makes them a checkpoint is its
manifest, ``.deploykit/checkpoints/NAME/node-0-of-1.json``, written when the last file has arrived:
it has the size, time and key of each. Where each of several nodes has a folder of its own, each
writes a manifest, and the checkpoint counts once there are those of all. A node without a part
says so by an empty one, or with its end.

A file that changes gets another key, so that the earlier checkpoint stays whole until the new
manifest replaces the old one.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from deploykit_node.bucket import Bucket, BucketError, Entry
from deploykit_node.outputs import File, readable
from deploykit_node.restart import checkpoint_folder
from deploykit_node.restart.checkpoint_folder import SHARD, Checkpoint

OWN = ".deploykit"
"""What is deploykit's below the prefix, and the folder in which files arrive."""
_MANIFESTS = f"{OWN}/checkpoints/"
_ENDED = f"{OWN}/ended/"
_ARRIVING = f"{OWN}/arriving"
_PROBE = f"{OWN}/writable"
_MANIFEST = re.compile(r"(?P<name>.+)/node-(?P<node>\d{1,6})-of-(?P<count>\d{1,6})\.json")
_SETTLED = 2.0
"""Seconds by which a file must be older than its copy to be taken for unchanged."""


class StoredFile(NamedTuple):
    """A file of a checkpoint in the bucket."""

    path: str
    size: int
    modified: int
    """When the original was written, in nanoseconds since the epoch."""
    key: str
    """The object's name below the prefix."""


class Manifest(NamedTuple):
    """The part of one node in a checkpoint."""

    run: str
    attempt: int
    files: Mapping[str, StoredFile]
    written: float
    """When the manifest arrived, in seconds since the epoch."""

    @property
    def origin(self) -> tuple[str, int]:
        return self.run, self.attempt


class Stored(NamedTuple):
    """A complete checkpoint in the bucket: the manifest of each node that has a part."""

    name: str
    parts: Mapping[int, Manifest]

    @property
    def files(self) -> dict[str, StoredFile]:
        """The files of all nodes; of two with the same path, that of the lower node."""
        return {
            path: file
            for _, part in sorted(self.parts.items(), reverse=True)
            for path, file in part.files.items()
        }

    @property
    def saved(self) -> int:
        return max((file.modified for file in self.files.values()), default=0)

    @property
    def series(self) -> str:
        return checkpoint_folder.series(self.name, self.files)

    @property
    def local(self) -> Checkpoint:
        """The same in a folder."""
        files = {path: File(*file[:3]) for path, file in self.files.items()}
        return Checkpoint(self.name, files)


class CheckpointBucket:
    """The checkpoints of a run below ``s3://bucket/prefix``, as node `node` of `count` sees them.

    Its methods raise BucketError where the bucket cannot be used.
    """

    def __init__(
        self, location: str, run: str = "", attempt: int = 0, node: int = 0, count: int = 1
    ) -> None:
        self._bucket = Bucket(location)
        self.location = self._bucket.location
        self._run, self._attempt = run, attempt
        self._node, self._count = node, count
        self._manifests: dict[str, dict[tuple[int, int], Manifest]] = {}
        """By the name of the checkpoint, then by node and number of nodes."""
        self._ended: dict[tuple[int, int], tuple[str, int]] = {}
        """By node and number of nodes: the run and attempt that ended there."""
        self._read: dict[str, tuple[str, Any]] = {}
        """By the name of a small object: its ETag and content."""

    def probe(self) -> None:
        """Raise BucketError unless an object can be written."""
        self._bucket.write(_PROBE, b"")

    def refresh(self) -> None:
        """Read what has changed in the bucket."""
        manifests: dict[str, dict[tuple[int, int], Manifest]] = {}
        for entry in self._bucket.entries(_MANIFESTS):
            match = _MANIFEST.fullmatch(entry.name.removeprefix(_MANIFESTS))
            manifest = match and _manifest(self._content(entry), entry.modified)
            if match and manifest:
                key = int(match["node"]), int(match["count"])
                manifests.setdefault(match["name"], {})[key] = manifest
        self._manifests = manifests
        if self._count > 1 or any(count > 1 for by in manifests.values() for _, count in by):
            self._ended = dict(self._read_ends())

    def _read_ends(self) -> Iterator[tuple[tuple[int, int], tuple[str, int]]]:
        for entry in self._bucket.entries(_ENDED):
            match = _MANIFEST.fullmatch(f"x/{entry.name.removeprefix(_ENDED)}")
            manifest = match and _manifest(self._content(entry), entry.modified)
            if match and manifest:
                yield (int(match["node"]), int(match["count"])), manifest.origin

    def _content(self, entry: Entry) -> Any:
        """The JSON in a small object, which is read once; None if it holds something else."""
        if self._read.get(entry.name, ("",))[0] != entry.etag:
            content = None
            with contextlib.suppress(ValueError, RecursionError):
                content = json.loads(self._bucket.read(entry.name) or b"")
            self._read[entry.name] = entry.etag, content
        return self._read[entry.name][1]

    def complete(self) -> dict[str, Stored]:
        """The complete checkpoints as of the last `refresh`, by name."""
        newest = {name: self._complete(name) for name in sorted(self._manifests)}
        return {name: stored for name, stored in newest.items() if stored}

    def _complete(self, name: str) -> Stored | None:
        """The newest complete set of manifests of a checkpoint."""
        sets: dict[int, dict[int, Manifest]] = {}
        for (node, count), manifest in self._manifests[name].items():
            if node < count:
                sets.setdefault(count, {})[node] = manifest
        whole = (parts for count, parts in sets.items() if self._is_whole(parts, count))
        every = (Stored(name, parts) for parts in whole)
        return max(every, key=lambda stored: stored.saved, default=None)

    def _is_whole(self, parts: Mapping[int, Manifest], count: int) -> bool:
        """Whether all nodes have written their parts of one save, or have none."""
        origins = {part.origin for part in parts.values() if part.files}
        if len(origins) != 1:
            return False
        missing = [node for node in range(count) if node not in parts]
        return all(self._ended.get((node, count)) in origins for node in missing)

    # ------------------------------------------------------------ to the bucket

    def is_stored(self, checkpoint: Checkpoint) -> bool:
        """Whether this node has nothing to add to a checkpoint in the bucket."""
        known = self._known_files(checkpoint.name)
        return bool(known) and all(
            _is_same(known.get(path), file) for path, file in checkpoint.files.items()
        )

    def _known_files(self, name: str) -> Mapping[str, StoredFile]:
        """The files of a checkpoint in the bucket that this node, or an earlier run, has saved."""
        own = self._own(name)
        if own is None and name in self._manifests:
            stored = self._complete(name)
            return stored.files if stored else {}
        return own.files if own else {}

    def save(self, folder: Path, checkpoint: Checkpoint) -> bool:
        """Copy what is new of a checkpoint, and complete it. False if it changed meanwhile."""
        known = self._known_files(checkpoint.name)
        used = self._used_keys(checkpoint.name)
        copies = {entry.name: entry for entry in self._copies(checkpoint)}
        files, missing = {}, []
        for path, file in checkpoint.files.items():
            if _is_same(known.get(path), file):
                files[path] = known[path]
                continue
            stored = files[path] = StoredFile(*file, self._free_key(path, used))
            if not _is_copy(copies.get(stored.key), file):
                missing.append((folder / path, stored.key))
        self._bucket.upload(missing)
        if checkpoint != checkpoint_folder.listed(folder, parts=True).get(checkpoint.name):
            return False
        self._write(checkpoint.name, files)
        self._bucket.delete(sorted(used - self._used_keys(checkpoint.name)))
        return True

    def _copies(self, checkpoint: Checkpoint) -> Iterator[Entry]:
        """The objects that may be copies of its files, from an upload that was interrupted."""
        for top in sorted({path.partition("/")[0] for path in checkpoint.files}):
            for beginning in (top, self._aside(top)) if self._node else (top,):
                yield from self._bucket.entries(beginning)

    def _aside(self, path: str) -> str:
        return f"{OWN}/node-{self._node}/{path}"

    def _free_key(self, path: str, used: set[str]) -> str:
        """The key for a file: its path, unless another node or an earlier state of it has that."""
        own = path if not self._node or path.endswith(SHARD) else self._aside(path)
        others = (f"{OWN}/again-{number}/{own}" for number in itertools.count(1))
        return next(key for key in itertools.chain([own], others) if key not in used)

    def _used_keys(self, name: str) -> set[str]:
        """The keys of the files of a checkpoint, in all its manifests."""
        manifests = self._manifests.get(name, {}).values()
        return {file.key for manifest in manifests for file in manifest.files.values()}

    def _own(self, name: str) -> Manifest | None:
        return self._manifests.get(name, {}).get((self._node, self._count))

    def _write(self, name: str, files: Mapping[str, StoredFile]) -> None:
        """Write this node's manifest."""
        key = f"node-{self._node}-of-{self._count}.json"
        content = {
            "run": self._run,
            "attempt": self._attempt,
            "files": [[*file] for file in files.values()],
        }
        self._bucket.write(f"{_MANIFESTS}{name}/{key}", json.dumps(content).encode())
        manifest = Manifest(self._run, self._attempt, dict(files), float("inf"))
        self._manifests.setdefault(name, {})[self._node, self._count] = manifest

    def first_has(self, name: str) -> bool:
        """Whether the first node has saved its part of a checkpoint in this attempt."""
        first = self._manifests.get(name, {}).get((0, self._count))
        return first is not None and first.origin == (self._run, self._attempt)

    def answers_due(self, here: Mapping[str, Checkpoint]) -> list[str]:
        """Checkpoints of this attempt of which this node has no part, or an unchanged one."""
        return [
            name
            for name, manifests in self._manifests.items()
            if self._is_asked(manifests) and (name not in here or self.is_stored(here[name]))
        ]

    def _is_asked(self, manifests: Mapping[tuple[int, int], Manifest]) -> bool:
        mine, now = manifests.get((self._node, self._count)), (self._run, self._attempt)
        others = [
            manifest
            for (node, count), manifest in manifests.items()
            if count == self._count and node != self._node
        ]
        is_current = any(one.origin == now and one.files for one in others)
        return is_current and (mine is None or bool(mine.files and mine.origin != now))

    def answer(self, name: str, here: Checkpoint | None) -> None:
        """Tell the other nodes what this one has of a checkpoint."""
        own = self._own(name)
        self._write(name, own.files if here and own else {})

    def end(self) -> None:
        """Tell the other nodes that nothing more comes from this one in this attempt."""
        content = {"run": self._run, "attempt": self._attempt, "files": []}
        key = f"{_ENDED}node-{self._node}-of-{self._count}.json"
        self._bucket.write(key, json.dumps(content).encode())

    def keep_newest(self, keep: int, since: float) -> list[str]:
        """Delete all but the newest `keep` complete checkpoints of each series; their names.

        What another run has saved after `since`, in seconds since the epoch, is not touched.
        """
        self.refresh()
        complete = self.complete().values()
        mine = [one.local for one in complete if not self._is_foreign(one.name, since)]
        expired = [one.name for one in checkpoint_folder.old(mine, keep)]
        for name in expired:
            keys = self._used_keys(name)
            manifests = [
                f"{_MANIFESTS}{name}/node-{node}-of-{count}.json"
                for node, count in self._manifests.pop(name)
            ]
            self._bucket.delete(manifests)
            self._bucket.delete(sorted(keys))
        return expired

    def _is_foreign(self, name: str, since: float) -> bool:
        manifests = self._manifests[name].values()
        return any(one.run != self._run and one.written > since for one in manifests)

    # ------------------------------------------------------------ from the bucket

    def restore(self, folder: Path) -> list[Stored]:
        """Bring the newest complete checkpoint of each series here, and what has no step.

        Returns those that were missing here, at least in part. On a single node, what is newer here
        stays; of several, the others do not have it, so each gives it a name that ends in
        ``.incomplete``. Raises OSError where the folder cannot be written.
        """
        here = checkpoint_folder.listed(folder, parts=self._count > 1)
        wanted = self._newest()
        if self._count == 1:
            wanted = [one for one in wanted if _is_wanted(one, here)]
        else:
            _set_aside(folder, [one for one in here.values() if one.name not in self.complete()])
        missing = {one.name: _missing(one, folder) for one in wanted}
        files = [file for some in missing.values() for file in some]
        _check_space(folder, sum(file.size for file in files if not _has_arrived(file, folder)))
        self.download(files, folder)
        return [one for one in wanted if missing[one.name]]

    def download(
        self,
        files: Sequence[StoredFile],
        folder: Path,
        done: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Copy files into `folder`, under their paths, once all of them have arrived.

        `done` receives the bytes that arrived, from several threads. What an interrupted copy has
        left is used.
        """
        _remove_other_versions(folder, files)
        absent = {file.key: file for file in files if not _has_arrived(file, folder)}
        objects = [Entry(file.key, file.size, 0.0, "") for file in absent.values()]
        self._bucket.download(objects, folder, done, lambda entry: _arrival(absent[entry.name]))
        for file in sorted(files, key=lambda file: checkpoint_folder.is_manifest(file.path)):
            arrived = folder / _arrival(file)
            os.utime(arrived, ns=(file.modified, file.modified))
            (folder / file.path).parent.mkdir(parents=True, exist_ok=True)
            arrived.replace(folder / file.path)
        shutil.rmtree(folder / _ARRIVING, ignore_errors=True)

    def _newest(self) -> list[Stored]:
        """The newest complete checkpoint of each series, and all that are in none."""
        complete = self.complete()
        local = [stored.local for stored in complete.values()]
        older = {one.name for one in checkpoint_folder.old(local, 1)}
        return [stored for name, stored in complete.items() if name not in older]

    def foreign_files(self) -> dict[str, File]:
        """Files of complete checkpoints that other nodes have saved, by path."""
        foreign: dict[str, File] = {}
        for stored in self.complete().values() if self._count > 1 else ():
            own: dict[str, StoredFile] = {}
            for node, part in stored.parts.items():
                if node == self._node or (node >= self._count and self._node == 0):
                    own |= part.files
            foreign |= {path: file for path, file in stored.local.files.items() if path not in own}
        return foreign


def _manifest(content: Any, written: float) -> Manifest | None:
    """A manifest; None for anything else, and for files that would leave the folder."""
    try:
        listed = [StoredFile(*file) for file in content["files"]]
        run, attempt = content["run"], content["attempt"]
    except (TypeError, KeyError):
        return None
    if not (isinstance(run, str) and type(attempt) is int and all(map(_is_valid, listed))):
        return None
    return Manifest(run, attempt, {file.path: file for file in listed}, written)


def _is_valid(file: StoredFile) -> bool:
    if not all(isinstance(name, str) and _is_below(name) for name in (file.path, file.key)):
        return False
    return all(type(number) is int and number >= 0 for number in (file.size, file.modified))


def _is_below(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(name) and "\0" not in name and not path.is_absolute() and ".." not in path.parts


def _is_same(stored: StoredFile | None, file: File) -> bool:
    return stored is not None and File(*stored[:3]) == file


def _is_copy(entry: Entry | None, file: File) -> bool:
    """Whether an object is a copy of the file, which has not changed since."""
    if entry is None or entry.size != file.size:
        return False
    return file.modified / 1e9 + _SETTLED < entry.modified


def _is_wanted(stored: Stored, here: Mapping[str, Checkpoint]) -> bool:
    """Whether nothing here is newer than a checkpoint in the bucket."""
    rivals = [one for one in here.values() if stored.series and one.series == stored.series]
    own = here.get(stored.name)
    return all(one.saved <= stored.saved for one in [*rivals, *([own] if own else [])])


def _set_aside(folder: Path, checkpoints: Iterable[Checkpoint]) -> None:
    """Hide checkpoints with a step from the program by their names."""
    for one in checkpoints:
        for top in {path.partition("/")[0] for path in one.files} if one.series else ():
            aside = folder / f"{top}.incomplete"
            shutil.rmtree(aside, ignore_errors=True)
            (folder / top).replace(aside)


def _missing(stored: Stored, folder: Path) -> list[StoredFile]:
    """The files of a checkpoint that are not here as they are in the bucket."""
    missing = []
    for path, file in stored.files.items():
        try:
            info = (folder / path).stat()
        except OSError:
            missing.append(file)
            continue
        if (info.st_size, info.st_mtime_ns) != (file.size, file.modified):
            missing.append(file)
    return missing


def _arrival(file: StoredFile) -> str:
    """Where a state of a file arrives, below the folder."""
    return f"{_ARRIVING}/{file.modified}/{file.key}"


def _has_arrived(file: StoredFile, folder: Path) -> bool:
    path = folder / _arrival(file)
    return path.exists() and path.stat().st_size == file.size


def _remove_other_versions(folder: Path, files: Sequence[StoredFile]) -> None:
    wanted = {str(file.modified) for file in files}
    for other in (folder / _ARRIVING).glob("*"):
        if other.name not in wanted:
            shutil.rmtree(other, ignore_errors=True)


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise BucketError(
            f"{folder} has {readable(free)} free, but the checkpoint to resume from needs "
            f"{readable(needed)}. Free some space there, or choose another folder."
        )


def newest_title(stored: Iterable[Stored]) -> str:
    """What a person calls the newest of some checkpoints; empty without one."""
    last = max(stored, key=lambda one: one.saved, default=None)
    return last.local.title if last else ""
