"""Files of a prefix in S3, read and written by a node: list, download, upload, delete.

boto3 does the copying, several files and parts at once. It finds credentials, region and endpoint
as every AWS tool does: variables, ``~/.aws``, the instance's role.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from deploykit_node.cluster import LaunchError

_AT_ONCE = 20
"""Requests at the same time; many small files need more than s3transfer's default of 10."""
_KEYS = {
    "aws_access_key_id": "AWS_ACCESS_KEY_ID",
    "aws_secret_access_key": "AWS_SECRET_ACCESS_KEY",
    "aws_session_token": "AWS_SESSION_TOKEN",
}
"""boto3's arguments -> variables that the job file may set, also as secrets."""
_DELETED_AT_ONCE = 1000
"""Objects that one DeleteObjects request may name."""


class BucketError(LaunchError):
    """A prefix cannot be read or written. The message is a sentence with the address."""


def reason(error: OSError) -> str:
    """Return why a file cannot be used, with its name."""
    where = f" ({error.filename})" if error.filename else ""
    return f"{error.strerror or error}{where}"


class Entry(NamedTuple):
    """An object below the prefix."""

    name: str
    """Its key below the prefix."""
    size: int
    modified: float
    """Seconds since the epoch."""
    etag: str


class Bucket:
    """The objects below ``s3://bucket/prefix``.

    Every method raises BucketError where S3 refuses or does not answer.
    """

    def __init__(self, location: str, env: Mapping[str, str] = os.environ) -> None:
        """Connect to nothing yet. Keys in `env`, such as resolved secrets, come first.

        Raises BucketError where boto3 is missing.
        """
        try:
            import boto3
            import botocore.config
        except ImportError:
            raise BucketError(
                f"{location} requires boto3, which is not installed on this node. Add boto3 to the "
                "job's environment, or to requirements.txt."
            ) from None
        name, _, prefix = location.removeprefix("s3://").partition("/")
        self.location = f"s3://{name}/{prefix.rstrip('/')}".rstrip("/")
        self._bucket, self._prefix = name, prefix.rstrip("/") + "/" if prefix else ""
        retries = {"mode": "adaptive", "max_attempts": 8}  # a bucket slows down many nodes at once
        config = botocore.config.Config(max_pool_connections=_AT_ONCE, retries=retries)
        keys = {argument: env[name] for argument, name in _KEYS.items() if name in env}
        self._client = boto3.client("s3", config=config, **keys)

    def entries(self, beginning: str = "") -> list[Entry]:
        """The objects whose names begin so, sorted, without marks of empty folders."""
        pages = self._client.get_paginator("list_objects_v2")
        listed = list[Entry]()
        with self._errors("listed"):
            for page in pages.paginate(Bucket=self._bucket, Prefix=self._prefix + beginning):
                for each in page.get("Contents", ()):
                    name = each["Key"].removeprefix(self._prefix)
                    if name and not name.endswith("/"):
                        when, etag = each["LastModified"].timestamp(), each["ETag"].strip('"')
                        listed.append(Entry(name, each["Size"], when, etag))
        return sorted(listed)

    def read(self, name: str) -> bytes | None:
        """The content of a small object; None if there is none."""
        with self._errors("read"):
            try:
                answer = self._client.get_object(Bucket=self._bucket, Key=self._prefix + name)
            except self._client.exceptions.NoSuchKey:
                return None
            return bytes(answer["Body"].read())

    def write(self, name: str, content: bytes) -> None:
        """Write a small object in one request, which S3 checks by a checksum."""
        with self._errors("written"):
            self._client.put_object(
                Bucket=self._bucket,
                Key=self._prefix + name,
                Body=content,
                ChecksumAlgorithm="CRC32",
            )

    def download(
        self,
        entries: Sequence[Entry],
        folder: Path,
        done: Callable[[int], None] = lambda _: None,
        path_of: Callable[[Entry], str] = lambda entry: entry.name,
    ) -> None:
        """Copy objects into `folder`; each gets its path there once it is complete.

        `done` receives the bytes that arrived, from several threads.
        """
        with self._errors("downloaded"), self._transfers() as (manager, transfer):
            pending = []
            paths = [folder / path_of(entry) for entry in entries]
            for parent in {path.parent for path in paths}:
                parent.mkdir(parents=True, exist_ok=True)
            for entry, path in zip(entries, paths, strict=True):
                key = self._prefix + entry.name
                subscribers = [transfer(done, entry)]
                future = manager.download(self._bucket, key, str(path), subscribers=subscribers)
                pending.append((entry, path, future))
            for entry, path, future in pending:
                with self._errors("downloaded", f"/{entry.name}"):
                    future.result()
                if path.stat().st_size != entry.size:
                    path.unlink()
                    raise BucketError(f"{self.location}/{entry.name} changed while being copied.")

    def upload(
        self,
        files: Iterable[tuple[Path, str]],
        done: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Copy files to names below the prefix, with a checksum that S3 verifies."""
        extra = {"ChecksumAlgorithm": "CRC32"}
        with self._errors("uploaded"), self._transfers() as (manager, transfer):
            watching = [transfer(done)]
            pending = [
                manager.upload(str(path), self._bucket, self._prefix + name, extra, watching)
                for path, name in files
            ]
            for future in pending:
                future.result()

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects; those that are gone already count as deleted."""
        with self._errors("deleted"):
            for start in range(0, len(names), _DELETED_AT_ONCE):
                some = names[start : start + _DELETED_AT_ONCE]
                keys = [{"Key": self._prefix + name} for name in some]
                request = {"Objects": keys, "Quiet": True}
                answer = self._client.delete_objects(Bucket=self._bucket, Delete=request)
                for refused in answer.get("Errors", ()):
                    why = refused.get("Message") or refused.get("Code")
                    raise BucketError(
                        f"s3://{self._bucket}/{refused['Key']} could not be deleted: {why}"
                    )

    @contextmanager
    def _transfers(self) -> Iterator[tuple[Any, Callable[..., Any]]]:
        """The transfer manager, and the subscriber of a transfer: what it calls, and its object."""
        from boto3.s3 import transfer

        class Transfer(transfer.BaseSubscriber):  # type: ignore[misc] # boto3 has no types
            def __init__(self, done: Callable[[int], None], known: Entry | None = None) -> None:
                self.done, self.known = done, known

            def on_queued(self, future: Any, **_: Any) -> None:
                """Spare s3transfer the request for what the listing has told."""
                if self.known and self.known.etag:
                    future.meta.provide_transfer_size(self.known.size)
                    if hasattr(future.meta, "provide_object_etag"):  # since boto3 1.37
                        future.meta.provide_object_etag(f'"{self.known.etag}"')

            def on_progress(self, bytes_transferred: int, **_: Any) -> None:
                self.done(bytes_transferred)

        config = transfer.TransferConfig(max_concurrency=_AT_ONCE)
        with transfer.create_transfer_manager(self._client, config) as manager:
            yield manager, Transfer

    @contextmanager
    def _errors(self, action: str, name: str = "") -> Iterator[None]:
        import boto3.exceptions
        import botocore.exceptions

        failures = (
            botocore.exceptions.BotoCoreError,
            botocore.exceptions.ClientError,
            boto3.exceptions.Boto3Error,
        )
        place = self.location + name
        try:
            yield
        except OSError as error:
            raise BucketError(f"{place} could not be {action}: {reason(error)}") from error
        except failures as error:
            raise BucketError(f"{place} could not be {action}: {error}") from error
