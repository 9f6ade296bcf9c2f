"""Upload over HTTP to moto: planted archives, buckets of other accounts, damaged uploads."""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import tarfile
import threading

import boto3
import pytest

from deploykit.backends import sagemaker
from deploykit.backends.sagemaker import uploads
from deploykit.bundle import archive as bundles
from deploykit.cli import main as cli
from deploykit.lib import progress
from deploykit.lib.errors import NotPermitted, SubmitRefused, TryAgain
from tests.aws_server import SECTION, sent_requests

pytestmark = pytest.mark.aws
OWNER = "x-amz-expected-bucket-owner"


@pytest.fixture
def plan(planned):
    return planned()


@pytest.fixture
def stored_object(plan):
    key = f"deploykit/bundles/{plan.bundle.hash}/sourcedir.tar.gz"
    return {"Bucket": "my-bucket", "Key": key}


@pytest.fixture
def s3(aws):
    return boto3.client("s3", "us-east-1")


def archive_of(text):
    """A source archive with another program."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        member = tarfile.TarInfo("train.py")
        member.size = len(text)
        tar.addfile(member, io.BytesIO(text))
    return packed.getvalue()


def program(s3, stored_object):
    """The program that a job with this source would run."""
    archive = s3.get_object(**stored_object)["Body"].read()
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return tar.extractfile("train.py").read()


def sha256(content):
    return base64.b64encode(hashlib.sha256(content).digest()).decode()


def storage_calls(aws):
    """Requests to S3, by the service in their signature."""
    return [
        one for one in aws.requests if "/s3/aws4_request" in one.headers.get("authorization", "")
    ]


PLANTED = {
    "without a checksum": lambda _: {"ChecksumAlgorithm": "CRC32"},
    "with the checksum of its own bytes": lambda body: {
        "ChecksumAlgorithm": "SHA256",
        "ChecksumSHA256": sha256(body),
    },
}


@pytest.mark.parametrize("checksum", PLANTED.values(), ids=PLANTED)
def test_a_planted_archive_is_replaced(aws, s3, plan, stored_object, tmp_path, checksum):
    evil = archive_of(b"print('evil')\n")
    s3.put_object(**stored_object, Body=evil, **checksum(evil))
    sagemaker.submit(plan, tmp_path)
    assert len(sent_requests(aws)) == 1
    assert program(s3, stored_object) == b"print('hello')\n"


def test_the_checksum_of_a_multipart_upload_is_not_trusted(s3, plan, stored_object, tmp_path):
    """S3 stores the checksum of the parts' checksums for such an upload."""
    evil = archive_of(b"print('evil')\n")
    upload = s3.create_multipart_upload(**stored_object, ChecksumAlgorithm="SHA256")["UploadId"]
    part = {"PartNumber": 1, "ChecksumSHA256": sha256(evil)}
    sent = s3.upload_part(**stored_object, UploadId=upload, Body=evil, **part)
    parts = {"Parts": [{**part, "ETag": sent["ETag"]}]}
    s3.complete_multipart_upload(**stored_object, UploadId=upload, MultipartUpload=parts)
    sagemaker.submit(plan, tmp_path)
    assert program(s3, stored_object) == b"print('hello')\n"


def test_the_checksum_is_sent_with_the_upload(aws, plan, tmp_path):
    sagemaker.submit(plan, tmp_path)
    (put,) = (one for one in aws.requests if one.method == "PUT")
    assert put.headers["x-amz-checksum-sha256"] == sha256(bundles.store(plan.bundle).read_bytes())
    assert hashlib.sha256(gzip.decompress(put.body)).hexdigest() == plan.bundle.hash


def test_an_upload_that_is_watched_sends_the_same(aws, plan, tmp_path):
    """As `submit` does on a terminal, where it draws a bar."""
    told = []
    with progress.shown_by(lambda *step: told.append(step)):
        sagemaker.submit(plan, tmp_path)
    (put,) = (one for one in aws.requests if one.method == "PUT")
    archive = bundles.store(plan.bundle).read_bytes()
    assert put.body == archive
    assert ("sending", len(archive), len(archive)) in told


def verifying(one, forward):
    """Verify the checksum of an upload, as S3 does and moto does not."""
    claimed = one.headers.get("x-amz-checksum-sha256")
    if one.method == "PUT" and claimed is not None and claimed != sha256(one.body):
        return 400, [], b"<Error><Code>BadDigest</Code><Message>checksum mismatch</Message></Error>"
    return forward()


def test_after_a_damaged_upload_no_job_is_created(aws, plan, tmp_path):
    def damage(one, forward):
        one.body = one.body[:-1] + b"?" if one.method == "PUT" else one.body
        return verifying(one, forward)

    aws.respond = damage
    with pytest.raises(TryAgain, match="checksum mismatch") as caught:
        sagemaker.submit(plan, tmp_path)
    assert caught.value.hint == "the upload was corrupted in transit; submit again"
    assert sent_requests(aws) == []


