"""What the state folder holds, how much of the disk it takes, and what can be removed.

A bundle's archive is shared by all runs of the same source: the registry says which runs refer to
it. The unpacked copy that a run works in is its own, since a trainer may write into any file of it.
Once the run has ended, what it did not change is in the archive, and need not be kept twice.

No link is followed: a link in place of a folder is removed, and its target stays.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
import tarfile
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from deploykit.backends import base as backend
from deploykit.bundle import archive as bundle
from deploykit.bundle import node_plane
from deploykit.job.decode import Malformed, read_json
from deploykit.job.model import Handle, Problem, State
from deploykit.lib import paths, shell
from deploykit.lib.errors import CannotWrite, UsageError
from deploykit.run import budgets, registry
from deploykit.run.registry import Run

PARTS = ("source", "output", "checkpoints", "logs")
"""Folders of a run whose sizes are shown; the rest is `other`."""
SWEEP_DEFINITION = "sweep.json"
"""In the folder of a sweep. `sweep.folder` reads the rest."""
SWEEP_FINISHED = "finished"
"""Made when a sweep has ended: all its results are in its journal."""
_TRIAL = re.compile(r"(.+?)-[0-9]+(?:-s[0-9]+)?(?:-r[0-9]+)?")
"""A run id of a trial: the sweep, the trial, the repeat, the attempt."""
_KEPT_WHOLE = 3
"""The newest runs, whose sources stay whole: to look at them after a failure."""
_LOOKED_AT, _REDUCED_AT_ONCE = 50, 5
"""The newest runs that are looked at when a run ends, and the most sources that are reduced then:
each takes a third of a second for 40 MB."""
_ABANDONED_AFTER = 3600
"""Seconds without a write after which a scratch folder belongs to no submit any more."""
_PIECE = 1 << 20
_SUFFIX = ".tar.gz"


class Usage(NamedTuple):
    size: int
    parts: Mapping[str, int]
    """By the names of `PARTS`, and `other`."""


def size(path: Path, seen: set[tuple[int, int]] | None = None) -> int:
    """Bytes of disk space that a file or folder takes, as `du` counts: a file with two names once.

    What cannot be read counts nothing. `seen` are files that were counted before.
    """
    seen = set() if seen is None else seen
    try:
        info = path.lstat()
    except OSError:
        return 0
    if info.st_nlink > 1 and not stat.S_ISDIR(info.st_mode):
        if (info.st_dev, info.st_ino) in seen:
            return 0
        seen.add((info.st_dev, info.st_ino))
    below = _items(path) if stat.S_ISDIR(info.st_mode) else []
    return info.st_blocks * 512 + sum(size(item, seen) for item in below)


def run_usage(run: str) -> Usage | None:
    """What the folder of a run takes; None if there is none, or another process removes it."""
    folder = paths.run_folder(run)
    try:
        own = folder.lstat().st_blocks * 512
    except FileNotFoundError:
        return None
    seen: set[tuple[int, int]] = set()
    parts = Counter[str]()
    for item in [] if folder.is_symlink() else _items(folder):
        parts[item.name if item.name in PARTS else "other"] += size(item, seen)
    return Usage(own + parts.total(), parts)


def bundles() -> dict[str, Path]:
    stored = (path for path in _items(paths.bundles()) if path.name.endswith(_SUFFIX))
    return {path.name.removesuffix(_SUFFIX): path for path in stored}


def references(rows: Iterable[Run]) -> dict[str, list[str]]:
    """The runs and unfinished sweeps that refer to each bundle, by its hash."""
    by_bundle: dict[str, list[str]] = {}
    pairs = [*((row.run, row.bundle) for row in rows), *unfinished_sweeps().items()]
    for name, digest in pairs:
        by_bundle.setdefault(digest, []).append(name)
    return by_bundle


def unlisted(rows: Iterable[Run]) -> list[Path]:
    """Run folders with results or logs that the registry does not know, as after its loss.

    Whether they are needed is unknown, so they are never removed.
    """
    known = {row.run for row in rows}
    folders = (path for path in _items(paths.state() / "runs") if path.name not in known)
    return [path for path in folders if not _is_empty(path)]


def leftovers(rows: Sequence[Run]) -> list[Path]:
    """What no run needs: archives without a run, and scratch of interrupted submits.

    A submit makes its run's folder just before the row, and writes its scratch steadily, so only
    what was not written for an hour counts.
    """
    known, used, stored = {row.run for row in rows}, references(rows), bundles()
    folders = [path for path in _items(paths.state() / "runs") if path.name not in known]
    all_are_needed = any(not _is_empty(path) for path in folders)  # there are `unlisted` runs
    needed = {path for digest, path in stored.items() if all_are_needed or digest in used}
    unused = [
        *filter(_is_empty, folders),
        *(path for path in _items(paths.bundles()) if path not in needed),
        *(path for path in sweep_folders() if not os.path.lexists(path / SWEEP_DEFINITION)),
    ]
    return [path for path in unused if time.time() - _last_written(path) > _ABANDONED_AFTER]


def _is_empty(folder: Path) -> bool:
    """Whether nothing came after the lock that a submit begins with."""
    return not folder.is_symlink() and {item.name for item in _items(folder)} <= {paths.LOCK}


def _last_written(path: Path) -> float:
    """When something was last written at or just below `path`."""
    newest = 0.0
    for item in (path, *([] if path.is_symlink() else _items(path))):
        with contextlib.suppress(OSError):
            newest = max(newest, item.lstat().st_mtime)
    return newest


def crashes() -> list[Path]:
    return _items(paths.state() / "crashes")


def sweep_folders() -> list[Path]:
    """The folder of each sweep, also of one whose definition was not written yet, by name."""
    return _items(paths.state() / "sweeps")


def unfinished_sweeps() -> dict[str, str]:
    """The unfinished sweeps by their ids, each with the hash of its source."""
    by_id = {}
    for folder in sweep_folders():
        with contextlib.suppress(OSError, Malformed):
            if not (folder / SWEEP_FINISHED).exists():
                match read_json(folder / SWEEP_DEFINITION):
                    case {"bundle": str(digest)}:
                        by_id[folder.name] = digest
    return by_id


def sweep_of(run: str, sweeps: Collection[str]) -> str | None:
    """Which of these sweeps the run belongs to."""
    match = _TRIAL.fullmatch(run)
    return match[1] if match and match[1] in sweeps else None


def _items(folder: Path) -> list[Path]:
    """What is in a folder, sorted by name; nothing if it cannot be read."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def refuse_unfinished(
    rows: Iterable[Run], sweeps: Collection[str] = (), *, force: bool = False
) -> None:
    """Raise UsageError with each run that has not ended or that a sweep needs, and what to do.

    `rows` have their current state. `sweeps` are removed too. `force` allows runs whose state
    cannot be known, since their target is gone.
    """
    rows = list(rows)
    problems = [
        Problem("", f"{row.run} is {row.state}", _how_to_end(row))
        for row in rows
        if not (removable(row) or (force and _is_out_of_reach(row)))
    ]
    for run, sweep in needed_by_sweeps(rows).items():
        if sweep not in sweeps:
            resume = shell.command("deploykit", "sweep", "resume", sweep)
            whole = shell.command("deploykit", "rm", sweep)
            hint = f"`{resume}` continues the sweep; `{whole}` removes it with all its runs"
            message = f"{run} is a trial of the unfinished sweep {sweep}"
            problems.append(Problem("", message, hint))
    if problems:
        raise UsageError("only finished runs can be removed", problems=problems)


