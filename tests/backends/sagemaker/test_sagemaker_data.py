"""Folders of data over HTTP to moto: uploaded once, never half, and to go on where they stopped."""

from __future__ import annotations

import contextlib
import io
import json
import re
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections import Counter
from functools import partial
from urllib.parse import unquote

import boto3
import pytest

import deploykit
from deploykit.backends import sagemaker
from deploykit.backends.sagemaker import aws as clients
from deploykit.backends.sagemaker.options import Channel
from deploykit.bundle import data_folder
from deploykit.cli import main as cli
from deploykit.cli import output
from deploykit.job.model import DataFolder
from deploykit.lib import paths
from deploykit.lib.errors import NotPermitted, SubmitRefused, TryAgain, UsageError
from deploykit.run import lifecycle
from tests.aws_server import SECTION, sent_requests
from tests.nightly import few

pytestmark = pytest.mark.aws
FILES = {f"part {number:02}/ü.bin": f"content {number}" * 40 for number in range(12)}
DATA, MANIFESTS = "/my-bucket/deploykit/data/", "/my-bucket/deploykit/data-manifests/"
SUBMIT = ["submit", "-b", "sagemaker"]


@pytest.fixture
def s3(aws):
    return boto3.client("s3", "us-east-1")


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "my data"
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text(content)
    return folder


@pytest.fixture
def with_data(planned, data):
    """Plan a job whose channel `train` is the folder; its state folder knows the checksums."""

    def plan(run="digits-1", **changes):
        one = planned(run, **{"data": {"train": str(data)}, **changes})
        data_folder.remember(one.data)
        return one

    return plan


@pytest.fixture
def job_file(project, data):
    with (project / "job.yaml").open("a") as file:
        file.write(f"data: {{train: {json.dumps(str(data))}}}\n{SECTION}")
    return project


@pytest.fixture
def once(monkeypatch):
    """Requests are not repeated by botocore."""
    monkeypatch.setattr(clients, "client", partial(clients.client, attempts=1))


def sent(aws, below=DATA):
    """The files that were sent below a folder of the bucket, one for each successful request."""
    puts = [one for one in aws.requests if one.method == "PUT" and one.path.startswith(below)]
    return [unquote(one.path.partition("?")[0]).split("/", 5)[-1] for one in puts]


def stored(s3, request):
    """The objects that the channel `train` of a request would copy to the nodes."""
    (channel,) = request["InputDataConfig"]
    address = channel["DataSource"]["S3DataSource"]["S3Uri"]
    bucket, _, prefix = address.removeprefix("s3://").partition("/")
    listed = s3.list_objects_v2(Bucket=bucket, Prefix=prefix).get("Contents", [])
    return {
        entry["Key"].removeprefix(prefix): s3.get_object(Bucket=bucket, Key=entry["Key"])[
            "Body"
        ].read()
        for entry in listed
    }


def as_bytes(files):
    return {name: content.encode() for name, content in files.items()}


def test_a_folder_is_uploaded_once_and_is_all_that_the_channel_reads(aws, s3, with_data, tmp_path):
    sagemaker.submit(with_data(), tmp_path)
    assert sorted(sent(aws)) == sorted(FILES)
    assert stored(s3, sent_requests(aws)[0]) == as_bytes(FILES)
    aws.requests.clear()
    sagemaker.submit(with_data("digits-2"), tmp_path)
    assert sent(aws) == sent(aws, MANIFESTS) == []
    assert len(sent_requests(aws)) == 1


def test_every_request_names_the_owner_and_every_file_has_a_checksum(aws, with_data, tmp_path):
    sagemaker.submit(with_data(), tmp_path)
    storage = [one for one in aws.requests if one.path.startswith("/my-bucket")]
    assert {one.headers.get("x-amz-expected-bucket-owner") for one in storage} == {"123456789012"}
    puts = [one for one in storage if one.method == "PUT"]
    assert len(puts) == len(FILES) + 2  # with the manifest and the source
    assert all(one.headers.get("x-amz-checksum-sha256") for one in puts)


def test_the_manifest_is_written_last_and_outside_of_the_channel(aws, with_data, tmp_path):
    plan = with_data()
    sagemaker.submit(plan, tmp_path)
    puts = [one.path for one in aws.requests if one.method == "PUT"]
    manifest = f"{MANIFESTS}{plan.data[0].hash}.json"
    assert puts.index(manifest) == len(FILES)
    assert not manifest.startswith(plan.data[0].target.replace("s3://", "/"))


