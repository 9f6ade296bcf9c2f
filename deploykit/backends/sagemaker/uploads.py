"""Upload a job's source and its folders of data to S3, once, and only to the expected account.

A name proves nothing: anyone with write access to the bucket can give an object any name. S3 stores
the SHA-256 of an upload if asked to, and refuses bytes that do not match it:
https://docs.aws.amazon.com/AmazonS3/latest/userguide/checking-object-integrity.html

A folder of data has two parts: its files below a prefix, named by their hash, and a manifest
elsewhere, which is written last. Without the manifest, the files are those of an interrupted
upload: each is compared by its checksum, and only what is missing is sent.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from deploykit.backends.sagemaker import aws
from deploykit.backends.sagemaker.downloads import pages
from deploykit.backends.sagemaker.options import Options
from deploykit.bundle import archive as bundles
from deploykit.bundle import data_folder
from deploykit.job.model import DataFile, DataFolder, Plan
from deploykit.lib import progress, units
from deploykit.lib.errors import (
    BackendUnavailable,
    NotPermitted,
    SubmitRefused,
    TryAgain,
)

_PRICE = 0.023
"""US dollars for a GB and month in S3 Standard: the first 50 TB in us-east-1.
https://aws.amazon.com/s3/pricing/ (2026-11)."""


def upload(plan: Plan) -> None:
    """Upload the data and the source of a plan, unless S3 has them with the same checksums.

    Raises NotPermitted if the bucket belongs to another account, TryAgain if an upload was
    damaged or interrupted: the next one sends what is missing.
    """
    store = _Store(plan.options, plan.target)
    with aws.errors(plan.target):
        for folder in plan.data:
            _upload_data(store, folder)
        archive = bundles.store(plan.bundle)
        with archive.open("rb") as file:
            checksum = hashlib.file_digest(file, "sha256").digest()
        key = plan.options.code_key(plan.bundle.hash)
        if not store.has(key, data_folder.as_base64(checksum)):
            with archive.open("rb") if progress.show is None else _Watched(archive) as file:
                store.put(key, file, data_folder.as_base64(checksum))


def upload_model(options: Options, region: str, archive: Path, location: str) -> None:
    """Upload the archive of a package, unless S3 has it with the same checksum. Raises as `upload`.

    `location` ends with the name of the archive.
    """
    store = _Store(options, region)
    folder = data_folder.scan("", str(archive))
    folder = folder._replace(target=f"{location.rpartition('/')[0]}/")
    (file,) = folder.files
    with aws.errors(region):
        if not store.has(_prefix(folder) + file.path, file.checksum):
            _send(store, folder, [file])


def unsent_data(plan: Plan) -> int:
    """Bytes of the plan's data that S3 does not have; see `base.Capabilities`."""
    store = _Store(plan.options, plan.target)
    with aws.errors(plan.target):
        return sum(file.size for folder in plan.data for file in _missing(store, folder))


def storage_price(size: int) -> str:
    """Describe what AWS bills for keeping data."""
    price = max(size / 1e9 * _PRICE, 0.01)
    return f"storing it in S3 costs up to {price:.2f} USD a month"


