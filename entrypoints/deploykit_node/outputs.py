"""What the program writes: found, recorded, and, where the job file names it, brought back.

A script that knows nothing of deploykit saves into its working folder, the unpacked source. Here
its files are told from those that came with the source, for the exit record ``written.json``, which
`deploykit status` and `wait` show.

Those that `outputs` of the job file names are copied into the output folder when the program has
ended, in whatever way, and kept in ``working_folder/`` of the checkpoint folder. From there they
come back into the working folder of another attempt, or of another run with the same checkpoints.
Machines without a common folder, as on SageMaker, each collect their own, those after the first in
a folder ``node-N``; there the kept files are also refreshed while the program runs, because no
signal announces the end.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, NamedTuple

from deploykit_node import LAUNCH, log, records, signals
from deploykit_node.cluster import Environ
from deploykit_node.records import FilesRecord, WrittenRecord

VARIABLE = "DEPLOYKIT_OUTPUTS"
"""The patterns, as a JSON list."""
EVERY = "DEPLOYKIT_COLLECT_SECONDS"
"""Seconds between two looks while the program runs."""

_EVERY = 30.0
_LISTING = ".deploykit/files.json"
"""The list of the bundle's files, with mode and size (`deploykit/bundle/archive.py`)."""
_CODE = (".py", ".pyc", ".so", ".pth")
"""What Python would import is never brought back: others may write to the bucket."""
_OTHERS = re.compile(r"node-[0-9]+/")
"""What the first machine finds below its own files: those of the others."""
_ZIP = b"PK\3\4"
"""The first bytes of a zip archive, the format of `torch.save`."""
_CLUTTER = frozenset({".deploykit", "__pycache__"})
"""Folders of the launcher and of Python, which are no results."""
_MOST_FILES = 100_000
"""Files of a folder that are counted."""
_LARGEST = 10
"""Files that are recorded by name."""
_LOGGED = 5
"""Files that a line of the log names."""
PART = ".deploykit-part"
"""Ending of a file that is being copied."""
KEPT = "working_folder"
"""The folder of the checkpoints that keeps the files that `outputs` names."""


class File(NamedTuple):
    """A regular file: its path below a folder, its size in bytes and its time in nanoseconds."""

    path: str
    size: int
    modified: int


