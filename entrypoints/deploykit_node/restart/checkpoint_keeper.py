"""Beside the program: copies its checkpoints to a bucket, and deletes old ones.

A process of the node's launcher, so that no rank waits for it. Before any rank starts, it brings
the newest complete checkpoint from the bucket. While they run, it copies what they have completed,
and, where the job file has `keep_checkpoints`, deletes what is older than the newest. When they
have ended, it copies the rest.

All nodes share the checkpoint folder, unless the job file names one on each node: then each node
copies its own part. On a shared folder the first node works for all.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from deploykit_node import LAUNCH, log, outputs, records, signals
from deploykit_node.bucket import BucketError
from deploykit_node.cluster import BadEnvironment, Cluster, Environ, LaunchError
from deploykit_node.network import gathering
from deploykit_node.outputs import File
from deploykit_node.records import CheckpointsRecord
from deploykit_node.restart import checkpoint_folder, slurm_job
from deploykit_node.restart.checkpoint_bucket import OWN, CheckpointBucket, newest_title
from deploykit_node.restart.checkpoint_folder import Checkpoint

BUCKET = "DEPLOYKIT_CHECKPOINT_BUCKET"
"""The prefix in S3."""
NODE_FOLDER = "DEPLOYKIT_CHECKPOINT_FOLDER"
"""The folder of each node, below which the run's checkpoints are; without it, all share one."""
KEEP = "DEPLOYKIT_KEEP_CHECKPOINTS"
"""How many of the newest checkpoints stay."""
_EVERY = 2.0
"""Seconds between two looks at the folder."""
_SHARE = 20.0
"""The pause, by the time that listing took: a folder with very many files is seldom looked at."""
_STABLE = 5.0
"""Seconds without a change after which a checkpoint without a last file is complete."""
_RETRY = 30.0
"""Seconds after a failure until the next attempt."""
_ANSWERS = 5.0
"""Seconds between two looks at what the other nodes have saved."""
_MARGIN = 20.0
"""Seconds before the time limit at which a copy is given up, so that the job can be requeued."""
_GRACE = 30.0
"""Seconds for the copy after a signal to stop, unless DEPLOYKIT_GRACE is set or Slurm knows."""
_PAUSE = 0.2
_NICE = 10
_READY = "ready"


def choose_folder(env: dict[str, str], here: Cluster) -> None:
    """Where each node has a folder of its own, make it the program's checkpoint folder."""
    base = os.path.expandvars(env.get(NODE_FOLDER, ""))
    if not base:
        return
    if "$" in base:
        raise BadEnvironment(
            f"slurm.checkpoint_folder is {env[NODE_FOLDER]}, which contains a variable that is not "
            "set on this node. Choose a folder that every node has."
        )
    path = Path(base, env.get("DEPLOYKIT_RUN", "run"), f"node-{here.number}")
    env["DEPLOYKIT_CHECKPOINT_DIR"] = str(path)


@contextlib.contextmanager
def around(env: Environ, here: Cluster, stopped: Callable[[], bool]) -> Iterator[None]:
    """Restore before the program runs, copy and delete beside it, and copy the rest after it.

    `stopped` says whether a signal to stop has come. Raises LaunchError where the bucket cannot be
    used, before any rank starts.
    """
    works = here.number == 0 or NODE_FOLDER in env
    if not (env.get(BUCKET) or env.get(KEEP)):
        yield
        return
    process = _start(env, here) if works else None
    try:
        _await_others(env, here)
        yield
    finally:
        if process is not None:
            _finish(process, env, here, stopped=stopped())
            if env.get(KEEP) and here.number == 0:
                outputs.recount_checkpoints(env)


def _start(env: Environ, here: Cluster) -> subprocess.Popen[str]:
    """Start the process, and wait until it has restored. Raises LaunchError with its reason."""
    count = len(here.hosts) if NODE_FOLDER in env else 1
    process = subprocess.Popen(
        [sys.executable, LAUNCH, "--keep-checkpoints", str(here.number), str(count)],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=signals.child_setup(set(), signal.SIGKILL),  # noqa: PLW1509 - no thread yet
    )
    assert process.stdout is not None  # noqa: S101 - for mypy
    answer = process.stdout.readline().strip()
    if answer != _READY:
        process.wait()
        raise BadEnvironment(answer or "The process that copies checkpoints crashed.")
    return process


def _await_others(env: Environ, here: Cluster) -> None:
    """Wait until all nodes have what they resume from, which may take one of them long."""
    restored = gathering.gathering(env, "restored", here) if env.get(BUCKET) else None
    if restored is None:
        return
    restored.arrive()
    while not restored.complete():
        if records.has_ended(env, 0):
            raise BadEnvironment("Node 0 did not restore the checkpoints; see its log.")
        time.sleep(_PAUSE)


