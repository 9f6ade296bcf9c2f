"""Checkpoints of a run that its nodes have copied to S3: list and download them.

The nodes complete each by a manifest. What they wrote is read by their own module.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from deploykit.backends import base as backend
from deploykit.backends.base import RemoteFile
from deploykit.job.model import Handle
from deploykit.lib import paths
from deploykit.lib.errors import TryAgain

if TYPE_CHECKING:
    from deploykit_node.restart.checkpoint_bucket import CheckpointBucket, StoredFile


def location(handle: Handle) -> str | None:
    """The prefix in S3 that the job file of a run names; None for a folder, or without a job."""
    try:
        job = json.loads((Path(handle.folder) / backend.JOB).read_text())
    except (OSError, ValueError):
        return None
    named = job.get("checkpoints") or ""
    return named if named.startswith("s3://") else None


def files(handle: Handle, prefix: str) -> Sequence[RemoteFile]:
    """The files of the complete checkpoints below a prefix; see `base.Capabilities.files`."""
    listed = []
    for task, bucket in _buckets(handle, prefix):
        for file in _stored(bucket):
            address = f"{bucket.location}/{file.key}"
            listed.append(RemoteFile(task + file.path, file.size, file.modified / 1e9, address))
    return sorted(listed)


def download(
    handle: Handle,
    prefix: str,
    files: Sequence[RemoteFile],
    folder: Path,
    done: Callable[[int], None],
) -> None:
    """Copy some of `files` into `folder`; see `base.Capabilities.download`."""
    wanted = {(file.name, file.address) for file in files}
    for task, bucket in _buckets(handle, prefix):
        chosen = [
            file
            for file in _stored(bucket)
            if (task + file.path, f"{bucket.location}/{file.key}") in wanted
        ]
        with _errors():
            bucket.download(chosen, folder / task, done)


def _buckets(handle: Handle, prefix: str) -> Iterator[tuple[str, CheckpointBucket]]:
    """The run's bucket; for a job array that of each task, with the beginning of its names."""
    paths.add_node_plane()
    from deploykit_node.restart.checkpoint_bucket import CheckpointBucket

    tasks = [path.name for path in Path(handle.folder, "tasks").glob("[0-9]*")]
    for task in sorted(tasks, key=int):
        yield f"{task}/", CheckpointBucket(f"{prefix.rstrip('/')}/{task}")
    if not tasks:
        yield "", CheckpointBucket(prefix)


def _stored(bucket: CheckpointBucket) -> Iterator[StoredFile]:
    """The files of its complete checkpoints."""
    with _errors():
        bucket.refresh()
    for stored in bucket.complete().values():
        yield from stored.files.values()


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    from deploykit_node.bucket import BucketError

    try:
        yield
    except BucketError as error:
        raise TryAgain(str(error), hint="check the bucket and your permissions") from error
