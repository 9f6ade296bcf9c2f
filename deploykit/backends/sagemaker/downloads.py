"""The results and checkpoints of a training job in S3: list, download and delete them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from deploykit.backends.base import RemoteFile
from deploykit.backends.sagemaker import aws
from deploykit.backends.sagemaker.jobs import client_of, described
from deploykit.backends.sagemaker.request import results
from deploykit.job.model import Handle
from deploykit.lib import shell, units
from deploykit.lib.errors import NotPermitted, TryAgain

AT_ONCE = 20
"""Requests at the same time; many small files need more than s3transfer's default of 10."""
_PRICE = 0.09
"""US dollars for a GB that leaves AWS: the first 10 TB a month from most regions, after 100 GB
free of charge. https://aws.amazon.com/ec2/pricing/on-demand/, "Data Transfer" (2026-11)."""
_PLAIN_MD5 = re.compile(r"[0-9a-f]{32}")
"""The ETag of an object that was uploaded in one part and is not encrypted by KMS."""


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
    with aws.errors(handle.target):
        for entries in pages(client, bucket, prefix):
            for entry in entries:
                name = entry["Key"].removeprefix(prefix)
                if name and not name.endswith("/"):  # a console's mark of an empty folder
                    address = f"s3://{bucket}/{entry['Key']}"
                    when, etag = entry["LastModified"].timestamp(), entry["ETag"].strip('"')
                    checksum = etag if _PLAIN_MD5.fullmatch(etag) else ""
                    objects.append(RemoteFile(name, entry["Size"], when, address, checksum))
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

    It writes to a temporary file beside the target and renames it. Raises TryAgain where the size
    or the checksum of a file is wrong.
    """
    from boto3.s3 import transfer

    client = client_of("s3", handle)
    config = transfer.TransferConfig(max_concurrency=AT_ONCE)
    with aws.errors(handle.target), transfer.create_transfer_manager(client, config) as manager:
        pending = []
        for file in files:
            bucket, key = _object(file)
            path = str(folder / file.name)
            subscribers = [subscriber(done)]
            pending.append((file, manager.download(bucket, key, path, subscribers=subscribers)))
        for file, future in pending:
            try:
                future.result()
            except transfer.S3TransferRetriesExceededError as error:
                raise TryAgain(
                    f"{file.address}: the connection was lost: {error.last_exception}",
                    hint="run the same command again; complete files are not downloaded again",
                ) from error
            _verify(client, file, folder / file.name)


def subscriber(done: Callable[[int], None]) -> Any:
    """For boto3's transfer manager: what calls `done` with the bytes of each step."""
    from boto3.s3 import transfer

    class Progress(transfer.BaseSubscriber):  # type: ignore[misc] # boto3 has no types
        def on_progress(self, bytes_transferred: int, **_: Any) -> None:
            done(bytes_transferred)

    return Progress()


def _object(file: RemoteFile) -> tuple[str, str]:
    bucket, _, key = file.address.removeprefix("s3://").partition("/")
    return bucket, key


def _verify(client: Any, file: RemoteFile, path: Path) -> None:
    """Raise TryAgain, and remove the file, unless it is what was listed.

    The ETag of a KMS-encrypted object looks like an MD5 sum but is not one:
    https://docs.aws.amazon.com/AmazonS3/latest/API/API_Object.html
    """
    wrong = path.stat().st_size != file.size
    if not wrong and file.checksum:
        with path.open("rb") as content:
            wrong = hashlib.file_digest(content, _md5).hexdigest() != file.checksum
        if wrong:
            bucket, key = _object(file)
            head = client.head_object(Bucket=bucket, Key=key)
            wrong = "kms" not in head.get("ServerSideEncryption", "")
    if wrong:
        path.unlink()
        raise TryAgain(
            f"{file.address} changed or was damaged during the download",
            hint="run the same command again",
        )


def _md5() -> Any:
    return hashlib.md5(usedforsecurity=False)


def transfer_price(size: int) -> str:
    """Describe what AWS bills for a download from outside its network."""
    price = f"{max(size / 1e9 * _PRICE, 0.01):.2f} USD"
    return f"AWS bills up to {price} to download {units.size(size)}; 100 GB a month are free"


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
                    hint="allow your user or role s3:DeleteObject in IAM",
                )


def _own_prefix(handle: Handle, output: str) -> str:
    """``s3://.../RUN/``; empty where the results are not below a folder of the run's own."""
    above, of_run, _ = output.partition(f"/{handle.run}/")
    return f"{above}{of_run}" if of_run and above.startswith("s3://") else ""