def needed_by_sweeps(rows: Iterable[Run]) -> dict[str, str]:
    """The runs whose sweeps have not ended, each with its sweep.

    The controller may not have recorded them yet: without their rows it would start them again.
    """
    sweeps = unfinished_sweeps()
    pairs = ((row.run, sweep_of(row.run, sweeps)) for row in rows)
    return {run: sweep for run, sweep in pairs if sweep is not None}


def removable(row: Run) -> bool:
    """Whether a run has ended, and no job of it can still appear."""
    return State(row.state).final and not registry.may_still_come(row)


def _is_out_of_reach(row: Run) -> bool:
    return row.state == State.UNKNOWN.value or row.reason.startswith(registry.LAST_KNOWN)


def _how_to_end(row: Run) -> str:
    if _is_out_of_reach(row):
        return f"{row.reason}; if the job no longer exists, add --force"
    if State(row.state).final:
        return f"the job may still appear; try again in {registry.IN_FLIGHT // 60} minutes"
    return f"`deploykit cancel {row.run}` stops it; `deploykit wait {row.run}` waits until it ends"


def left_elsewhere(row: Run) -> list[tuple[str, str | None]]:
    """Locations outside the run folder with files of the run, and the command that removes each.

    The command is None if other runs may use the location too.
    """
    locations: list[tuple[str, str | None]] = []
    with contextlib.suppress(UsageError):  # its backend is no longer installed
        engine = backend.find(row.backend)
        if backend.offers(engine, "remains"):
            job = Handle(row.backend, row.target, row.id or "", row.run, row.folder)
            locations += engine.remains(job, row.output)
    output = Path(row.output)
    if output.is_absolute() and Path(row.folder) not in output.parents:
        locations.append((row.output, None))
    if paths.is_address(checkpoints := row.job_data().get("checkpoints") or ""):
        locations.append((checkpoints, None))
    return locations


def remove_elsewhere(row: Run) -> None:
    """Delete the files of a run outside this machine that only this run uses.

    Raises BackendUnavailable, NotPermitted or TryAgain.
    """
    engine = backend.find(row.backend)
    if backend.offers(engine, "remove_remains"):
        job = Handle(row.backend, row.target, row.id or "", row.run, row.folder)
        engine.remove_remains(job, row.output)


