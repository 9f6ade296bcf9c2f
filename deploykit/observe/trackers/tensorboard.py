"""TensorBoard: event files in a folder, or below an ``s3://`` prefix.

The sizes of the files are remembered. Bytes beyond them come from an interrupted write;
they are cut off and written again.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deploykit.lib import paths
from deploykit.lib.errors import BackendUnavailable, CannotWrite, NotPermitted
from deploykit.observe.metrics import tensorboard as events
from deploykit.observe.metrics.points import Value
from deploykit.observe.trackers.contract import About, Ending, Memory

_MAX_FILE_BYTES = 4 << 20
"""A file of this size is followed by another one: in S3 a file that grows is sent again."""
_DENIED = {"AccessDenied", "403", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken"}


def make(where: str, about: About, memory: Memory) -> TensorBoard:
    """A folder of event files below `where`, a folder or an ``s3://`` prefix."""
    return TensorBoard(where, about, memory)


class TensorBoard:
    """The event files of one run; see `deploykit.observe.trackers.contract.Tracker`."""

    def __init__(self, where: str, about: About, memory: Memory) -> None:
        self.url = f"{where.rstrip('/')}/{about.run}"
        self._about, self._memory = about, memory
        self._in_s3 = paths.is_address(where)
        self._folder = about.folder / "tensorboard" if self._in_s3 else Path(self.url)
        for key, empty in (("sizes", []), ("sent", {}), ("uploaded", [])):
            memory.setdefault(key, empty)

    def clean(self, name: str) -> str:
        """Every name is allowed."""
        return name

    def begin(self) -> Mapping[str, int]:
        """Make the folder, and cut off incomplete writes. Raises CannotWrite."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if not all(self._path(number).exists() for number in range(len(self._sizes))):
                self._memory |= {"sizes": [], "sent": {}, "uploaded": []}  # files were removed
            for number in range(len(self._sizes) + 1):
                path = self._path(number)
                if path.exists():
                    os.truncate(path, self._sizes[number] if number < len(self._sizes) else 0)
        except OSError as error:
            raise CannotWrite(f"cannot write {self._folder}: {error.strerror}") from error
        return dict(self._memory["sent"])

    def send(self, values: Sequence[Value]) -> None:
        """Append to the last file, or begin another. Raises CannotWrite."""
        if not self._sizes or self._sizes[-1] >= _MAX_FILE_BYTES:
            self._sizes.append(0)
        path = self._path(len(self._sizes) - 1)
        data = events.records(values, self._about.started)
        try:
            with path.open("ab") as file:
                if not self._sizes[-1]:
                    file.write(events.heading(self._about.started))
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
                self._sizes[-1] = file.tell()
        except OSError as error:
            raise CannotWrite(f"cannot write {path}: {error.strerror}") from error
        self._memory["sent"].update({one.name: one.step for one in values})

    def end(self, ending: Ending | None) -> None:  # noqa: ARG002 - TensorBoard knows no states
        """Upload files that have grown to S3. Raises NotPermitted or BackendUnavailable."""
        uploaded = self._memory["uploaded"]
        if not self._in_s3 or uploaded == self._sizes:
            return
        client = _client()
        for number, size in enumerate(self._sizes):
            if uploaded[number : number + 1] != [size]:
                self._upload(client, self._path(number))
                uploaded[number:] = [size]

    @property
    def _sizes(self) -> list[int]:
        return self._memory["sizes"]  # type: ignore[no-any-return]

    def _path(self, number: int) -> Path:
        return self._folder / events.file_name(self._about.started, number)

    def _upload(self, client: Any, path: Path) -> None:
        from botocore.exceptions import BotoCoreError, ClientError

        bucket, _, prefix = self.url.removeprefix("s3://").partition("/")
        try:
            client.put_object(Bucket=bucket, Key=f"{prefix}/{path.name}", Body=path.read_bytes())
        except (BotoCoreError, ClientError, OSError) as error:
            answer = error.response if isinstance(error, ClientError) else {}
            code = answer.get("Error", {}).get("Code")
            message = f"cannot write {self.url}: {error}"
            raise (NotPermitted if code in _DENIED else BackendUnavailable)(message) from error


def _client() -> Any:
    import boto3  # not for folders

    return boto3.client("s3")
