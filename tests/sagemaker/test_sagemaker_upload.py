"""Whose code a job gets: planted archives, foreign buckets, damaged uploads, over HTTP to moto."""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import tarfile
import threading

import boto3
import pytest
from aws_server import SECTION, sent_requests

from deploykit import cli
from deploykit.backends import sagemaker
from deploykit.backends.sagemaker import uploading
from deploykit.errors import NotPermitted, TryAgain

pytestmark = pytest.mark.aws
OWNER = "x-amz-expected-bucket-owner"


@pytest.fixture
def plan(planned):
    return planned(sender="boto3")


@pytest.fixture
def place(plan):
    key = f"deploykit/bundles/{plan.bundle.hash}/sourcedir.tar.gz"
    return {"Bucket": "my-bucket", "Key": key}


@pytest.fixture
def s3(aws):
    return boto3.client("s3", "us-east-1")


def archive_of(text):
    """A source archive with another's program."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        member = tarfile.TarInfo("train.py")
        member.size = len(text)
        tar.addfile(member, io.BytesIO(text))
    return packed.getvalue()


def program(s3, place):
    """The program that a job at this place would run."""
    stored = s3.get_object(**place)["Body"].read()
    with tarfile.open(fileobj=io.BytesIO(stored)) as tar:
        return tar.extractfile("train.py").read()


def sha256(content):
    return base64.b64encode(hashlib.sha256(content).digest()).decode()


def storage_calls(aws):
    """Requests to S3; those of the other services are signed for them."""
    return [one for one in aws.seen if "/s3/aws4_request" in one.headers.get("authorization", "")]


PLANTED = {
    "without a checksum": lambda _: {"ChecksumAlgorithm": "CRC32"},
    "with the checksum of its own bytes": lambda body: {
        "ChecksumAlgorithm": "SHA256",
        "ChecksumSHA256": sha256(body),
    },
}


@pytest.mark.parametrize("checksum", PLANTED.values(), ids=PLANTED)
def test_a_planted_archive_of_the_right_name_is_replaced(aws, s3, plan, place, tmp_path, checksum):
    evil = archive_of(b"print('evil')\n")
    s3.put_object(**place, Body=evil, **checksum(evil))
    sagemaker.submit(plan, tmp_path)
    assert len(sent_requests(aws)) == 1
    assert program(s3, place) == b"print('hello')\n"


def test_an_archive_in_parts_proves_nothing_by_its_checksum(s3, plan, place, tmp_path):
    """S3 keeps the checksum of the parts' checksums for such an upload."""
    evil = archive_of(b"print('evil')\n")
    upload = s3.create_multipart_upload(**place, ChecksumAlgorithm="SHA256")["UploadId"]
    part = {"PartNumber": 1, "ChecksumSHA256": sha256(evil)}
    sent = s3.upload_part(**place, UploadId=upload, Body=evil, **part)
    parts = {"Parts": [{**part, "ETag": sent["ETag"]}]}
    s3.complete_multipart_upload(**place, UploadId=upload, MultipartUpload=parts)
    sagemaker.submit(plan, tmp_path)
    assert program(s3, place) == b"print('hello')\n"


def test_s3_is_told_the_checksum_that_it_must_find(aws, plan, tmp_path):
    sagemaker.submit(plan, tmp_path)
    (put,) = (one for one in aws.seen if one.method == "PUT")
    assert put.headers["x-amz-checksum-sha256"] == sha256(plan.bundle.store().read_bytes())
    assert hashlib.sha256(gzip.decompress(put.body)).hexdigest() == plan.bundle.hash


def verifying(one, forward):
    """As S3 does, and moto does not: an upload must have the checksum that came with it."""
    claimed = one.headers.get("x-amz-checksum-sha256")
    if one.method == "PUT" and claimed is not None and claimed != sha256(one.body):
        return 400, [], b"<Error><Code>BadDigest</Code><Message>not what came</Message></Error>"
    return forward()