def _finish(process: subprocess.Popen[str], env: Environ, here: Cluster, *, stopped: bool) -> None:
    """Have the process copy the rest, for as long as there is time."""
    assert process.stdin is not None  # noqa: S101 - for mypy
    with contextlib.suppress(BrokenPipeError):  # it has crashed
        process.stdin.close()
    left = _time_left(env, here, stopped=stopped)
    try:
        process.wait(left)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        folder = env.get("DEPLOYKIT_CHECKPOINT_DIR", "")
        log.say(
            here.number,
            f"warning: the last {left:.0f} seconds were not enough to copy all checkpoints to "
            f"{env.get(BUCKET)}; the rest are in {folder}",
        )


def _time_left(env: Environ, here: Cluster, *, stopped: bool) -> float | None:
    """Seconds for the last copy; None: as long as it takes."""
    if here.launcher == "slurm":
        job = slurm_job.query(env)
        return max(1.0, job.left - _MARGIN) if job and math.isfinite(job.left) else None
    return float(env.get("DEPLOYKIT_GRACE") or _GRACE) if stopped else None


def main(argv: Sequence[str], env: Environ) -> int:
    """Work as node ``argv[0]`` of ``argv[1]`` until the standard input is closed."""
    for number in (*signals.STOPS, *signals.NOTICES):
        signal.signal(number, signal.SIG_IGN)  # the launcher decides
    os.nice(_NICE)
    try:
        keeper = _Keeper(env, int(argv[0]), int(argv[1]))
        keeper.begin()
    except LaunchError as error:
        print(*str(error).split(), flush=True)  # one line, which the launcher reads
        return error.exit_code
    print(_READY, flush=True)
    while not select.select([sys.stdin], [], [], keeper.pause)[0]:
        keeper.look()
    keeper.finish()
    return 0


