"""The results and checkpoints of a training job in S3: list, download and delete them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from deploykit.backends.base import RemoteFile
from deploykit.backends.sagemaker import aws
from deploykit.backends.sagemaker.jobs import client_of, described
from deploykit.backends.sagemaker.request import results
from deploykit.job.model import Handle
from deploykit.lib import shell, units
from deploykit.lib.errors import DeploykitError, NotPermitted, TryAgain

_PRICE = 0.09
"""US dollars for a GB that leaves AWS: the first 10 TB a month from most regions, after 100 GB
free of charge. https://aws.amazon.com/ec2/pricing/on-demand/, "Data Transfer" (2026-11)."""
_MD5 = re.compile(r'"([0-9a-f]{32})"')
"""The ETag of an object that was uploaded in one part and is not encrypted by KMS."""
_DAMAGED = "the object changed or was corrupted during the download"
_AGAIN = "run the same command again; complete files are not downloaded again"
_PARTIAL = ".deploykit-partial"
"""Where files arrive, below the folder that they are for."""


def files(handle: Handle, part: str) -> Sequence[RemoteFile] | None:
    """Objects below the location of the job's results or checkpoints; see `base.Capabilities`."""
    job = described(handle)
    if part == "checkpoints":
        location = job.get("CheckpointConfig", {}).get("S3Uri", "")
    else:
        location = results(job).removesuffix("output.tar.gz")
    if not location:
        return []
    bucket, _, prefix = location.removeprefix("s3://").partition("/")
    prefix = f"{prefix.rstrip('/')}/" if prefix else ""
    client = client_of("s3", handle)
    objects = []
    with _reading(location, handle):
        for entries in pages(client, bucket, prefix):
            for entry in entries:
                name = entry["Key"].removeprefix(prefix)
                if name and not name.endswith("/"):  # a console's mark of an empty folder
                    address = f"s3://{bucket}/{entry['Key']}"
                    when, etag = entry["LastModified"].timestamp(), entry["ETag"]
                    objects.append(RemoteFile(name, entry["Size"], when, address, etag))
    return objects


def pages(client: Any, bucket: str, prefix: str, **more: str) -> Iterator[list[Any]]:
    """The objects below a prefix, up to a thousand at a time. `more` are fields of the request."""
    lister = client.get_paginator("list_objects_v2")
    for page in lister.paginate(Bucket=bucket, Prefix=prefix, **more):
        if entries := page.get("Contents"):
            yield entries


def download(
    handle: Handle, files: Sequence[RemoteFile], folder: Path, done: Callable[[int], None]
) -> None:
    """Download objects with boto3's transfer manager, several files and parts at once.

    Each file gets its name when it is complete, with the time that S3 has for it. Raises TryAgain
    where the size or the checksum of a file is wrong.
    """
    from boto3.s3 import transfer

    partial, arrived = folder / _PARTIAL, SimpleQueue[tuple[RemoteFile, Any]]()

    class Transfer(transfer.BaseSubscriber):  # type: ignore[misc] # boto3 has no types
        def __init__(self, file: RemoteFile) -> None:
            self.file = file

        def on_queued(self, future: Any, **_: Any) -> None:
            future.meta.provide_transfer_size(self.file.size)  # or s3transfer asks for it
            if hasattr(future.meta, "provide_object_etag"):  # boto3 1.37
                future.meta.provide_object_etag(self.file.etag)

        def on_progress(self, bytes_transferred: int, **_: Any) -> None:
            done(bytes_transferred)

        def on_done(self, future: Any, **_: Any) -> None:
            arrived.put((self.file, future))

    client = client_of("s3", handle)
    config = transfer.TransferConfig(max_concurrency=aws.AT_ONCE)
    shutil.rmtree(partial, ignore_errors=True)  # of an interrupted download
    try:
        for parent in {(partial / file.name).parent for file in files}:
            parent.mkdir(parents=True, exist_ok=True)
        with transfer.create_transfer_manager(client, config) as manager:
            for file in files:
                path = str(partial / file.name)
                manager.download(*_object(file), path, subscribers=[Transfer(file)])
            for _ in files:
                file, future = arrived.get()
                with _reading(file.address, handle):
                    future.result()
                    _verify(client, file, partial / file.name)
                os.utime(partial / file.name, (file.modified, file.modified))
                (partial / file.name).replace(folder / file.name)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def _reading(address: str, handle: Handle) -> Iterator[None]:
    """Raise what `aws.errors` raises, with the address, and TryAgain for half a file."""
    from boto3.s3.transfer import S3TransferRetriesExceededError
    from botocore.exceptions import FlexibleChecksumError

    try:
        with aws.errors(handle.target):
            try:
                yield
            except S3TransferRetriesExceededError as error:
                message = f"the connection was lost: {error.last_exception}"
                raise TryAgain(message, hint=_AGAIN) from error
            except Exception as error:
                is_other = aws.code(error) == "PreconditionFailed"  # the ETag of a part's request
                if is_other or isinstance(error, FlexibleChecksumError):
                    raise TryAgain(_DAMAGED, hint=_AGAIN) from error
                raise
    except DeploykitError as error:
        hint = error.hint if aws.code(error.__cause__ or error) != "NoSuchBucket" else None
        raise type(error)(f"{address}: {error.message}", hint=hint) from error