def remove_run(row: Run) -> None:
    """Remove a run's folder, its row, and its bundle if no other run or sweep refers to it.

    The row goes after the folder, so that an interrupted removal can be repeated. Raises TryAgain
    while the run is being submitted, and CannotWrite as `remove`.
    """
    folder = paths.run_folder(row.run)
    with contextlib.ExitStack() as held:
        if folder.is_dir() and not folder.is_symlink():
            held.enter_context(paths.submitting(folder, row.run))
        budgets.settle(row)
        remove(folder)
        registry.remove(row.run)
        archive = bundles().get(row.bundle)
        if archive is not None:
            discard(archive)


def discard(path: Path) -> None:
    """Remove one of `leftovers` or `crashes`, unless a submit or a sweep has begun to use it."""
    name = path.name.removesuffix(_SUFFIX)
    if path.parent == paths.bundles():
        if name not in unfinished_sweeps().values():
            registry.release(name, lambda: remove(path))
    elif path.parent.name != "runs" or name not in registry.lookup(name):
        remove(path)


def remove(path: Path) -> None:
    """Remove a file, a link or a folder two levels below the state folder, with all that is in it.

    A path that is gone already, also through another process, is no error. Raises CannotWrite if
    something cannot be removed, such as another user's file, and for any other path.
    """
    if path.parent.parent != paths.state() or path.name in {"", ".", ".."}:
        raise CannotWrite(f"{path} is not two levels below {paths.state()}")
    paths.private_folder(path.parent)
    try:
        if path.is_symlink() or not path.is_dir():
            path.unlink(missing_ok=True)
            return
        try:
            _remove_tree(path)
        except PermissionError:  # some caches are folders without write permission
            path.chmod(stat.S_IRWXU)
            for folder, below, _ in os.walk(path):
                for name in below:
                    if not (closed := Path(folder, name)).is_symlink():
                        closed.chmod(stat.S_IRWXU)
            _remove_tree(path)
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
            _remove_tree(path)  # another process that removes the same run has written its lock
    except OSError as error:
        raise CannotWrite(
            f"cannot remove {path}: {error.strerror}",
            hint="check whether a file in it is in use or belongs to another user, then try again",
        ) from error


def _remove_tree(folder: Path) -> None:
    def raise_unless_gone(_function: object, _path: object, raised: Any) -> None:
        if not isinstance(raised[1], FileNotFoundError):
            raise raised[1]

    shutil.rmtree(folder, onerror=raise_unless_gone)


def tidy() -> None:
    """Reduce the sources of a few of the newest runs that have ended to what the runs wrote."""
    _reduce_all(whole(registry.select(limit=_LOOKED_AT))[:_REDUCED_AT_ONCE])


def tidy_all() -> None:
    """Like `tidy`, for all runs."""
    _reduce_all(whole(registry.every()))


def whole(rows: Iterable[Run]) -> list[Run]:
    """The runs whose sources can be reduced: they have ended, and are not the newest.

    `rows` are all runs, or the newest ones; the newest first.
    """
    return [
        row
        for row in list(rows)[_KEPT_WHOLE:]
        if State(row.state).final
        and row.state != State.UNSENT.value
        and paths.run_folder(row.run) == Path(row.folder)
        and Path(row.folder, "source", backend.LAUNCH).is_file()
    ]


def _reduce_all(rows: Iterable[Run]) -> None:
    for row in rows:
        with contextlib.suppress(OSError):
            _reduce(paths.run_folder(row.run), row.bundle)


def _reduce(folder: Path, digest: str) -> None:
    """Remove from ``source`` in a run's folder the files that the archive of the bundle has too.

    ``files.json`` stays, which lists what they were. Does nothing without the right archive. Files
    behind a link in place of a folder are another folder's, and stay.
    """
    source, archive = folder / "source", bundle.kept(digest)
    if archive is None or folder.is_symlink() or source.is_symlink():
        return
    top, emptied = source.resolve(), set()
    with tarfile.open(archive, "r:gz") as tar:
        for member in tar:
            path = source / member.name
            is_below = path.parent.resolve() == top / Path(member.name).parent
            if is_below and member.name != node_plane.FILES and _is_same(tar, member, path):
                path.unlink()
                emptied |= {below for below in path.parents if source in below.parents}
    for below in sorted(emptied, reverse=True):
        if {item.name for item in _items(below)} == {"__pycache__"}:
            shutil.rmtree(below / "__pycache__", ignore_errors=True)
        with contextlib.suppress(OSError):
            below.rmdir()


def _is_same(tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> bool:
    if path.is_symlink() or member.issym():
        return path.is_symlink() and str(path.readlink()) == member.linkname
    stored = tar.extractfile(member)
    if stored is None or not path.is_file() or path.stat().st_size != member.size:
        return False
    with path.open("rb") as on_disk:
        while piece := stored.read(_PIECE):
            if on_disk.read(len(piece)) != piece:
                return False
    return True