class _Keeper:
    """Keeps the checkpoints of a folder."""

    def __init__(self, env: Environ, node: int, count: int) -> None:
        self._env, self._node, self._count = env, node, count
        self._folder = Path(env["DEPLOYKIT_CHECKPOINT_DIR"])
        self._keep = int(env.get(KEEP) or 0)
        location, run = env.get(BUCKET), env.get("DEPLOYKIT_RUN", "")
        self._bucket = (
            CheckpointBucket(location, run, records.attempt(env), node, count) if location else None
        )
        self.pause = _EVERY
        """Seconds until the next look."""
        self._began = time.time()
        self._seen: dict[str, tuple[Checkpoint, float]] = {}
        """By name: how a checkpoint looks, and since when (`time.monotonic`)."""
        self._whole: dict[str, Checkpoint] = {}
        """By name: how a checkpoint looked when no file of it was cut off."""
        self._foreign: Mapping[str, File] = {}
        """Files here that came from other nodes, by path."""
        self._asked: dict[str, float] = {}
        """Since when another node has a checkpoint of which this one has nothing new."""
        self._retry_at = self._answer_at = 0.0
        self._error = self._newest = ""
        self._run = _Presence(self._folder, run)

    def begin(self) -> None:
        """Restore what the program resumes from. Raises LaunchError."""
        restored = []
        try:
            self._run.enter()
            if self._bucket is not None:
                self._bucket.probe()
                self._bucket.refresh()
                restored = self._bucket.restore(self._folder)
        except OSError as error:
            raise BadEnvironment(
                f"{self._folder} cannot be used for checkpoints: {error}"
            ) from error
        if self._bucket is None:
            return
        self._foreign = self._bucket.foreign_files()
        self._newest = newest_title(self._bucket.complete().values())
        names = ", ".join(one.local.title for one in restored)
        what = f"restored {names}" if names else "nothing to restore"
        self._say(f"checkpoints in {self._bucket.location}: {what}")
        self._record()

    def look(self, *, last: bool = False) -> None:
        """Copy what is complete, and delete what is old; `last` when nothing writes any more."""
        began = time.monotonic()
        try:
            here = self._complete(last=last)
            self.pause = max(_EVERY, _SHARE * (time.monotonic() - began))
        except OSError as error:
            self._say(f"warning: {self._folder} cannot be read: {error}")
            return
        old = list(checkpoint_folder.old(here, self._keep)) if self._keep else []
        current = [one for one in here if one not in old]
        if self._bucket is not None and (last or time.monotonic() >= self._retry_at):
            try:
                self._copy(self._bucket, current, last=last)
                self._set_error("")
            except BucketError as error:
                self._retry_at = time.monotonic() + _RETRY
                self._set_error(str(error))
        if not self._run.is_shared():
            for one in old:
                checkpoint_folder.remove(self._folder, one)
                self._say(f"{one.title} deleted: keep_checkpoints is {self._keep}")

    def finish(self) -> None:
        """Copy the rest, after the program has ended."""
        self.look(last=True)
        if self._bucket is not None and self._error:
            missing = f"not all checkpoints are in {self._bucket.location}"
            self._say(f"warning: {missing}; this attempt's checkpoints are in {self._folder}")
        elif self._bucket is not None and self._count > 1:
            with contextlib.suppress(BucketError):
                self._bucket.end()
        self._run.leave()

    def _complete(self, *, last: bool) -> list[Checkpoint]:
        """The complete checkpoints here, the earliest first."""
        now, complete = time.monotonic(), []
        listed = checkpoint_folder.listed(self._folder, parts=self._node > 0)
        self._seen = {
            name: before if (before := self._seen.get(name, (None, 0.0)))[0] == one else (one, now)
            for name, one in listed.items()
        }
        for name, (one, since) in self._seen.items():
            if not (one.is_marked or last or now - since >= _STABLE):
                continue
            if self._whole.get(name) != one:
                if checkpoint_folder.is_cut_off(self._folder, one):
                    continue
                self._whole[name] = one
            complete.append(one)
        return sorted(complete, key=lambda one: one.saved)

    def _copy(self, bucket: CheckpointBucket, here: list[Checkpoint], *, last: bool) -> None:
        """Copy what this node has saved and the bucket has not."""
        if self._count > 1 and (last or time.monotonic() >= self._answer_at):
            self._answer_at = time.monotonic() + _ANSWERS
            bucket.refresh()
        own = [self._own_part(one) for one in here]
        saved = []
        for one in own:
            may_be_partial = self._node > 0 and one.is_sharded and not one.is_marked and not last
            if not one.files or bucket.is_stored(one):
                continue
            if may_be_partial and not bucket.first_has(one.name):
                continue  # the first node knows when all ranks have written
            if bucket.save(self._folder, one):
                saved.append(one)
                self._newest = one.title
                self._say(f"{one.title} copied to {bucket.location}")
        if self._count > 1:
            self._answer(bucket, {one.name: one for one in own if one.files}, last=last)
        if saved and self._keep and self._node == 0:
            for name in bucket.keep_newest(self._keep, self._began):
                why = f"keep_checkpoints is {self._keep}"
                self._say(f"{name} deleted from {bucket.location}: {why}")
        if saved:
            self._record()

    def _own_part(self, one: Checkpoint) -> Checkpoint:
        """The files of a checkpoint that did not come from another node."""
        files = {path: file for path, file in one.files.items() if self._foreign.get(path) != file}
        return Checkpoint(one.name, files)

    def _answer(
        self, bucket: CheckpointBucket, own: Mapping[str, Checkpoint], *, last: bool
    ) -> None:
        """Tell the other nodes about checkpoints of which this one has nothing new."""
        now = time.monotonic()
        due = bucket.answers_due(own)
        self._asked = {name: self._asked.get(name, now) for name in due}
        for name, since in self._asked.items():
            if last or now - since >= _STABLE:
                bucket.answer(name, own.get(name))

    def _set_error(self, text: str) -> None:
        """Note that the last copy failed, or did not."""
        if text == self._error:
            return
        self._error = text
        if text:
            self._say(f"warning: {text} Training continues, and the copy will be retried.")
        self._record()

    def _record(self) -> None:
        folder = records.folder(self._env)
        if folder is None or self._bucket is None:
            return
        record: CheckpointsRecord = {
            "attempt": records.attempt(self._env),
            "time": log.now(),
            "location": self._bucket.location,
            "newest": self._newest,
            "error": self._error,
        }
        with contextlib.suppress(OSError):
            records.write(folder / f"checkpoints-{self._node}.json", record)

    def _say(self, text: str) -> None:
        log.say(self._node, text)


class _Presence:
    """That this run uses a folder: a lock, by which other runs see it as long as it lives.

    Runs with the same folder would delete each other's checkpoints. A file system without locks
    shows none of them.
    """

    def __init__(self, folder: Path, run: str) -> None:
        self._path = folder / OWN / f"{run}.lock"
        self._file: IO[bytes] | None = None

    def enter(self) -> None:
        records.make_folder(self._path.parent)
        self._file = self._path.open("ab")
        with contextlib.suppress(OSError):
            fcntl.flock(self._file, fcntl.LOCK_SH)  # waits while another run looks at the file

    def is_shared(self) -> bool:
        """Whether another run uses the folder now."""
        others = [path for path in self._path.parent.glob("*.lock") if path != self._path]
        return any(map(_is_locked, others))

    def leave(self) -> None:
        self._path.unlink(missing_ok=True)


def _is_locked(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # removed at this moment, or there are no locks
        return False
    return False