class Outputs:
    """The outputs of the program in the current folder, on node `node`."""

    def __init__(self, env: Environ, node: int) -> None:
        self._env, self._node = env, node
        self._folder = Path.cwd()
        self.patterns: list[str] = json.loads(env.get(VARIABLE, "[]"))
        self._shared = bool(env.get("DEPLOYKIT_RUN_DIR"))
        own = f"node-{node}" if node and not self._shared else ""
        self._output = Path(env.get("DEPLOYKIT_OUTPUT_DIR", ""), own)
        self._all_kept = Path(env.get("DEPLOYKIT_CHECKPOINT_DIR", ""), KEPT)
        self._kept = self._all_kept / own

    def collect(self) -> None:
        """Copy new and changed files into the output folder, and keep them for another attempt."""
        with self._lock():
            files = self._found()
            copied = [file for file in files if self._collect(file)]
        if copied:
            self._say(f"outputs collected: {_named(copied)}")
        elif self.patterns and not files:
            self._say(f"outputs: the program wrote no file matching {self.patterns}")

    @property
    def is_due(self) -> bool:
        """Whether this node has to copy: of those that share a folder, the first one has."""
        return not (self._shared and self._node)

    @property
    def is_volatile(self) -> bool:
        """Whether the working folder is lost when the program is killed."""
        return not self._shared

    def restore(self) -> None:
        """Bring back the kept files that are missing here, or were cut off while being written."""
        with self._lock():
            folders = dict.fromkeys([self._kept, self._all_kept])
            restored = [file for folder in folders for file in self._restore(folder)]
        if restored:
            self._say(f"outputs restored: {_named(restored)}")

    def keep_stable(self, before: Mapping[str, File]) -> dict[str, File]:
        """Keep the files that have not changed since `before`; returns all as they are now."""
        with self._lock():
            now = {file.path: file for file in self._found()}
            for path, file in now.items():
                if before.get(path) == file:
                    self._copy(self._folder / path, self._kept / path, file)
        return now

    def report(self) -> None:
        """Record, or else log, what the program has written."""
        if self._shared:
            with contextlib.suppress(OSError):  # the run is over, with or without this record
                record_written(self._env, self._folder, self.patterns)
        else:
            say_written(self._env, self._folder, self._node, named=bool(self.patterns))

    def _found(self) -> list[File]:
        """The new and changed files that match."""
        if not self.patterns:
            return []
        return [file for file in new_files(self._folder, self._env) if self._matches(file)]

    def _matches(self, file: File) -> bool:
        parts = file.path.split("/")
        split = (pattern.split("/") for pattern in self.patterns)
        return any(matches(parts, [word for word in one if word not in {"", "."}]) for one in split)

    def _collect(self, file: File) -> bool:
        source, target, kept = (
            folder / file.path for folder in (self._folder, self._output, self._kept)
        )
        if self._kept != self._all_kept and _same(self._all_kept / file.path, file):
            return False  # it was brought back from the first machine
        if is_cut_off(source):
            self._say(f"outputs: {file.path!a} is incomplete, so the earlier copy is kept")
            return False
        return self._copy(source, target, file) and (
            _link(target, kept) or self._copy(source, kept, file)
        )

    def _restore(self, folder: Path) -> Iterator[File]:
        for file in files(folder) if self.patterns else ():
            if self._is_wanted(file) and self._copy(
                folder / file.path, self._folder / file.path, file
            ):
                yield file

    def _is_wanted(self, file: File) -> bool:
        """Whether a kept file is to be brought back."""
        foreign = not self._shared and _OTHERS.match(file.path)
        if foreign or file.path.endswith(_CODE):
            return False
        target = self._folder / file.path
        return self._matches(file) and (not target.exists() or is_cut_off(target))

    def _copy(self, source: Path, target: Path, file: File) -> bool:
        """Copy a file unless the copy is there. Returns whether it was copied; says what failed."""
        try:
            return not _same(target, file) and _copied(source, target)
        except OSError as error:
            self._say(f"outputs: {file.path!a} cannot be copied to {target.parent}: {error}")
            return False

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Wait for the other ranks of a machine. On a shared folder only one node copies."""
        with contextlib.ExitStack() as stack:
            if not self._shared:
                with contextlib.suppress(OSError):
                    file: IO[bytes] = stack.enter_context((self._folder / _LISTING).open("rb"))
                    fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _say(self, text: str) -> None:
        log.say(self._node, text)


@contextlib.contextmanager
def around(env: Environ, node: int, local_rank: int = 0) -> Iterator[None]:
    """Restore before the program runs and collect after it, in whatever way it ends.

    Below another launcher every rank collects at its end, since none knows which of them writes,
    or which is the last.
    """
    mine = Outputs(env, node)
    if not mine.is_due:
        yield
        return
    mine.restore()
    keeps = mine.patterns and mine.is_volatile and not local_rank
    keeper = _start_keeper(env, node) if keeps else None
    try:
        yield
    finally:
        if keeper is not None:
            keeper.kill()
            keeper.wait()
        mine.collect()
        if not local_rank:
            mine.report()


def _start_keeper(env: Environ, node: int) -> subprocess.Popen[bytes]:
    """Start the process that keeps the files while the program runs; it ends with this one."""
    return subprocess.Popen(
        [sys.executable, LAUNCH, "--keep-outputs", str(node)],
        env=env,
        stdin=subprocess.DEVNULL,
        preexec_fn=signals.child_setup(set(), signal.SIGKILL),  # noqa: PLW1509 - no thread yet
    )


def keep(argv: Sequence[str], env: Environ, sleep: Callable[[float], None] = time.sleep) -> None:
    """Keep the files of node ``argv[0]`` until this process is killed."""
    mine = Outputs(env, int(argv[0]))
    seen: dict[str, File] = {}
    while True:
        sleep(float(env.get(EVERY) or _EVERY))
        seen = mine.keep_stable(seen)


def matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether a path matches, or lies in a folder that does; ``**`` matches any folders."""
    if not pattern:
        return True
    if not parts:
        return False
    first, *rest = pattern
    if first == "**":
        return matches(parts, rest) or matches(parts[1:], pattern)
    return fnmatchcase(parts[0], first) and matches(parts[1:], rest)


def is_cut_off(path: Path) -> bool:
    """Whether this is a zip archive without its end, as a killed `torch.save` leaves it."""
    try:
        with path.open("rb") as file:
            return file.read(len(_ZIP)) == _ZIP and not zipfile.is_zipfile(file)
    except OSError:
        return False


def _same(target: Path, file: File) -> bool:
    """Whether `target` is already the copy of this file."""
    try:
        info = target.lstat()
    except FileNotFoundError:
        return False
    return (info.st_size, info.st_mtime_ns) == (file.size, file.modified)


def _copied(source: Path, target: Path) -> bool:
    """Copy a file with its time, complete or not at all; False if it changed meanwhile."""
    records.make_folder(target.parent)
    part = target.with_name(f".{target.name}{PART}")
    before = source.stat()
    shutil.copyfile(source, part)
    after = source.stat()
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        part.unlink()
        return False
    os.utime(part, ns=(after.st_atime_ns, after.st_mtime_ns))
    part.replace(target)
    return True


def _link(source: Path, target: Path) -> bool:
    """Give a copy a second name, where both are on one disk."""
    part = target.with_name(f".{target.name}{PART}")
    try:
        records.make_folder(target.parent)
        part.unlink(missing_ok=True)
        os.link(source, part)
        part.replace(target)
    except OSError:
        return False
    return True