class _Store:
    """The bucket of a job, in the account that must own it."""

    def __init__(self, options: Options, region: str) -> None:
        self.client = aws.client("s3", region, options.credentials)
        self.region, self.options, self.bucket = region, options, options.bucket
        self.owner = {"ExpectedBucketOwner": options.owner}
        self.encryption: dict[str, str] = {}
        if options.kms_key is not None:
            self.encryption = {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": options.kms_key}

    def has(self, key: str, checksum: str) -> bool:
        """Whether S3 stores this checksum for the object, and has encrypted it with `kms_key`."""
        where = {"Bucket": self.bucket, "Key": key, **self.owner}
        try:
            head = self.client.head_object(**where, ChecksumMode="ENABLED")
        except Exception as error:
            # S3 answers 403 for a missing key without permission to list the bucket
            if aws.code(error) in {"404", "403", "NoSuchKey"}:
                return False
            if aws.code(error) == "400":  # without a body: STS says whether the login has expired
                with contextlib.suppress(BackendUnavailable, TryAgain):
                    aws.account(self.region, self.options.credentials)
            raise
        # after a hyphen, S3 adds the number of parts; stores that imitate S3 may not
        stored = head.get("ChecksumSHA256", "").partition("-")[0]
        same = stored == checksum.partition("-")[0]
        return bool(same and self._is_encrypted(head))

    def _is_encrypted(self, head: Mapping[str, str]) -> bool:
        """Whether the object has the encryption of `kms_key`; S3 does not tell a key's alias."""
        key = self.options.kms_key
        if key is None or "alias/" in key:
            return key is None or "kms" in head.get("ServerSideEncryption", "")
        return head.get("SSEKMSKeyId", "").endswith(key.rpartition("/")[2])

    def put(self, key: str, content: Any, checksum: str) -> None:
        with self.allowed("s3:PutObject"):
            self.client.put_object(
                Bucket=self.bucket,
                Key=key,
                Body=content,
                ChecksumAlgorithm="SHA256",
                ChecksumSHA256=checksum,
                **self.owner,
                **self.encryption,
            )

    @contextlib.contextmanager
    def allowed(self, action: str) -> Iterator[None]:
        """Raise NotPermitted, with what to allow, where S3 denies the `action` of the block."""
        try:
            yield
        except Exception as error:
            if aws.code(error) not in aws.DENIED:
                raise
            where = f"on the bucket {self.bucket} in account {self.options.owner}"
            raise NotPermitted(
                f"S3 denied {action} {where}: {aws.message(error)}",
                hint=f"grant {aws.denied_action(error) or action} to your user or role; if the "
                "bucket belongs to another account that you trust, set sagemaker.bucket_owner",
            ) from error


class _Watched(io.FileIO):
    """A file that reports how much of it was read."""

    def read(self, size: int | None = -1) -> bytes:
        piece = super().read(-1 if size is None else size)
        if progress.show is not None:
            progress.show("sending", self.tell(), os.fstat(self.fileno()).st_size)
        return piece


def _upload_data(store: _Store, folder: DataFolder) -> None:
    """Send the files that are missing, then the manifest. Raises TryAgain if a file changes."""
    missing = _missing(store, folder)
    _send(store, folder, missing)
    for file in missing:
        if not data_folder.is_unchanged(folder.top, file):
            raise data_folder.changed(folder.top / file.path)
    key, checksum = _manifest(store, folder)
    if missing or not store.has(key, checksum):
        store.put(key, folder.manifest.encode(), checksum)


def _manifest(store: _Store, folder: DataFolder) -> tuple[str, str]:
    """The key and the checksum of the object that marks a complete upload."""
    return store.options.manifest_key(folder.hash), data_folder.as_base64(
        bytes.fromhex(folder.hash)
    )


def _prefix(folder: DataFolder) -> str:
    return folder.target.split("/", 3)[3]


def _missing(store: _Store, folder: DataFolder) -> list[DataFile]:
    """The files that S3 does not have. Raises SubmitRefused for objects that are none of them."""
    prefix, sizes = _prefix(folder), dict[str, int]()
    with store.allowed("s3:ListBucket"):
        for entries in pages(store.client, store.bucket, prefix, **store.owner):
            sizes |= {entry["Key"].removeprefix(prefix): entry["Size"] for entry in entries}
    if foreign := sorted(sizes.keys() - {file.path for file in folder.files}):
        raise SubmitRefused(
            f"{folder.target} contains {units.plural(len(foreign), 'object')} that deploykit did "
            f"not upload, such as {foreign[0]}: the job would read them as data",
            hint=f"delete them, or delete the whole folder: aws s3 rm --recursive {folder.target}",
        )
    present = [file for file in folder.files if sizes.get(file.path) == file.size]
    if present and not store.has(*_manifest(store, folder)):
        present = _verified(store, prefix, present)
    paths = {file.path for file in present}
    return [file for file in folder.files if file.path not in paths]


def _verified(store: _Store, prefix: str, files: Sequence[DataFile]) -> list[DataFile]:
    """Those files of an interrupted upload for which S3 stores the right checksum."""
    from concurrent.futures import ThreadPoolExecutor  # a tenth of all that a dry run imports

    with ThreadPoolExecutor(aws.AT_ONCE) as pool:
        complete = pool.map(lambda file: store.has(prefix + file.path, file.checksum), files)
        return [file for file, is_complete in zip(files, complete, strict=True) if is_complete]


def _send(store: _Store, folder: DataFolder, files: Sequence[DataFile]) -> None:
    """Upload files with boto3's transfer manager, several files and parts at once."""
    from boto3.s3 import transfer

    total, so_far, lock = sum(file.size for file in files), 0, threading.Lock()

    class Progress(transfer.BaseSubscriber):  # type: ignore[misc] # boto3 has no types
        def on_progress(self, bytes_transferred: int, **_: Any) -> None:
            nonlocal so_far
            with lock:  # several files are sent at once
                so_far += bytes_transferred
                if progress.show is not None:
                    progress.show("sending data", so_far, total)

    subscribers = [Progress()] if progress.show is not None else []
    config = transfer.TransferConfig(
        max_concurrency=aws.AT_ONCE,
        multipart_threshold=data_folder.PART,
        multipart_chunksize=data_folder.PART,
    )
    parts = {
        (_prefix(folder) + file.path, number): {"ChecksumSHA256": checksum}
        for file in files
        for number, checksum in enumerate(file.parts, 1)
    }
    store.client.meta.events.register(
        "before-parameter-build.s3.UploadPart",
        lambda params, **_: params.update(parts.get((params["Key"], params["PartNumber"]), {})),
    )
    sent, pending = 0, []
    try:
        with (
            aws.errors(store.region),
            store.allowed("s3:PutObject"),
            transfer.create_transfer_manager(store.client, config) as manager,
        ):
            for file in files:
                path, key = str(folder.top / file.path), _prefix(folder) + file.path
                extra = {**store.owner, **store.encryption, **_checksums(file)}
                future = manager.upload(path, store.bucket, key, extra, subscribers)
                pending.append((file, future))
            for file, future in pending:
                try:
                    future.result()
                except OSError as error:
                    raise data_folder.changed(folder.top / file.path) from error
                sent += 1
    except (BackendUnavailable, TryAgain) as error:
        what = f"data.{folder.channel}: " if folder.channel else ""
        raise TryAgain(
            f"{what}{sent:,} of {units.plural(len(files), 'file')} were uploaded; {error.message}",
            hint="submit again: files that are complete in S3 are not sent again",
        ) from error


def _checksums(file: DataFile) -> dict[str, str]:
    """What makes S3 verify a file that is sent in one, or announces the checksums of its parts."""
    whole = {} if file.parts else {"ChecksumSHA256": file.checksum}
    return {"ChecksumAlgorithm": "SHA256", **whole}
