"""The source of a job in S3: put there, unless S3 itself says that it is there already.

A name proves nothing: anyone with write access to the bucket can give any archive that name.
S3 keeps the SHA-256 of what it was sent, if it was asked to, and refuses bytes that do not fit it.
https://docs.aws.amazon.com/AmazonS3/latest/userguide/checking-object-integrity.html
"""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Any

from deploykit import bundle as bundles
from deploykit.backends.sagemaker import aws, request
from deploykit.errors import NotPermitted
from deploykit.model import Plan


def upload(plan: Plan) -> None:
    """Put the source archive into the bucket, unless S3 has it with the same checksum.

    Raises NotPermitted where the bucket is another account's, and TryAgain where the archive was
    damaged on its way.
    """
    archive = bundles.store(plan.bundle)
    checksum = _checksum(archive)
    place = {
        "Bucket": plan.options.bucket,
        "Key": request.code_key(plan.options, plan.bundle.hash),
        "ExpectedBucketOwner": plan.options.owner,
    }
    client = aws.client("s3", plan.target)
    with aws.errors(plan.target):
        if _stored_checksum(client, place) != checksum:
            _put(client, place, archive, checksum)


def _checksum(archive: Path) -> str:
    with archive.open("rb") as file:
        return base64.b64encode(hashlib.file_digest(file, "sha256").digest()).decode()


def _stored_checksum(client: Any, place: dict[str, str]) -> str | None:
    """What S3 keeps of the object there; None where there is none, or it has no such checksum."""
    from botocore.exceptions import ClientError

    try:
        found: str | None = client.head_object(**place, ChecksumMode="ENABLED").get(
            "ChecksumSHA256"
        )
    except ClientError as error:
        # 403 is what one who may not list the bucket gets for a missing key
        if aws.code(error) in {"404", "403", "NoSuchKey"}:
            return None
        raise
    return found


def _put(client: Any, place: dict[str, str], archive: Path, checksum: str) -> None:
    from botocore.exceptions import ClientError

    try:
        with archive.open("rb") as file:
            told = {"ChecksumAlgorithm": "SHA256", "ChecksumSHA256": checksum}
            client.put_object(**place, Body=file, **told)
    except ClientError as error:
        if aws.code(error) not in aws.DENIED:
            raise
        bucket, owner = place["Bucket"], place["ExpectedBucketOwner"]
        raise NotPermitted(
            f"S3 denied the upload to the bucket {bucket} of account {owner}: {aws.message(error)}",
            hint="allow your user or role s3:PutObject there; if the bucket belongs to another "
            "account, and you trust that, set sagemaker.bucket_owner",
        ) from error