def test_an_interrupted_upload_is_repeated(aws, s3, plan, stored_object, tmp_path):
    interrupted = []

    def interrupt(one, forward):
        if one.method == "PUT" and not interrupted:
            interrupted.append(len(one.body))
            raise ConnectionResetError
        return verifying(one, forward)

    aws.respond = interrupt
    sagemaker.submit(plan, tmp_path)
    assert interrupted
    assert program(s3, stored_object) == b"print('hello')\n"


def test_concurrent_submits_replace_a_planted_archive(aws, s3, planned, stored_object, tmp_path):
    """Both see the planted archive before either uploads its own."""
    s3.put_object(**stored_object, Body=archive_of(b"print('evil')\n"))
    barrier = threading.Barrier(2)

    def synchronize(one, forward):
        response = verifying(one, forward)
        if one.method == "HEAD":
            barrier.wait(60)
        return response

    aws.respond = synchronize
    plans = [planned(f"digits-{number}") for number in (1, 2)]
    threads = [threading.Thread(target=sagemaker.submit, args=(one, tmp_path)) for one in plans]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    puts = [one.headers["amz-sdk-invocation-id"] for one in aws.requests if one.method == "PUT"]
    assert len(set(puts)) == 3  # the client repeats what fails in moto, under the same id
    assert sorted(one["TrainingJobName"] for one in sent_requests(aws)) == ["digits-1", "digits-2"]
    assert program(s3, stored_object) == b"print('hello')\n"


def test_a_local_archive_is_not_trusted_by_its_name(s3, plan, stored_object, tmp_path):
    stored = bundles.store(plan.bundle)
    stored.write_bytes(archive_of(b"print('evil')\n"))
    sagemaker.submit(plan, tmp_path)
    assert program(s3, stored_object) == b"print('hello')\n"


def owned_by(account):
    """Deny requests that expect another owner, as S3 does and moto does not."""

    def deny_others(one, forward):
        if one.headers.get(OWNER, account) != account:
            denied = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
            return 403, [], b"" if one.method == "HEAD" else denied
        return forward()

    return deny_others


def test_nothing_is_sent_to_a_bucket_of_another_account(aws, planned, tmp_path):
    """A misspelled or abandoned name: the bucket's owner could read and replace the source."""
    aws.respond = owned_by("666666666666")
    with pytest.raises(
        NotPermitted, match="the bucket my-bucket in account 123456789012"
    ) as caught:
        sagemaker.submit(planned(), tmp_path)
    assert "sagemaker.bucket_owner" in caught.value.hint
    assert sent_requests(aws) == []
    sagemaker.submit(planned(bucket_owner="666666666666"), tmp_path)
    assert len(sent_requests(aws)) == 1


def test_the_owner_defaults_to_the_account_of_the_role(aws, planned):
    for number, options in enumerate(({}, {"bucket_owner": "000000000012"})):
        aws.requests.clear()
        uploads.upload(planned(f"digits-{number}", **options))
        expected = options.get("bucket_owner", "123456789012")
        assert {one.headers.get(OWNER) for one in storage_calls(aws)} == {expected}
        assert storage_calls(aws)


OWNERS = {
    **dict.fromkeys(("12345", "1234567890123", "arn:aws:iam::123456789012:root", "''"), 65),
    **dict.fromkeys(("123456789012", '"012345678901"', "012345678901"), 0),
}


@pytest.mark.parametrize("owner", OWNERS)
def test_an_owner_is_twelve_digits_with_quotes_or_without(project, capsys, owner):
    with (project / "job.yaml").open("a") as file:
        file.write(f"{SECTION}  bucket_owner: {owner}\n")
    assert cli.main(["check", "--backend", "sagemaker"]) == OWNERS[owner]
    assert ("sagemaker.bucket_owner" in capsys.readouterr().err) == bool(OWNERS[owner])


EXPIRED = b"""<ErrorResponse><Error><Type>Sender</Type><Code>ExpiredToken</Code>
<Message>The security token included in the request is expired</Message></Error></ErrorResponse>"""


@pytest.mark.parametrize("expired", [True, False])
def test_a_token_that_expired_is_said_to_have_expired(aws, planned, tmp_path, expired):
    """S3 answers a HEAD without a body: only STS says why it was refused."""

    def respond(one, forward):
        if one.method == "HEAD":
            return 400, [], b""
        if expired and b"GetCallerIdentity" in one.body:
            return 403, [("Content-Type", "text/xml")], EXPIRED
        return forward()

    aws.respond = respond
    with pytest.raises(NotPermitted if expired else SubmitRefused) as caught:
        sagemaker.submit(planned(), tmp_path)
    assert ("is expired" in caught.value.message) == expired
    if expired:
        assert "aws sso login" in caught.value.hint
    assert [one.method for one in aws.requests][-1] == "POST"
    assert sent_requests(aws) == []