def test_a_damaged_upload_is_refused_by_s3_and_nothing_is_sent(aws, plan, tmp_path):
    def damage(one, forward):
        one.body = one.body[:-1] + b"?" if one.method == "PUT" else one.body
        return verifying(one, forward)

    aws.mood = damage
    with pytest.raises(TryAgain, match="not what came") as caught:
        sagemaker.submit(plan, tmp_path)
    assert caught.value.hint == "the upload was damaged on its way; submit again"
    assert sent_requests(aws) == []


def test_a_torn_upload_is_done_again(aws, s3, plan, place, tmp_path):
    torn = []

    def tear(one, forward):
        if one.method == "PUT" and not torn:
            torn.append(len(one.body))
            raise ConnectionResetError
        return verifying(one, forward)

    aws.mood = tear
    sagemaker.submit(plan, tmp_path)
    assert torn
    assert program(s3, place) == b"print('hello')\n"


def test_two_submits_at_once_leave_one_good_archive(aws, s3, planned, place, tmp_path):
    """Both find a planted archive before either has put its own."""
    s3.put_object(**place, Body=archive_of(b"print('evil')\n"))
    both = threading.Barrier(2)

    def meet(one, forward):
        answer = verifying(one, forward)
        if one.method == "HEAD":
            both.wait(60)
        return answer

    aws.mood = meet
    plans = [planned(f"digits-{number}", sender="boto3") for number in (1, 2)]
    threads = [threading.Thread(target=sagemaker.submit, args=(one, tmp_path)) for one in plans]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len([one for one in aws.seen if one.method == "PUT"]) == 3
    assert sorted(one["TrainingJobName"] for one in sent_requests(aws)) == ["digits-1", "digits-2"]
    assert program(s3, place) == b"print('hello')\n"


def test_a_stored_archive_of_the_state_folder_is_not_believed_by_its_name(
    s3, plan, place, tmp_path
):
    stored = plan.bundle.store()
    stored.write_bytes(archive_of(b"print('evil')\n"))
    sagemaker.submit(plan, tmp_path)
    assert program(s3, place) == b"print('hello')\n"


def owned_by(account):
    """S3's answer to who expects another owner; moto has no such answer."""

    def mood(one, forward):
        if one.headers.get(OWNER, account) != account:
            denied = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
            return 403, [], b"" if one.method == "HEAD" else denied
        return forward()

    return mood


def test_a_bucket_of_another_account_gets_nothing(aws, planned, tmp_path):
    """A name that was free, or is misspelt: its owner would read the source, and choose it."""
    aws.mood = owned_by("666666666666")
    with pytest.raises(
        NotPermitted, match="the bucket my-bucket of account 123456789012"
    ) as caught:
        sagemaker.submit(planned(sender="boto3"), tmp_path)
    assert "sagemaker.bucket_owner" in caught.value.hint
    assert sent_requests(aws) == []
    sagemaker.submit(planned(sender="boto3", bucket_owner="666666666666"), tmp_path)
    assert len(sent_requests(aws)) == 1


def test_the_owner_is_the_roles_account_or_the_one_that_is_named(aws, planned):
    for number, options in enumerate(({}, {"bucket_owner": "000000000012"})):
        aws.seen.clear()
        uploading.upload(planned(f"digits-{number}", **options))
        expected = options.get("bucket_owner", "123456789012")
        assert {one.headers.get(OWNER) for one in storage_calls(aws)} == {expected}
        assert storage_calls(aws)


@pytest.mark.parametrize(
    "owner", ["12345", "1234567890123", "arn:aws:iam::123456789012:root", "''"]
)
def test_an_owner_is_twelve_digits(project, capsys, owner):
    with (project / "job.yaml").open("a") as file:
        file.write(f"{SECTION}  bucket_owner: {owner}\n")
    assert cli.main(["check", "--backend", "sagemaker"]) == 65
    assert "sagemaker.bucket_owner" in capsys.readouterr().err


def test_an_owner_may_be_written_with_quotes_or_without(project, capsys):
    for owner in ("123456789012", '"012345678901"', "012345678901"):
        text = (project / "job.yaml").read_text().partition("sagemaker:")[0]
        (project / "job.yaml").write_text(f"{text}{SECTION}  bucket_owner: {owner}\n")
        assert cli.main(["check", "--backend", "sagemaker"]) == 0, capsys.readouterr().err