def _object(file: RemoteFile) -> tuple[str, str]:
    bucket, _, key = file.address.removeprefix("s3://").partition("/")
    return bucket, key


def _verify(client: Any, file: RemoteFile, path: Path) -> None:
    """Raise TryAgain unless the file is what was listed.

    The ETag of a KMS-encrypted object looks like an MD5 sum but is not one:
    https://docs.aws.amazon.com/AmazonS3/latest/API/API_Object.html
    """
    wrong, md5 = path.stat().st_size != file.size, _MD5.fullmatch(file.etag)
    if not wrong and md5:
        with path.open("rb") as content:
            wrong = hashlib.file_digest(content, _md5).hexdigest() != md5[1]
        if wrong:
            bucket, key = _object(file)
            head = client.head_object(Bucket=bucket, Key=key)
            wrong = "kms" not in head.get("ServerSideEncryption", "")
    if wrong:
        raise TryAgain(_DAMAGED, hint=_AGAIN)


def _md5() -> Any:
    return hashlib.md5(usedforsecurity=False)


def transfer_price(size: int) -> str:
    """Describe what AWS bills for a download from outside its network."""
    price = f"{max(size / 1e9 * _PRICE, 0.01):.2f} USD"
    return f"AWS charges up to {price} to download {units.size(size)}; 100 GB a month are free"


def remains(handle: Handle, output: str) -> Iterator[tuple[str, str]]:
    """The results in S3; the source archive there is shared with other runs."""
    if prefix := _own_prefix(handle, output):
        yield prefix, shell.command("aws", "s3", "rm", "--recursive", prefix)


def remove_remains(handle: Handle, output: str) -> None:
    """Delete the objects below the run's own prefix, a thousand in a request."""
    bucket, _, key = _own_prefix(handle, output).removeprefix("s3://").partition("/")
    if not key:
        return
    client = client_of("s3", handle)
    with aws.errors(handle.target):
        for entries in pages(client, bucket, key):
            keys = [{"Key": entry["Key"]} for entry in entries]
            answer = client.delete_objects(Bucket=bucket, Delete={"Objects": keys})
            if refused := answer.get("Errors"):
                raise NotPermitted(
                    f"s3://{bucket}/{refused[0]['Key']} was not deleted: "
                    f"{refused[0].get('Message', refused[0].get('Code'))}",
                    hint="grant s3:DeleteObject to your user or role in IAM",
                )


def _own_prefix(handle: Handle, output: str) -> str:
    """``s3://.../RUN/``; empty where the results are not below a folder of the run's own."""
    above, of_run, _ = output.partition(f"/{handle.run}/")
    return f"{above}{of_run}" if of_run and above.startswith("s3://") else ""