def files(folder: Path) -> Iterator[File]:
    """Every regular file below `folder`. Follows no link; skips what cannot be read."""
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _CLUTTER)
        for path in (Path(root, name) for name in sorted(names) if not name.endswith(PART)):
            with contextlib.suppress(OSError):
                info = path.lstat()
                if stat.S_ISREG(info.st_mode):
                    below = path.relative_to(folder).as_posix()
                    yield File(below, info.st_size, info.st_mtime_ns)


def new_files(folder: Path, env: Environ) -> Iterator[File]:
    """The files of the working folder that did not come with the source, or have changed since."""
    listing = folder / _LISTING
    try:
        came = dict(json.loads(listing.read_bytes()))
        began = _began(env) or listing.stat().st_mtime_ns
    except (OSError, ValueError, TypeError):
        came, began = {}, 0
    for file in files(folder):
        known = came.get(file.path)
        same_size = isinstance(known, list) and known[-1:] == [file.size]
        if not (same_size and file.modified <= began):
            yield file


def record_written(env: Environ, folder: Path, patterns: list[str]) -> None:
    """Leave the record of what was written, if the run has a folder for it."""
    own = records.folder(env)
    if own is None:
        return
    output = Path(env.get("DEPLOYKIT_OUTPUT_DIR", ""))
    content: WrittenRecord = {
        "attempt": records.attempt(env),
        "working_folder": _summary(folder, new_files(folder, env)),
        "output": _summary(output, _of_run(output, env)),
        "checkpoints": _checkpoints(env),
        "outputs": patterns,
    }
    records.write(own / "written.json", content)


def recount_checkpoints(env: Environ) -> None:
    """Correct the record once old checkpoints have been deleted: they are no results any more."""
    own = records.folder(env)
    before = records.read(own / "written.json") if own else None
    if own and before and before.get("attempt") == records.attempt(env):
        with contextlib.suppress(OSError):  # the run is over, with or without this record
            records.write(own / "written.json", {**before, "checkpoints": _checkpoints(env)})


def _of_run(folder: Path, env: Environ) -> Iterator[File]:
    """The files that were written since the run began; others may have written there before."""
    began = _began(env) or 0
    return (file for file in files(folder) if file.modified >= began)


def _checkpoints(env: Environ) -> FilesRecord:
    """The run's files in the checkpoint folder, without those that are listed elsewhere."""
    folder = Path(env.get("DEPLOYKIT_CHECKPOINT_DIR", ""))
    listed = folder.is_relative_to(Path(env.get("DEPLOYKIT_OUTPUT_DIR", "")))
    own = () if listed else _of_run(folder, env)
    return _summary(folder, (file for file in own if not file.path.startswith(f"{KEPT}/")))


def say_written(env: Environ, folder: Path, node: int, *, named: bool) -> None:
    """Log what was written into a working folder that is lost when the container ends."""
    listed = _summary(folder, new_files(folder, env)) if env.get("DEPLOYKIT_RUN") else None
    if listed and listed["count"]:
        hint = "" if named else "; to keep them, list them under `outputs` in the job file"
        log.say(node, f"written to the working folder: {_text(listed)}{hint}")


def _named(listed: Iterable[File]) -> str:
    """``2 files, 1.5 MB: a.pt (1.4 MB), b.log (20 B)``."""
    return _text(_summary(Path(), listed))


def readable(size: float) -> str:
    """A number of bytes as text, in powers of 1000."""
    for unit in ("B", "kB", "MB"):
        if size < 1000:  # noqa: PLR2004 - the step between two units
            return f"{size:.1f} {unit}".replace(".0 ", " ")
        size /= 1000
    return f"{size:.1f} GB"


def _began(env: Environ) -> int | None:
    """When the run started for the first time, by the clock of the run folder's disk."""
    run = env.get("DEPLOYKIT_RUN_DIR")
    try:
        return Path(run, "claim").lstat().st_mtime_ns if run else None
    except OSError:
        return None


def _summary(folder: Path, listed: Iterable[File]) -> FilesRecord:
    counted = list(itertools.islice(listed, _MOST_FILES))
    largest = sorted(counted, key=lambda file: (-file.size, file.path))[:_LARGEST]
    return {
        "folder": str(folder),
        "count": len(counted),
        "bytes": sum(file.size for file in counted),
        "largest": [(file.path, file.size) for file in largest],
    }


def _text(listed: FilesRecord) -> str:
    count = listed["count"]
    shown = [f"{ascii(path)[1:-1]} ({readable(size)})" for path, size in listed["largest"]]
    more = ", ..." if count > _LOGGED else ""
    total = f"{count} file{'' if count == 1 else 's'}, {readable(listed['bytes'])}"
    return f"{total}: {', '.join(shown[:_LOGGED])}{more}"