def test_a_single_file_is_named_by_its_variable(aws, s3, planned, data, tmp_path):
    """On a laptop the variable names the file too."""
    file = data / "part 00/ü.bin"
    plan = planned(data={"train": str(file)})
    sagemaker.submit(plan, tmp_path)
    (request,) = sent_requests(aws)
    assert request["Environment"]["DEPLOYKIT_DATA_TRAIN"] == "/opt/ml/input/data/train/ü.bin"
    assert stored(s3, request) == {"ü.bin": file.read_bytes()}


def test_several_channels_are_uploaded_each_for_itself(aws, s3, planned, tmp_path):
    for name in ("train", "test"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "large").write_bytes(name.encode() * (data_folder.PART // 4))
    plan = planned(data={name: str(tmp_path / name) for name in ("train", "test")})
    sagemaker.submit(plan, tmp_path)
    for folder in plan.data:
        bucket, _, key = f"{folder.target}large".removeprefix("s3://").partition("/")
        content = s3.get_object(Bucket=bucket, Key=key)["Body"].read()
        assert content == (folder.source / "large").read_bytes()


def test_a_large_file_is_sent_in_parts_and_known_by_its_checksum(aws, s3, with_data, data):
    """Without its manifest, an upload that S3 has completely is not sent again."""
    (data / "large").write_bytes(bytes(range(256)) * (data_folder.PART // 200))
    plan = with_data()
    lifecycle.submit(plan)
    parts = [one for one in aws.requests if one.method == "PUT" and "/large?" in one.path]
    (large,) = (file for file in plan.data[0].files if file.path == "large")
    by_number = {one.path.partition("partNumber=")[2][0]: one for one in parts}
    checksums = [by_number[n].headers["x-amz-checksum-sha256"] for n in ("1", "2")]
    assert tuple(checksums) == large.parts
    manifest = f"deploykit/data-manifests/{plan.data[0].hash}.json"
    s3.delete_object(Bucket="my-bucket", Key=manifest)
    aws.requests.clear()
    lifecycle.submit(with_data("digits-2"))
    assert sent(aws) == []
    assert len(sent(aws, MANIFESTS)) == 1


def fail_after(count, answer):
    """Answer every upload of data with `answer` after the first `count`; None: hang up."""
    lock, seen = threading.Lock(), []

    def respond(one, forward):
        if one.method == "PUT" and one.path.startswith(DATA):
            with lock:
                seen.append(one.path)
                if len(seen) > count:
                    return answer
        return forward()

    return respond


def error(status, name):
    return status, [], f"<Error><Code>{name}</Code><Message>no</Message></Error>".encode()


INTERRUPTIONS = {
    "a connection that drops": (None, TryAgain, "cannot reach AWS in us-east-1"),
    "throttling": (error(503, "SlowDown"), TryAgain, "SlowDown|no"),
    "a damaged file": (error(400, "BadDigest"), TryAgain, "PutObject"),
    "a missing permission": (error(403, "AccessDenied"), NotPermitted, "s3:PutObject"),
}


@pytest.mark.usefixtures("once")
@pytest.mark.parametrize(("answer", "kind", "said"), INTERRUPTIONS.values(), ids=INTERRUPTIONS)
def test_an_interrupted_upload_goes_on_where_it_was(
    aws, s3, with_data, tmp_path, answer, kind, said
):
    aws.respond = fail_after(5, answer)
    with pytest.raises(kind, match=said) as caught:
        sagemaker.submit(with_data(), tmp_path)
    assert caught.value.hint
    assert sent(aws, MANIFESTS) == []
    assert sent_requests(aws) == []
    aws.respond = lambda _, forward: forward()
    complete = {one["Key"] for one in s3.list_objects_v2(Bucket="my-bucket").get("Contents", [])}
    assert 0 < len(complete) < len(FILES)
    aws.requests.clear()
    sagemaker.submit(with_data(), tmp_path)
    assert len(sent(aws)) == len(FILES) - len(complete)
    assert stored(s3, sent_requests(aws)[0]) == as_bytes(FILES)


class Cut(socketserver.ThreadingTCPServer):
    """A network whose every connection drops after some bytes."""

    daemon_threads = True

    def __init__(self, port, limit):
        super().__init__(("127.0.0.1", 0), _Connection)
        self.port, self.limit = port, limit
        self.endpoint = f"http://127.0.0.1:{self.server_address[1]}"


class _Connection(socketserver.BaseRequestHandler):
    def handle(self):
        with socket.create_connection(("127.0.0.1", self.server.port)) as there:
            threading.Thread(target=self._answers, args=(there,), daemon=True).start()
            left = self.server.limit
            while left > 0 and (piece := self.request.recv(min(left, 1 << 16))):
                there.sendall(piece)
                left -= len(piece)
            there.shutdown(socket.SHUT_RDWR)

    def _answers(self, there):
        with contextlib.suppress(OSError):
            while piece := there.recv(1 << 16):
                self.request.sendall(piece)


@pytest.mark.usefixtures("once")
def test_a_connection_that_drops_in_the_middle_of_a_file(
    aws, s3, with_data, data, tmp_path, monkeypatch
):
    (data / "large").write_bytes(bytes(3 * data_folder.PART))
    with Cut(aws.port, data_folder.PART // 2) as cut:
        threading.Thread(target=cut.serve_forever, daemon=True).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", cut.endpoint)
        with pytest.raises(TryAgain, match=r"data\.train: \d+ of 13 files were uploaded"):
            sagemaker.submit(with_data(), tmp_path)
        cut.shutdown()
    assert sent(aws, MANIFESTS) == []
    monkeypatch.setenv("AWS_ENDPOINT_URL", aws.endpoint)
    sagemaker.submit(with_data(), tmp_path)
    expected = {**as_bytes(FILES), "large": bytes(3 * data_folder.PART)}
    assert stored(s3, sent_requests(aws)[0]) == expected


@pytest.mark.usefixtures("once")
def test_the_error_says_how_far_an_upload_came(aws, with_data, tmp_path):
    aws.respond = fail_after(0, None)
    with pytest.raises(TryAgain) as caught:
        sagemaker.submit(with_data(), tmp_path)
    assert caught.value.message.startswith("data.train: 0 of 12 files were uploaded; cannot reach")
    assert "not sent again" in caught.value.hint


def test_a_missing_bucket_is_said(aws, with_data, tmp_path):
    with pytest.raises(SubmitRefused, match="bucket does not exist") as caught:
        sagemaker.submit(with_data(bucket="another-bucket"), tmp_path)
    assert caught.value.hint == "create the bucket, or correct sagemaker.bucket"


def test_the_permission_to_list_is_named(aws, with_data, tmp_path):
    aws.respond = lambda one, forward: (
        error(403, "AccessDenied") if "list-type" in one.path else forward()
    )
    with pytest.raises(NotPermitted) as caught:
        sagemaker.submit(with_data(), tmp_path)
    assert "grant s3:ListBucket" in caught.value.hint


def test_a_planted_file_of_an_unfinished_upload_is_replaced(aws, s3, with_data, tmp_path):
    plan = with_data()
    bucket, _, prefix = plan.data[0].target.removeprefix("s3://").partition("/")
    name, content = next(iter(FILES.items()))
    s3.put_object(Bucket=bucket, Key=prefix + name, Body=content.upper())
    sagemaker.submit(plan, tmp_path)
    assert stored(s3, sent_requests(aws)[0]) == as_bytes(FILES)


def test_objects_of_others_are_never_read_as_data(aws, s3, with_data, tmp_path):
    plan = with_data()
    sagemaker.submit(plan, tmp_path)
    bucket, _, prefix = plan.data[0].target.removeprefix("s3://").partition("/")
    s3.put_object(Bucket=bucket, Key=f"{prefix}more.bin", Body=b"x")
    with pytest.raises(SubmitRefused, match=r"1 object .* such as more\.bin") as caught:
        sagemaker.submit(with_data("digits-2"), tmp_path)
    assert "aws s3 rm --recursive" in caught.value.hint
    assert len(sent_requests(aws)) == 1


def test_a_file_that_was_deleted_from_s3_is_sent_again(aws, s3, with_data, tmp_path):
    """By a rule of the bucket, for example: the manifest alone does not prove that all is there."""
    plan, name = with_data(), next(iter(FILES))
    sagemaker.submit(plan, tmp_path)
    bucket, _, prefix = plan.data[0].target.removeprefix("s3://").partition("/")
    s3.delete_object(Bucket=bucket, Key=prefix + name)
    aws.requests.clear()
    sagemaker.submit(with_data("digits-2"), tmp_path)
    assert sent(aws) == [name]
    assert stored(s3, sent_requests(aws)[0]) == as_bytes(FILES)


def test_a_file_that_changes_while_it_is_sent_is_never_used(aws, with_data, data, tmp_path):
    """Its size stays: for the rest of a shorter file, a server waits until a time-out."""
    size = (data / "part 00/ü.bin").stat().st_size

    def change(one, forward):
        if one.method == "PUT" and one.path.startswith(DATA):
            with (data / "part 00/ü.bin").open("r+b") as file:
                file.write(b"!" * size)
        return forward()

    plan = with_data()
    aws.respond = change
    with pytest.raises(TryAgain, match=r"ü\.bin changed while|checksum"):
        sagemaker.submit(plan, tmp_path)
    assert sent(aws, MANIFESTS) == []
    assert sent_requests(aws) == []


KEY = "arn:aws:kms:us-east-1:123456789012:key/1234abcd-12ab-34cd-56ef-1234567890ab"


@pytest.mark.parametrize("key", [KEY, KEY.rpartition("/")[2], "alias/ours"])
def test_source_and_data_are_encrypted_with_the_key(aws, with_data, tmp_path, key):
    """Also what was uploaded before the key was chosen; each object once."""
    sagemaker.submit(with_data(), tmp_path)
    aws.requests.clear()
    sagemaker.submit(with_data("digits-2", kms_key=key), tmp_path)
    puts = [one for one in aws.requests if one.method == "PUT"]
    assert len(puts) == len(FILES) + 2
    assert {one.headers["x-amz-server-side-encryption"] for one in puts} == {"aws:kms"}
    assert {one.headers["x-amz-server-side-encryption-aws-kms-key-id"] for one in puts} == {key}
    aws.requests.clear()
    sagemaker.submit(with_data("digits-3", kms_key=key), tmp_path)
    assert [one for one in aws.requests if one.method == "PUT"] == []


def test_a_missing_permission_for_the_key_is_named(aws, with_data, tmp_path):
    message = f"not authorized to perform: kms:GenerateDataKey on resource: {KEY} because"
    denied = f"<Error><Code>AccessDenied</Code><Message>{message}</Message></Error>".encode()
    aws.respond = lambda one, forward: (403, [], denied) if one.method == "PUT" else forward()
    with pytest.raises(NotPermitted) as caught:
        sagemaker.submit(with_data(kms_key=KEY), tmp_path)
    assert f"grant kms:GenerateDataKey on {KEY}" in caught.value.hint


def test_a_folder_that_does_not_exist_is_a_problem_like_others(job_file, capsys):
    assert cli.main(["check", "-b", "sagemaker", "--set", "data.train=./mydata"]) == 65
    assert "was not found on this machine" in capsys.readouterr().err


def test_the_dry_run_shows_what_would_be_uploaded_and_writes_nothing(aws, job_file, data, capsys):
    assert cli.main([*SUBMIT, "--dry-run"]) == 0
    shown = capsys.readouterr().err
    size = sum(len(content.encode()) for content in FILES.values())
    assert f"data.train: 12 files, {size / 1000:.1f} kB in {data}" in shown
    assert "uploaded once to s3://my-bucket/deploykit/data/" in shown
    assert "storing it in S3 costs up to 0.01 USD a month" in shown
    assert "part 11/ü.bin" in shown
    assert aws.requests == []
    assert not (paths.state() / "data").exists()
    assert cli.main([*SUBMIT, "--dry-run", "--json"]) == 0
    (folder,) = json.loads(capsys.readouterr().out)["data"]
    assert {one["path"] for one in folder["files"]} == set(FILES)
    assert folder["bytes"] == size


def test_what_is_left_out_is_a_warning(job_file, data, capsys):
    (data / ".env").write_text("TOKEN=1")
    assert cli.main([*SUBMIT, "--dry-run"]) == 0
    assert "suggest secrets: .env" in capsys.readouterr().err
    assert cli.main(["check", "-b", "sagemaker"]) == 0
    assert "suggest secrets: .env" in capsys.readouterr().err
    assert cli.main([*SUBMIT, "--dry-run", "--strict"]) == 65


@pytest.fixture
def much(monkeypatch):
    """The folder of this test counts as much data."""
    monkeypatch.setattr(lifecycle, "_MUCH_DATA", 1000)


@pytest.mark.usefixtures("much")
def test_much_data_must_be_confirmed_once(aws, job_file, capsys):
    assert cli.main([*SUBMIT, "--run", "one"]) == 64
    assert "of data, more than 1.0 kB; nothing was sent" in (said := capsys.readouterr().err)
    assert "deploykit submit --yes" in said
    assert sent(aws) == sent_requests(aws) == []
    assert cli.main([*SUBMIT, "--run", "one", "--yes"]) == 0
    assert cli.main([*SUBMIT, "--run", "two"]) == 0  # S3 has it: nothing is uploaded
    assert len(sent(aws)) == len(FILES)
    assert len(sent_requests(aws)) == 2


@pytest.mark.usefixtures("much", "job_file")
@pytest.mark.parametrize(("typed", "code", "jobs"), [("\n", 64, 0), ("no\n", 64, 0), ("2\n", 0, 1)])
def test_a_person_is_asked_about_much_data(aws, monkeypatch, capsys, typed, code, jobs):
    monkeypatch.setattr(output, "can_ask", lambda: True)
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    assert cli.main(SUBMIT) == code
    assert re.search(r"^Upload \d.* of data\?$", capsys.readouterr().err, re.MULTILINE)
    assert len(sent_requests(aws)) == jobs
    assert len(sent(aws)) == jobs * len(FILES)


@pytest.mark.usefixtures("much", "job_file")
def test_much_data_must_be_confirmed_in_python(aws):
    with pytest.raises(UsageError, match="nothing was sent"):
        deploykit.submit(backend="sagemaker")
    assert sent_requests(aws) == []
    assert deploykit.submit(backend="sagemaker", yes=True).handle
    assert deploykit.plan(backend="sagemaker").submit().handle


def test_ten_gigabytes_are_the_limit(planned, data, monkeypatch):
    """Measured without a folder of that size."""
    plan = planned()
    for size, asked in ((10_000_000_000, 0), (10_000_000_001, 10_000_000_001)):
        monkeypatch.setattr(DataFolder, "size", size)
        monkeypatch.setattr(sagemaker, "unsent_data", lambda _, size=size: size)
        folder = DataFolder("train", data)
        assert lifecycle.much_data(plan._replace(data=(folder,))) == asked


def test_a_channel_with_its_own_location_uploads_nothing(planned, data):
    channel = Channel(s3="s3://b-b/train")
    plan = planned(data={"train": str(data)}, channels={"train": channel})
    assert plan.data == ()


class Killing:
    """Answers for the server, and kills the process that sends one file too many."""

    def __init__(self, count, complete):
        self.count, self.complete, self.process = count, complete, None
        self.lock, self.seen, self.busy = threading.Lock(), 0, 0

    def __call__(self, one, forward):
        if one.method != "PUT" or not one.path.startswith(DATA):
            return forward()
        with self.lock:
            self.seen += 1
            if self.seen > self.count:
                self.process.kill()
                return None
            self.busy += 1
        try:
            answer = forward()
            self.complete[one.path] += answer[0] == 200
            return answer
        finally:
            with self.lock:
                self.busy -= 1


@pytest.mark.slow
@pytest.mark.parametrize("counts", few([[1, 0, 2], [1, 2, 0, 1, 2, 1, 0, 1, 1, 2]], [1, 0, 2]))
def test_after_kills_nothing_is_sent_twice_and_nothing_half_is_used(aws, job_file, s3, counts):
    """SIGKILL in the middle of an upload, each time after as many files."""
    complete = Counter()
    for count in counts:
        aws.respond = killing = Killing(count, complete)
        argv = [sys.executable, "-m", "deploykit", *SUBMIT]
        killing.process = subprocess.Popen(argv, stderr=subprocess.DEVNULL)
        assert killing.process.wait(300) == -signal.SIGKILL
        while killing.busy:
            time.sleep(0.05)
        assert sent(aws, MANIFESTS) == []
        assert sent_requests(aws) == []
    aws.respond = Killing(len(FILES), complete)
    assert cli.main(SUBMIT) == 0
    assert sorted(complete.values()) == [1] * len(FILES)
    assert stored(s3, sent_requests(aws)[0]) == as_bytes(FILES)
